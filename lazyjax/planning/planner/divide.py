"""Cases of a program, for a bound and for plans near them (see `lazyjax.planning.planner.cases`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from lazyjax.planning.planner.cases import Cases, ColumnBounds, Relaxation, Values
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.decisions.decision import Binaries
from lazyjax.planning.planner.descent import descend
from lazyjax.planning.planner.linear import Line, Question
from lazyjax.planning.planner.milp import RELAX_SECONDS, Program
from lazyjax.planning.planner.rows import ProgramRows
from lazyjax.planning.program.conditions import Condition

#: With decisions rounded, a relaxation within so many times that without promises a good plan.
_NEAR = 1.05


class _Best:
    """The best assignment so far, with its period."""

    def __init__(self, program: Program, values: Binaries | None) -> None:
        self.program, self.values = program, values
        self.seconds = math.inf if values is None else program.model.period(values)

    def offer(self, values: Binaries) -> None:
        """Takes an assignment if it is the best so far."""
        seconds = self.program.model.period(values)
        if seconds < self.seconds:
            self.values, self.seconds = values, seconds


def divide(
    program: Program,
    start: Binaries | None,
    *,
    cutoff_seconds: float,
    deadline: float,
    relative_gap: float,
) -> tuple[Binaries | None, float]:
    """By cases of what the relaxation leaves almost decided: a better assignment, and a proven bound.

    Arguments and result as for `Program.branch`. Ends where cases do not raise the bound, and where neither
    `start` nor the first cases' neighbourhood holds a plan.
    """
    best = _Best(program, start)
    looked = 0

    def target_seconds() -> float:
        return min(best.seconds * (1 - relative_gap), cutoff_seconds)

    def look(bounds: ColumnBounds, values: Values, voided: Sequence[Condition]) -> None:
        nonlocal looked
        looked += 1
        # The first, second, fourth ...: most cases differ little from the one before.
        if looked & (looked - 1) == 0 and voided:
            within = {**bounds, **_rounded_kind(program, values, voided[0])}
            found = _descend_within(program, within, min(target_seconds(), _NEAR * program.relax()), deadline)
            if found is not None:
                best.offer(found)

    fix = functools.partial(condition_bounds, program.linear)
    cases = Cases(program.model, functools.partial(relaxation, program), fix, program.relax())
    cases.close(target_seconds, deadline, look)
    return best.values, max(program.relax(), min(cases.bound_seconds, target_seconds()))


def relaxation(program: Program, bounds: ColumnBounds, line: Line) -> Relaxation | None:
    """The relaxation within bounds; None where the solver fails.

    Args:
        line: see `Question`.
    """
    answer = program.ask(
        Question(
            program.solver, relaxed=True, line=line, large=True, bounds=bounds, max_seconds=RELAX_SECONDS
        )
    )
    if answer is None or answer.status == "unknown":
        return None
    if answer.values is None:
        return Relaxation(math.inf, None)
    values = np.array([answer.values[column] for column in program.linear.variables])
    return Relaxation(answer.objective * program.linear.time_unit, values)


def condition_bounds(rows: ProgramRows, condition: Condition, holds: bool) -> ColumnBounds | None:
    """Bounds of columns under which a condition holds or does not; None where bounds cannot say it."""
    if condition.constant or condition.minus:
        return None
    if not holds:
        return {rows.variables[variable]: (0.0, 0.0) for variable in condition.plus}
    if len(condition.plus) == 1:
        return {rows.variables[variable]: (1.0, 1.0) for variable in condition.plus}
    for group, none in rows.exclusive.items():
        if condition.plus <= group:
            others = [rows.variables[variable] for variable in group - condition.plus]
            return dict.fromkeys([*others, *none], (0.0, 0.0))
    return None


def _rounded_kind(program: Program, values: Values, voided: Condition) -> ColumnBounds:
    """Bounds that round all decisions of the kind that a condition is about."""
    choices = program.model.choices
    about = _decisions_in(choices, voided)
    rounded: dict[int, tuple[float, float]] = {}
    first = 0
    for decision in choices.decisions:
        own = range(first, first + decision.count)
        first = own.stop
        if not about.isdisjoint(own):
            rounded |= {
                program.linear.binaries[number]: (float(round(values[number])),) * 2 for number in own
            }
    return rounded


def _decisions_in(choices: Choices, condition: Condition) -> frozenset[int]:
    """The variables of decisions that a condition is about, through products."""
    found = frozenset[int]()
    for variable in condition.plus | condition.minus:
        if variable < choices.binaries:
            found |= {variable}
        else:
            both = choices.products[variable - choices.binaries]
            found = found.union(*(_decisions_in(choices, one) for one in both))
    return found


def _descend_within(
    program: Program, bounds: ColumnBounds, target_seconds: float, deadline: float
) -> Binaries | None:
    """Descent from the relaxation within bounds, where that is below the target."""
    relaxed = relaxation(program, bounds, "anew")
    if relaxed is None or relaxed.values is None or relaxed.seconds >= target_seconds:
        return None
    choices = program.model.choices
    return descend(program.replay, choices.rounded(relaxed.values[: choices.binaries]), deadline)
