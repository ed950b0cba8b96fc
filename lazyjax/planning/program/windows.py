"""The windows of a step that some plan could need, and which come before and after which.

A window runs all microbatches through one layer: forward, loss, recomputation, backward. Forward, loss
and backward windows are in every plan; the recomputation of layer i for the segment that ends at layer
e is in those plans whose segment ending at e starts at or before i. A lead or lag that reaches beyond
the segment at hand is counted in backward windows only, so that it does not depend on how the layers
before are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lazyjax.planning.program.operations import Action


class Segment(NamedTuple):
    """Layers start..end run backward from the kept input of `start`."""

    start: int
    end: int

    @property
    def single(self) -> bool:
        """Whether nothing is recomputed but what is inside the layer."""
        return self.start == self.end


class Window(NamedTuple):
    """One pass of all microbatches through `layer`; `end` names the segment of a recomputation."""

    action: Action
    layer: int
    end: int = -1


class Item(NamedTuple):
    """The `position`-th microbatch that passes a window, counted in order of execution."""

    window: Window
    position: int


class Windows:
    """All windows in order.

    Args:
        head: number of the last layer.
        segments: those that a plan may consist of.
        items: microbatches that pass a window.
        alternating: whether odd layers are passed in reverse order, so that the microbatch that leaves
            a layer last enters the next one first.
        whole: whether a segment's last layer is recomputed too.
    """

    def __init__(
        self, head: int, segments: Sequence[Segment], items: int, *, alternating: bool, whole: bool
    ) -> None:
        self.head, self.items = head, items
        self._alternating, self._whole = alternating, whole
        self._of: dict[Segment, list[Window]] = {}
        self.segments = sorted(segments)
        self.covering: list[list[Segment]] = [[] for _ in range(head + 1)]
        self.ending: list[list[Segment]] = [[] for _ in range(head + 1)]
        for segment in self.segments:
            self.ending[segment.end].append(segment)
            for layer in range(segment.start, segment.end + 1):
                self.covering[layer].append(segment)
        self.order = [Window(Action.FORWARD, layer) for layer in range(head)]
        self.order.append(Window(Action.LOSS, head))
        for end in range(head - 1, 0, -1):
            several = [segment for segment in self.ending[end] if not segment.single]
            if several:
                longest = min(several)
                self.order += self.of(longest)[: -(end - longest.start + 1)]
            self.order.append(Window(Action.BACKWARD, end))
        self.order.append(Window(Action.BACKWARD, 0))
        self.number = {window: number for number, window in enumerate(self.order)}

    def of(self, segment: Segment) -> list[Window]:
        """The windows of a segment's recomputation and backward pass."""
        if segment in self._of:
            return self._of[segment]
        start, end = segment
        until = end + 1 if self._whole and not segment.single else end
        recomputed = [Window(Action.RECOMPUTE, layer, end) for layer in range(start, until)]
        backward = [Window(Action.BACKWARD, layer) for layer in range(end, start - 1, -1)]
        self._of[segment] = recomputed + backward
        return self._of[segment]

    def recomputing(self, window: Window) -> list[Segment]:
        """The segments that need a recomputation window."""
        return [s for s in self.ending[window.end] if not s.single and s.start <= window.layer]

    def backward_of(self, layer: int) -> Window:
        """The loss for the head, else the layer's backward window."""
        return Window(Action.LOSS if layer == self.head else Action.BACKWARD, layer)

    def position(self, window: Window, microbatch: int) -> int:
        """When a microbatch passes the window."""
        reverse = self._alternating and window.layer % 2
        return self.items - 1 - microbatch if reverse else microbatch

    def item(self, window: Window, microbatch: int) -> Item:
        """The microbatch's item of a window."""
        return Item(window, self.position(window, microbatch))

    def _beyond(self, end: int, count: int) -> Window:
        """`count` windows (one at least) before those of a segment that ends at `end`."""
        layer = end + count
        return self.backward_of(layer) if layer <= self.head else self.order[max(0, 2 * self.head - layer)]

    def before(self, window: Window, count: int, segment: Segment | None = None) -> Window:
        """The window `count` earlier, at least the first; `segment` is the one that is run."""
        if window.action in (Action.FORWARD, Action.LOSS):
            return self.order[max(0, self.number[window] - count)]
        if segment is None:
            return self._beyond(window.layer, count) if count else window
        own = self.of(segment)
        offset = own.index(window)
        return own[offset - count] if count <= offset else self._beyond(segment.end, count - offset)

    def after(self, window: Window, count: int, segment: Segment | None = None) -> Window | None:
        """The window `count` later; None after the last.

        Args:
            segment: the one that is run, or that follows on `window` at once.
        """
        if not count:
            return window
        if segment is not None:
            own = self.of(segment)
            offset = (own.index(window) if window in own else -1) + count
            if offset < len(own):
                return own[offset]
            return self._backward(segment.start - 1 - (offset - len(own)))
        if window.action is Action.BACKWARD:
            return self._backward(window.layer - count)
        number = self.number[window] + count
        return self.order[number] if number <= self.head else self._backward(2 * self.head - number)

    def _backward(self, layer: int) -> Window | None:
        return Window(Action.BACKWARD, layer) if layer >= 0 else None

    def item_before(self, item: Item, count: int, segment: Segment | None = None) -> Item:
        """The item `count` earlier, at least the first of all."""
        if item.position >= count:
            return Item(item.window, item.position - count)
        windows = -(-(count - item.position) // self.items)
        first = self.order[0]
        # The first window has nothing before it.
        reached = self.before(item.window, windows, segment)
        if reached == first and self.before(item.window, windows - 1, segment) == first:
            return Item(first, 0)
        return Item(reached, item.position + windows * self.items - count)

    def item_after(self, item: Item, count: int, segment: Segment | None = None) -> Item | None:
        """The item `count` later; None after the last."""
        windows, position = divmod(item.position + count, self.items)
        window = self.after(item.window, windows, segment)
        return None if window is None else Item(window, position)

    def follows(self, window: Window, segment: Segment | None) -> bool:
        """Whether the segment is the one that a window belongs to, or comes right after the window."""
        if segment is None:
            return False
        return window in self.of(segment) or window == self.backward_of(segment.end + 1)

    def windows_between(self, one: Window, other: Window, segment: Segment | None = None) -> int:
        """How many windows `other` comes after `one`.

        Args:
            segment: the one that both belong to, or `other` while `one` comes right before it. Without
                it, backward windows follow one another.
        """
        if segment is not None and other in self.of(segment):
            own = self.of(segment)
            return own.index(other) - (own.index(one) if one in own else -1)
        return self._rank(other) - self._rank(one)

    def _rank(self, window: Window) -> int:
        return 2 * self.head - window.layer if window.action is Action.BACKWARD else window.layer
