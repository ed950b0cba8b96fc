"""What of a layer lives below the host: one of a few sets of parts, each within the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lazyjax.planning.plan.document import Plan, PlanError, owned_homes
from lazyjax.planning.planner.affine import Affine
from lazyjax.planning.planner.decisions.decision import Binaries, Change, ManyBinaries, Row, different
from lazyjax.planning.planner.decisions.segments import Segments
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.program.conditions import ALWAYS, NEVER, Condition
from lazyjax.specs import Part, Tier


class OwnedHomes:
    """One of the problem's sets per layer; a variable for every set but the first.

    Attributes:
        number: layer -> its first variable.
    """

    def __init__(self, problem: Problem, first: int, segments: Segments) -> None:
        del segments
        self.home, self.sets = problem.state_home, problem.owned_sets
        if self.home is Tier.HOST:
            self.sets = (frozenset(),)
        self._options = len(self.sets) - 1
        layers = range(problem.head + 1) if self._options else range(0)
        self.number = {layer: first + position * self._options for position, layer in enumerate(layers)}
        self.count = len(self.number) * self._options

    def owned(self, layer: int, part: Part, tier: Tier) -> Condition:
        """A part of what the layer owns lives on `tier`."""
        below = ALWAYS if part in self.sets[0] else NEVER
        if below == NEVER and layer in self.number:
            holding = [option for option, held in enumerate(self.sets[1:]) if part in held]
            below = Condition(0, frozenset(self.number[layer] + option for option in holding))
        if tier is Tier.HOST:
            return ALWAYS.unless(below)
        return below if tier is self.home else NEVER

    def rows(self) -> Sequence[Row]:
        """One set at most."""
        if self._options < 2:
            return []
        return [Row(Affine(0.0, dict.fromkeys(own, 1.0)), "<", 1.0) for own in map(self._own, self.number)]

    def groups(self) -> Sequence[frozenset[int]]:
        """None: of the first set nothing is on."""
        return []

    def encode(self, plan: Plan) -> Iterator[int]:
        """See `Decision`; where layers have no choice, what a plan says of it means nothing."""
        decided_already = self.home is not Tier.HOST and not self._options
        for layer, decided in enumerate(() if decided_already else plan.layers):
            held = decided.on_nvme
            if held not in self.sets or (held and self.home is not Tier.NVME):
                words = ", ".join(sorted(held)) or "nothing"
                raise PlanError(f"layers.{layer}: not open in this problem: {words} on NVMe")
            if layer in self.number and (position := self.sets.index(held)):
                yield self.number[layer] + position - 1

    def decode(self, values: Binaries, layers: Sequence[dict[str, Any]]) -> None:
        """See `Decision`."""
        for layer, fields in enumerate(layers):
            fields |= owned_homes(self.sets[self._taken(values, layer)], self.home)

    def round(self, relaxed: Binaries) -> Iterator[int]:
        """The largest set that is due with all within it; only whole ones: copies under way take memory."""
        due = np.zeros(self._options)
        for layer in self.number:
            own = self._own(layer)
            # How much of the layer is to hold each set, as itself or within a larger one.
            due += np.cumsum(relaxed[own.start : own.stop][::-1])[::-1]
            held = 0
            while held < self._options and due[held] >= 1.0 - 1e-6:
                held += 1
            due[:held] -= 1.0
            yield from self._on(layer, held)

    def repair(self, values: ManyBinaries) -> None:
        """The largest of several sets."""
        for layer in self.number if self._options > 1 else ():
            own = self._own(layer)
            for option in reversed(range(1, self._options)):
                values[values[:, own[option]] > 0.5, own.start : own[option]] = 0.0

    def changes(self, values: Binaries) -> Iterator[Change]:
        """Another set, and exchanges."""
        taken = {layer: self._taken(values, layer) for layer in self.number}
        for layer, now in taken.items():
            for other in range(len(self.sets)):
                if other != now:
                    yield Change(self._on(layer, now), self._on(layer, other))
        for one, other in different(taken):
            off = self._on(one, taken[one]) + self._on(other, taken[other])
            yield Change(off, self._on(one, taken[other]) + self._on(other, taken[one]))

    def alternatives(self) -> Sequence[Sequence[tuple[int, ...]]]:
        """Layer by layer."""
        return [[(), *((number,) for number in self._own(layer))] for layer in self.number]

    def _own(self, layer: int) -> range:
        return range(self.number[layer], self.number[layer] + self._options)

    def _on(self, layer: int, position: int) -> tuple[int, ...]:
        return (self.number[layer] + position - 1,) if position else ()

    def _taken(self, values: Binaries, layer: int) -> int:
        if layer not in self.number:
            return 0
        return next((1 + option for option, number in enumerate(self._own(layer)) if values[number] > 0.5), 0)
