"""Every operation that any plan of a space could need, each under a condition over the decisions.

This is where a step is written down, once: which operations there are and in which order they are issued,
what they allocate and free on which tier, over which link they move how many tensors, and which of them
hold others up so that memory stays bounded. The schedule of a plan is what remains when the conditions
are evaluated (`lazyjax.planning.program.schedule`); the program's rows for time and memory and the
replay of many plans at once are sums over the same list (`lazyjax.planning.planner`). What an operation
waits for because it reads it follows from who made it and is not written down.

Emitters: `lazyjax.planning.program.compute` writes compute operations, `lazyjax.planning.program.activations`
whatever passes between layers, `lazyjax.planning.program.parameters` slabs and gradients,
`lazyjax.planning.program.updates` host updates and what they need.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import NamedTuple

from lazyjax.planning.plan.document import Plan
from lazyjax.planning.program.conditions import NEVER, Condition, weakest
from lazyjax.planning.program.operations import (
    RESOURCE_OF,
    Action,
    Buffer,
    BufferRole,
    ModelSizes,
    Place,
)
from lazyjax.planning.program.space import Space
from lazyjax.planning.program.tiers import STATE_DOWN, Link
from lazyjax.planning.program.windows import Item, Window, Windows
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

#: Windows after which a layer's gradient must have left the device.
GRADIENT_WINDOW = 2
#: Compute items after which a move further down must have ended: longer than one takes on most drives.
SPILL_WINDOW_ITEMS = 4
#: Compute items after which a gradient must have been summed over the devices.
SCATTER_WINDOW_ITEMS = 2
#: Windows by which parameters are gathered ahead of their use; not before they are fetched.
GATHER_AHEAD = 1
#: Layers of which copies of what lives on a drive exist at once: read ahead, in use, being written.
STATE_WINDOW = 4
#: Windows by which a read of parameters precedes their fetch.
PARAMETERS_AHEAD = 1
#: Compute items by which a move up precedes the next one, and the lowest one its reload.
LOAD_AHEAD_ITEMS = 3


class Phase(enum.IntEnum):
    """Order of issue around one compute item."""

    UPDATE = -1
    LOAD = 0
    RELOAD = 1
    FETCH = 2
    GATHER = 3
    STATE_DOWN = 4
    COMPUTE = 5
    REDUCE_SCATTER = 6
    OFFLOAD = 7
    GRADIENT_OUT = 8
    SPILL = 9
    GRADIENT_DOWN = 10


class Slot(NamedTuple):
    """Where an operation is in the list of all: by window, item, phase, and what it is for."""

    window: int
    position: int
    phase: int
    order: tuple[int, ...] = ()


class Change(NamedTuple):
    """A tensor that comes into being on a tier, or goes.

    Attributes:
        times: microbatches for which it stands; more than one only where one item stands for all.
        pipelined: what was copied out microbatch by microbatch comes back while others still leave.
    """

    place: Place
    times: int = 1
    pipelined: bool = False


@dataclasses.dataclass(slots=True)
class LiftedOperation:
    """An operation and when it exists.

    Attributes:
        slot: its place in the list.
        window: the window it serves.
        item: for compute and what is moved up for it, the item it serves.
        condition: of a compute operation and an update; a transfer exists where something moves.
        allocates, frees: tensors that come into being on a tier, and that go.
        parts: of a compute operation: the layers that it runs, each under its condition.
        throttles: operations that must have ended first, so that memory stays bounded; under any of some
            conditions.
    """

    slot: Slot
    action: Action
    resource: Resource
    layer: int
    microbatch: int | None
    window: Window
    item: Item | None = None
    condition: Condition | None = None
    allocates: dict[Change, Condition] = dataclasses.field(default_factory=dict)
    frees: dict[Change, Condition] = dataclasses.field(default_factory=dict)
    throttles: dict[Slot, list[Condition]] = dataclasses.field(default_factory=dict)
    accumulates: bool = False
    last: bool = False
    parts: list[tuple[int, Condition]] = dataclasses.field(default_factory=list)

    @property
    def exists(self) -> list[Condition]:
        """It exists where one of these holds."""
        if self.condition is not None:
            return [self.condition]
        changes = self.frees if self.action in (Action.GRADIENT_OUT, *STATE_DOWN) else self.moves
        return weakest(changes.values())

    @property
    def moves(self) -> Mapping[Change, Condition]:
        """What a transfer takes somewhere."""
        if self.action is Action.GRADIENT_OUT:
            return self.frees
        if self.action is Action.REDUCE_SCATTER:
            partial = BufferRole.PARTIAL
            return {c: where for c, where in self.frees.items() if c.place.buffer.role is partial}
        if self.action in STATE_DOWN:
            # The update has used the gradient up; its copy only goes.
            spent = BufferRole.GRADIENT
            return {c: where for c, where in self.frees.items() if c.place.buffer.role is not spent}
        return self.allocates or self.frees


class IssueOrder:
    """Where operations that every plan has are in the list.

    Args:
        items: compute items of a window.
        shared: whether gradients are summed over devices.
    """

    def __init__(self, windows: Windows, settings: Plan, items: int, *, shared: bool) -> None:
        self._windows, self._items, self._prefetch = windows, items, settings.prefetch
        self._shared = shared
        self.deferred = settings.update == "deferred"

    @property
    def last_norm(self) -> Slot:
        """What finishes the last layer's gradient, and with it the norm of all."""
        phase = Phase.REDUCE_SCATTER if self._shared else Phase.COMPUTE
        return Slot(len(self._windows.order) - 1, self._items - 1, phase)

    def gradient(self, layer: int) -> Slot:
        """Where a layer's gradient leaves the device."""
        return self._after_backward(layer, Phase.GRADIENT_OUT)

    def gradient_write(self, layer: int) -> Slot:
        """Where a layer's gradient goes to the drive, if it lives there."""
        return self._after_backward(layer, Phase.GRADIENT_DOWN)

    def update(self, layer: int, order: int = 0) -> Slot:
        """A layer's host update and, with a negative order, the moves that bring up what it needs.

        Where it is deferred, right before its slab is fetched: what the forward pass moves down to a
        drive must not queue behind the state of layers that come much later. Else after everything.
        """
        return Slot(self._update_window(layer), 0, Phase.UPDATE, (layer, order))

    def after_update(self, layer: int, depth: int) -> Slot:
        """Where a layer's update goes down: after its slab was fetched, where it is deferred."""
        if self.deferred:
            return Slot(self._update_window(layer), 0, Phase.STATE_DOWN, (layer, depth))
        return self.update(layer, depth)

    def _update_window(self, layer: int) -> int:
        return max(0, layer - self._prefetch + 1) if self.deferred else len(self._windows.order)

    def _after_backward(self, layer: int, phase: Phase) -> Slot:
        window = self._windows.backward_of(layer)
        return Slot(self._windows.number[window], self._items - 1, phase)


class Expansion:
    """The operations of all plans of a space, to be added by emitters (`lazyjax.planning.program.schedule`).

    Args:
        space: the decisions.
        sizes: only whether tables are tied, slabs shared, and which residuals there are.
        by_layer: one item stands for all microbatches of a window. The list is then short, and right in
            time up to how microbatches overlap; it says nothing about memory.
    """

    def __init__(self, space: Space, sizes: ModelSizes, *, by_layer: bool = False) -> None:
        self.space, self.sizes, self.by_layer = space, sizes, by_layer
        self.settings = space.settings
        self.head = len(sizes.layers) - 1
        self.microbatches = self.settings.microbatches
        self.items = 1 if by_layer else self.microbatches
        self.reload_ahead = 1 if by_layer else self.settings.reload_ahead
        self.windows = Windows(
            self.head,
            space.segments,
            self.items,
            alternating=self.settings.interlayer_home == "host",
            whole=self.settings.recompute == "segment",
        )
        self._lumps: dict[Window, Window] = {}
        if by_layer:
            for window in self.windows.order:
                if window.action is Action.RECOMPUTE:
                    first = self.windows.recomputing(window)[0].start
                    self._lumps[window] = Window(Action.RECOMPUTE, min(first, window.layer), window.end)
        self.order = IssueOrder(self.windows, self.settings, self.items, shared=sizes.shared)
        self.operations: dict[Slot, LiftedOperation] = {}
        #: Where what layers own goes down a link after their updates.
        self.state_writes: dict[Link, dict[int, Slot]] = {}
        #: The fetch of each layer's slab for the forward pass or the loss.
        self.first_fetches: dict[int, LiftedOperation] = {}
        #: Reads of halves of the master weights for a fetch, by layer.
        self.parameter_loads: dict[int, list[LiftedOperation]] = {}

    def ordered(self) -> list[LiftedOperation]:
        """All operations in order of issue."""
        return [self.operations[slot] for slot in sorted(self.operations)]

    def lag(self, items: int) -> int:
        """The same lag in items of this expansion, at least one window where they are windows."""
        if not self.by_layer:
            return items
        return -(-(self.microbatches - 1 + items) // self.microbatches)

    def compute(self, item: Item) -> LiftedOperation:
        """The compute operation of an item."""
        return self.operations[self.slot(item, Phase.COMPUTE)]

    def lump(self, window: Window) -> Window:
        """The window as which another counts: by layer, a segment's recomputation is one."""
        return self._lumps[window] if window in self._lumps else window

    def slot(self, item: Item, phase: int, order: tuple[int, ...] = ()) -> Slot:
        """The slot of something that is issued around an item."""
        return Slot(self.windows.number[self.lump(item.window)], item.position, phase, order)

    def transfer(
        self,
        action: Action,
        at: Item,
        phase: Phase,
        layer: int,
        microbatch: int | None,
        target: Item,
        order: tuple[int, ...] = (),
    ) -> LiftedOperation:
        """The transfer of this kind that is issued at an item; made where there is none yet.

        Args:
            target: the item that it serves.
        """
        slot = self.slot(at, phase, order)
        if slot not in self.operations:
            served = self.lump(target.window)
            self.operations[slot] = LiftedOperation(
                slot, action, RESOURCE_OF[action], layer, microbatch, served, Item(served, target.position)
            )
        return self.operations[slot]

    def add(
        self,
        changes: dict[Change, Condition],
        buffer: Buffer,
        tier: Tier,
        condition: Condition,
        times: int = 1,
        pipelined: bool = False,
    ) -> None:
        """Adds to `allocates` or `frees` of an operation."""
        if condition == NEVER:
            return
        change = Change(Place(buffer, tier), times, pipelined)
        if change in changes:
            condition = changes[change].either(condition)
        changes[change] = self.space.reduced(condition)

    def throttle(self, operation: LiftedOperation, waited: LiftedOperation, condition: Condition) -> None:
        """Makes an operation wait for an earlier one, where that exists, under a condition."""
        if condition == NEVER:
            return
        operation.throttles.setdefault(waited.slot, [])
        if condition not in operation.throttles[waited.slot]:
            operation.throttles[waited.slot].append(condition)
