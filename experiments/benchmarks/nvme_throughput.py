"""What the executor gets out of a drive, beside plain sequential reads and writes of the same files.

    python -m experiments.benchmarks.nvme_throughput [FOLDER] [--blocks 5] [--steps 6] [--save]

A model whose blocks have slabs of 64 MiB trains with all that its layers own on NVMe. Two things are
measured.

Throughput: before a step all files are synced and dropped from the page cache, so that what the step
reads first comes from the drive. Of the step's timeline, bytes over the time in which the drive's read
(write) queue had anything under way. Plain: the same files, synced and dropped, read one after another
into one aligned buffer with `readv`; and as many bytes written to new files from that buffer, like the
executor's writes without fsync, so both go to the page cache. Both take turns; medians of the ratios.
Wanted: 0.9 at least.

Step time: steps in a row, nothing dropped, against the simulated period with kernels and rates measured
in this run, the drive's as the plain reads (of cached files) and writes above. Wanted: within 10 %. Only
where compute, copies, updates and drives do not share the same few cores can that be expected.

About two minutes on two cores.
"""

from __future__ import annotations

import argparse
import mmap
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.benchmarks.gpu_models import random_batch, random_store
from experiments.benchmarks.provenance import provenance
from lazyjax.execution.build import executor_of
from lazyjax.execution.calibrate import calibrate, kernels_of
from lazyjax.execution.executor import Executor
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.measure import MeasureOptions, measure_profile
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.probes import block_shapes, update_probe
from lazyjax.planning.costs.seconds import Costs, template_costs
from lazyjax.planning.plan.document import LayerPlan, Plan
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.planning.program.simulate import simulate
from lazyjax.specs import Part
from lazyjax.timeline import Resource, Timeline

RESULT = pathlib.Path(__file__).parent / "results" / "nvme_throughput.md"
SOURCES = ("lazyjax", "experiments/benchmarks/nvme_throughput.py")
OPTIMIZER = "hybrid8bit"
ROWS, LENGTH = 2, 128


def model(blocks: int) -> ModelTemplate:
    """Blocks of 33.5 M parameters: 64 MiB in bfloat16."""
    return build_template(
        Qwen2Architecture(
            name="nvme", vocab_size=4096, hidden_size=1664, intermediate_size=5056,
            num_hidden_layers=blocks, num_attention_heads=26, num_key_value_heads=13, head_dim=64,
            rms_norm_eps=1e-6, tie_word_embeddings=False, rope=Rope(theta=1e4), qkv_bias=True,
        )
    )  # fmt: skip


def plan_of(template: ModelTemplate) -> Plan:
    """All that layers own on NVMe."""
    layers = tuple(LayerPlan().with_on_nvme(frozenset(Part)) for _ in template.spec.layers)
    return Plan(
        model="nvme", planner="everything on NVMe", batch_rows=ROWS, sequence_length=LENGTH, layers=layers
    )


class Rates(NamedTuple):
    """Bytes per second from and to the drive."""

    read: float
    write: float


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """The slabs on the drive."""
    return sorted(path for path in folder.glob("lazyjax-scratch-*/*/c/*") if path.is_file())


def drop(files: Sequence[pathlib.Path]) -> None:
    """Writes files to the drive and forgets their pages."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain(files: Sequence[pathlib.Path], folder: pathlib.Path, *, dropped: bool) -> Rates:
    """Reads the files one after another, and writes as many bytes to new ones."""
    sizes = [path.stat().st_size for path in files]
    buffer = np.frombuffer(mmap.mmap(-1, max(sizes)), np.uint8)
    buffer[:] = 1
    if dropped:
        drop(files)
    start = time.perf_counter()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        while os.readv(descriptor, [buffer]):
            pass
        os.close(descriptor)
    reading = time.perf_counter() - start
    targets = [folder / f"plain-{number}" for number in range(len(sizes))]
    start = time.perf_counter()
    for path, size in zip(targets, sizes, strict=True):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, buffer[:size])
        os.close(descriptor)
    writing = time.perf_counter() - start
    for path in targets:
        path.unlink()
    return Rates(sum(sizes) / reading, sum(sizes) / writing)


def executor_rates(timeline: Timeline) -> Rates:
    """Bytes over the time in which a queue of the drive had anything under way."""
    return Rates(*(_rate(timeline, queue) for queue in (Resource.NVME_READ, Resource.NVME_WRITE)))


def _rate(timeline: Timeline, resource: Resource) -> float:
    events = sorted(
        (event.start_seconds, event.end_seconds, event.bytes)
        for event in timeline.events
        if event.resource is resource and event.bytes
    )
    return sum(size for *_, size in events) / sum(_busy((start, end) for start, end, _ in events))


def _busy(spans: Iterator[tuple[float, float]]) -> Iterator[float]:
    """Lengths of what sorted spans cover."""
    until = 0.0
    for start, end in spans:
        yield max(0.0, end - max(start, until))
        until = max(until, end)


def throughput(executor: Executor, folder: pathlib.Path, steps: int) -> tuple[list[Rates], list[Rates]]:
    """Rates of steps and of plain files, which take turns."""
    batch = random_batch(ROWS, LENGTH, executor.template.spec.vocabulary_size)
    ours, theirs = [], []
    for step in range(steps + 1):
        drop(files_of(folder))
        executor.train_step(batch, 1e-5)
        measured = executor_rates(executor.timeline())
        beside = plain(files_of(folder), folder, dropped=True)
        if step:  # the first compiles, and has nothing to read for its update
            ours.append(measured)
            theirs.append(beside)
    return ours, theirs


def costs_here(template: ModelTemplate, kernels: Kernels, plan: Plan, drive: Rates) -> Costs:
    """Kernels and rates as measured now, the drive's as given."""
    shapes = block_shapes(template, ROWS * LENGTH)
    options = MeasureOptions(shapes, "bfloat16", transfer_bytes=2**26, update_elements=2**24, repeats=3)
    profile = measure_profile("here", options, {OPTIMIZER: update_probe(OPTIMIZER)}).model_copy(
        update={"nvme_read_bytes_per_second": drive.read, "nvme_write_bytes_per_second": drive.write}
    )
    optimizer = make_host_optimizer(OPTIMIZER)
    costs = template_costs(
        template, profile, microbatch_rows=ROWS, sequence_length=LENGTH, optimizer=optimizer
    )
    wanted = kernels_of([build_schedule(plan, costs.sizes)], kernels)
    timed = calibrate(
        kernels, wanted, microbatch_rows=ROWS, sequence_length=LENGTH, repeats=3, working_sets=False
    )
    return costs.with_measured(timed.seconds)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    template = model(options.blocks)
    plan = plan_of(template)
    kernels = Kernels(template, data_mesh(), "bfloat16", "bfloat16")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = pathlib.Path(name)
        executor = executor_of(
            kernels, plan, random_store(template), make_host_optimizer(OPTIMIZER), clip=ClipRule(),
            nvme_folder=folder,
        )  # fmt: skip
        ours, theirs = throughput(executor, folder, options.steps)
        batch = random_batch(ROWS, LENGTH, template.spec.vocabulary_size)
        for _ in range(2):
            executor.train_step(batch, 1e-5)
        start = time.perf_counter()
        for _ in range(options.steps):
            executor.train_step(batch, 1e-5)
        executor.timeline()  # waits for what is still written
        step_seconds = (time.perf_counter() - start) / options.steps
        warm = plain(files_of(folder), folder, dropped=False)
        executor.close()
    costs = costs_here(template, kernels, plan, warm)
    schedule = build_schedule(plan, costs.sizes)
    alone = simulate(schedule, costs.operation_seconds).period_seconds
    contended = simulate(schedule, costs.operation_seconds, costs.contention).period_seconds
    lines = [
        "# The executor and its drive",
        "",
        provenance(*SOURCES),
        "",
        f"{options.blocks} blocks with slabs of {costs.sizes.layers[1].half_bytes / 2**20:.0f} MiB, all that "
        f"layers own on NVMe; files synced and dropped from the page cache before every step and every plain "
        "read; writes go to the page cache on both sides.",
        "",
        "| GB/s, median (lowest to highest) | executor | plain | ratio |",
        "|---|---|---|---|",
        *(_row(words, figure, ours, theirs) for words, figure in (("read", "read"), ("write", "write"))),
        "",
        f"Step time with nothing dropped: {step_seconds:.3f} s; simulated {alone:.3f} s "
        f"({alone / step_seconds - 1:+.1%}), {contended:.3f} s with what compute loses to copies and updates "
        f"on these cores ({contended / step_seconds - 1:+.1%}); the drive as plain files: "
        f"{warm.read / 1e9:.2f} GB/s read from the cache, {warm.write / 1e9:.2f} written.",
    ]
    print("\n".join(lines))
    if options.save:
        RESULT.write_text("\n".join(lines) + "\n")


def _row(words: str, figure: str, ours: Sequence[Rates], theirs: Sequence[Rates]) -> str:
    columns = [[getattr(rates, figure) / 1e9 for rates in side] for side in (ours, theirs)]
    ratios = [one / other for one, other in zip(*columns, strict=True)]
    cells = [
        f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        for values in (*columns, ratios)
    ]
    return f"| {words} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
