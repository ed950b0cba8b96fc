"""Does a long run with everything on NVMe stay as it is? Memory, threads, open files, files on the drive.

A small model trains under a plan that keeps every boundary and residual and all that layers own on NVMe, and
what waits between layers on the host, with batches of two lengths in turn.

    python -m experiments.benchmarks.steady_run [--steps 400] [--save]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax

from experiments.benchmarks.provenance import provenance
from experiments.benchmarks.stress import LENGTH, ROWS, filled_store, random_batches, stress_kernels
from lazyjax.execution.build import executor_of
from lazyjax.execution.kernels import Kernels
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan
from lazyjax.specs import Part, Tier

RESULT = pathlib.Path(__file__).parent / "results" / "steady_run.md"
SOURCES = ("lazyjax/execution", "lazyjax/storage", "experiments/benchmarks/steady_run.py")


class Resources(NamedTuple):
    """What the process holds after a step."""

    step: int
    resident_mib: float
    threads: int
    open_files: int
    live_arrays: int
    drive_files: int
    drive_bytes: int


def resources(step: int, folder: pathlib.Path) -> Resources:
    """Looks at the process and at the folder on the drive."""
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return Resources(
        step,
        int(fields["VmRSS"].split()[0]) / 1024,
        int(fields["Threads"]),
        len(os.listdir("/proc/self/fd")),
        len(jax.live_arrays()),
        len(files),
        sum(path.stat().st_size for path in files),
    )


def everything_on_nvme(kernels: Kernels) -> Plan:
    """All that can be there."""
    spec = kernels.template.spec
    block = LayerPlan(boundary=Boundary.NVME, saved={"gate": Tier.NVME, "up": Tier.NVME})
    layers = (LayerPlan(), *[block] * (len(spec.layers) - 2), LayerPlan())
    return Plan(
        model=spec.name,
        planner="everything on NVMe",
        rows=ROWS,
        sequence_length=LENGTH,
        microbatches=3,
        interlayer_home="host",
        layers=tuple(layer.with_on_nvme(frozenset(Part)) for layer in layers),
    )


def run(kernels: Kernels, steps: int, folder: pathlib.Path, look: Callable[[int], bool]) -> list[Resources]:
    """Trains and looks after the steps that `look` names."""
    optimizer = Hybrid8bit()
    executor = executor_of(
        kernels, everything_on_nvme(kernels), filled_store(kernels.template), optimizer,
        clip=ClipRule("global_norm", 0.5), nvme_folder=folder,
    )  # fmt: skip
    batches, seen = random_batches(), []
    try:
        for step in range(1, steps + 1):
            executor.train_step(batches[step % 2], 1e-3)
            if look(step):
                executor.timeline()  # waits for what is still written
                seen.append(resources(step, folder))
    finally:
        executor.close()
    return seen


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    every = max(1, options.steps // 8)
    with tempfile.TemporaryDirectory() as folder:
        seen = run(stress_kernels(), options.steps, pathlib.Path(folder), lambda s: s == 10 or s % every == 0)
        left = list(pathlib.Path(folder).iterdir())
    lines = [
        f"# {options.steps} steps with everything on NVMe",
        "",
        provenance(*SOURCES),
        "",
        "| step | resident MiB | threads | open files | live arrays | files on the drive | bytes there |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {r.step} | {r.resident_mib:.1f} | {r.threads} | {r.open_files} | {r.live_arrays} "
            f"| {r.drive_files} | {r.drive_bytes} |"
            for r in seen
        ),
        "",
        f"Left on the drive after closing: {left or 'nothing'}.",
    ]
    print("\n".join(lines))
    if options.save:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
