"""What the executor gets out of a drive, beside plain sequential reads and writes of the same files.

    python -m experiments.benchmarks.nvme_throughput [FOLDER] [--blocks 20] [--steps 6] [--save]

A model whose blocks have slabs of 64 MiB trains with all that its layers own on NVMe. The slabs, the 8-bit
updates, the host threads and the drive are real; the device and its links are emulated
(`experiments.emulation`), so that kernels take time but no cores, as with a GPU: on a CPU they would leave
none to the drive. Nothing is computed, and nothing of it is needed: what passes is bytes.

Throughput: kernels and links take next to no time, so that the step waits for the drive. Before a step all
files are synced and dropped from the page cache, and after it what it has written is synced. The executor's
rate is bytes over the time in which a queue of the drive had anything under way, the sync included. Plain:
the bytes of every transfer of the step's timeline, read one after another with `readv` from the same files
after they were dropped, and written one after another to new files with O_DIRECT, synced. What a step reads
a second time may come from the page cache, on both sides. Both take turns; medians of the ratios. Wanted:
0.9 at least.

Step time: steps in a row, every file dropped from the page cache after it was read, as with a model that is
much larger than memory, against the simulated period with this machine's rates measured now (`drive_rates`,
the update's): once with next to no compute, once with kernels that take about as long as the drive. Wanted:
within 10 %.

About four minutes on two cores, with 7 GB on the drive.
"""

from __future__ import annotations

import argparse
import mmap
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.benchmarks.gpu_models import random_store
from experiments.benchmarks.provenance import provenance
from experiments.emulation import RealHost, WallClock, blank_batch, emulated_executor
from lazyjax.execution.executor import Executor
from lazyjax.hardware.drive import drive_rates, forget, write_file
from lazyjax.hardware.measure import median_seconds
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.probes import update_probe
from lazyjax.planning.costs.seconds import Costs, template_costs
from lazyjax.planning.plan.document import LayerPlan, Plan
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.planning.program.simulate import simulate
from lazyjax.specs import Part
from lazyjax.storage.nvme import Drive, DriveTransfer, NvmeStore
from lazyjax.timeline import Resource, Timeline, covered_seconds

RESULT = pathlib.Path(__file__).parent / "results" / "nvme_throughput.md"
SOURCES = ("lazyjax", "experiments/emulation.py", "experiments/benchmarks/nvme_throughput.py")
OPTIMIZER = "hybrid8bit"
ROWS, LENGTH = 2, 128
#: The emulated device: no matter which, as long as it is much faster than the drive.
DEVICE = "h100-sxm"


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


class Transfers(NamedTuple):
    """Bytes read and written, and the seconds that it took; `synced` of them for the final sync."""

    read_bytes: int
    written_bytes: int
    seconds: float
    synced: float
    reading: float
    writing: float

    @property
    def rate(self) -> float:
        """Bytes per second, both directions together."""
        return (self.read_bytes + self.written_bytes) / self.seconds


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """The slabs on the drive, largest first."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"]
    return sorted(files, key=lambda path: (-path.stat().st_size, path))


def sync(files: Sequence[pathlib.Path]) -> float:
    """Writes files to the drive; the seconds that it took."""
    start = time.perf_counter()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


def drop(files: Sequence[pathlib.Path]) -> None:
    """Writes files to the drive and forgets their pages."""
    for path in files:
        forget(path)


def plain(files: Sequence[pathlib.Path], folder: pathlib.Path, like: Transfers, *, cold: bool) -> Transfers:
    """As many bytes as `like`, one file after another.

    Args:
        cold: dropped before, so that what is read first comes from the drive, and synced at the end.
    """
    buffer = np.frombuffer(mmap.mmap(-1, files[0].stat().st_size), np.uint8)
    buffer[:] = 1
    if cold:
        drop(files)
    start, left = time.perf_counter(), like.read_bytes
    while left > 0:
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            while got := os.readv(descriptor, [buffer]):
                left -= got
            os.close(descriptor)
            if left <= 0:
                break
    reading = time.perf_counter() - start
    targets: list[pathlib.Path] = []
    start, left = time.perf_counter(), like.written_bytes
    while left > 0:
        targets.append(folder / f"plain-{len(targets)}")
        size = min(left, buffer.size)
        write_file(targets[-1], buffer[:size])
        left -= size
    writing = time.perf_counter() - start
    synced = sync(targets) if cold else 0.0
    for path in targets:
        path.unlink()
    return Transfers(
        like.read_bytes, like.written_bytes, reading + writing + synced, synced, reading, writing
    )


def of_step(timeline: Timeline, synced: float) -> Transfers:
    """What a step moved, and the time in which the drive had anything under way."""
    reads, writes = (
        [event for event in timeline.events if event.resource is queue and event.bytes]
        for queue in (Resource.NVME_READ, Resource.NVME_WRITE)
    )
    return Transfers(
        sum(event.bytes for event in reads), sum(event.bytes for event in writes),
        covered_seconds(reads + writes) + synced, synced, covered_seconds(reads), covered_seconds(writes),
    )  # fmt: skip


def throughput(executor: Executor, folder: pathlib.Path, steps: int) -> list[tuple[Transfers, Transfers]]:
    """Steps and plain transfers of the same bytes, which take turns."""
    pairs, batch = [], blank_batch(executor.plan)
    for step in range(steps + 2):
        drop(files_of(folder))
        executor.train_step(batch, 1e-5)
        timeline = executor.timeline()  # waits for what is still written
        ours = of_step(timeline, sync(files_of(folder)))
        if step > 1:  # the first has nothing to read for its update
            pairs.append((ours, plain(files_of(folder), folder, ours, cold=True)))
    return pairs


def step_seconds(executor: Executor, steps: int) -> float:
    """Of a step in a row of them."""
    batch = blank_batch(executor.plan)
    for _ in range(3):
        executor.train_step(batch, 1e-5)
    start = time.perf_counter()
    for _ in range(steps):
        executor.train_step(batch, 1e-5)
    return (time.perf_counter() - start) / steps


class Case(NamedTuple):
    """A measured step beside the simulated one, in seconds."""

    words: str
    measured: float
    simulated: float


def costs_of(template: ModelTemplate, profile: HardwareProfile) -> Costs:
    """Of microbatches of the benchmark's size."""
    optimizer = make_host_optimizer(OPTIMIZER)
    return template_costs(
        template, profile, microbatch_rows=ROWS, sequence_length=LENGTH, optimizer=optimizer
    )


class Forgetful(NvmeStore):
    """A drive whose files never stay in the page cache."""

    def read(self, key: str, target: np.ndarray) -> DriveTransfer:
        """See `Drive.read`; what is read a second time comes from the drive again."""
        return _Forgetting(super().read(key, target), self.folder / key)


class _Forgetting(NamedTuple):
    transfer: DriveTransfer
    path: pathlib.Path

    def result(self) -> None:
        self.transfer.result()
        forget(self.path)


def host_of(template: ModelTemplate, drive: Callable[[], Drive]) -> RealHost:
    """Slabs with values in them, the real optimizer and a real drive."""
    return RealHost(random_store(template), make_host_optimizer(OPTIMIZER), drive)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    template = model(options.blocks)
    plan = plan_of(template)
    update_elements = 2**25
    update = median_seconds(update_probe(OPTIMIZER)(update_elements), 5)
    device = load_profile(DEVICE).model_copy(
        update={
            "host_update_parameters_per_second": {OPTIMIZER: update_elements / update},
            "nvme_read_bytes_per_second": 2e9, "nvme_write_bytes_per_second": 2e9, "duplex_factor": 1.0,
        }
    )  # fmt: skip
    cases = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = pathlib.Path(name)
        fast = costs_of(template, device)
        clock, host = WallClock(1.0), host_of(template, lambda: NvmeStore(folder))
        with emulated_executor(template, plan, fast, clock, host) as (executor, _):
            pairs = throughput(executor, folder, options.steps)
        host = host_of(template, lambda: Forgetful(folder))
        with emulated_executor(template, plan, fast, clock, host) as (executor, _):
            measured = step_seconds(executor, options.steps)
        rates = drive_rates(options.folder, 2**30)
        device = device.model_copy(
            update={
                "nvme_read_bytes_per_second": rates.read,
                "nvme_write_bytes_per_second": rates.write,
                "nvme_shared_bytes_per_second": rates.shared,
            }
        )
        fast = costs_of(template, device)
        period = simulate(build_schedule(plan, fast.sizes), fast.operation_seconds).period_seconds
        cases.append(Case("next to no compute", measured, period))
        # Kernels of about the drive's time: all of a step's products at this rate take as long.
        balanced = device.model_copy(
            update={"matmul_flops_per_second": fast.executed_flops(build_schedule(plan, fast.sizes)) / period}
        )
        slow = costs_of(template, balanced)
        host = host_of(template, lambda: Forgetful(folder))
        with emulated_executor(template, plan, slow, clock, host) as (executor, _):
            measured = step_seconds(executor, options.steps)
        period = simulate(build_schedule(plan, slow.sizes), slow.operation_seconds).period_seconds
        cases.append(Case("kernels about as long as the drive", measured, period))
    lines = [
        "# The executor and its drive",
        "",
        provenance(*SOURCES),
        "",
        f"{options.blocks} blocks with slabs of {fast.sizes.layers[1].half_bytes / 2**20:.0f} MiB, all that "
        "layers own on NVMe; slabs, updates, threads and drive are real, the device is emulated. Files are "
        "synced and dropped from the page cache before every step and every plain read; plain writes are "
        "direct ones; what is written is synced after it.",
        "",
        f"Bytes of a step: {pairs[-1][0].read_bytes / 1e9:.2f} GB read, "
        f"{pairs[-1][0].written_bytes / 1e9:.2f} GB written.",
        "",
        "| median (lowest to highest) | executor | plain | ratio |",
        "|---|---|---|---|",
        _row("GB/s, reads, writes and sync together", pairs, lambda one: one.rate / 1e9),
        _row("GB/s read while reading", pairs, lambda one: one.read_bytes / one.reading / 1e9),
        _row("GB/s written while writing", pairs, lambda one: one.written_bytes / one.writing / 1e9),
        "",
        "The executor reads and writes at once, plain transfers come one after another: the first row "
        "compares them, the others say what each direction does meanwhile.",
        "",
        f"Step time; the drive: {rates.read / 1e9:.2f} GB/s read, {rates.write / 1e9:.2f} "
        f"written, each alone, {rates.shared / 1e9:.2f} both together; updates "
        f"{update_elements / update / 1e9:.2f} G parameters/s:",
        "",
        "| | measured s | simulated s | difference |",
        "|---|---|---|---|",
        *(
            f"| {case.words} | {case.measured:.3f} | {case.simulated:.3f} "
            f"| {case.simulated / case.measured - 1:+.1%} |"
            for case in cases
        ),
    ]
    print("\n".join(lines))
    if options.save:
        RESULT.write_text("\n".join(lines) + "\n")


def _row(
    words: str, pairs: Sequence[tuple[Transfers, Transfers]], figure: Callable[[Transfers], float]
) -> str:
    columns = [[figure(side) for side in sides] for sides in zip(*pairs, strict=True)]
    ratios = [one / other for one, other in zip(*columns, strict=True)]
    cells = [
        f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        for values in (*columns, ratios)
    ]
    return f"| {words} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
