"""Cases of a program, for a bound and for plans near them (see `lazyjax.planning.planner.cases`)."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import queue
import time
from collections.abc import Sequence

import numpy as np

from lazyjax.planning.planner.cases import Cases, ColumnBounds, Relaxation, Values
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.decisions.decision import Binaries
from lazyjax.planning.planner.descent import descend
from lazyjax.planning.planner.linear import Line, Question
from lazyjax.planning.planner.milp import RELAX_SECONDS, Program
from lazyjax.planning.planner.rows import ProgramRows
from lazyjax.planning.planner.solver import SolverProcess, shared_process
from lazyjax.planning.program.conditions import Condition

#: Cases that are worth the start of another process.
_MANY = 4
#: With decisions rounded, a relaxation within so many times that without promises a good plan.
_NEAR = 1.05


class _Best:
    """The best assignment so far, with its period."""

    def __init__(self, program: Program, values: Binaries | None) -> None:
        self.program, self.values = program, values
        self.seconds = math.inf if values is None else program.model.period(values)

    def offer(self, values: Binaries) -> bool:
        """Takes an assignment if it is the best so far."""
        seconds = self.program.model.period(values)
        better = seconds < self.seconds
        if better:
            self.values, self.seconds = values, seconds
        return better


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
    looked, fruitless = 0, False

    def target_seconds() -> float:
        return min(best.seconds * (1 - relative_gap), cutoff_seconds)

    def look(bounds: ColumnBounds, values: Values, voided: Sequence[Condition]) -> None:
        nonlocal looked, fruitless
        looked += 1
        # The first, second, fourth ...: most cases differ little from the one before.
        if looked & (looked - 1) or fruitless or not voided:
            return
        within = {**bounds, **_rounded_kind(program, values, voided[0])}
        found = _descend_within(program, within, min(target_seconds(), _NEAR * program.relax()), deadline)
        fruitless = found is None or not best.offer(found)

    cases = Cases(
        program.model,
        functools.partial(relaxation, program),
        functools.partial(relaxations, program, deadline=deadline),
        functools.partial(condition_bounds, program.linear),
        program.relax(),
    )
    cases.close(target_seconds, deadline, look)
    return best.values, max(program.relax(), min(cases.bound_seconds, target_seconds()))


def relaxation(
    program: Program, bounds: ColumnBounds, line: Line = "path", process: SolverProcess | None = None
) -> Relaxation | None:
    """The relaxation within bounds; None where the solver fails.

    Args:
        line: see `Question`.
        process: asked instead of the program's own.
    """
    question = Question(
        program.solver, relaxed=True, line=line, large=True, bounds=bounds, max_seconds=RELAX_SECONDS
    )
    answer = program.ask(question, process=process)
    if answer is None or answer.status == "unknown":
        return None
    if answer.values is None:
        return Relaxation(math.inf, None)
    values = np.array([answer.values[column] for column in program.linear.variables])
    return Relaxation(answer.objective * program.linear.time_unit, values)


def relaxations(
    program: Program, cases: Sequence[ColumnBounds], *, deadline: float = math.inf
) -> list[Relaxation | None]:
    """The relaxation of each case, by two processes where they are many; None also where time is over."""
    processes = [program.process, *([shared_process(1)] if len(cases) >= _MANY else ())]
    idle: queue.SimpleQueue[SolverProcess] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def ask(bounds: ColumnBounds) -> Relaxation | None:
        if time.monotonic() >= deadline:
            return None
        process = idle.get()
        try:
            return relaxation(program, bounds, "aside", process)
        finally:
            idle.put(process)

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(ask, cases))


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
