"""What saving costs: time, memory while saving, memory after many saves, and memory to restore.

    python -m experiments.benchmarks.checkpoint_cost [--blocks 22] [--rows 8] [--pairs 2] [--nvme] [--save]

A model of about 156 M parameters trains, bfloat16 with 8-bit state, on random tokens. Stretches of 20
steps with one save at their beginning, which runs beside the steps, take turns with stretches without
(the order changes from pair to pair); the pending update is applied before a save, as in a run. Resident
memory is sampled every few milliseconds. Then ten saves with a step after each. At last a process of its
own restores the last checkpoint into new slabs. Wanted: a stretch with a save takes at most 3 % longer,
the most memory in it is at most one layer plus 256 MiB more, ten saves leave nothing (slope), and
restoring needs no more than training did. A save takes cores from steps that compute on them, the same
whatever a step is: few tokens make it dear. About eight minutes on two cores; writes a gigabyte per save.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from experiments.benchmarks.gpu_models import random_batch, random_store
from experiments.benchmarks.process_status import status_bytes
from experiments.benchmarks.provenance import provenance
from lazyjax.config import CheckpointsConfig
from lazyjax.execution.build import executor_of
from lazyjax.execution.executor import Executor
from lazyjax.execution.host_update import HostUpdates
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.plan.document import LayerPlan, Plan
from lazyjax.specs import Part
from lazyjax.storage.host import allocate_host_store
from lazyjax.training.checkpoints import Position, identity_of, list_checkpoints, open_checkpoint
from lazyjax.training.resume import Resume
from lazyjax.training.run_folder import RunFolder
from lazyjax.training.saving import Saver

RESULT = pathlib.Path(__file__).parent / "results" / "checkpoint_cost.md"
SOURCES = ("lazyjax", "experiments/benchmarks/checkpoint_cost.py")
OPTIMIZER = "hybrid8bit"
LENGTH, STRETCH, SAVES = 128, 20, 10
_MIB = 2**20


def model(blocks: int) -> ModelTemplate:
    """About 7.1 M parameters a block."""
    return build_template(
        Qwen2Architecture(
            name="checkpoints", vocab_size=4096, hidden_size=768, intermediate_size=2304,
            num_hidden_layers=blocks, num_attention_heads=12, num_key_value_heads=6, head_dim=64,
            rms_norm_eps=1e-6, tie_word_embeddings=False, rope=Rope(theta=1e4), qkv_bias=True,
        )
    )  # fmt: skip


@contextmanager
def watched() -> Iterator[list[int]]:
    """Samples resident memory; the list holds the highest figure at the end."""
    highest, over = [status_bytes("VmRSS")], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            highest[0] = max(highest[0], status_bytes("VmRSS"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield highest
    finally:
        over.set()
        thread.join()


class Stretch(NamedTuple):
    """Some steps: how long they took, and the most memory meanwhile."""

    seconds: float
    highest_bytes: int


class Run:
    """An executor with a saver, fed the same batch again and again."""

    def __init__(self, folder: pathlib.Path, blocks: int, rows: int, *, nvme: bool) -> None:
        self.template = model(blocks)
        optimizer = make_host_optimizer(OPTIMIZER)
        parts = frozenset(Part) if nvme else frozenset[Part]()
        layers = tuple(LayerPlan().with_on_nvme(parts) for _ in self.template.spec.layers)
        plan = Plan(
            model="checkpoints", planner="none", batch_rows=rows, sequence_length=LENGTH, layers=layers
        )
        self.executor: Executor = executor_of(
            Kernels(self.template, data_mesh(), "bfloat16", "bfloat16"), plan, random_store(self.template),
            optimizer, clip=ClipRule(), nvme_folder=folder / "nvme",
        )  # fmt: skip
        self.saver = Saver(
            RunFolder(folder).checkpoints, self.template.spec, self.executor.updates.reading,
            identity_of(self.template.spec, optimizer), CheckpointsConfig(every_steps=STRETCH),
            data_state=dict, plan=lambda: plan, seed={}, config={}, attention="blocks", say=self._heard,
        )  # fmt: skip
        self.executor.updates.before_change = self.saver.fence
        self.batch = random_batch(rows, LENGTH, self.template.spec.vocabulary_size)
        self.step = 0

    def _heard(self, text: str) -> None:
        if "WARNING" in text:
            print(text, file=sys.stderr)

    def steps(self, count: int, *, saves: bool) -> Stretch:
        """Some steps, with a save that begins before them."""
        with watched() as highest:
            start = time.perf_counter()
            if saves:
                self.executor.flush()
                self.saver.begin(_position(self.step))
            for _ in range(count):
                self.executor.train_step(self.batch, 1e-5)
                self.step += 1
            self.saver.wait()
            self.executor.timeline()  # waits for what is still written
            seconds = time.perf_counter() - start
        return Stretch(seconds, highest[0])


def _position(step: int) -> Position:
    return Position(step, step, 0, 0, 1e-5, 10**6, {}, {}, {"bytes": 0, "waiting": []}, None)


def restore(folder: pathlib.Path, blocks: int) -> None:
    """Restores the newest checkpoint; prints the highest resident memory."""
    template, optimizer = model(blocks), make_host_optimizer(OPTIMIZER)
    run = RunFolder(folder)
    newest = open_checkpoint(list_checkpoints(run.checkpoints)[0])
    store = allocate_host_store(template.spec)
    Resume(folder, run, (newest,), (), None).restore(store, HostUpdates(store, optimizer), lambda text: None)
    print(json.dumps(status_bytes("VmHWM")))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--rows", type=int, default=8, help=f"of {LENGTH} tokens, in a step")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--nvme", action="store_true", help="with all that layers own on NVMe")
    parser.add_argument("--restore", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    if options.restore is not None:
        restore(options.restore, options.blocks)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run = Run(folder, options.blocks, options.rows, nvme=options.nvme)
        run.steps(5, saves=False)  # compiles
        run.steps(3, saves=True)
        without: list[Stretch] = []
        saving: list[Stretch] = []
        for pair in range(options.pairs):
            for saves in (False, True) if pair % 2 else (True, False):
                (saving if saves else without).append(run.steps(STRETCH, saves=saves))
        after = []
        for _ in range(SAVES):
            run.steps(1, saves=True)
            after.append(status_bytes("VmRSS") / _MIB)
        training = status_bytes("VmHWM")
        run.executor.close()
        words = [f"--blocks={options.blocks}", f"--restore={folder}"]
        command = [sys.executable, "-m", "experiments.benchmarks.checkpoint_cost", *words]
        restoring = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    spec = run.template.spec
    cost = [one.seconds / other.seconds - 1 for one, other in zip(saving, without, strict=True)]
    extra = max(one.highest_bytes for one in saving) - max(one.highest_bytes for one in without)
    layer = max(slabs.length for slabs in run.executor.store.layouts) * 6
    slope = float(np.polyfit(range(SAVES), after, 1)[0])
    lines = [
        f"# What saving costs: {spec.parameter_count / 1e6:.0f} M parameters"
        + (", all that layers own on NVMe" if options.nvme else ""),
        "",
        provenance(*SOURCES),
        "",
        "| | found | wanted |",
        "|---|---|---|",
        f"| {STRETCH} steps with a save against {STRETCH} without, median of {options.pairs} pairs "
        f"({min(cost):+.1%} to {max(cost):+.1%}) | {statistics.median(cost):+.1%} | +3 % at most |",
        f"| most resident memory, with saves less without | {extra / _MIB:.0f} MiB "
        f"| {layer / _MIB + 256:.0f} MiB at most |",
        f"| resident memory per save, slope over {SAVES} ({after[0]:.0f} to {after[-1]:.0f} MiB) "
        f"| {slope:+.2f} MiB | 0 |",
        f"| most resident memory of restoring, of training | {restoring / _MIB:.0f} MiB, "
        f"{training / _MIB:.0f} MiB | no more |",
        "",
        f"A step of {options.rows * LENGTH} tokens takes "
        f"{statistics.median(one.seconds for one in without) / STRETCH:.2f} s.",
    ]
    print("\n".join(lines))
    if options.save:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
