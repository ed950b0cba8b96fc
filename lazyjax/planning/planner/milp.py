"""The planner's mixed-integer program: start times and decisions that minimise the period.

Every resource serves its operations in a fixed order, so a start time is a continuous variable
and each wait is one linear row (design: `t[w+1] >= t[w] + seconds`). The period T closes the ring
from one step to the next; its minimum for given decisions is the largest ratio of seconds to
steps over all cycles of the schedule, which is what a replay settles to. Solved in a process of its
own (`lazyjax.planning.planner.solver`); where that fails, descent and replay go on without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from lazyjax.planning.planner.batch_replay import BatchReplay
from lazyjax.planning.planner.decisions.decision import Binaries
from lazyjax.planning.planner.descent import descend, free_device_memory, reduce_traffic
from lazyjax.planning.planner.linear import Answer, Question
from lazyjax.planning.planner.memory import memory_rows
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.planner.rows import ProgramRows
from lazyjax.planning.planner.solver import SolverFailure, SolverProcess, shared_process, solvers
from lazyjax.planning.planner.timing import TimeModel

#: Seconds for a linear relaxation (27B: 1 s), after which it does without.
RELAX_SECONDS = 30.0
#: Units of time in a rough period. Solvers drop durations of less than about 1e-6 units, and are slow
#: where units are much smaller than what they decide about; the exact number is for fixed decisions.
_TIME_UNITS, _EXACT_TIME_UNITS = 4e2, 4e6
#: Relative gain for which descent is worth another round.
_LEAST_GAIN = 1e-4
#: By how much of itself a solver's bound may exceed a plan's period and still be rounding.
_BOUND_TOLERANCE = 1e-3


class Program:
    """The program of one problem: relaxed for a bound, descended from for a plan, branched for both.

    `solver` is `CBC` or `HIGHS`, by default the preferred one; where it fails, `failures` says how.
    """

    def __init__(self, problem: Problem, solver: str | None = None) -> None:
        self.problem = problem
        self.model = TimeModel(problem)
        self.rows = memory_rows(problem, self.model.choices, self.model.expansion)
        self.replay = BatchReplay(self.model, self.rows)
        self.solver = solver or solvers()[0]
        self.process = shared_process()
        self.failures: list[str] = []
        self.linear = ProgramRows(self.model, self.rows)
        self.bound: float | None = None
        self.relaxed: Binaries | None = None
        self.linear.limit_memory()
        self.linear.time(_TIME_UNITS)

    def ask(
        self, question: Question, rows: ProgramRows | None = None, process: SolverProcess | None = None
    ) -> Answer | None:
        """The solver's answer, by default about all rows; None, and one more failure, where it has none."""
        try:
            return (process or self.process).solve((rows or self.linear).program, question)
        except SolverFailure as failure:
            self.failures.append(str(failure))
            return None

    def relax(self) -> float:
        """Seconds that the linear relaxation takes, a bound; infinite where not even that fits.

        Where the solver fails, what the busiest resource must do at least.
        """
        if self.bound is None:
            self.bound = math.inf
            if not self.rows.hopeless(self.problem.capacity):
                answer = self.ask(Question(self.solver, relaxed=True, large=True, max_seconds=RELAX_SECONDS))
                if answer is None or answer.status == "unknown":
                    self.bound = self.model.least_seconds()
                elif answer.status != "infeasible":
                    self.bound = answer.objective * self.linear.time_unit
                    self.relaxed = self.linear.binaries_of(answer)
        return self.bound

    def descend(
        self, starts: Sequence[Binaries], deadline: float, enough_seconds: float = 0.0
    ) -> Binaries | None:
        """A good assignment, by descent from the rounded relaxation or from the best of `starts`.

        Args:
            deadline: of `time.monotonic`.
            enough_seconds: a period that is short enough.
        """
        found = None
        if self.relaxed is not None:
            found = descend(self.replay, self.model.choices.rounded(self.relaxed), deadline)
        elif self.bound is not None and self.bound < math.inf:
            found = descend(self.replay, self.model.choices.plainest(), deadline)
        best = math.inf if found is None else self.model.period(found)
        fitting = [values for values in starts if self.fits(values)]
        period, start = min(
            ((self.model.period(values), position) for position, values in enumerate(fitting)),
            default=(math.inf, None),
        )
        if start is not None and period < best:
            return self.descend_from(fitting[start], deadline, enough_seconds)
        return None if found is None else self._improved(found, deadline, enough_seconds)

    def descend_from(self, start: Binaries, deadline: float, enough_seconds: float = 0.0) -> Binaries:
        """A good assignment by descent from one that fits."""
        better = descend(self.replay, start, deadline)
        return self._improved(start if better is None else better, deadline, enough_seconds)

    def _improved(self, values: Binaries, deadline: float, enough_seconds: float) -> Binaries:
        """Descent again and again with room made for it, until that gains nothing."""
        period = self.model.period(values)
        while period > enough_seconds and time.monotonic() < deadline:
            roomier = free_device_memory(self.replay, values, deadline)
            again = descend(self.replay, roomier, deadline)
            shorter = math.inf if again is None else self.model.period(again)
            if again is None or shorter > period * (1 - _LEAST_GAIN):
                break
            values, period = again, shorter
        return values

    def reduce_traffic(self, values: Binaries, deadline: float) -> Binaries:
        """An assignment as fast that moves less."""
        return reduce_traffic(self.replay, values, deadline)

    def fits(self, values: Binaries) -> bool:
        """Whether an assignment keeps within all capacities."""
        return bool(self.replay.excess(self.model.choices.complete(values[None]))[0] <= 0)

    def branch(
        self,
        start: Binaries | None,
        *,
        cutoff_seconds: float,
        deadline: float,
        relative_gap: float,
    ) -> tuple[Binaries | None, float]:
        """Branch and bound from `start`: the best assignment under the cutoff, and the proven bound.

        The bound is infinite where nothing fits, and the cutoff where nothing fits below it. Where the
        solver fails, it is the relaxation's, and `start` stays the best.
        """
        bound = self.relax()
        period = math.inf if start is None else self.model.period(start)
        if period >= cutoff_seconds:
            start, period = None, math.inf
        if bound >= min(period * (1 - relative_gap), cutoff_seconds) or time.monotonic() >= deadline:
            return start, bound
        known = {} if start is None else dict(zip(self.linear.binaries, map(float, start), strict=True))
        answer = self.ask(
            Question(
                self.solver,
                bounds={self.linear.period: (0.0, cutoff_seconds / self.linear.time_unit)},
                start=known,
                relative_gap=relative_gap,
                max_seconds=max(0.1, deadline - time.monotonic()),
            )
        )
        if answer is None:
            return start, bound
        # With a plan in hand, CBC means by "infeasible" that there is no better one.
        proven = period if answer.status == "infeasible" else answer.bound * self.linear.time_unit
        if answer.values is not None:
            found = self.linear.binaries_of(answer).round()
            if self.model.period(found) < period:
                start = found
        # A bound above a plan in hand is none.
        raised = bound if proven > period * (1 + _BOUND_TOLERANCE) else min(proven, period, cutoff_seconds)
        return start, max(bound, raised)

    def objective(self, values: Binaries) -> float:
        """Seconds that the program gives an assignment; a replay must give the same.

        Asked of the same rows for time in finer units, so that no duration is too short to count.
        Infinite where the solver gives up.
        """
        exact = ProgramRows(self.model, self.rows)
        exact.time(_EXACT_TIME_UNITS)
        for column, value in zip(exact.binaries, values, strict=True):
            exact.program.lower[column] = exact.program.upper[column] = float(value)
        answer = self.ask(Question(self.solver, relaxed=True, max_seconds=RELAX_SECONDS), exact)
        if answer is None or answer.status != "optimal":
            return math.inf
        return answer.objective * exact.time_unit
