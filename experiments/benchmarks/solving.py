"""One program solved to the end, for comparisons with brute force; planning itself searches over many.

Used by `experiments.benchmarks.planner_exactness` and by tests.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping

from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.divide import divide
from lazyjax.planning.planner.leanest import memory_shortfall
from lazyjax.planning.planner.milp import Program
from lazyjax.planning.planner.problem import Problem
from lazyjax.specs import Tier


@dataclasses.dataclass(frozen=True)
class Solution:
    """Outcome of one program.

    Attributes:
        plan: the best plan found; None where there is none.
        period_seconds: its period at layer granularity, by replay.
        objective_seconds: its period as the program computed it.
        bound_seconds: no plan of this problem has a smaller period.
        shortfall_bytes: where nothing fits, the bytes missing per tier in the nearest miss.
        seconds: spent solving.
    """

    plan: Plan | None
    period_seconds: float
    objective_seconds: float
    bound_seconds: float
    shortfall_bytes: Mapping[Tier, int]
    seconds: float

    @property
    def gap(self) -> float:
        """(period - bound) / period."""
        if self.plan is None:
            return math.inf
        return max(0.0, (self.period_seconds - self.bound_seconds) / self.period_seconds)


def solve(
    problem: Problem,
    *,
    warm_start: Plan | None = None,
    cutoff_seconds: float = math.inf,
    time_limit_seconds: float = 10.0,
    relative_gap: float = 0.005,
    solver: str | None = None,
) -> Solution:
    """The plan with the shortest steady-state period under the problem's settings.

    Args:
        warm_start: a plan within this problem from which to start.
        cutoff_seconds: periods from here on are of no interest.
        solver: `CBC` or `HIGHS`; the preferred one by default.
    """
    begun = time.monotonic()
    deadline = begun + time_limit_seconds
    program = Program(problem, solver)
    start, bound = None, program.relax()
    if bound < math.inf:
        starts = [] if warm_start is None else [program.model.choices.encode(warm_start)]
        start = program.descend(starts, deadline, bound / (1 - relative_gap))
        start, divided = divide(
            program, start, cutoff_seconds=cutoff_seconds, deadline=deadline, relative_gap=relative_gap
        )
        start, bound = program.branch(
            start, cutoff_seconds=cutoff_seconds, deadline=deadline, relative_gap=relative_gap
        )
        bound = max(bound, divided)
    shortfall: Mapping[Tier, int] = {}
    if start is None and bound == math.inf and cutoff_seconds == math.inf:
        shortfall = memory_shortfall(problem, time_limit_seconds=time_limit_seconds, solver=solver)
    if start is None:
        return Solution(None, math.inf, math.inf, bound, shortfall, time.monotonic() - begun)
    plan = program.model.choices.decode(start, "milp")
    period = program.model.period(start)
    objective = program.objective(start)
    return Solution(plan, period, objective, bound, {}, time.monotonic() - begun)
