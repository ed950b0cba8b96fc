"""Emits parameter slabs and gradients: what is fetched when, how long it stays, and what leaves.

Where several devices share slabs, each fetches its part. A window's kernels need the whole layer: it is
gathered for each window anew, ahead of it, and given up after it, so that what stays on a device between
windows is its part alone. Backward kernels leave the gradient of a device's own rows, of the whole layer;
microbatch by microbatch it is summed over the devices, of which each keeps its part.
"""

from __future__ import annotations

from lazyjax.planning.program.conditions import ALWAYS, NEVER, Condition
from lazyjax.planning.program.expansion import (
    GATHER_AHEAD,
    GRADIENT_WINDOW,
    PARAMETERS_AHEAD,
    SCATTER_WINDOW_ITEMS,
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
        fetch = self._fetch(layer, first, self.forward_depth, None, ALWAYS)
        self._gather(layer, first, self.forward_depth, None, ALWAYS, fetch)
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
        fetch = None
        if self.head > self.forward_depth:
            gone = ALWAYS.unless(self.space.resident(0))
            self._free(0, first, gone)
            fetch = self._fetch(0, loss, self.forward_depth, None, gone)
        self._gather(0, loss, self.forward_depth, None, ALWAYS, fetch, after=first)

    def _block(self, layer: int, first: Window) -> None:
        backward = Window(Action.BACKWARD, layer)
        for segment in self.windows.covering[layer]:
            own = self.windows.of(segment)
            streamed = self.space.streamed(segment, layer)
            again = Window(Action.RECOMPUTE, layer, segment.end)
            use = again if again in own else backward
            # The first slabs after the loss may still be there from the forward pass.
            since = self.head - layer + 1 + own.index(use)
            fetch = None
            if segment.end < self.head - 1 or since > self.backward_depth:
                self._free(layer, first, streamed)
                fetch = self._fetch(layer, use, self.backward_depth, segment, streamed, after=first)
            chosen = self.space.chosen([segment])
            adjacent = use == again and own.index(backward) - own.index(again) == 1
            until = backward if adjacent else use
            self._gather(layer, use, self.backward_depth, segment, chosen, fetch, after=first, until=until)
            if until == backward:
                continue
            fetch = None
            if own.index(backward) - own.index(again) > self.backward_depth:
                self._free(layer, again, streamed)
                fetch = self._fetch(layer, backward, self.backward_depth, segment, streamed)
            self._gather(layer, backward, self.backward_depth, segment, chosen, fetch, after=again)
        self._free(layer, backward, ALWAYS)

    def _fetch(
        self,
        layer: int,
        use: Window,
        depth: int,
        segment: Segment | None,
        condition: Condition,
        after: Window | None = None,
    ) -> LiftedOperation | None:
        """A fetch `depth - 1` windows before the use, and not before the window `after` is over."""
        if condition == NEVER:
            return None
        by = self._needed_by(use, segment)
        at = self._ahead(by, depth - 1, segment, after)
        order = self._order(layer, use)
        fetch = self.e.transfer(Action.FETCH, Item(at, 0), Phase.FETCH, layer, None, Item(use, 0), order)
        self.e.add(fetch.allocates, Buffer(BufferRole.PARAMETERS, layer), Tier.DEVICE, condition)
        if use == self.windows.order[layer]:
            self.e.first_fetches[layer] = fetch
            if self.e.order.deferred:
                return fetch  # it follows the layer's update, which has the parameters
        earlier = self._ahead(by, depth - 1 + PARAMETERS_AHEAD, segment, after)
        _read_halves(self.e, fetch, condition, Item(earlier, 0), Item(use, 0))
        return fetch

    def _gather(
        self,
        layer: int,
        use: Window,
        depth: int,
        segment: Segment | None,
        condition: Condition,
        fetch: LiftedOperation | None,
        *,
        after: Window | None = None,
        until: Window | None = None,
    ) -> None:
        """The whole layer on every device, from ahead of the use to the end of it, or of `until`.

        Args:
            depth: of the fetches, which are not overtaken.
            fetch: what brings the device's part, if that is not there still.
            after: an earlier window after which the layer was given up.
        """
        if condition == NEVER or not self.e.sizes.shared:
            return
        at = self._ahead(self._needed_by(use, segment), min(GATHER_AHEAD, depth - 1), segment, after)
        order = self._order(layer, use)
        gather = self.e.transfer(Action.GATHER, Item(at, 0), Phase.GATHER, layer, None, Item(use, 0), order)
        whole = Buffer(BufferRole.WHOLE, layer)
        self.e.add(gather.allocates, whole, Tier.DEVICE, condition)
        last = self.e.compute(Item(until or use, self.e.items - 1))
        self.e.add(last.frees, whole, Tier.DEVICE, condition)
        if fetch is not None:
            for exists in fetch.exists:
                self.e.throttle(gather, fetch, exists)

    def _needed_by(self, use: Window, segment: Segment | None) -> Window:
        """All slabs of a recomputation that counts as one window come with the first."""
        return self.windows.of(segment)[0] if self.e.lump(use) != use and segment is not None else use

    def _order(self, layer: int, use: Window) -> tuple[int, int]:
        """By use; the table of the head comes after its own slab."""
        return self.windows.number[self.e.lump(use)], int(use.action is Action.LOSS and layer < use.layer)

    def _ahead(self, use: Window, count: int, segment: Segment | None, after: Window | None) -> Window:
        at = self.windows.before(use, count, segment)
        if after is not None and self.windows.number[at] <= self.windows.number[after]:
            at = self.windows.order[self.windows.number[after] + 1]
        return at

    def _free(self, layer: int, window: Window, condition: Condition) -> None:
        last = self.e.compute(Item(window, self.e.items - 1))
        self.e.add(last.frees, Buffer(BufferRole.PARAMETERS, layer), Tier.DEVICE, condition)


def _read_halves(
    expansion: Expansion, fetch: LiftedOperation, condition: Condition, at: Item, use: Item
) -> None:
    """Reads the halves of the master weights that live on a drive, and drops them after the fetch."""
    layer = fetch.layer
    for part in expansion.sizes.fetched:
        where = expansion.space.product(_below_host(expansion, layer, part), condition)
        if where == NEVER:
            continue
        load = expansion.transfer(Action.LOAD_PARAMETERS, at, Phase.LOAD, layer, None, use, fetch.slot.order)
        loads = expansion.parameter_loads.setdefault(layer, [])
        if load not in loads:
            loads.append(load)
        half = Buffer(ROLE_OF[part], layer)
        expansion.add(load.allocates, half, Tier.HOST, where)
        expansion.add(fetch.frees, half, Tier.HOST, where)
        expansion.throttle(fetch, load, where)


def _below_host(expansion: Expansion, layer: int, part: Part) -> Condition:
    condition = NEVER
    for link in LINKS[1:]:
        condition = condition.either(expansion.space.owned(layer, part, link.lower))
    return condition


def _emit_gradient(expansion: Expansion, layer: int) -> None:
    """The accumulator lives while microbatches add to it; the last one turns it into the gradient."""
    windows, tied, count = expansion.windows, expansion.sizes.tied, expansion.items
    window = windows.backward_of(layer)
    item = Item(window, count - 1)
    first, last = expansion.compute(Item(window, 0)), expansion.compute(item)
    if expansion.sizes.shared:
        first, last = _emit_scatters(expansion, layer, window)
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
    out = expansion.transfer(Action.GRADIENT_OUT, item, Phase.GRADIENT_OUT, layer, None, item)
    expansion.add(out.frees, gradient, Tier.DEVICE, ALWAYS)
    if expansion.sizes.shared:
        expansion.throttle(out, last, ALWAYS)
    later = windows.after(window, GRADIENT_WINDOW)
    if later is not None:
        expansion.throttle(expansion.compute(Item(later, 0)), out, ALWAYS)
    _write_gradient(expansion, layer, item, out)


def _emit_scatters(
    expansion: Expansion, layer: int, window: Window
) -> tuple[LiftedOperation, LiftedOperation]:
    """Sums every microbatch's gradient over the devices; the first and the last of these operations."""
    windows, sizes = expansion.windows, expansion.sizes
    owners = (layer, 0) if layer == expansion.head and sizes.tied else (layer,)
    if expansion.by_layer and expansion.microbatches > 1:
        # All but the last are summed while others are computed: they count as beginning with the window.
        item, after_gathers = Item(window, 0), (len(windows.order),)
        early = expansion.transfer(
            Action.REDUCE_SCATTER, item, Phase.GATHER, layer, None, item, after_gathers
        )
        for owner in owners:
            partial = Buffer(BufferRole.PARTIAL, owner)
            expansion.add(early.frees, partial, Tier.DEVICE, ALWAYS, expansion.microbatches - 1)
    scatters = []
    for position in range(expansion.items):
        item, microbatch = Item(window, position), windows.position(window, position)
        scatter = expansion.transfer(
            Action.REDUCE_SCATTER, item, Phase.REDUCE_SCATTER, layer, microbatch, item
        )
        scatter.last = position == expansion.items - 1
        scatter.accumulates = position > 0 or (layer == 0 and sizes.tied)
        for owner in owners:
            partial = Buffer(BufferRole.PARTIAL, owner, microbatch)
            expansion.add(expansion.compute(item).allocates, partial, Tier.DEVICE, ALWAYS)
            expansion.add(scatter.frees, partial, Tier.DEVICE, ALWAYS)
        later = windows.item_after(item, expansion.lag(SCATTER_WINDOW_ITEMS))
        if later is not None:
            expansion.throttle(expansion.compute(later), scatter, ALWAYS)
        scatters.append(scatter)
    return scatters[0], scatters[-1]


def _write_gradient(expansion: Expansion, layer: int, item: Item, out: LiftedOperation) -> None:
    """A gradient that lives on a drive passes through one of a few copies on the host."""
    gradient, below = Buffer(BufferRole.GRADIENT, layer), _below_host(expansion, layer, Part.GRADIENT)
    if below == NEVER:
        return
    spill = expansion.transfer(Action.SPILL_GRADIENT, item, Phase.GRADIENT_DOWN, layer, None, item)
    expansion.add(out.allocates, gradient, Tier.HOST, below)
    expansion.add(spill.frees, gradient, Tier.HOST, below)
    expansion.throttle(spill, out, below)
    later = layer + STATE_WINDOW
    if later <= expansion.head and expansion.order.gradient_write(later) in expansion.operations:
        earlier = expansion.operations[expansion.order.gradient_write(later)]
        for leaving in earlier.exists:
            expansion.throttle(out, earlier, expansion.space.product(leaving, below))
