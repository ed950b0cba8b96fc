"""Whether some plan of a problem fits, and what the nearest miss lacks; time does not matter here."""

from __future__ import annotations

import math
import time
from collections.abc import Collection

from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.batch_replay import BatchReplay
from lazyjax.planning.planner.decisions.decision import Binaries
from lazyjax.planning.planner.descent import descend
from lazyjax.planning.planner.linear import Answer, Question
from lazyjax.planning.planner.memory import SOLVER_TOLERANCE, memory_rows
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.planner.rows import ProgramRows
from lazyjax.planning.planner.solver import SolverFailure, shared_process, solvers
from lazyjax.planning.planner.timing import TimeModel
from lazyjax.specs import Tier


def memory_shortfall(
    problem: Problem, *, time_limit_seconds: float = 10.0, solver: str | None = None
) -> dict[Tier, int]:
    """Bytes missing per tier in the nearest miss; empty where some plan fits."""
    return _Leanest(problem).find(solver or solvers()[0], time_limit_seconds)[1]


def least_missing(
    problem: Problem, tier: Tier, *, time_limit_seconds: float = 10.0, solver: str | None = None
) -> int | None:
    """Bytes that `tier` lacks under the plan that needs least of it; None where another tier is too small."""
    values, missing = _Leanest(problem, (tier,)).find(solver or solvers()[0], time_limit_seconds)
    if values is None or missing.keys() - {tier}:
        return None
    return missing[tier] if tier in missing else 0


def leanest_plan(
    problem: Problem, *, time_limit_seconds: float = 10.0, solver: str | None = None
) -> Plan | None:
    """Some plan that fits, however slow; None where there is none."""
    leanest = _Leanest(problem)
    values, shortfall = leanest.find(solver or solvers()[0], time_limit_seconds)
    return None if values is None or shortfall else leanest.model.choices.decode(values, "milp")


class _Leanest:
    """A program of memory rows alone, whose objective is what is missing.

    Args:
        scarce: tiers that may lack something.
    """

    def __init__(self, problem: Problem, scarce: Collection[Tier] = tuple(Tier)) -> None:
        self.problem, self.model = problem, TimeModel(problem)
        self.rows = memory_rows(problem, self.model.choices, self.model.expansion)
        self.linear = ProgramRows(self.model, self.rows)
        program = self.linear.program
        self.slack = {tier: program.add_column(upper=math.inf if tier in scarce else 0.0) for tier in Tier}
        self.linear.limit_memory(self.slack)
        # Relative to what there is; a tier of which there is nothing must not drown the others.
        least, unit = self.linear.byte_unit / 1e3, self.linear.byte_unit
        program.objective = {
            self.slack[tier]: unit / max(least, float(problem.capacity[tier])) for tier in Tier
        }

    def find(self, solver: str, time_limit_seconds: float) -> tuple[Binaries | None, dict[Tier, int]]:
        """The assignment that lacks the fewest bytes, as shares of each capacity, and what it lacks.

        Where the solver fails, that of descent.
        """
        try:
            answer = shared_process().solve(
                self.linear.program, Question(solver, max_seconds=time_limit_seconds)
            )
        except SolverFailure:
            return self._by_descent(time_limit_seconds)
        if answer.values is None:
            return None, {}
        return self.linear.binaries_of(answer).round(), self._missing(answer)

    def _missing(self, answer: Answer) -> dict[Tier, int]:
        assert answer.values is not None
        unit = self.linear.byte_unit
        missing = {}
        for tier in Tier:
            capacity = self.problem.capacity[tier]
            short = math.ceil(answer.values[self.slack[tier]] * unit - 1e-3)
            if short > 0:
                # With so much more the row holds, tightened as it is.
                needed = capacity + short
                short = max(needed, math.ceil((needed - 0.5) / (1 - SOLVER_TOLERANCE))) - capacity
            # Less than this is the solver's tolerance.
            if short > 1e-7 * unit:
                missing[tier] = short
        return missing

    def _by_descent(self, time_limit_seconds: float) -> tuple[Binaries, dict[Tier, int]]:
        plainest = self.model.choices.plainest()
        replay = BatchReplay(self.model, self.rows)
        found = descend(replay, plainest, time.monotonic() + time_limit_seconds)
        if found is not None:
            return found, {}
        peaks = self.rows.peak_bytes(self.model.choices.complete(plainest[None]))
        missing = {tier: math.ceil(peaks[tier][0]) - self.problem.capacity[tier] for tier in Tier}
        return plainest, {tier: size for tier, size in missing.items() if size > 0}
