"""Does a long run with everything on NVMe stay as it is? Memory, threads, open files, files on the drive.

A small model trains under a plan that keeps every boundary and residual and all that layers own on NVMe, and
what waits between layers on the host, with batches of two lengths in turn.

    python -m experiments.benchmarks.steady_run [--steps 400] [--checkpoint-every 50] [--save]

With checkpoints, every so many steps all of the training state is saved, while steps go on.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax

from experiments.benchmarks.process_status import status_fields
from experiments.benchmarks.provenance import provenance
from experiments.benchmarks.stress import LENGTH, ROWS, filled_store, random_batches, stress_kernels
from lazyjax.config import CheckpointsConfig
from lazyjax.execution.build import executor_of
from lazyjax.execution.kernels import Kernels
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan
from lazyjax.specs import Part, Tier
from lazyjax.training.checkpoints import Position, identity_of
from lazyjax.training.saving import Saver

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
    fields = status_fields()
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
        batch_rows=ROWS,
        sequence_length=LENGTH,
        microbatches=3,
        interlayer_home="host",
        layers=tuple(layer.with_on_nvme(frozenset(Part)) for layer in layers),
    )


def run(
    kernels: Kernels,
    steps: int,
    folder: pathlib.Path,
    look: Callable[[int], bool],
    *,
    checkpoints: pathlib.Path | None = None,
    checkpoint_every: int = 50,
) -> list[Resources]:
    """Trains and looks after the steps that `look` names.

    Args:
        checkpoints: gets one every so many steps, and keeps the last two.
    """
    optimizer, spec = Hybrid8bit(), kernels.template.spec
    plan = everything_on_nvme(kernels)
    executor = executor_of(
        kernels, plan, filled_store(kernels.template), optimizer,
        clip=ClipRule("global_norm", 0.5), nvme_folder=folder,
    )  # fmt: skip
    policy = CheckpointsConfig(every_steps=checkpoint_every, keep_last=2)
    saver = Saver(
        checkpoints or folder, spec, executor.updates.reading, identity_of(spec, optimizer), policy,
        data_state=dict, plan=lambda: plan, seed={}, config={}, attention="blocks", say=_warn,
    )  # fmt: skip
    executor.updates.before_change = saver.fence
    batches, seen = random_batches(), []
    try:
        for step in range(1, steps + 1):
            executor.train_step(batches[step % 2], 1e-3)
            if checkpoints is not None and saver.due(step):
                executor.flush()
                saver.begin(Position(step, step, 0, 0, 1e-3, steps, {}, {}, {}, None))
            if look(step):
                saver.wait()
                executor.timeline()  # waits for what is still written
                seen.append(resources(step, folder))
    finally:
        saver.wait()
        executor.close()
    return seen


def _warn(text: str) -> None:
    if "WARNING" in text:
        print(text, file=sys.stderr)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoint-every", type=int, help="by default nothing is saved")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    every = max(1, options.steps // 8)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as saved:
        seen = run(
            stress_kernels(), options.steps, pathlib.Path(folder), lambda s: s == 10 or s % every == 0,
            checkpoints=pathlib.Path(saved) if options.checkpoint_every else None,
            checkpoint_every=options.checkpoint_every or 1,
        )  # fmt: skip
        left = list(pathlib.Path(folder).iterdir())
        kept = sorted(path.name for path in pathlib.Path(saved).iterdir())
    lines = [
        f"# {options.steps} steps with everything on NVMe"
        + (f", saved every {options.checkpoint_every}" if options.checkpoint_every else ""),
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
        f"Left on the drive after closing: {left or 'nothing'}."
        + (f" Checkpoints kept: {', '.join(kept)}." if kept else ""),
    ]
    print("\n".join(lines))
    if options.save:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
