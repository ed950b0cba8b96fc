"""Emits whatever passes between layers: inputs, their gradients, residuals, and the batch.

One rule covers them all. A tensor is written by one compute item and read by others. Between two uses
it stays on the device where its home is there or the gap is short; else it is copied out as soon as it
is written, further down if its home is there, and brought back in time for the next use. Copies on
their way are waited for some items later, which is when the place that they leave counts as free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lazyjax.planning.program.conditions import ALWAYS, NEVER, Condition
from lazyjax.planning.program.expansion import (
    LOAD_AHEAD_ITEMS,
    SPILL_WINDOW_ITEMS,
    Expansion,
    LiftedOperation,
    Phase,
)
from lazyjax.planning.program.operations import Action, Buffer, BufferRole
from lazyjax.planning.program.tiers import LINKS, depth_of, path_to
from lazyjax.planning.program.windows import Item, Segment, Window
from lazyjax.specs import Tier

_BEFORE_LOSS = (Action.FORWARD, Action.LOSS)


class Chain(NamedTuple):
    """One value of a tensor.

    Attributes:
        uses: the windows that use it: the first writes it.
        home: the tier where it waits between the passes.
        condition: under which it exists.
        segment: the one that its windows after the loss belong to; None if that makes no difference.
    """

    buffer: Buffer
    uses: Sequence[Window]
    home: Tier
    condition: Condition
    segment: Segment | None = None


def emit_activations(expansion: Expansion) -> None:
    """All chains of all microbatches."""
    emitter = _Emitter(expansion)
    for microbatch in range(expansion.items):
        emitter.batch(microbatch)
    for chain in _Chains(expansion).all():
        for microbatch in range(expansion.items):
            emitter.emit(chain, microbatch)


class _Chains:
    """Which tensors there are, under which condition, and which windows use them."""

    def __init__(self, expansion: Expansion) -> None:
        self.space, self.windows, self.sizes = expansion.space, expansion.windows, expansion.sizes
        self.head = expansion.head
        self.streaming = expansion.settings.interlayer_home == "host"
        #: Where a tensor waits between a layer and the next.
        self.between = Tier.HOST if self.streaming else Tier.DEVICE

    def all(self) -> Iterator[Chain]:
        """One value each, of any microbatch."""
        for layer in range(1, self.head + 1):
            yield from self._gradient(layer)
            yield from self._input(layer)
            if layer < self.head:
                for name in sorted(self.sizes.layers[layer].residual_bytes):
                    yield from self._residual(layer, name)

    def _gradient(self, layer: int) -> Iterator[Chain]:
        """The gradient of a layer's input: written by its backward pass, read by the one below."""
        buffer = Buffer(BufferRole.INPUT_GRADIENT, layer)
        uses = [self.windows.backward_of(layer), Window(Action.BACKWARD, layer - 1)]
        below = self.windows.ending[layer - 1] if self.streaming else []
        rest = ALWAYS
        for segment in below:
            if not segment.single:
                # Its recomputation comes in between.
                chosen = self.space.chosen([segment])
                rest = rest.unless(chosen)
                yield Chain(buffer, uses, self.between, chosen, segment)
        yield Chain(buffer, uses, self.between, rest)

    def _input(self, layer: int) -> Iterator[Chain]:
        """A layer's input: kept from the forward pass where a segment starts, else computed again."""
        buffer = Buffer(BufferRole.INPUT, layer)
        written = Window(Action.FORWARD, layer - 1)
        if layer == self.head:
            yield Chain(buffer, [written, Window(Action.LOSS, layer)], Tier.DEVICE, ALWAYS)
            return
        read = Window(Action.FORWARD, layer)
        covering = self.windows.covering[layer]
        inner = [segment for segment in covering if segment.start < layer]
        if inner:
            yield Chain(buffer, [written, read], self.between, self.space.chosen(inner))
        for segment in covering:
            own = self.windows.of(segment)
            later = [Window(Action.RECOMPUTE, layer, segment.end), Window(Action.BACKWARD, layer)]
            later = [window for window in later if window in own]
            if segment.start < layer:
                uses = [Window(Action.RECOMPUTE, layer - 1, segment.end), *later]
                yield Chain(buffer, uses, self.between, self.space.chosen([segment]), segment)
                continue
            for home in self.space.homes(segment):
                chosen = self.space.chosen([segment], [home])
                yield Chain(buffer, [written, read, *later], home, chosen, segment)

    def _residual(self, layer: int, name: str) -> Iterator[Chain]:
        """A tensor kept inside a layer, from the forward to the backward pass."""
        buffer = Buffer(BufferRole.RESIDUAL, layer, name=name)
        uses = [Window(Action.FORWARD, layer), Window(Action.BACKWARD, layer)]
        # In a plan the layer's segment is known; in a program only layers on their own keep anything.
        covering, alone = self.windows.covering[layer], Segment(layer, layer)
        segment = alone if alone in covering else covering[0]
        for home in (Tier.DEVICE, *(link.lower for link in LINKS)):
            yield Chain(buffer, uses, home, self.space.saved(layer, name, home), segment)


class _Emitter:
    """The rule: where a tensor is between two uses, and how it gets there."""

    def __init__(self, expansion: Expansion) -> None:
        self.e, self.windows = expansion, expansion.windows
        self.head, self.microbatches = expansion.head, expansion.microbatches
        self.streaming = expansion.settings.interlayer_home == "host"
        self.offload_window = expansion.settings.offload_window
        # Bringing a tensor back that is only just leaving would save nothing.
        self.soon = expansion.settings.reload_ahead + self.offload_window

    def batch(self, microbatch: int) -> None:
        """Every layer reads it, and it is a thousandth of an activation: it stays."""
        buffer = Buffer(BufferRole.BATCH, 0, microbatch)
        target = self.windows.item(self.windows.order[0], microbatch)
        reload = self._bring_up(0, target, None, microbatch)
        self.e.add(reload.allocates, buffer, Tier.DEVICE, ALWAYS, self._represented)
        last = self.e.compute(self.windows.item(self.windows.order[-1], microbatch))
        self.e.add(last.frees, buffer, Tier.DEVICE, ALWAYS)

    @property
    def _represented(self) -> int:
        """Microbatches for which one item stands."""
        return self.microbatches if self.e.by_layer else 1

    def emit(self, chain: Chain, microbatch: int) -> None:
        """Emits everything that one value of a tensor needs."""
        if chain.condition == NEVER:
            return
        buffer = chain.buffer._replace(microbatch=microbatch)
        chain = chain._replace(buffer=buffer, home=self._reachable(chain))
        add, condition = self.e.add, chain.condition
        items = [self.windows.item(window, microbatch) for window in chain.uses]
        add(self.e.compute(items[0]).allocates, buffer, Tier.DEVICE, condition)
        add(self.e.compute(items[-1]).frees, buffer, Tier.DEVICE, condition)
        away = [self._away(chain, gap, microbatch) for gap in range(len(items) - 1)]
        if not any(away):
            return
        offload = self.e.transfer(
            LINKS[0].down, items[0], Phase.OFFLOAD, items[0].window.layer, microbatch, items[0]
        )
        add(offload.allocates, buffer, LINKS[0].lower, condition, max(away))
        retiring = self._retire(offload, items[0], chain, self.offload_window)
        for gap, times in enumerate(away):
            if not times:
                continue
            copied = gap and self._items_between(chain, 0, gap, microbatch) >= self.offload_window
            leaves = items[gap] if copied else retiring
            if leaves is not None:
                add(self.e.compute(leaves).frees, buffer, Tier.DEVICE, condition)
            self._return(chain, items, gap, times, last=not any(away[gap + 1 :]), microbatch=microbatch)

    def _return(
        self, chain: Chain, items: Sequence[Item], gap: int, times: int, *, last: bool, microbatch: int
    ) -> None:
        """Brings the tensor back to the device at the end of a gap, from below if it went there."""
        add, buffer, condition = self.e.add, chain.buffer, chain.condition
        target = items[gap + 1]
        lower = path_to(chain.home)[1:] if self._crosses(chain, gap) else []
        for depth, link in enumerate(lower, start=1):
            self._sink(chain, items[gap], depth, times, microbatch)
            load = self._bring_up(depth, target, chain.segment, microbatch)
            add(load.allocates, buffer, link.upper, condition, times)
            add(load.frees, buffer, link.lower, condition, times)
        reload = self._bring_up(0, target, chain.segment, microbatch)
        pipelined = self.e.by_layer and self.microbatches > 1 and not self._crosses(chain, gap)
        add(reload.allocates, buffer, Tier.DEVICE, condition, times, pipelined)
        if last:
            add(reload.frees, buffer, LINKS[0].lower, condition, times)

    def _sink(self, chain: Chain, item: Item, depth: int, times: int, microbatch: int) -> None:
        """Moves the tensor one tier further down after it was read, or after it came to the tier above."""
        link = LINKS[depth]
        at = self.windows.item_after(item, self.e.lag((depth - 1) * SPILL_WINDOW_ITEMS) if depth > 1 else 0)
        assert at is not None
        spill = self.e.transfer(
            link.down, at, Phase.SPILL, item.window.layer, microbatch, item, (depth, self._number(item))
        )
        self.e.add(spill.allocates, chain.buffer, link.lower, chain.condition, times)
        self.e.add(spill.frees, chain.buffer, link.upper, chain.condition, times)
        self._retire(spill, at, chain, SPILL_WINDOW_ITEMS)

    def _bring_up(
        self, depth: int, target: Item, segment: Segment | None, microbatch: int
    ) -> LiftedOperation:
        """The move up the link at `depth` that serves an item."""
        ahead = self.e.reload_ahead + depth * LOAD_AHEAD_ITEMS
        at = self.windows.item_before(target, ahead, segment)
        phase = Phase.LOAD if depth else Phase.RELOAD
        order = (self._number(target), -depth)
        layer = target.window.layer
        return self.e.transfer(LINKS[depth].up, at, phase, layer, microbatch, target, order)

    def _retire(self, copy: LiftedOperation, at: Item, chain: Chain, count: int) -> Item | None:
        """Makes the compute item `count` later wait for a copy; None where the step ends before."""
        context = chain.segment if self.windows.follows(at.window, chain.segment) else None
        retiring = self.windows.item_after(at, self.e.lag(count), context)
        if retiring is not None:
            self.e.throttle(self.e.compute(retiring), copy, chain.condition)
        return retiring

    def _number(self, item: Item) -> int:
        return self.windows.number[item.window] * self.e.items + item.position

    def _crosses(self, chain: Chain, gap: int) -> bool:
        """Whether the gap lies between the passes, which is where homes matter."""
        gradient = chain.buffer.role is BufferRole.INPUT_GRADIENT
        return not gradient and _passes_loss(chain.uses[gap], chain.uses[gap + 1])

    def _reachable(self, chain: Chain) -> Tier:
        """The home, or the lowest tier above it from which the tensor is back in time."""
        home, layer = chain.home, chain.buffer.layer
        while (depth := depth_of(home)) > 1:
            way = self.e.settings.reload_ahead + (depth - 1) * (LOAD_AHEAD_ITEMS + SPILL_WINDOW_ITEMS)
            if (self.head + 1 - layer) * self.microbatches > way:
                break
            home = LINKS[depth - 1].upper
        return home

    def _away(self, chain: Chain, gap: int, microbatch: int) -> int:
        """For how many of the microbatches that an item stands for the tensor leaves the device."""
        if chain.home is Tier.DEVICE:
            return 0
        if self._crosses(chain, gap):
            turning = 2 * (self.head - chain.buffer.layer) * self.microbatches <= self.soon
            return 0 if turning else self._represented
        if not self.streaming:
            return 0
        represented = range(self.microbatches) if self.e.by_layer else [microbatch]
        return sum(self._items_between(chain, gap, gap + 1, m) > self.soon for m in represented)

    def _items_between(self, chain: Chain, one: int, other: int, microbatch: int) -> int:
        """Compute items from one use to another, with all microbatches."""
        first, second = chain.uses[one], chain.uses[other]
        if chain.buffer.role is not BufferRole.INPUT_GRADIENT and _passes_loss(first, second):
            return 2 * (self.head - chain.buffer.layer) * self.microbatches
        between = self.windows.windows_between(first, second, chain.segment)
        return (
            between * self.microbatches
            + self._real_position(second, microbatch)
            - self._real_position(first, microbatch)
        )

    def _real_position(self, window: Window, microbatch: int) -> int:
        reverse = self.streaming and window.layer % 2
        return self.microbatches - 1 - microbatch if reverse else microbatch


def _passes_loss(one: Window, other: Window) -> bool:
    return one.action in _BEFORE_LOSS and other.action not in _BEFORE_LOSS
