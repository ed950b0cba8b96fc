"""Yes or no per layer: whether a slab stays on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.affine import Affine
from lazyjax.planning.planner.decisions.decision import Binaries, Change, ManyBinaries, Row, different
from lazyjax.planning.planner.decisions.segments import Segments
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.program.conditions import NEVER, Condition
from lazyjax.planning.program.windows import Segment


class _Flags:
    """One variable per layer where the decision is open.

    Args:
        only_if: layer -> condition without which the flag is off.
    """

    def __init__(self, layers: Sequence[int], first: int, only_if: Mapping[int, Condition]) -> None:
        self.number = {layer: first + position for position, layer in enumerate(layers)}
        self.count = len(self.number)
        self._only_if = only_if

    def _on(self, layer: int) -> Condition:
        return Condition(0, frozenset([self.number[layer]])) if layer in self.number else NEVER

    def rows(self) -> Sequence[Row]:
        """Off where it may not be on."""
        return [
            Row(Affine(0.0, {self.number[layer]: 1.0}) - Affine.of(condition), "<", 0.0)
            for layer, condition in self._only_if.items()
        ]

    def groups(self) -> Sequence[frozenset[int]]:
        """None: flags are independent."""
        return []

    def round(self, relaxed: Binaries) -> Iterator[int]:
        """Only whole ones: they take memory."""
        behind = 0.0
        for number in self.number.values():
            behind += float(relaxed[number])
            if behind >= 1.0 - 1e-6:
                yield number
                behind -= 1.0

    def repair(self, values: ManyBinaries) -> None:
        """Off where it may not be on."""
        for layer, condition in self._only_if.items():
            values[condition.value(values) < 0.5, self.number[layer]] = 0.0

    def changes(self, values: Binaries) -> Iterator[Change]:
        """On, off, and exchanges."""
        for number in self.number.values():
            yield Change((number,), ()) if values[number] > 0.5 else Change((), (number,))
        decided = {layer: bool(values[number] > 0.5) for layer, number in self.number.items()}
        for one, other in different(decided):
            on, off = (one, other) if decided[other] else (other, one)
            yield Change((self.number[off],), (self.number[on],))

    def alternatives(self) -> Sequence[Sequence[tuple[int, ...]]]:
        """Layer by layer."""
        return [[(), (number,)] for number in self.number.values()]


class Residency(_Flags):
    """Whether a layer's slab stays on the device from the forward to the backward pass."""

    def __init__(self, problem: Problem, first: int, segments: Segments) -> None:
        layers = [*([0] if problem.sizes.tied else []), *segments.blocks] if problem.residents else []
        alone = {layer: segments.chosen([Segment(layer, layer)]) for layer in layers if layer}
        super().__init__(layers, first, alone)

    def resident(self, layer: int) -> Condition:
        """The layer's slab stays."""
        return self._on(layer)

    def encode(self, plan: Plan) -> Iterator[int]:
        """See `Decision`; a wish for a slab that cannot stay means nothing."""
        for layer, decided in enumerate(plan.layers):
            if decided.resident and layer in self.number:
                yield self.number[layer]

    def decode(self, values: Binaries, layers: Sequence[dict[str, Any]]) -> None:
        """See `Decision`."""
        for layer, number in self.number.items():
            layers[layer]["resident"] = bool(values[number] > 0.5)
