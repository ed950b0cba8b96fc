"""Emits parameter slabs and gradients: what is fetched when, how long it stays, and what leaves."""

from __future__ import annotations

from lazyjax.planning.program.conditions import ALWAYS, NEVER, Condition
from lazyjax.planning.program.expansion import (
    GRADIENT_WINDOW,
    PARAMETERS_AHEAD,
    STATE_WINDOW,
    Expansion,
    LiftedOperation,
    Phase,
)
from lazyjax.planning.program.operations import ROLE_OF, Action, Buffer, BufferRole
from lazyjax.planning.program.tiers import LINKS
from lazyjax.planning.program.windows import Item, Segment, Window
from lazyjax.specs import Part, Tier


def emit_parameters(expansion: Expansion) -> None:
    """Slabs and gradients of all layers."""
    slabs = _Slabs(expansion)
    for layer in range(expansion.head + 1):
        slabs.emit(layer)
    for layer in range(expansion.head, -1, -1):
        _emit_gradient(expansion, layer)


class _Slabs:
    """A slab is fetched ahead of the windows that need it and stays where it is wanted again soon."""

    def __init__(self, expansion: Expansion) -> None:
        self.e, self.space, self.windows = expansion, expansion.space, expansion.windows
        self.head = expansion.head
        self.forward_depth = expansion.settings.prefetch
        self.backward_depth = expansion.settings.backward_prefetch

    def emit(self, layer: int) -> None:
        """Everything about one layer's slab."""
        first = Window(Action.LOSS if layer == self.head else Action.FORWARD, layer)
        self._fetch(layer, first, self.forward_depth, None, ALWAYS)
        if layer == self.head:
            self._free(layer, first, ALWAYS)
        elif layer == 0:
            self._embedding(first)
        else:
            self._block(layer, first)

    def _embedding(self, first: Window) -> None:
        """A tied table serves the loss as well."""
        loss = Window(Action.LOSS, self.head)
        if not self.e.sizes.tied:
            self._free(0, first, ALWAYS)
            return
        self._free(0, loss, ALWAYS)
        if self.head > self.forward_depth:
            gone = ALWAYS.unless(self.space.resident(0))
            self._free(0, first, gone)
            self._fetch(0, loss, self.forward_depth, None, gone)

    def _block(self, layer: int, first: Window) -> None:
        backward = Window(Action.BACKWARD, layer)
        for segment in self.windows.covering[layer]:
            own = self.windows.of(segment)
            streamed = self.space.streamed(segment, layer)
            again = Window(Action.RECOMPUTE, layer, segment.end)
            use = again if again in own else backward
            # The first slabs after the loss may still be there from the forward pass.
            since = self.head - layer + 1 + own.index(use)
            if segment.end < self.head - 1 or since > self.backward_depth:
                self._free(layer, first, streamed)
                self._fetch(layer, use, self.backward_depth, segment, streamed, after=first)
            if use == again and own.index(backward) - own.index(again) > self.backward_depth:
                self._free(layer, again, streamed)
                self._fetch(layer, backward, self.backward_depth, segment, streamed)
        self._free(layer, backward, ALWAYS)

    def _fetch(
        self,
        layer: int,
        use: Window,
        depth: int,
        segment: Segment | None,
        condition: Condition,
        after: Window | None = None,
    ) -> None:
        """A fetch `depth - 1` windows before the use, and not before the window `after` is over."""
        if condition == NEVER:
            return
        lump = self.e.lump(use)
        # All slabs of a recomputation that counts as one window come with the first.
        by = self.windows.of(segment)[0] if lump != use and segment is not None else use
        at = self._ahead(by, depth - 1, segment, after)
        # The table of the head comes after its own slab.
        order = (self.windows.number[lump], int(use.action is Action.LOSS and layer < use.layer))
        fetch = self.e.transfer(Action.FETCH, Item(at, 0), Phase.FETCH, layer, None, Item(use, 0), order)
        self.e.add(fetch.allocates, Buffer(BufferRole.PARAMETERS, layer), Tier.DEVICE, condition)
        if use == self.windows.order[layer]:
            self.e.first_fetches[layer] = fetch
            if self.e.deferred:
                return  # it follows the layer's update, which has the parameters
        earlier = self._ahead(by, depth - 1 + PARAMETERS_AHEAD, segment, after)
        self._read(layer, use, fetch, condition, earlier)

    def _ahead(self, use: Window, count: int, segment: Segment | None, after: Window | None) -> Window:
        at = self.windows.before(use, count, segment)
        if after is not None and self.windows.number[at] <= self.windows.number[after]:
            at = self.windows.order[self.windows.number[after] + 1]
        return at

    def _read(
        self, layer: int, use: Window, fetch: LiftedOperation, condition: Condition, at: Window
    ) -> None:
        """Reads the halves of the master weights that live on a drive, and drops them after the fetch."""
        for part in self.e.sizes.fetched:
            where = self.space.product(self._below(layer, part), condition)
            if where == NEVER:
                continue
            load = self.e.transfer(
                Action.LOAD_PARAMETERS, Item(at, 0), Phase.LOAD, layer, None, Item(use, 0), fetch.slot.order
            )
            loads = self.e.parameter_loads.setdefault(layer, [])
            if load not in loads:
                loads.append(load)
            half = Buffer(ROLE_OF[part], layer)
            self.e.add(load.allocates, half, Tier.HOST, where)
            self.e.add(fetch.frees, half, Tier.HOST, where)
            self.e.throttle(fetch, load, where)

    def _below(self, layer: int, part: Part) -> Condition:
        condition = NEVER
        for link in LINKS[1:]:
            condition = condition.either(self.space.owned(layer, part, link.lower))
        return condition

    def _free(self, layer: int, window: Window, condition: Condition) -> None:
        last = self.e.compute(Item(window, self.e.items - 1))
        self.e.add(last.frees, Buffer(BufferRole.PARAMETERS, layer), Tier.DEVICE, condition)


def _emit_gradient(expansion: Expansion, layer: int) -> None:
    """The accumulator lives while microbatches add to it; the last one turns it into the gradient."""
    windows, tied, count = expansion.windows, expansion.sizes.tied, expansion.items
    window = windows.backward_of(layer)
    first, last = expansion.compute(Item(window, 0)), expansion.compute(Item(window, count - 1))
    accumulator, gradient = Buffer(BufferRole.ACCUMULATOR, layer), Buffer(BufferRole.GRADIENT, layer)
    tied_table = layer == 0 and tied
    if layer == expansion.head and tied:
        table = Buffer(BufferRole.ACCUMULATOR, 0)
        expansion.add(first.allocates, table, Tier.DEVICE, ALWAYS)
    if count > 1 and not tied_table:
        expansion.add(first.allocates, accumulator, Tier.DEVICE, ALWAYS)
    expansion.add(last.allocates, gradient, Tier.DEVICE, ALWAYS)
    if count > 1 or tied_table:
        expansion.add(last.frees, accumulator, Tier.DEVICE, ALWAYS)
    item = Item(window, count - 1)
    out = expansion.transfer(Action.GRADIENT_OUT, item, Phase.GRADIENT_OUT, layer, None, item)
    expansion.add(out.frees, gradient, Tier.DEVICE, ALWAYS)
    later = windows.after(window, GRADIENT_WINDOW)
    if later is not None:
        expansion.throttle(expansion.compute(Item(later, 0)), out, ALWAYS)
    _write_gradient(expansion, layer, item, out)


def _write_gradient(expansion: Expansion, layer: int, item: Item, out: LiftedOperation) -> None:
    """A gradient that lives on a drive passes through one of a few copies on the host."""
    gradient, below = Buffer(BufferRole.GRADIENT, layer), NEVER
    for link in LINKS[1:]:
        below = below.either(expansion.space.owned(layer, Part.GRADIENT, link.lower))
    if below == NEVER:
        return
    spill = expansion.transfer(Action.SPILL_GRADIENT, item, Phase.GRADIENT_DOWN, layer, None, item)
    expansion.add(out.allocates, gradient, Tier.HOST, below)
    expansion.add(spill.frees, gradient, Tier.HOST, below)
    expansion.throttle(spill, out, below)
    later = layer + STATE_WINDOW
    if later <= expansion.head and expansion.gradient_write_slot(later) in expansion.operations:
        earlier = expansion.operations[expansion.gradient_write_slot(later)]
        for leaving in earlier.exists:
            expansion.throttle(out, earlier, expansion.space.product(leaving, below))
