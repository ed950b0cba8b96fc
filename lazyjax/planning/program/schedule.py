"""From a plan to the ordered list of operations of one step.

The schedule is the program: the simulator replays this list against costs, the executor walks
the same list and does the work. The order of the list is the order of issue. Every operation
names its resource, what it waits for, the buffers it reads, allocates and frees, and the bytes
it moves; nothing about time.

A step is a chain of *windows*, each of which needs the parameters of one layer: forward through
all layers, loss, then per segment the recomputation of dropped boundaries and the backward pass.
A window holds one compute *item* per microbatch.

How memory is counted, and what the operations are, stands in `lazyjax.planning.program.operations`.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from lazyjax.planning.plan.document import Boundary, Plan, segment_start
from lazyjax.planning.program.operations import (
    COMPUTE_ACTIONS,
    STATE_ACTIONS,
    Action,
    Allocation,
    Buffer,
    BufferRole,
    LayerSizes,
    ModelSizes,
    Operation,
    Place,
    Schedule,
)
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

__all__ = [
    "COMPUTE_ACTIONS",
    "STATE_ACTIONS",
    "Action",
    "Allocation",
    "Buffer",
    "BufferRole",
    "LayerSizes",
    "ModelSizes",
    "Operation",
    "Place",
    "Schedule",
    "build_schedule",
]

#: Compute items after which an offload must have left the device.
OFFLOAD_WINDOW_ITEMS = 2
#: Windows after which a layer's gradient must have left the device.
GRADIENT_WINDOW = 2
#: NVMe writes of activations in flight; their host copies are live until a later write waits.
SPILL_WINDOW = 2
#: Host copies through which optimizer state on NVMe passes: read ahead, in use, being written.
STATE_WINDOW = 4
#: Compute items ahead of its reload at which an NVMe read is issued.
LOAD_AHEAD_ITEMS = 3


@dataclasses.dataclass(slots=True)
class _Draft:
    """An operation under construction; becomes an `Operation` when the list is complete."""

    action: Action
    resource: Resource
    layer: int
    microbatch: int | None
    window: int
    waits: set[int] = dataclasses.field(default_factory=set)
    waits_previous: set[int] = dataclasses.field(default_factory=set)
    reads: list[Buffer] = dataclasses.field(default_factory=list)
    allocates: list[Place] = dataclasses.field(default_factory=list)
    frees: list[Place] = dataclasses.field(default_factory=list)
    bytes: int = 0
    saved: tuple[str, ...] = ()
    accumulates: bool = False
    last: bool = False


class _Window(NamedTuple):
    action: Action
    layer: int
    parameter_layers: tuple[int, ...]


class _Item(NamedTuple):
    window: int
    action: Action
    layer: int
    microbatch: int
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    accumulates: bool
    last: bool


def build_schedule(plan: Plan, sizes: ModelSizes) -> Schedule:
    """Expands `plan` to the operations of one steady-state step.

    `plan` must have passed `validate_plan`; `sizes` describe one microbatch of it.
    """
    builder = _Builder(plan, sizes)
    return Schedule(plan, sizes, builder.build())


def _windows(plan: Plan, tied: bool) -> list[_Window]:
    head = len(plan.layers) - 1
    windows = [_Window(Action.FORWARD, layer, (layer,)) for layer in range(head)]
    windows.append(_Window(Action.LOSS, head, (head, 0) if tied else (head,)))
    layer = head - 1
    while layer >= 1:
        start = segment_start(plan, layer)
        recomputed_until = layer + 1 if plan.recompute == "segment" and start < layer else layer
        windows += [_Window(Action.RECOMPUTE, again, (again,)) for again in range(start, recomputed_until)]
        windows += [_Window(Action.BACKWARD, back, (back,)) for back in range(layer, start - 1, -1)]
        layer = start - 1
    windows.append(_Window(Action.BACKWARD, 0, ()))
    return windows


def _items(plan: Plan, sizes: ModelSizes, windows: Sequence[_Window]) -> list[_Item]:
    head = len(plan.layers) - 1
    order = list(range(plan.microbatches))
    items = []
    for index, window in enumerate(windows):
        # Alternating the direction lets the microbatch that leaves a layer last enter the next
        # one first, without a trip through the host.
        if plan.interlayer_home == "host" and index:
            order = order[::-1]
        layer = window.layer
        for position, microbatch in enumerate(order):
            batch = Buffer(BufferRole.BATCH, 0, microbatch)
            own_input = () if layer == 0 else (Buffer(BufferRole.INPUT, layer, microbatch),)
            reads: tuple[Buffer, ...] = (batch, *own_input)
            writes: tuple[Buffer, ...] = ()
            residuals = tuple(
                Buffer(BufferRole.RESIDUAL, layer, microbatch, name)
                for name in sorted(plan.layers[layer].saved)
            )
            match window.action:
                case Action.FORWARD:
                    writes = (Buffer(BufferRole.INPUT, layer + 1, microbatch), *residuals)
                case Action.RECOMPUTE if plan.layers[layer + 1].boundary is Boundary.RECOMPUTE:
                    writes = (Buffer(BufferRole.INPUT, layer + 1, microbatch),)
                case Action.LOSS:
                    writes = (Buffer(BufferRole.INPUT_GRADIENT, head, microbatch),)
                case Action.BACKWARD:
                    reads += (*residuals, Buffer(BufferRole.INPUT_GRADIENT, layer + 1, microbatch))
                    if layer:
                        writes = (Buffer(BufferRole.INPUT_GRADIENT, layer, microbatch),)
            accumulates = position > 0 or (window.action is Action.BACKWARD and layer == 0 and sizes.tied)
            last = position == len(order) - 1
            items.append(_Item(index, window.action, layer, microbatch, reads, writes, accumulates, last))
    return items


class _Builder:
    """Walks the items once and emits the list; holds what is where at that point."""

    def __init__(self, plan: Plan, sizes: ModelSizes) -> None:
        self.plan, self.sizes = plan, sizes
        self.windows = _windows(plan, sizes.tied)
        self.items = _items(plan, sizes, self.windows)
        self.loss_window = len(plan.layers) - 1
        self.drafts: list[_Draft] = []
        # Where buffers are used: item numbers, in order.
        self.read_at: dict[Buffer, list[int]] = defaultdict(list)
        self.written_at: dict[Buffer, list[int]] = defaultdict(list)
        for number, item in enumerate(self.items):
            for buffer in item.reads:
                self.read_at[buffer].append(number)
            for buffer in item.writes:
                self.written_at[buffer].append(number)
        # What is on the device or the host now, and the operation that put it there.
        self.on_device: dict[Buffer, int] = {}
        self.on_host: dict[Buffer, int] = {}
        self.on_nvme: dict[Buffer, int] = {}
        self.updates: dict[int, int] = {}
        self.offloads: list[tuple[int, int]] = []  # (item, operation) not yet waited for
        # What such an offload still copies but nothing else uses; the item that waits for it frees it.
        self.leaving: dict[int, list[Place]] = defaultdict(list)
        self.gradients: list[tuple[int, int]] = []  # (window, operation) not yet waited for
        self.gradient_of: dict[int, int] = {}
        self.spills: list[int] = []
        self.last_compute: int | None = None

    def build(self) -> tuple[Operation, ...]:
        if self.plan.update == "deferred":
            self._emit_updates(window=0)
        for microbatch in range(self.plan.microbatches):
            self.on_host[Buffer(BufferRole.BATCH, 0, microbatch)] = -1
        plan = self.plan
        for number, item in enumerate(self.items):
            new_window = number == 0 or item.window != self.items[number - 1].window
            self._emit_loads(number)
            for ahead in range(0 if number == 0 else plan.reload_ahead, plan.reload_ahead + 1):
                self._emit_reload(number + ahead)
            if new_window:
                self._emit_fetches(item.window)
            self._emit_compute(number, item)
        if self.plan.update == "immediate":
            self._emit_updates(window=len(self.windows) - 1)
        self._close_the_ring()
        return tuple(
            Operation(
                index=index,
                action=draft.action,
                resource=draft.resource,
                layer=draft.layer,
                microbatch=draft.microbatch,
                window=draft.window,
                waits=tuple(sorted(draft.waits)),
                waits_previous=tuple(sorted(draft.waits_previous)),
                reads=tuple(draft.reads),
                allocates=tuple(Allocation(place, self.sizes.of(place.buffer)) for place in draft.allocates),
                frees=tuple(draft.frees),
                bytes=draft.bytes,
                saved=draft.saved,
                accumulates=draft.accumulates,
                last=draft.last,
            )
            for index, draft in enumerate(self.drafts)
        )

    def _append(self, draft: _Draft) -> int:
        self.drafts.append(draft)
        return len(self.drafts) - 1

    # Parameters

    def _depth(self, window: int) -> int:
        return self.plan.prefetch if window <= self.loss_window else self.plan.backward_prefetch

    def _wanted_soon(self, layer: int, after: int) -> bool:
        """Whether a window after `after` uses the layer's slab before it could be fetched again."""
        if self.plan.layers[layer].resident:
            return any(layer in window.parameter_layers for window in self.windows[after + 1 :])
        furthest = max(self.plan.prefetch, self.plan.backward_prefetch)
        return any(
            layer in self.windows[later].parameter_layers and later - after <= self._depth(later)
            for later in range(after + 1, min(after + 1 + furthest, len(self.windows)))
        )

    def _emit_fetches(self, window: int) -> None:
        furthest = max(self.plan.prefetch, self.plan.backward_prefetch)
        for ahead in range(window, min(window + furthest, len(self.windows))):
            if ahead - window >= self._depth(ahead):
                continue
            for layer in self.windows[ahead].parameter_layers:
                slab = Buffer(BufferRole.PARAMETERS, layer)
                if slab in self.on_device:
                    continue
                draft = _Draft(Action.FETCH, Resource.H2D, layer, None, ahead)
                draft.allocates.append(Place(slab, Tier.DEVICE))
                draft.bytes = self.sizes.of(slab)
                if layer in self.updates:
                    draft.waits.add(self.updates[layer])
                if self.last_compute is not None:
                    draft.waits.add(self.last_compute)
                self.on_device[slab] = self._append(draft)

    # Activations

    def _home(self, buffer: Buffer) -> Tier | None:
        """Where the plan keeps the buffer between the passes; None where it is dropped."""
        layer = self.plan.layers[buffer.layer]
        match buffer.role:
            case BufferRole.INPUT:
                return layer.boundary.tier
            case BufferRole.RESIDUAL:
                return layer.saved[buffer.name]
            case BufferRole.BATCH:
                # Every layer reads it, and it is a thousandth of an activation.
                return Tier.DEVICE
            case _:
                return Tier.DEVICE if self.plan.interlayer_home == "device" else Tier.HOST

    def _next_read(self, buffer: Buffer, after: int) -> int | None:
        """The next item that reads this value of the buffer; None if it is overwritten or unused."""
        reads = self.read_at[buffer]
        position = bisect.bisect_right(reads, after)
        if position == len(reads):
            return None
        writes = self.written_at[buffer]
        rewritten = bisect.bisect_right(writes, after)
        if rewritten < len(writes) and writes[rewritten] < reads[position]:
            return None
        return reads[position]

    def _stays(self, buffer: Buffer, item: int, following: int) -> bool:
        """Whether the buffer stays on the device between two uses."""
        # Bringing a buffer back that is only just leaving would save nothing.
        soon = item + self.plan.reload_ahead + OFFLOAD_WINDOW_ITEMS
        if following <= soon or self._home(buffer) is Tier.DEVICE:
            return True
        if buffer.role is not BufferRole.INPUT:
            return False
        loss = self.loss_window
        crosses_passes = self.items[item].window <= loss < self.items[following].window
        return self.plan.interlayer_home == "device" and not crosses_passes

    def _needs_host_copy(self, buffer: Buffer, item: int) -> bool:
        """Whether some later gap between two uses of this value is spent off the device."""
        following = self._next_read(buffer, item)
        while following is not None:
            if not self._stays(buffer, item, following):
                return True
            item, following = following, self._next_read(buffer, following)
        return False

    def _emit_loads(self, number: int) -> None:
        ahead = number + self.plan.reload_ahead + LOAD_AHEAD_ITEMS
        for later in range(number, min(ahead, len(self.items) - 1) + 1):
            found = [b for b in self.items[later].reads if b in self.on_nvme and b not in self.on_host]
            if not found:
                continue
            item = self.items[later]
            draft = _Draft(Action.LOAD, Resource.NVME_READ, item.layer, item.microbatch, item.window)
            for buffer in found:
                draft.waits.add(self.on_nvme.pop(buffer))
                draft.allocates.append(Place(buffer, Tier.HOST))
                draft.frees.append(Place(buffer, Tier.NVME))
                draft.bytes += self.sizes.of(buffer)
            if self.last_compute is not None:
                draft.waits.add(self.last_compute)
            operation = self._append(draft)
            for buffer in found:
                self.on_host[buffer] = operation

    def _emit_reload(self, number: int) -> None:
        if number >= len(self.items):
            return
        item = self.items[number]
        missing = [b for b in item.reads if b not in self.on_device and b in self.on_host]
        if not missing:
            return
        draft = _Draft(Action.RELOAD, Resource.H2D, item.layer, item.microbatch, item.window)
        for buffer in missing:
            if self.on_host[buffer] >= 0:
                draft.waits.add(self.on_host[buffer])
            draft.reads.append(buffer)
            draft.allocates.append(Place(buffer, Tier.DEVICE))
            draft.bytes += self.sizes.of(buffer)
            if buffer.role is not BufferRole.BATCH and not self._needs_host_copy(buffer, number):
                draft.frees.append(Place(buffer, Tier.HOST))
                del self.on_host[buffer]
        if self.last_compute is not None:
            draft.waits.add(self.last_compute)
        operation = self._append(draft)
        for buffer in missing:
            self.on_device[buffer] = operation

    def _emit_compute(self, number: int, item: _Item) -> None:
        window = self.windows[item.window]
        draft = _Draft(item.action, Resource.COMPUTE, item.layer, item.microbatch, item.window)
        draft.accumulates, draft.last = item.accumulates, item.last
        if item.action in (Action.FORWARD, Action.BACKWARD):
            draft.saved = tuple(sorted(self.plan.layers[item.layer].saved))
        draft.reads = [Buffer(BufferRole.PARAMETERS, layer) for layer in window.parameter_layers]
        draft.reads += item.reads
        draft.waits |= {self.on_device[buffer] for buffer in draft.reads}
        self._retire(draft, number, item.window)
        draft.allocates = [Place(buffer, Tier.DEVICE) for buffer in item.writes]
        self._gradient_buffers(draft, item)
        operation = self._append(draft)
        self.last_compute = operation
        for buffer in item.writes:
            self.on_device[buffer] = operation
        self._emit_offload(number, item)
        if item.last and item.action in (Action.LOSS, Action.BACKWARD):
            self._emit_gradient_out(item, operation)
        self._free_after(draft, number, item, window)

    def _gradient_buffers(self, draft: _Draft, item: _Item) -> None:
        """The accumulator lives while microbatches add to it; the last one turns it into the gradient."""
        if item.action not in (Action.LOSS, Action.BACKWARD):
            return
        accumulator = Place(Buffer(BufferRole.ACCUMULATOR, item.layer), Tier.DEVICE)
        table = Place(Buffer(BufferRole.ACCUMULATOR, 0), Tier.DEVICE)
        if item.action is Action.LOSS and self.sizes.tied and not item.accumulates:
            draft.allocates.append(table)
        if item.last:
            draft.allocates.append(Place(Buffer(BufferRole.GRADIENT, item.layer), Tier.DEVICE))
            if item.accumulates:
                draft.frees.append(accumulator)
        elif not item.accumulates:
            draft.allocates.append(accumulator)

    def _retire(self, draft: _Draft, number: int, window: int) -> None:
        """Makes the item wait for offloads and gradients that should have left by now."""
        due = [entry for entry in self.offloads if entry[0] <= number - OFFLOAD_WINDOW_ITEMS]
        draft.waits |= {operation for _, operation in due}
        draft.frees += [place for _, operation in due for place in self.leaving.pop(operation, ())]
        self.offloads = [entry for entry in self.offloads if entry not in due]
        late = [entry for entry in self.gradients if entry[0] <= window - GRADIENT_WINDOW]
        draft.waits |= {operation for _, operation in late}
        self.gradients = [entry for entry in self.gradients if entry not in late]

    def _emit_offload(self, number: int, item: _Item) -> None:
        leaving = [b for b in item.writes if self._needs_host_copy(b, number)]
        if not leaving:
            return
        draft = _Draft(Action.OFFLOAD, Resource.D2H, item.layer, item.microbatch, item.window)
        draft.waits.add(self.last_compute if self.last_compute is not None else 0)
        for buffer in leaving:
            draft.reads.append(buffer)
            draft.allocates.append(Place(buffer, Tier.HOST))
            draft.bytes += self.sizes.of(buffer)
        operation = self._append(draft)
        self.offloads.append((number, operation))
        for buffer in leaving:
            self.on_host[buffer] = operation

    def _emit_spill(self, item: _Item, buffers: Sequence[Buffer]) -> None:
        draft = _Draft(Action.SPILL, Resource.NVME_WRITE, item.layer, item.microbatch, item.window)
        for buffer in buffers:
            draft.waits.add(self.on_host.pop(buffer))
            draft.allocates.append(Place(buffer, Tier.NVME))
            draft.frees.append(Place(buffer, Tier.HOST))
            draft.bytes += self.sizes.of(buffer)
        if len(self.spills) >= SPILL_WINDOW:
            draft.waits.add(self.spills[-SPILL_WINDOW])
        operation = self._append(draft)
        self.spills.append(operation)
        for buffer in buffers:
            self.on_nvme[buffer] = operation

    def _emit_gradient_out(self, item: _Item, operation: int) -> None:
        gradient = Buffer(BufferRole.GRADIENT, item.layer)
        draft = _Draft(Action.GRADIENT_OUT, Resource.D2H, item.layer, None, item.window)
        draft.waits.add(operation)
        draft.reads.append(gradient)
        draft.frees.append(Place(gradient, Tier.DEVICE))
        draft.bytes = self.sizes.of(gradient)
        copied = self._append(draft)
        self.gradients.append((item.window, copied))
        self.gradient_of[item.layer] = copied

    def _free_after(self, draft: _Draft, number: int, item: _Item, window: _Window) -> None:
        spilled = []
        for buffer in dict.fromkeys((*item.reads, *item.writes)):
            following = self._next_read(buffer, number)
            if following is None or not self._stays(buffer, number, following):
                del self.on_device[buffer]
                place = Place(buffer, Tier.DEVICE)
                copying = [o for _, o in self.offloads if self.on_host.get(buffer) == o]
                (self.leaving[copying[0]] if copying else draft.frees).append(place)
                if following is not None and self._home(buffer) is Tier.NVME and buffer in self.on_host:
                    crosses = item.window <= self.loss_window < self.items[following].window
                    spilled += [buffer] if crosses else []
        if spilled:
            self._emit_spill(item, spilled)
        if item.last:
            for layer in window.parameter_layers:
                if not self._wanted_soon(layer, item.window):
                    slab = Buffer(BufferRole.PARAMETERS, layer)
                    del self.on_device[slab]
                    draft.frees.append(Place(slab, Tier.DEVICE))

    # Updates

    def _emit_updates(self, window: int) -> None:
        """One host update per layer, in forward order; state that lives on NVMe comes and goes around it."""
        spills: list[int] = []
        for layer in range(len(self.plan.layers)):
            update = _Draft(Action.UPDATE, Resource.CPU, layer, None, window)
            if self.plan.update == "immediate":
                update.waits |= set(self.gradient_of.values())
            on_nvme = self.plan.layers[layer].state == "nvme"
            if on_nvme:
                load = _Draft(Action.LOAD_STATE, Resource.NVME_READ, layer, None, window)
                load.bytes = self.sizes.layers[layer].state_bytes
                if len(spills) >= STATE_WINDOW:
                    load.waits.add(spills[-STATE_WINDOW])
                update.waits.add(self._append(load))
            self.updates[layer] = self._append(update)
            if on_nvme:
                spill = _Draft(Action.SPILL_STATE, Resource.NVME_WRITE, layer, None, window)
                spill.bytes = self.sizes.layers[layer].state_bytes
                spill.waits.add(self.updates[layer])
                spills.append(self._append(spill))

    def _close_the_ring(self) -> None:
        """What the first operations of a step wait for in the step before it."""
        assert self.last_compute is not None
        last_state = [i for i, draft in enumerate(self.drafts) if draft.action is Action.SPILL_STATE][-1:]
        for draft in self.drafts:
            match draft.action:
                case Action.UPDATE if self.plan.update == "deferred":
                    # The clip factor needs every layer's norm, hence the last backward.
                    draft.waits_previous |= {self.gradient_of[draft.layer], self.last_compute}
                case Action.FETCH if self.plan.update == "immediate":
                    draft.waits_previous.add(self.updates[len(self.plan.layers) - 1])
                case Action.LOAD_STATE:
                    draft.waits_previous |= set(last_state)
