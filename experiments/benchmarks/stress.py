"""Delays everything that a step waits for, at random, and compares bits with a step that waits for nothing.

A random plan is run twice on a small model. Once as it is, with random sleeps in drives, copies and host
updates, so that whatever is not waited for comes too late. Once with every home on the device and
immediate updates, so that there is nothing to wait for; kernels and their order are the same, hence losses,
masters and optimizer state have to be the same bits.

    python -m experiments.benchmarks.stress [--plans 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lazyjax.batch import Batch
from lazyjax.execution.build import checked_schedules
from lazyjax.execution.executor import Executor
from lazyjax.execution.host_update import HostUpdates
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.execution.transfers import Transfers
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.base import HostState
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan, owned_homes
from lazyjax.specs import Part, Tier
from lazyjax.storage.host import HostStore, LayerOnDrive, LayerSlabs, allocate_host_store
from lazyjax.storage.nvme import Drive, DriveTransfer, NvmeStore

ROWS, LENGTH, VOCABULARY, BLOCKS, STEPS = 6, 9, 61, 4, 3
#: The most of an ordinary delay; one in ten is up to fifteen times as long, every second one is none.
_DELAY_SECONDS = 0.001
#: Few sets, so that few kernels are compiled.
_SAVED = ((), ("gate", "up"))


class Delays:
    """Sleeps for random times."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self) -> None:
        """Sleeps, mostly not at all or shortly, sometimes long."""
        kind, share = self._random.random(), self._random.random()
        if kind < 0.5:
            time.sleep(_DELAY_SECONDS * share * (15 if kind < 0.1 else 1))


class _SlowTransfer(NamedTuple):
    transfer: DriveTransfer
    delay: Callable[[], None]

    def result(self) -> None:
        self.delay()
        self.transfer.result()


class SlowDrive:
    """A drive whose transfers begin and end late."""

    def __init__(self, drive: Drive, delay: Callable[[], None]) -> None:
        self._drive, self._delay = drive, delay

    def write(self, key: str, source: np.ndarray) -> DriveTransfer:
        """Writes, later."""
        self._delay()
        return _SlowTransfer(self._drive.write(key, source), self._delay)

    def read(self, key: str, target: np.ndarray) -> DriveTransfer:
        """Reads, later."""
        self._delay()
        target[:] = 0xAA
        return _SlowTransfer(self._drive.read(key, target), self._delay)

    def delete(self, key: str) -> None:
        """Deletes."""
        self._drive.delete(key)

    def close(self) -> None:
        """Closes."""
        self._drive.close()


class SlowCopies(Transfers):
    """Copies that are late on the host's side, on the walk's thread and on others."""

    def __init__(self, kernels: Kernels, delay: Callable[[], None]) -> None:
        super().__init__(kernels.sharded, kernels.compute_dtype)
        self._delay = delay

    def into_slab(self, delivered: Any, gradient_N: np.ndarray) -> None:
        """Copies late, into a slab that held something else meanwhile."""
        gradient_N[:] = np.nan
        self._delay()
        super().into_slab(delivered, gradient_N)

    def to_bytes(self, array: Any) -> np.ndarray:
        """Gives bytes late."""
        self._delay()
        return super().to_bytes(array)

    def from_bytes(self, raw: np.ndarray, like: Any) -> Any:
        """Gives an array late."""
        self._delay()
        return super().from_bytes(raw, like)

    def to_host(self, arrays: Sequence[Any]) -> list[Any]:
        """Are issued late."""
        self._delay()
        return super().to_host(arrays)

    def slab_to_device(self, slabs: LayerSlabs | LayerOnDrive, *, lasting: bool = True) -> Any:
        """Is issued late."""
        self._delay()
        return super().slab_to_device(slabs, lasting=lasting)


class SlowOptimizer(Hybrid8bit):
    """Updates late; the 8-bit optimizer otherwise."""

    delay: Callable[[], None] = staticmethod(lambda: None)

    def update(
        self, slabs: LayerSlabs, state: HostState, *, learning_rate: float, count: int, scale: float
    ) -> None:
        """One step, before and after a delay."""
        self.delay()
        super().update(slabs, state, learning_rate=learning_rate, count=count, scale=scale)
        self.delay()


def small_model() -> ModelTemplate:
    """Four blocks of hidden size 32."""
    return build_template(
        Qwen2Architecture(
            name="stress", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48,
            num_hidden_layers=BLOCKS, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            rms_norm_eps=1e-6, tie_word_embeddings=False, rope=Rope(theta=1e4), qkv_bias=True,
        )
    )  # fmt: skip


def random_plan(template: ModelTemplate, seed: int) -> Plan:
    """Any homes, depths and updates."""
    draw = random.Random(seed)
    last = len(template.spec.layers) - 1
    layers = []
    for index in range(last + 1):
        inner = 0 < index < last
        homes = ["device"] if not inner else ["device", "host", "nvme", *(["recompute"] if index > 1 else [])]
        saved = draw.choice(_SAVED) if inner else ()
        layers.append(
            LayerPlan(
                boundary=Boundary(draw.choice(homes)),
                saved={name: draw.choice(list(Tier)) for name in saved},
                resident=inner and draw.random() < 0.2,
            ).with_on_nvme([part for part in Part if draw.random() < 0.5])
        )
    return Plan(
        model=template.spec.name,
        planner=f"random {seed}",
        batch_rows=ROWS,
        sequence_length=LENGTH,
        microbatches=3,
        prefetch=draw.randint(1, 3),
        backward_prefetch=draw.randint(1, 3),
        reload_ahead=draw.randint(1, 3),
        interlayer_home=draw.choice(("device", "host")),
        update=draw.choice(("deferred", "deferred", "immediate")),
        layers=tuple(layers),
    )


def without_waiting(plan: Plan) -> Plan:
    """The same kernels in the same order, with everything on the device and updates at once."""
    layers = tuple(
        layer.model_copy(
            update={
                "boundary": Boundary.RECOMPUTE if layer.boundary is Boundary.RECOMPUTE else Boundary.DEVICE,
                "saved": dict.fromkeys(layer.saved, Tier.DEVICE),
                **owned_homes((), Tier.HOST),
            }
        )
        for layer in plan.layers
    )
    return plan.model_copy(update={"layers": layers, "update": "immediate"})


def random_batches() -> list[Batch]:
    """One batch per step, of two lengths, as buckets give them."""
    batches = []
    for step in range(STEPS):
        rng, shape = np.random.default_rng(step), (ROWS, LENGTH if step % 2 == 0 else LENGTH - 4)
        tokens = rng.integers(0, VOCABULARY, shape, dtype=np.int32)
        positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy()
        whole = np.ones(shape, np.int32)
        batches.append(Batch(tokens, np.roll(tokens, -1, axis=1), whole > 0, whole, positions))
    return batches


def filled_store(template: ModelTemplate) -> HostStore:
    """Random weights, always the same."""
    store = allocate_host_store(template.spec, gradient_dtype="bfloat16")
    for index, slabs in enumerate(store.layers):
        for name, value in init_parameters(template, index, jax.random.key(0)).items():
            slabs.set_master(name, np.asarray(value))
    return store


@contextlib.contextmanager
def slow_executor(
    kernels: Kernels, store: HostStore, plan: Plan, folder: pathlib.Path, delay: Callable[[], None]
) -> Iterator[Executor]:
    """An executor all of whose helpers are late."""
    optimizer = SlowOptimizer()
    # The optimizer is a frozen dataclass.
    object.__setattr__(optimizer, "delay", delay)
    executor = Executor(
        kernels,
        SlowCopies(kernels, delay),
        checked_schedules(kernels, optimizer),
        plan,
        store,
        HostUpdates(store, optimizer),
        clip=ClipRule("global_norm", 0.5),
        open_drive=lambda: SlowDrive(NvmeStore(folder), delay),
    )
    try:
        yield executor
    finally:
        executor.close()


def outcome(
    kernels: Kernels, plans: list[Plan], folder: pathlib.Path, delay: Callable[[], None]
) -> tuple[list[float], list[bytes]]:
    """Losses of a few steps, and the bytes of masters and state after them.

    Step i runs under `plans[i % len(plans)]`.
    """
    store = filled_store(kernels.template)
    with slow_executor(kernels, store, plans[0], folder, delay) as executor:
        losses = []
        for step, batch in enumerate(random_batches()):
            if step:
                executor.set_plan(plans[step % len(plans)])
            losses.append(executor.train_step(batch, 1e-2).loss)
        executor.flush()
        arrays = [array for slabs in store.layers for array in (slabs.hi, slabs.lo)]
        for layer in range(len(store.layers)):
            arrays += executor.updates.read_state(layer).values()
        return losses, [array.tobytes() for array in arrays]


def stress_kernels() -> Kernels:
    """Kernels for all plans of `random_plan`."""
    return Kernels(small_model(), data_mesh(), compute_dtype="float32", gradient_dtype="bfloat16")


def same_bits(kernels: Kernels, seed: int, folder: pathlib.Path) -> bool:
    """Whether two random plans, one after another, give under delays what they give without."""
    first = random_plan(kernels.template, 2 * seed)
    second = random_plan(kernels.template, 2 * seed + 1)
    # One order of microbatches, or sums differ by rounding.
    second = second.model_copy(update={"interlayer_home": first.interlayer_home})
    plans = [first, second]
    late = outcome(kernels, plans, folder, Delays(seed))
    return late == outcome(kernels, [without_waiting(plan) for plan in plans], folder, lambda: None)


def main() -> None:
    """Runs the command line; exits with 1 if any bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kernels = stress_kernels()
    start, different = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + options.plans // 2):
            if not same_bits(kernels, seed, pathlib.Path(folder)):
                different.append(seed)
    seconds = time.perf_counter() - start
    differing = different or "none"
    print(f"{options.plans} random plans, two to a run, {seconds:.0f} s; runs that differ: {differing}")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
