"""Whether some plan of a problem fits, and what the nearest miss lacks; time does not matter here.

Bytes of one tier are never weighed against bytes of another: where more of a single tier is enough, the least
of it is told, and only where no single tier is enough, what several lack together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping

from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.affine import Number
from lazyjax.planning.planner.batch_replay import BatchReplay
from lazyjax.planning.planner.decisions.decision import Binaries
from lazyjax.planning.planner.descent import descend
from lazyjax.planning.planner.linear import Question
from lazyjax.planning.planner.memory import SOLVER_TOLERANCE, memory_rows
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.planner.rows import ProgramRows
from lazyjax.planning.planner.solver import SolverFailure, shared_process, solvers
from lazyjax.planning.planner.timing import TimeModel
from lazyjax.specs import Tier

#: In which order a miss is put down to a single tier: memory of the host is what is added most easily.
_SINGLE = (Tier.HOST, Tier.NVME, Tier.DEVICE)
#: In which order several tiers are made as small as they can be: the device's memory cannot be added to.
_TOGETHER = (Tier.DEVICE, Tier.HOST, Tier.NVME)


def memory_shortfall(
    problem: Problem, *, time_limit_seconds: float = 10.0, solver: str | None = None
) -> dict[Tier, int]:
    """Bytes missing per tier in the nearest miss; empty where some plan fits.

    One tier where more of it is enough (of several such tiers the first of host, NVMe and device), else the
    least of device memory that any plan needs, the least of the host's with that much, and so on.

    Args:
        time_limit_seconds: for each of the few questions that this takes.
    """
    leanest = _Leanest(problem, solver or solvers()[0], time_limit_seconds)
    if leanest.fitting() is not None:
        return {}
    for tier in _SINGLE:
        missing = leanest.least_missing(tier)
        if missing is not None:
            return {tier: missing} if missing else {}
    allowed: dict[Tier, Number] = dict.fromkeys(Tier, math.inf)
    for tier in _TOGETHER:
        allowed[tier] = leanest.least_missing(tier, allowed) or 0
    return {tier: int(size) for tier, size in allowed.items() if size}


def some_plan_fits(problem: Problem, *, time_limit_seconds: float = 10.0, solver: str | None = None) -> bool:
    """Whether a plan was found that fits: one question, where `memory_shortfall` asks several."""
    return _Leanest(problem, solver or solvers()[0], time_limit_seconds).fitting() is not None


def nearest(misses: Iterable[Mapping[Tier, int]]) -> dict[Tier, int]:
    """Of what several problems lack, fewest tiers, in the order of `memory_shortfall`, then fewest bytes."""

    def rank(miss: Mapping[Tier, int]) -> tuple[list[int], list[int]]:
        tiers = sorted(_SINGLE.index(tier) for tier in miss)
        return [len(tiers), *tiers], [miss[tier] for tier in _TOGETHER if tier in miss]

    ranked = sorted(misses, key=rank)
    return dict(ranked[0]) if ranked else {}


def least_missing(
    problem: Problem, tier: Tier, *, time_limit_seconds: float = 10.0, solver: str | None = None
) -> int | None:
    """Bytes that `tier` lacks under the plan that needs least of it; None where another tier is too small."""
    return _Leanest(problem, solver or solvers()[0], time_limit_seconds).least_missing(tier)


def leanest_plan(
    problem: Problem, *, time_limit_seconds: float = 10.0, solver: str | None = None
) -> Plan | None:
    """Some plan that fits, however slow; None where there is none."""
    leanest = _Leanest(problem, solver or solvers()[0], time_limit_seconds)
    values = leanest.fitting()
    return None if values is None else leanest.model.choices.decode(values, "milp")


class _Leanest:
    """Programs of memory rows alone, whose objective is what is missing."""

    def __init__(self, problem: Problem, solver: str, time_limit_seconds: float) -> None:
        self.problem, self.model = problem, TimeModel(problem)
        self.rows = memory_rows(problem, self.model.choices, self.model.expansion)
        self._solver, self._seconds = solver, time_limit_seconds

    def fitting(self) -> Binaries | None:
        """An assignment that lacks nothing; None where there is none, or none was found."""
        values, missing = self._find(dict.fromkeys(Tier, math.inf), Tier)
        return None if any(missing.values()) else values

    def least_missing(self, tier: Tier, others: Mapping[Tier, Number] | None = None) -> int | None:
        """The least that `tier` lacks; None where other tiers are too small.

        Args:
            others: bytes that these may lack; by default none.
        """
        allowed = {**(others or dict.fromkeys(Tier, 0.0)), tier: math.inf}
        roomy = {own: self.problem.capacity[own] + allowed[own] for own in Tier}
        if self.rows.hopeless(roomy):
            return None
        values, missing = self._find(allowed, (tier,))
        return None if values is None else missing[tier]

    def _find(
        self, allowed: Mapping[Tier, Number], counted: Collection[Tier]
    ) -> tuple[Binaries | None, dict[Tier, int]]:
        """The assignment that lacks the least of `counted`, and what it lacks; None where all lack more.

        Where the solver fails, that of descent. Several tiers count as shares of their capacities, which is
        only good for whether anything is missing.
        """
        linear = ProgramRows(self.model, self.rows)
        slack = {
            tier: linear.program.add_column(upper=allowed[tier] / linear.byte_units[tier]) for tier in Tier
        }
        linear.limit_memory(slack)
        # A tier of which there is nothing must not drown the others.
        least = min(linear.byte_units.values()) / 1e3
        linear.program.objective = {
            slack[tier]: linear.byte_units[tier] / max(least, float(self.problem.capacity[tier]))
            for tier in counted
        }
        try:
            answer = shared_process().solve(linear.program, Question(self._solver, max_seconds=self._seconds))
        except SolverFailure:
            return self._by_descent(allowed, counted)
        if answer.values is None:
            return None, {}
        missing = {
            tier: self._missing(tier, answer.values[slack[tier]], linear.byte_units[tier]) for tier in counted
        }
        return linear.binaries_of(answer).round(), missing

    def _missing(self, tier: Tier, units: float, unit: float) -> int:
        capacity, short = self.problem.capacity[tier], math.ceil(units * unit - 1e-3)
        if short > 0:
            # With so much more the row holds, tightened as it is.
            needed = capacity + short
            short = max(needed, math.ceil((needed - 0.5) / (1 - SOLVER_TOLERANCE))) - capacity
        # Less than this is the solver's tolerance.
        return short if short > 1e-7 * unit else 0

    def _by_descent(
        self, allowed: Mapping[Tier, Number], counted: Collection[Tier]
    ) -> tuple[Binaries | None, dict[Tier, int]]:
        plainest = self.model.choices.plainest()
        replay = BatchReplay(self.model, self.rows)
        found = descend(replay, plainest, time.monotonic() + self._seconds)
        if found is not None:
            return found, dict.fromkeys(counted, 0)
        peaks = self.rows.peak_bytes(self.model.choices.complete(plainest[None]))
        missing = {tier: max(0, math.ceil(peaks[tier][0]) - self.problem.capacity[tier]) for tier in Tier}
        if any(missing[tier] > allowed[tier] for tier in Tier):
            return None, {}
        return plainest, {tier: missing[tier] for tier in counted}
