"""A small training state to save: slabs and optimizer state of a tiny model, filled at random."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np

from lazyjax.execution.host_update import HostUpdates
from lazyjax.optim.base import HostOptimizer, HostState
from lazyjax.optim.make import make_host_optimizer
from lazyjax.storage.host import HostStore, LayerSlabs, allocate_host_store
from lazyjax.training import checkpoints
from lazyjax.training.checkpoints import Checkpoint, Identity, Position, identity_of
from tests import tiny

TEMPLATE = tiny.template("qwen2", tied=False, blocks=1)


@dataclasses.dataclass
class Saved:
    """Slabs and state, and what it takes to save them."""

    store: HostStore
    states: list[HostState]
    optimizer: HostOptimizer

    @property
    def identity(self) -> Identity:
        return identity_of(self.store.spec, self.optimizer)

    def contents(self) -> list[bytes]:
        slabs = [array.tobytes() for layer in self.store.layers for array in (layer.hi, layer.lo)]
        return slabs + [array.tobytes() for state in self.states for array in state.values()]

    def save(self, folder: pathlib.Path, step: int, *, loss: float | None = None, **options) -> pathlib.Path:
        return checkpoints.save(
            folder, self.store.spec, self.reading, position(step, loss), self.identity,
            plan={}, config={}, attention="blocks", **options,
        )  # fmt: skip

    @contextlib.contextmanager
    def reading(self, layer: int) -> Iterator[tuple[LayerSlabs, HostState]]:
        yield self.store.slabs(layer), self.states[layer]

    def restore(self, checkpoint: Checkpoint) -> None:
        for index in range(len(self.states)):
            slabs = self.store.slabs(index)
            checkpoint.restore_layer(index, slabs, self.states[index])

    def updates(self) -> HostUpdates:
        return HostUpdates(self.store, self.optimizer)


def make_saved(seed: int | None, *, optimizer: str = "hybrid8bit", devices: int = 1) -> Saved:
    """Random contents; zeros where there is no seed."""
    store = allocate_host_store(TEMPLATE.spec, devices=devices)
    host_optimizer = make_host_optimizer(optimizer, threads=1, path="pure")
    states = [host_optimizer.create_state(slabs.layout) for slabs in store.layers]
    if seed is not None:
        rng = np.random.default_rng(seed)
        for slabs, state in zip(store.layers, states, strict=True):
            used = sum(segment.elements for segment in slabs.layout.segments)
            for array in (slabs.hi, slabs.lo, *(a for name, a in state.items() if name != "version")):
                raw = array.reshape(-1).view(np.uint8)
                size = min(used, raw.size)
                raw[:size] = rng.integers(0, 256, size, np.uint8)
    return Saved(store, states, host_optimizer)


def position(step: int, loss: float | None = None) -> Position:
    return Position(
        step=step, applied_steps=step - 1, skipped_steps=1, skipped_in_a_row=0, learning_rate=1e-3,
        schedule_steps=100, data={"epoch": 0, "position": step}, seed={"weights": 1, "data": 2},
        metrics={"bytes": 10 * step, "waiting": []}, evaluation_loss=loss,
    )  # fmt: skip
