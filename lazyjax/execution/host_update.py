"""Runs the optimizer on host slabs, behind the device's back.

Updates of one step run in forward order on one worker (an optimizer may use more threads inside
itself); the executor waits for a layer's update only when it is about to fetch that layer.

A layer's optimizer state may live on NVMe. It passes through a few scratch copies: the next
layers' are read while this one computes, and the last ones' are still being written.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from lazyjax.optim.base import HostOptimizer, HostState
from lazyjax.planning.program.schedule import STATE_WINDOW
from lazyjax.storage.host import HostStore
from lazyjax.storage.nvme import NvmeStore

#: Layers whose state is read before their turn; with the one in use fewer than all scratch copies.
_READ_AHEAD = STATE_WINDOW // 2

#: Called with `update`, `load_state` or `spill_state` and its start and end (perf_counter seconds).
Timed = Callable[[str, float, float], None]


class UpdateStep(NamedTuple):
    """What the updates of one step need; `scales` holds each layer's clip factor."""

    learning_rate: float
    step: int
    scales: tuple[float, ...]


class HostUpdates:
    """Optimizer state of all layers, and the worker that updates them."""

    def __init__(self, store: HostStore, optimizer: HostOptimizer) -> None:
        self._store, self._optimizer = store, optimizer
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="host-update")
        self._states: list[HostState | None] = [
            optimizer.create_state(slabs.layout) for slabs in store.layers
        ]
        self._nvme: NvmeStore | None = None
        self._queued: collections.deque[int] = collections.deque()
        self._reading: dict[int, _Borrowed] = {}
        self._scratch: list[_Borrowed] = []

    def place_states(self, on_nvme: Iterable[int], nvme: NvmeStore | None) -> None:
        """Moves the states of the layers in `on_nvme` to NVMe and all others to the host.

        Must not run while updates are queued.
        """
        wanted = set(on_nvme)
        for layer, state in enumerate(self._states):
            if layer in wanted and state is not None:
                assert nvme is not None
                for pending in [nvme.write(_key(layer, name), _raw(array)) for name, array in state.items()]:
                    pending.result()
                self._nvme, self._states[layer] = nvme, None
            elif layer not in wanted and state is None:
                self._states[layer] = self.read_state(layer)

    def read_state(self, layer: int) -> HostState:
        """The optimizer's arrays of one layer: those in use, or a copy of what is on NVMe.

        Must not run while updates are queued.
        """
        state = self._states[layer]
        if state is not None:
            return state
        copy = self._optimizer.create_state(self._store.layers[layer].layout)
        self._read(layer, copy).finish()
        for borrowed in self._scratch:
            borrowed.finish()
        return copy

    def submit(self, layer: int, step: UpdateStep, timed: Timed) -> Future[None]:
        """Queues the update of one layer."""
        if self._states[layer] is None:
            self._queued.append(layer)
        return self._worker.submit(self._run, layer, step, timed)

    def _run(self, layer: int, step: UpdateStep, timed: Timed) -> None:
        state = self._states[layer]
        borrowed = None
        if state is None:
            start = time.perf_counter()
            borrowed = self._borrow(layer)
            state = borrowed.state
            timed("load_state", start, time.perf_counter())
        start = time.perf_counter()
        self._optimizer.update(
            self._store.layers[layer],
            state,
            learning_rate=step.learning_rate,
            count=step.step,
            scale=step.scales[layer],
        )
        timed("update", start, time.perf_counter())
        if borrowed is not None:
            assert self._nvme is not None
            start = time.perf_counter()
            for name, array in state.items():
                borrowed.pending.append(self._nvme.write(_key(layer, name), _raw(array)))
            timed("spill_state", start, time.perf_counter())

    def _borrow(self, layer: int) -> _Borrowed:
        """The layer's state in scratch memory; starts reading the next ones that are queued."""
        self._queued.popleft()
        borrowed = self._reading.pop(layer, None) or self._read(layer, self._free_scratch(layer))
        borrowed.finish()
        for following in list(self._queued)[:_READ_AHEAD]:
            if following != layer and following not in self._reading:
                self._reading[following] = self._read(following, self._free_scratch(following))
        return borrowed

    def _free_scratch(self, layer: int) -> HostState:
        """The scratch copy that was used longest ago, if it has the right sizes, else a new one."""
        if len(self._scratch) >= STATE_WINDOW:
            oldest = self._scratch.pop(0)
            oldest.finish()
            wanted = self._optimizer.describe_state(self._store.layers[layer].layout)
            if {name: array.shape for name, array in oldest.state.items()} == {
                name: shape for name, (shape, _) in wanted.items()
            }:
                return oldest.state
        return self._optimizer.create_state(self._store.layers[layer].layout)

    def _read(self, layer: int, state: HostState) -> _Borrowed:
        assert self._nvme is not None
        for borrowed in self._scratch:
            if borrowed.layer == layer:
                borrowed.finish()
        pending = [self._nvme.read(_key(layer, name), _raw(array)) for name, array in state.items()]
        borrowed = _Borrowed(layer, state, pending)
        self._scratch.append(borrowed)
        return borrowed

    def state_bytes(self) -> int:
        """Bytes of optimizer state on the host (scratch copies not counted)."""
        return sum(array.nbytes for state in self._states if state is not None for array in state.values())

    def close(self) -> None:
        """Waits for queued updates and stops the worker."""
        self._worker.shutdown(wait=True)
        for borrowed in self._scratch:
            borrowed.finish()


class _Borrowed:
    """A scratch copy of one layer's state, and the reads or writes on it that are in flight."""

    def __init__(self, layer: int, state: HostState, pending: list[Any]) -> None:
        self.layer, self.state, self.pending = layer, state, pending

    def finish(self) -> None:
        """Waits until nothing reads or writes the copy any more."""
        while self.pending:
            self.pending.pop().result()


def _key(layer: int, name: str) -> str:
    return f"state-{layer}-{name}"


def _raw(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
