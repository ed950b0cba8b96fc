"""Runs the optimizer on host slabs, behind the device's back.

Updates of one step run in forward order on one worker (an optimizer may use more threads inside
itself); the executor waits for a layer's update only when it is about to fetch that layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from lazyjax.optim.base import HostOptimizer
from lazyjax.storage.host import HostStore


class UpdateStep(NamedTuple):
    """What the updates of one step need; `scales` holds each layer's clip factor."""

    learning_rate: float
    step: int
    scales: tuple[float, ...]


class HostUpdates:
    """Optimizer state of all layers, and the worker that updates them.

    Attributes:
        states: per layer, the optimizer's arrays by name.
    """

    def __init__(self, store: HostStore, optimizer: HostOptimizer) -> None:
        self._store, self._optimizer = store, optimizer
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="host-update")
        self.states: list[dict[str, np.ndarray]] = [
            optimizer.create_state(slabs.layout) for slabs in store.layers
        ]

    def submit(self, layer: int, step: UpdateStep, done: Callable[[float, float], None]) -> Future[None]:
        """Queues the update of one layer; `done` gets its start and end in seconds of perf_counter."""
        return self._worker.submit(self._run, layer, step, done)

    def _run(self, layer: int, step: UpdateStep, done: Callable[[float, float], None]) -> None:
        start = time.perf_counter()
        self._optimizer.update(
            self._store.layers[layer],
            self.states[layer],
            learning_rate=step.learning_rate,
            count=step.step,
            scale=step.scales[layer],
        )
        done(start, time.perf_counter())

    def state_bytes(self) -> int:
        """Bytes of optimizer state on the host."""
        return sum(array.nbytes for state in self.states for array in state.values())

    def close(self) -> None:
        """Waits for queued updates and stops the worker."""
        self._worker.shutdown(wait=True)
