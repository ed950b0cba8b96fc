"""Optimizer state of all layers, on the host or on NVMe, and what is done with it.

Nothing here decides when: the executor runs these functions on its host threads, where the
schedule says (load_state, update, spill_state). A state that lives on NVMe passes through scratch
copies; the schedule bounds how many are in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from lazyjax.optim.base import HostOptimizer, HostState
from lazyjax.storage.host import HostStore
from lazyjax.storage.nvme import Drive, DriveTransfer


class UpdateStep(NamedTuple):
    """The inputs of one step's updates; `scales` holds each layer's clip factor."""

    learning_rate: float
    step: int
    scales: tuple[float, ...]


class HostUpdates:
    """Optimizer state of all layers, wherever it lives.

    A state that was never updated takes no memory: it is mapped when it is placed.
    """

    def __init__(self, store: HostStore, optimizer: HostOptimizer) -> None:
        self._store, self._optimizer = store, optimizer
        self._on_host: dict[int, HostState] = {}
        self._on_nvme: set[int] = set()
        self._drive: Drive | None = None
        self._borrowed: dict[int, HostState] = {}
        self._scratch: list[HostState] = []
        self._most_copies = 0
        self._lock = threading.Lock()
        #: Called with a layer before its slabs or its state change or move; waits until they may.
        self.before_change: Callable[[int], None] = lambda layer: None

    def place_states(self, on_nvme: Iterable[int], drive: Drive | None) -> None:
        """Moves the states of the layers in `on_nvme` to the drive and all others to the host.

        Must not run while updates are queued. What was used before stays where it was until everything
        has arrived, so that after an error the states are as before.

        Raises:
            NvmeError: naming the array that could not be written or read.
        """
        wanted = set(on_nvme)
        leaving, coming = wanted - self._on_nvme, self._on_nvme - wanted
        for layer in leaving | coming:
            self.before_change(layer)
        for layer in sorted(leaving):
            assert drive is not None
            state = self._on_host[layer] if layer in self._on_host else self._create(layer)
            _finish([drive.write(_key(layer, name), _raw(array)) for name, array in state.items()])
        arrived = {layer: self.read_state(layer) for layer in sorted(coming)}
        for layer, state in arrived.items():
            assert self._drive is not None
            self._on_host[layer] = state
            for name in state:
                self._drive.delete(_key(layer, name))
        for layer in leaving:
            self._on_host.pop(layer, None)
        self._on_nvme = wanted
        for layer in range(len(self._store.layers)):
            if layer not in wanted:
                self._state(layer)  # mapped now, so that no step has to
        self._drive = drive if wanted else None
        self._scratch.clear()

    def read_state(self, layer: int) -> HostState:
        """The optimizer's arrays of one layer: those in use, or a copy of what is on NVMe.

        Must not run while updates are queued.
        """
        if layer not in self._on_nvme:
            return self._state(layer)
        copy = self._create(layer)
        self._start_reading(layer, copy)()
        return copy

    def write_state(self, layer: int, state: HostState) -> None:
        """Puts back what `read_state` gave, with new contents; must not run while updates are queued."""
        if layer in self._on_nvme:
            assert self._drive is not None
            drive = self._drive
            _finish([drive.write(_key(layer, name), _raw(array)) for name, array in state.items()])

    def _state(self, layer: int) -> HostState:
        if layer not in self._on_host:
            self._on_host[layer] = self._create(layer)
        return self._on_host[layer]

    def load(self, layer: int) -> Callable[[], None]:
        """Starts reading a layer's state into a scratch copy; returns what waits for the end."""
        with self._lock:
            state = self._free_scratch(layer)
            self._borrowed[layer] = state
        return self._start_reading(layer, state)

    def update(self, layer: int, step: UpdateStep) -> None:
        """One optimizer step on a layer's slabs; a state on NVMe has to be loaded."""
        self.before_change(layer)
        self._optimizer.update(
            self._store.layers[layer],
            self._borrowed[layer] if layer in self._on_nvme else self._state(layer),
            learning_rate=step.learning_rate,
            count=step.step,
            scale=step.scales[layer],
        )

    def spill(self, layer: int) -> Callable[[], None]:
        """Starts writing a layer's state back; what is returned waits and gives up the scratch copy."""
        assert self._drive is not None
        state = self._borrowed[layer]
        writes = [self._drive.write(_key(layer, name), _raw(array)) for name, array in state.items()]

        def end() -> None:
            _finish(writes)
            with self._lock:
                self._scratch.append(self._borrowed.pop(layer))

        return end

    def _create(self, layer: int) -> HostState:
        return self._optimizer.create_state(self._store.layers[layer].layout)

    def _free_scratch(self, layer: int) -> HostState:
        """A scratch copy of the right sizes, new if none is free."""
        description = self._optimizer.describe_state(self._store.layers[layer].layout)
        wanted = {name: shape for name, (shape, _) in description.items()}
        for index, state in enumerate(self._scratch):
            if {name: array.shape for name, array in state.items()} == wanted:
                return self._scratch.pop(index)
        # No more copies than were ever in use at once: those of other sizes go, the oldest first.
        self._most_copies = max(self._most_copies, len(self._borrowed) + 1)
        while self._scratch and len(self._borrowed) + len(self._scratch) >= self._most_copies:
            self._scratch.pop(0)
        return self._create(layer)

    def _start_reading(self, layer: int, state: HostState) -> Callable[[], None]:
        drive = self._drive
        assert drive is not None
        reads = [drive.read(_key(layer, name), _raw(array)) for name, array in state.items()]
        return lambda: _finish(reads)


def _finish(transfers: list[DriveTransfer]) -> None:
    """Waits for all, also after an error, so that no memory is given up while a transfer uses it."""
    errors = []
    for transfer in transfers:
        try:
            transfer.result()
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _key(layer: int, name: str) -> str:
    return f"state-{layer}-{name}"


def _raw(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
