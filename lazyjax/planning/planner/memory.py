"""Bytes on every tier as running sums over the operations of all plans: the schedule's own count.

A row is one moment at which a tier may be fullest: what was live there at the moment before, plus what
came and went in between, weighed by the conditions of the decisions. For a given plan the largest row of
a tier is the peak that its schedule counts (`Schedule.peak_bytes`), with the working sets of compute
operations, to the byte.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.planner.affine import Affine, Number
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.program.conditions import NEVER, Condition
from lazyjax.planning.program.expansion import Expansion, LiftedOperation, Slot
from lazyjax.planning.program.operations import COMPUTE_ACTIONS, LINKS, Action, Place, shows_free
from lazyjax.planning.program.schedule import expand
from lazyjax.planning.program.tiers import STATE_DOWN, UP
from lazyjax.planning.program.windows import Item
from lazyjax.specs import Part, Tier

#: Twice the feasibility tolerance of the solvers.
SOLVER_TOLERANCE = 2e-7


def usable_bytes(capacity: int) -> float:
    """What rows may fill: solvers exceed a row by their tolerance, no plan may exceed memory by a byte."""
    return capacity - max(0.0, SOLVER_TOLERANCE * capacity - 0.5)


class MemoryRow(NamedTuple):
    """A moment: live bytes are those of the tier's row before plus `change`."""

    label: str
    change: Affine


@dataclasses.dataclass
class MemoryRows:
    """The rows of each tier in order, and all of them as one matrix.

    Attributes:
        matrix: coefficient of every variable in every row's live bytes, all tiers after one another.
        constants: live bytes without any.
        tiers: of every row.
    """

    rows: dict[Tier, list[MemoryRow]]
    matrix: Float64[np.ndarray, "variables rows"]
    constants: Float64[np.ndarray, "rows"]
    tiers: list[Tier]

    def hopeless(self, capacity: Mapping[Tier, Number]) -> bool:
        """Whether a tier cannot hold whatever is decided."""
        lowest = self.constants + np.minimum(self.matrix, 0.0).sum(axis=0)
        return bool((lowest > np.array([capacity[tier] for tier in self.tiers])).any())

    def peak_bytes(
        self, values: Float64[np.ndarray, "batch variables"]
    ) -> dict[Tier, Float64[np.ndarray, "batch"]]:
        """The largest row of each tier for complete assignments."""
        live = values @ self.matrix + self.constants
        return {tier: live[:, [own is tier for own in self.tiers]].max(axis=1, initial=0.0) for tier in Tier}


def memory_rows(problem: Problem, choices: Choices, expansion: Expansion | None = None) -> MemoryRows:
    """All rows of a problem; adds products to `choices`.

    Args:
        expansion: microbatch by microbatch, where there is one already.
    """
    if expansion is None or expansion.by_layer:
        expansion = expand(choices, problem.sizes)
    rows = _Counting(problem, choices, expansion).rows()
    kept = {tier: _undominated(rows[tier]) for tier in rows}
    tiers = [tier for tier in kept for _ in kept[tier]]
    matrix = np.zeros((choices.size, len(tiers)))
    constants = np.zeros(len(tiers))
    column = 0
    for own in kept.values():
        for position, row in enumerate(own):
            if position:
                matrix[:, column] = matrix[:, column - 1]
                constants[column] = constants[column - 1]
            constants[column] += row.change.constant
            for variable, coefficient in row.change.terms.items():
                matrix[variable, column] += coefficient
            column += 1
    return MemoryRows(kept, matrix, constants, tiers)


class _Counting:
    """Walks the operations and adds up what comes and goes."""

    def __init__(self, problem: Problem, choices: Choices, expansion: Expansion) -> None:
        self.problem, self.choices, self.expansion = problem, choices, expansion
        self.operations = expansion.ordered()
        self.moments: dict[Tier, list[MemoryRow]] = {tier: [] for tier in Tier}
        self.pending = {tier: self._always_live(tier) for tier in Tier}
        #: What a transfer frees, by the operation that waits for it first.
        self.released: dict[Slot, list[tuple[Place, Condition]]] = defaultdict(list)
        for slot, place, condition in self._releases():
            self.released[slot].append((place, condition))

    def _always_live(self, tier: Tier) -> Affine:
        total = Affine(float(self.problem.static_host_bytes) if tier is Tier.HOST else 0.0)
        for layer in range(self.problem.head + 1):
            for part in Part:
                size, here = self.problem.sizes.owned_bytes(layer, part), self.choices.owned
                total.add(here(layer, part, tier), size)
                if tier is Tier.HOST and part is not Part.STATE:
                    total += Affine(-float(size))  # counted as static
        return total

    def rows(self) -> dict[Tier, list[MemoryRow]]:
        """Every moment at which something came into being."""
        for operation in self.operations:
            for place, condition in self.released[operation.slot]:
                self._add(place, condition, -1)
            for change, condition in operation.allocates.items():
                self._add(change.place, condition, 1)
            computing = operation.action in COMPUTE_ACTIONS
            working = self._working(operation) if computing else Affine()
            self.pending[Tier.DEVICE] += working
            label = f"{operation.action.value} {operation.layer}/{operation.microbatch}"
            touched = {change.place.tier for change in operation.allocates}
            for tier in {*touched, Tier.DEVICE} if computing else touched:
                self.moments[tier].append(MemoryRow(label, self.pending[tier]))
                self.pending[tier] = Affine()
            self.pending[Tier.DEVICE] += working * -1.0
            if computing:
                for change, condition in operation.frees.items():
                    self._add(change.place, condition, -1)
        for tier, moments in self.moments.items():
            if not moments:
                moments.append(MemoryRow("always", self.pending[tier]))
        return self.moments

    def _add(self, place: Place, condition: Condition, sign: int) -> None:
        self.pending[place.tier].add(condition, sign * self.problem.sizes.of(place.buffer))

    def _working(self, operation: LiftedOperation) -> Affine:
        total = Affine()
        working_bytes = self.problem.working_bytes
        assert operation.condition is not None
        if operation.action in (Action.FORWARD, Action.BACKWARD):
            for names, condition in self.choices.saved_sets(operation.layer):
                total.add(condition, working_bytes(operation.action, operation.layer, names, None))
            return total
        if operation.action is Action.LOSS:
            for tokens, condition in self.choices.head_chunks():
                total.add(condition, working_bytes(operation.action, operation.layer, (), tokens))
            return total
        return total.add(operation.condition, working_bytes(operation.action, operation.layer, (), None))

    def _releases(self) -> Iterator[tuple[Slot, Place, Condition]]:
        """What transfers free, and the operation whose start shows that it is free."""
        throttled: dict[Slot, Slot] = {}
        raised: dict[Place, list[tuple[Slot, Condition]]] = defaultdict(list)
        for operation in self.operations:
            for slot in operation.throttles:
                if shows_free(operation.action, self.expansion.operations[slot].action):
                    throttled.setdefault(slot, operation.slot)
            if operation.action in UP:
                for change, condition in operation.allocates.items():
                    raised[change.place].append((operation.slot, condition))
        for operation in self.operations:
            if operation.action in COMPUTE_ACTIONS or not operation.frees:
                continue
            if operation.action in UP and operation.item is not None:
                yield from self._releases_of_moves_up(operation, operation.item, raised)
            elif operation.action is Action.FETCH and operation.item is not None:
                waiting = self.expansion.compute(operation.item).slot
                if self.problem.sizes.shared:
                    waiting = throttled[operation.slot]  # what gathers it
                for change, condition in operation.frees.items():
                    yield waiting, change.place, condition
            elif operation.slot in throttled:
                waiting = throttled[operation.slot]
                for change, condition in operation.frees.items():
                    for held in self._released_under(operation, waiting, condition):
                        yield waiting, change.place, held

    def _releases_of_moves_up(
        self, operation: LiftedOperation, item: Item, raised: Mapping[Place, Sequence[tuple[Slot, Condition]]]
    ) -> Iterator[tuple[Slot, Place, Condition]]:
        """The next move up waits for one from further down, and the item itself for the last one."""
        number = LINKS.index(UP[operation.action])
        for change, condition in operation.frees.items():
            if not number:
                yield self.expansion.compute(item).slot, change.place, condition
                continue
            for slot, other in raised[change.place._replace(tier=LINKS[number - 1].upper)]:
                both = condition.both(other)
                if slot > operation.slot and both != NEVER:
                    yield slot, change.place, both

    def _released_under(
        self, operation: LiftedOperation, waiting: Slot, condition: Condition
    ) -> Iterator[Condition]:
        """When what an operation frees under a condition is known to be free by the one that waits for it."""
        later = self.expansion.operations[waiting]
        if operation.action in STATE_DOWN:
            # Only where the later layer's copies come up are the earlier one's waited for.
            for exists in later.exists:
                yield self.choices.product(condition, exists)
        elif operation.action is Action.SPILL_GRADIENT:
            yield from later.throttles[operation.slot]
        else:
            yield condition


def _undominated(moments: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Without moments at which, whatever is decided, no more is live than at a neighbour."""
    kept: list[MemoryRow] = []
    # What has come and gone since the last moment kept, by moments that do not count.
    carried = Affine()
    for moment in moments:
        change = carried + moment.change
        if kept and _never_negative(change * -1.0):
            carried = change
            continue
        while len(kept) > 1 and _never_negative(change):
            change = kept.pop().change + change
        if kept and _never_negative(change):
            change = kept.pop().change + change
        kept.append(MemoryRow(moment.label, change))
        carried = Affine()
    return kept


def _never_negative(change: Affine) -> bool:
    return change.constant >= 0 and all(coefficient >= 0 for coefficient in change.terms.values())
