"""A bound from cases of what a relaxation leaves almost decided.

A wait that depends on a decision is void in the relaxation wherever that decision is not quite one: 0.998
of a layer's state on a drive makes 0.998 of the room and needs none of the waits. Solvers branch on such
decisions in no useful order. Here they are taken from the cycle of operations that would bind if whatever
is mostly so were so: where a condition on it held exactly, the relaxation often takes so long that no plan
worth having fulfils it, and the other case is what is left. Every case differs from the one before by a few
bounds, which a solver that goes on from its last basis answers in hundredths of a second. Once a condition
has turned out to need the target, the next ones are taken to need it, too, and asked about afterwards,
several at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.planner.timing import TimeModel, Wait
from lazyjax.planning.program.conditions import ALWAYS, Condition
from lazyjax.timeline import Resource

#: Limits of columns, by column, for one question.
ColumnBounds = Mapping[int, tuple[float, float]]
#: Values of all variables, products included.
Values = Float64[np.ndarray, "variables"]

#: The relaxation within each of some bounds; None where the solver fails or time is over.
Probe = Callable[[Sequence[ColumnBounds]], Sequence["Relaxation | None"]]

#: Gets the bounds of a case, its relaxed values, and the conditions that these void.
Look = Callable[[ColumnBounds, Values, Sequence[Condition]], None]

#: A condition holds for the greater part; it holds.
_MOSTLY, _WHOLLY = 0.5, 1.0 - 1e-6
#: Steps that are replayed to find a cycle: queues that begin empty are in step after a few.
_STEPS = 6
#: Conditions of a cycle that are looked at, the weakest first.
_MOST_LOOKED_AT = 2
#: Conditions on the way to the target, by default; 27B with state on NVMe takes about twenty.
_MOST_CONDITIONS = 64


class Relaxation(NamedTuple):
    """Seconds of a solved relaxation, and its values; infinite and None where nothing fits."""

    seconds: float
    values: Values | None


class Case(NamedTuple):
    """Bounds that make a case, and seconds that no plan of it undercuts."""

    bounds: ColumnBounds
    seconds: float


class _Sides(NamedTuple):
    """Bounds under which a condition holds, and under which it fails; seconds that it needs to hold."""

    holding: ColumnBounds
    failing: ColumnBounds
    seconds: float = -math.inf


class Cases:
    """The cases of one problem that may still have a plan below a target.

    Args:
        relax: the relaxation within bounds, going on from the one before; None where the solver fails.
        probe: of cases that are far from each other.
        fix: bounds under which a condition holds, or does not; None where bounds cannot say it.
        root_seconds: of the relaxation without any.
        most_conditions: that one case may need to reach the target, as its last one went; else it is stuck.

    Attributes:
        open: cases to be taken up, the last one first.
        stuck_seconds: the least of those that no further case raises.
    """

    def __init__(
        self,
        model: TimeModel,
        relax: Callable[[ColumnBounds], Relaxation | None],
        probe: Probe,
        fix: Callable[[Condition, bool], ColumnBounds | None],
        root_seconds: float,
        *,
        most_conditions: float = _MOST_CONDITIONS,
    ) -> None:
        self.model, self._relax, self._probe, self._fix = model, relax, probe, fix
        self._most_conditions = most_conditions
        self.open = [Case({}, root_seconds)]
        self.stuck_seconds = math.inf

    @property
    def bound_seconds(self) -> float:
        """No plan is faster, as far as cases were not closed for exceeding a target."""
        return min([self.stuck_seconds, *(case.seconds for case in self.open)])

    def close(
        self,
        target_seconds: Callable[[], float],
        deadline: float,
        look: Look,
    ) -> None:
        """Takes up cases until the bound reaches the target, or one is stuck below it.

        Args:
            target_seconds: asked again and again, because plans found on the way may lower it.
            deadline: of `time.monotonic`.
            look: may find a plan near every case.
        """
        while self.open and time.monotonic() < deadline:
            if self.stuck_seconds < target_seconds():
                return
            passed: list[Case] = []
            left = self._pursue(self.open.pop(), passed, target_seconds, deadline, look)
            self.open += self._below(passed, target_seconds())
            if left is not None:
                self.open.append(left)

    def _below(self, cases: Sequence[Case], target_seconds: float) -> Iterator[Case]:
        """Those whose relaxation is below the target, or not known."""
        for case, relaxed in zip(cases, self._probe([case.bounds for case in cases]), strict=True):
            seconds = case.seconds if relaxed is None else max(case.seconds, relaxed.seconds)
            if seconds < target_seconds:
                yield case._replace(seconds=seconds)

    def _pursue(
        self,
        case: Case,
        passed: list[Case],
        target_seconds: Callable[[], float],
        deadline: float,
        look: Look,
    ) -> Case | None:
        """Narrows a case down until it exceeds the target; what is left of it when time is over.

        Args:
            passed: gets what was taken out of it.
        """
        bounds, seconds = case
        reached, trusted = -math.inf, False
        while time.monotonic() < deadline:
            relaxed = self._relax(bounds)
            if relaxed is None:
                break
            seconds = max(seconds, relaxed.seconds)
            missing = target_seconds() - seconds
            if missing <= 0 or relaxed.values is None:
                return None
            rise = seconds - reached
            if (missing / rise if rise > 0 else math.inf) > self._most_conditions:
                break
            reached = seconds
            voided = critical_conditions(self.model, relaxed.values)
            look(bounds, relaxed.values, voided)
            target = target_seconds()
            side = self._chosen(bounds, voided, target, trusted) if math.isfinite(target) else None
            if side is None:
                break
            if side.seconds >= target:
                trusted = True
            else:
                passed.append(Case({**bounds, **side.holding}, max(seconds, side.seconds)))
            bounds = {**bounds, **side.failing}
        else:
            return Case(bounds, seconds)
        self.stuck_seconds = min(self.stuck_seconds, seconds)
        return None

    def _chosen(
        self, bounds: ColumnBounds, voided: Sequence[Condition], target_seconds: float, trusted: bool
    ) -> _Sides | None:
        """Of the first conditions that bounds can fix, one that needs the target, or else the most seconds.

        Args:
            trusted: take the very first, without asking.
        """
        possible = list(self._sides(voided))
        if trusted:
            return possible[0] if possible else None
        most: _Sides | None = None
        for side in possible[:_MOST_LOOKED_AT]:
            (relaxed,) = self._probe([{**bounds, **side.holding}])
            if relaxed is not None and (most is None or relaxed.seconds > most.seconds):
                most = side._replace(seconds=relaxed.seconds)
            if most is not None and most.seconds >= target_seconds:
                break
        return most

    def _sides(self, conditions: Sequence[Condition]) -> Iterator[_Sides]:
        """Of those conditions that bounds can fix."""
        for condition in conditions:
            holding, failing = self._fix(condition, True), self._fix(condition, False)
            if holding is not None and failing is not None:
                yield _Sides(holding, failing)


def critical_conditions(model: TimeModel, values: Values) -> list[Condition]:
    """What is mostly but not wholly so, on the cycle that would bind if it were; the weakest first."""
    shares: dict[Condition, float] = {ALWAYS: 1.0}
    for operation in model.operations:
        for _, condition in (*operation.binding, *operation.waits_previous):
            if condition not in shares:
                shares[condition] = float(condition.value(values))
    seconds = [float(operation.seconds.value(values)) for operation in model.operations]
    waits = [_mostly(operation.binding, shares) for operation in model.operations]
    previous = [_mostly(operation.waits_previous, shares) for operation in model.operations]
    queues: dict[Resource, list[int]] = {}
    for operation in model.operations:
        queue = queues.setdefault(operation.resource, [])
        if queue:
            waits[operation.index].append((queue[-1], ALWAYS))
        queue.append(operation.index)
    for queue in queues.values():
        previous[queue[0]].append((queue[-1], ALWAYS))
    on_cycle = {condition for condition in _cycle(seconds, waits, previous) if shares[condition] < _WHOLLY}
    return sorted(on_cycle, key=lambda condition: (shares[condition], *sorted(condition.plus)))


def _mostly(waits: Sequence[Wait], shares: Mapping[Condition, float]) -> list[Wait]:
    return [(index, condition) for index, condition in waits if shares[condition] >= _MOSTLY]


def _cycle(
    seconds: Sequence[float], waits: Sequence[Sequence[Wait]], previous: Sequence[Sequence[Wait]]
) -> Iterator[Condition]:
    """The conditions of the waits on a cycle that binds: it is what the last of some steps goes back to."""
    ends: list[list[float]] = []
    #: What held each operation up, per step: the operation, how many steps before, and on which condition.
    held: list[list[tuple[int, int, Condition] | None]] = []
    for step in range(_STEPS):
        end = [0.0] * len(seconds)
        by: list[tuple[int, int, Condition] | None] = [None] * len(seconds)
        for index, duration in enumerate(seconds):
            begin = 0.0
            cause: tuple[int, int, Condition] | None = None
            for waited, condition in waits[index]:
                if end[waited] >= begin:
                    begin, cause = end[waited], (waited, 0, condition)
            for waited, condition in previous[index] if step else ():
                if ends[-1][waited] >= begin:
                    begin, cause = ends[-1][waited], (waited, 1, condition)
            end[index], by[index] = begin + duration, cause
        ends.append(end)
        held.append(by)
    advance = [after - before for before, after in zip(*ends[-2:], strict=True)]
    current, step = max(range(len(seconds)), key=advance.__getitem__), _STEPS - 1
    path: list[tuple[int, Condition]] = []
    while current not in [index for index, _ in path]:
        before = held[step][current]
        if before is None:
            return
        path.append((current, before[2]))
        current, step = before[0], step - before[1]
    first = next(position for position, (index, _) in enumerate(path) if index == current)
    yield from (condition for _, condition in path[first:])
