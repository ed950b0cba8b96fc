"""A bound from cases of what a relaxation leaves almost decided.

A wait that depends on a decision is void in the relaxation wherever that decision is not quite one: 0.998
of a layer's state on a drive makes 0.998 of the room and needs none of the waits. Solvers branch on such
decisions in no useful order. Here they are taken from the cycle of operations that would bind if whatever
is mostly so were so: where a condition on it held exactly, the relaxation often takes so long that no plan
worth having fulfils it, and the other case is what is left. Every case differs from the one before by a few
bounds, which a solver that goes on from its last basis answers in hundredths of a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.planner.linear import Line
from lazyjax.planning.planner.timing import TimeModel, Wait
from lazyjax.planning.program.conditions import ALWAYS, Condition
from lazyjax.timeline import Resource

#: Limits of columns, by column, for one question.
ColumnBounds = Mapping[int, tuple[float, float]]
#: Values of all variables, products included.
Values = Float64[np.ndarray, "variables"]

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


class Cases:
    """The cases of one problem that may still have a plan below a target.

    Args:
        relax: the relaxation within bounds, on a line of questions; None where the solver fails.
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
        relax: Callable[[ColumnBounds, Line], Relaxation | None],
        fix: Callable[[Condition, bool], ColumnBounds | None],
        root_seconds: float,
        *,
        most_conditions: float = _MOST_CONDITIONS,
    ) -> None:
        self.model, self._relax, self._fix = model, relax, fix
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
            case = self.open.pop()
            left = self._pursue(case, target_seconds, deadline, look)
            if left is not None:
                self.open.append(left)

    def _pursue(
        self,
        case: Case,
        target_seconds: Callable[[], float],
        deadline: float,
        look: Look,
    ) -> Case | None:
        """Narrows a case down until it exceeds the target; what is left of it when time is over."""
        bounds, seconds = case
        reached = -math.inf
        while time.monotonic() < deadline:
            relaxed = self._relax(bounds, "path")
            if relaxed is None:
                self.stuck_seconds = min(self.stuck_seconds, seconds)
                return None
            seconds = max(seconds, relaxed.seconds)
            missing = target_seconds() - seconds
            if missing <= 0 or relaxed.values is None:
                return None
            rise = seconds - reached
            if (missing / rise if rise > 0 else math.inf) > self._most_conditions:
                self.stuck_seconds = min(self.stuck_seconds, seconds)
                return None
            reached = seconds
            voided = critical_conditions(self.model, relaxed.values)
            look(bounds, relaxed.values, voided)
            narrowed = None
            if math.isfinite(target_seconds()):
                narrowed = self._narrowed(bounds, voided, target_seconds())
            if narrowed is None:
                self.stuck_seconds = min(self.stuck_seconds, seconds)
                return None
            bounds = narrowed
        return Case(bounds, seconds)

    def _narrowed(
        self, bounds: ColumnBounds, voided: Sequence[Condition], target_seconds: float
    ) -> ColumnBounds | None:
        """The case without one of its conditions: one that needs the target, or else that opens a case.

        None where no condition that the relaxation voids can be fixed.
        """
        most: tuple[float, ColumnBounds, ColumnBounds] | None = None
        for condition in voided[:_MOST_LOOKED_AT]:
            holding, failing = self._fix(condition, True), self._fix(condition, False)
            if holding is None or failing is None:
                continue
            relaxed = self._relax({**bounds, **holding}, "aside")
            if relaxed is None:
                continue
            if relaxed.seconds >= target_seconds:
                return {**bounds, **failing}
            if most is None or relaxed.seconds > most[0]:
                most = relaxed.seconds, holding, failing
        if most is None:
            return None
        seconds, holding, failing = most
        self.open.append(Case({**bounds, **holding}, seconds))
        return {**bounds, **failing}


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
