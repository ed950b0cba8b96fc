"""Host updates of all layers, wherever what they work on lives.

Nothing here decides when: the executor runs these functions on its host threads, where the
schedule says (load_state, update, spill_state and the moves around fetches and gradients). What lives on
NVMe passes through copies; the schedule bounds how many are in use.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from lazyjax.optim.base import HostOptimizer, HostState
from lazyjax.specs import Part, item_bytes, slab_part
from lazyjax.storage.host import HostStore, LayerSlabs
from lazyjax.storage.nvme import Drive

#: What an update changes.
CHANGED = (Part.STATE, Part.LO, Part.HI)


class UpdateStep(NamedTuple):
    """What the updates of one step need; `scales` holds each layer's clip factor."""

    learning_rate: float
    step: int
    scales: tuple[float, ...]


class HostUpdates:
    """The optimizer, with its state among what the layers of a store own.

    A state that was never updated takes no memory: it is mapped when it is placed.
    """

    def __init__(self, store: HostStore, optimizer: HostOptimizer) -> None:
        self._store, self._optimizer, self._owned = store, optimizer, store.owned
        store.owned.add(
            Part.STATE,
            lambda layer: optimizer.create_state(store.layouts[layer]),
            lambda layer: optimizer.describe_state(store.layouts[layer]),
        )
        #: Called with a layer before what it owns changes or moves; waits until it may.
        self.before_change: Callable[[int], None] = lambda layer: None

    def place(self, on_nvme: Sequence[Collection[Part]], drive: Drive | None) -> None:
        """Moves `on_nvme` of every layer to the drive and all else into memory: see `OwnedMemory.place`.

        Must not run while updates are queued.
        """
        for layer, parts in enumerate(on_nvme):
            if parts != self._owned.on_nvme(layer):
                self.before_change(layer)
        self._store.place(on_nvme, drive)

    def read_state(self, layer: int) -> HostState:
        """The optimizer's arrays of one layer: those in use, or a copy of what is on NVMe.

        Must not run while updates are queued.
        """
        with self._owned.reading(layer, (Part.STATE,)) as arrays:
            if Part.STATE in self._owned.on_nvme(layer):
                return {name: array.copy() for name, array in arrays[Part.STATE].items()}
            return arrays[Part.STATE]

    def state_bytes_before(self, layer: int) -> dict[str, int]:
        """By array, the bytes of a layer's state that belong to the parts of its slab before the one here."""
        whole = self._store.whole_layouts[layer]
        before = slab_part(whole, 0, self._store.share.elements(whole.length).start)
        return {
            name: math.prod(shape) * item_bytes(dtype)
            for name, (shape, dtype) in self._optimizer.describe_state(before).items()
        }

    @contextlib.contextmanager
    def reading(self, layer: int) -> Iterator[tuple[LayerSlabs, HostState]]:
        """A layer's master weights and state, as copies where they live on NVMe; not its gradient.

        Updates of the layer must not run meanwhile, those of others may.
        """
        with self._store.reading(layer) as slabs, self._owned.reading(layer, (Part.STATE,)) as arrays:
            yield slabs, arrays[Part.STATE]

    @contextlib.contextmanager
    def writing(self, layer: int) -> Iterator[tuple[LayerSlabs, HostState]]:
        """The same, to be changed: what was put into it is written, unless an error is raised."""
        with self.reading(layer) as (slabs, state):
            yield slabs, state
            halves = {Part.HI: {Part.HI.value: slabs.hi}, Part.LO: {Part.LO.value: slabs.lo}}
            self._owned.write(layer, halves | {Part.STATE: state})

    # What a schedule asks for

    def load(self, layer: int, *, updates: bool, fetched: Collection[Part]) -> Callable[[], None]:
        """Starts bringing up what a layer needs; returns what waits for the end.

        Args:
            updates: whether it is updated; else only what a fetch reads comes.
            fetched: the parts that a fetch reads.
        """
        return self._owned.copies.load(layer, Part if updates else fetched)

    def update(self, layer: int, step: UpdateStep) -> None:
        """One optimizer step on a layer's slabs; what lives on NVMe has to be loaded."""
        self.before_change(layer)
        state = self._owned.in_memory(layer, Part.STATE)
        assert state is not None
        self._optimizer.update(
            self._store.slabs(layer),
            state,
            learning_rate=step.learning_rate,
            count=step.step,
            scale=step.scales[layer],
        )

    def spill(self, layer: int, *, updated: bool) -> Callable[[], None]:
        """Starts writing what an update has changed; what is returned waits and gives up all copies."""
        return self._owned.copies.store(layer, CHANGED if updated else ())

    def spill_gradient(self, layer: int) -> Callable[[], None]:
        """The same for a gradient that came from the device."""
        return self._owned.copies.store_new(layer, Part.GRADIENT)
