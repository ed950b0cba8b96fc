"""The planner's mixed-integer program: start times and decisions that minimise the period.

Every resource serves its operations in a fixed order, so a start time is a continuous variable
and each wait is one linear row (design: `t[w+1] >= t[w] + seconds`). The period T closes the ring
from one step to the next; its minimum for given decisions is the largest ratio of seconds to
steps over all cycles of the schedule, which is what a replay settles to. Python-MIP with CBC,
or HiGHS where a library for it is installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.plan import Plan
from lazyjax.planning.problem import Affine, Problem
from lazyjax.planning.simulate import simulate
from lazyjax.planning.window_memory import memory_rows
from lazyjax.planning.windows import WindowModel, window_schedule
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

_HIGHS_LIBRARY = "PMIP_HIGHS_LIBRARY"
#: HiGHS keeps one pool of threads per process and refuses another number later.
_THREADS = 2
#: Relative gap to which the neighbourhood of the relaxation is searched.
_NEIGHBOURHOOD_GAP = 2e-3
#: Twice the feasibility tolerance of the solvers.
_TOLERANCE = 2e-7
#: Share of the open decisions that one round of a dive rounds up.
_DIVE_SHARE = 0.2


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


def solvers() -> tuple[str, ...]:
    """Solvers at hand, the preferred one first."""
    return ("HIGHS", "CBC") if _highs_library() else ("CBC",)


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
    chosen = solver or solvers()[0]
    program = _Program(problem, chosen)
    warm = program.model.choices.encode(warm_start) if warm_start is not None else None
    left_seconds = max(0.1, time_limit_seconds - (time.monotonic() - begun))
    values, objective, bound = program.minimise_period(warm, cutoff_seconds, left_seconds, relative_gap)
    shortfall: Mapping[Tier, int] = {}
    if values is None and bound == math.inf and cutoff_seconds == math.inf:
        shortfall = memory_shortfall(problem, time_limit_seconds=time_limit_seconds, solver=chosen)
    elapsed = time.monotonic() - begun
    if values is None:
        return Solution(None, math.inf, math.inf, bound, shortfall, elapsed)
    plan = program.model.choices.decode(values, "milp")
    period = window_period(program.model, values)
    return Solution(plan, period, objective, bound, {}, elapsed)


def relaxed_period(problem: Problem, *, solver: str | None = None) -> float:
    """The bound of the linear relaxation; infinite where not even that is feasible."""
    program = _Program(problem, solver or solvers()[0])
    return program.relax()


def memory_shortfall(
    problem: Problem, *, time_limit_seconds: float = 10.0, solver: str | None = None
) -> dict[Tier, int]:
    """Bytes missing per tier in the nearest miss; empty where some plan fits."""
    program = _Program(problem, solver or solvers()[0], timed=False)
    return program.shortfall(time_limit_seconds)


def window_period(model: WindowModel, binaries: Float64[np.ndarray, "binaries"]) -> float:
    """Period of an assignment at layer granularity, by replay."""
    schedule, seconds = window_schedule(model, model.choices.complete(binaries))
    return simulate(schedule, lambda operation: seconds[operation.index]).period_seconds


class _Program:
    """The program of one problem.

    Times are in units of a rough period and bytes in units of the smallest memory, so that the
    solver's tolerances mean the same for every model.
    """

    def __init__(self, problem: Problem, solver: str, *, timed: bool = True) -> None:
        self.mip = _import_mip()
        self.problem = problem
        self.model = WindowModel(problem)
        self.rows = memory_rows(self.model)
        self.program = self.mip.Model(solver_name=solver)
        self.program.verbose = 0
        self.program.threads = _THREADS
        self.byte_unit = float(min([size for size in problem.capacity.values() if size], default=1))
        self._decide()
        if timed:
            self._time()

    def _decide(self) -> None:
        choices = self.model.choices
        self.variables = [self.program.add_var(var_type=self.mip.BINARY) for _ in range(choices.binaries)]
        self.scale = [1.0] * choices.binaries
        self.upper = [1.0] * choices.binaries
        for affine, right in choices.equalities():
            self.program += self._expression(affine) == right
        for expressions in choices.derived:
            largest = max(
                abs(part)
                for e in expressions
                for part in (e.constant, *(c * self.scale[v] for v, c in e.terms.items()))
            )
            scale = self.byte_unit if largest > 1e3 else 1.0
            variable = self.program.add_var(lb=0.0)
            for expression in expressions:
                if expression.terms or expression.constant > 0:
                    self.program += variable >= self._expression(expression, 1.0 / scale)
            self.variables.append(variable)
            self.scale.append(scale)
            self.upper.append(max(0.0, *(self._highest(expression) for expression in expressions)))

    def _highest(self, affine: Affine) -> float:
        """No assignment makes `affine` larger."""
        return affine.constant + sum(max(0.0, c) * self.upper[v] for v, c in affine.terms.items())

    def _expression(self, affine: Affine, factor: float = 1.0) -> Any:
        terms = self.mip.xsum(
            coefficient * self.scale[v] * factor * self.variables[v]
            for v, coefficient in affine.terms.items()
            if coefficient
        )
        return terms + affine.constant * factor

    def limit_memory(self, slack: Mapping[Tier, Any] | None = None) -> bool:
        """Adds the capacity rows; False where one cannot hold whatever is decided."""
        for row in self.rows:
            capacity = float(self.problem.capacity[row.tier])
            lowest = -self._highest(row.bytes * -1.0)
            if slack is None and lowest > capacity:
                return False
            if slack is None and self._highest(row.bytes) <= capacity:
                continue
            left = self._expression(row.bytes, 1.0 / self.byte_unit)
            # A solver may exceed a row by its tolerance; no plan may exceed the memory by a byte.
            right = (capacity - max(0.0, _TOLERANCE * capacity - 0.5)) / self.byte_unit
            self.program += left <= (right if slack is None else right + slack[row.tier])
        return True

    def _time(self) -> None:
        model = self.model
        rough = sum(max(0.0, operation.seconds.constant) for operation in model.operations)
        rough += sum(max((0.0, *operation.seconds.terms.values())) for operation in model.operations)
        self.time_unit = max(rough, 1e-12) / 4
        self.period = self.program.add_var(lb=0.0)
        self.start = [self.program.add_var(lb=0.0) for _ in model.operations]
        # No plan worth having takes longer than everything after everything.
        self.horizon = 2 * rough / self.time_unit
        last: dict[Resource, int] = {}
        first: dict[Resource, int] = {}
        for operation in model.operations:
            index, resource = operation.index, operation.resource
            waits = dict.fromkeys(wait for wait, condition in operation.waits if condition is None)
            if resource in last:
                waits[last[resource]] = None
            else:
                first[resource] = index
            last[resource] = index
            for wait in waits:
                self._after(index, wait)
            for wait, condition in operation.waits:
                if condition is not None and condition.terms:
                    self._after(index, wait, condition=condition)
            for wait in dict.fromkeys(operation.waits_previous):
                self._after(index, wait, previous=True)
        for resource, index in first.items():
            self._after(index, last[resource], previous=True)
            total = Affine()
            for operation in model.operations:
                if operation.resource is resource:
                    total += operation.seconds
            if total.terms:
                self.program += self.period >= self._expression(total, 1.0 / self.time_unit)
            else:
                self.program += self.period >= total.constant / self.time_unit
        self.program.objective = self.mip.minimize(self.period)

    def _after(
        self, later: int, earlier: int, *, previous: bool = False, condition: Affine | None = None
    ) -> None:
        seconds = self._expression(self.model.operations[earlier].seconds, 1.0 / self.time_unit)
        end = self.start[earlier] + seconds
        if condition is not None:
            end = end - self.horizon * (1.0 - self._expression(condition))
        self.program += (self.start[later] + self.period if previous else self.start[later]) >= end

    def minimise_period(
        self,
        warm: Float64[np.ndarray, "binaries"] | None,
        cutoff_seconds: float,
        time_limit_seconds: float,
        relative_gap: float,
    ) -> tuple[Float64[np.ndarray, "binaries"] | None, float, float]:
        """Best assignment (None: none), its objective and the proven bound, in seconds."""
        if not self.limit_memory():
            return None, math.inf, math.inf
        program = self.program
        if cutoff_seconds < math.inf:
            program += self.period <= cutoff_seconds / self.time_unit
        program.max_mip_gap = relative_gap
        if warm is None:
            begun = time.monotonic()
            warm = self._first_plan(time_limit_seconds / 4)
            time_limit_seconds = max(0.1, time_limit_seconds - (time.monotonic() - begun))
        if warm is not None:
            program.start = [
                (variable, float(value))
                for variable, value in zip(self.variables[: warm.size], warm, strict=True)
            ]
        with _quiet():
            status = program.optimize(max_seconds=time_limit_seconds)
        infeasible = self.mip.OptimizationStatus.INFEASIBLE
        if status in (infeasible, self.mip.OptimizationStatus.INT_INFEASIBLE):
            return None, math.inf, math.inf
        bound = max(0.0, float(program.objective_bound)) * self.time_unit
        if not program.num_solutions:
            return None, math.inf, bound
        values = np.array(
            [round(variable.x) for variable in self.variables[: self.model.choices.binaries]], float
        )
        return values, float(program.objective_value) * self.time_unit, bound

    def _first_plan(self, time_limit_seconds: float) -> Float64[np.ndarray, "binaries"] | None:
        """The better of two roundings of the relaxation; None if both fail."""
        begun = time.monotonic()
        tries = [self._neighbourhood(time_limit_seconds / 2)]
        tries.append(self._dive(time_limit_seconds - (time.monotonic() - begun)))
        found = [values for values in tries if values is not None]
        return min(found, key=lambda values: window_period(self.model, values), default=None)

    def _neighbourhood(self, time_limit_seconds: float) -> Float64[np.ndarray, "binaries"] | None:
        """The best assignment among decisions that the relaxation uses at least in part."""
        optimal = self.mip.OptimizationStatus.OPTIMAL
        binaries = self.variables[: self.model.choices.binaries]
        gap, self.program.max_mip_gap = self.program.max_mip_gap, _NEIGHBOURHOOD_GAP
        found = None
        with _quiet():
            if self.program.optimize(relax=True) == optimal:
                for variable, value in zip(binaries, [variable.x for variable in binaries], strict=True):
                    variable.ub = 1.0 if value > 1e-6 else 0.0
                self.program.optimize(max_seconds=time_limit_seconds)
                if self.program.num_solutions:
                    found = np.array([float(round(variable.x)) for variable in binaries])
        for variable in binaries:
            variable.ub = 1.0
        self.program.max_mip_gap = gap
        return found

    def _dive(self, time_limit_seconds: float) -> Float64[np.ndarray, "binaries"] | None:
        """A good assignment by rounding the relaxation a few decisions at a time; None if that fails.

        Solvers prove bounds quickly here but are slow to find such an assignment.
        """
        begun = time.monotonic()
        optimal = self.mip.OptimizationStatus.OPTIMAL
        binaries = self.variables[: self.model.choices.binaries]
        raised: list[int] = []
        found = None
        share = _DIVE_SHARE
        self.program.verbose = 0
        with _quiet():
            solved = self.program.optimize(relax=True) == optimal
            while solved and time.monotonic() - begun < time_limit_seconds:
                values = np.array([variable.x for variable in binaries])
                open_ = [i for i, v in enumerate(values) if 1e-6 < v < 1 - 1e-6]
                if not open_:
                    found = np.round(values)
                    break
                # Once the segments are settled, keeping nothing inside the layers always fits.
                segments = [i for i in open_ if i < len(self.model.choices.segments)]
                open_ = sorted(segments or open_, key=lambda i: -values[i])
                batch = open_[: max(1, int(len(open_) * share))]
                for index in batch:
                    binaries[index].lb = 1.0
                raised += batch
                solved = self.program.optimize(relax=True) == optimal
                # Too much: take back the last ones until the rest is feasible again.
                while not solved and raised and time.monotonic() - begun < time_limit_seconds:
                    taken = raised.pop()
                    binaries[taken].lb = 0.0
                    if raised and raised[-1] in batch:
                        continue
                    binaries[taken].ub = 0.0
                    solved = self.program.optimize(relax=True) == optimal
                    share = min(share, 1.0 / len(open_))
        for variable in binaries:
            variable.lb, variable.ub = 0.0, 1.0
        return found

    def relax(self) -> float:
        """Objective of the linear relaxation."""
        if not self.limit_memory():
            return math.inf
        with _quiet():
            status = self.program.optimize(relax=True)
        if status != self.mip.OptimizationStatus.OPTIMAL:
            return math.inf
        return float(self.program.objective_value) * self.time_unit

    def shortfall(self, time_limit_seconds: float) -> dict[Tier, int]:
        """Fewest bytes missing per tier, as a share of each capacity, over all decisions."""
        slack = {tier: self.program.add_var(lb=0.0) for tier in Tier}
        self.limit_memory(slack)
        # Relative to what there is; a tier of which there is nothing must not drown the others.
        least = self.byte_unit / 1e3
        weight = {tier: self.byte_unit / max(least, float(self.problem.capacity[tier])) for tier in Tier}
        self.program.objective = self.mip.minimize(self.mip.xsum(weight[tier] * slack[tier] for tier in Tier))
        with _quiet():
            self.program.optimize(max_seconds=time_limit_seconds)
        if not self.program.num_solutions:
            return {}
        # Less than this is the solver's tolerance.
        missing = {tier: math.ceil(slack[tier].x * self.byte_unit - 1e-3) for tier in Tier}
        return {tier: value for tier, value in missing.items() if value > 1e-7 * self.byte_unit}


def _highs_library() -> str | None:
    """A HiGHS shared library that Python-MIP can load, if one is installed."""
    if _HIGHS_LIBRARY in os.environ:
        return os.environ[_HIGHS_LIBRARY]
    spec = importlib.util.find_spec("highsbox")
    if spec is None or spec.origin is None:
        return None
    found = sorted(pathlib.Path(spec.origin).parent.rglob("libhighs.*"))
    return str(found[0]) if found else None


def _import_mip() -> Any:
    """Python-MIP, told where HiGHS is before it looks for it on import."""
    library = _highs_library()
    if library is not None:
        os.environ[_HIGHS_LIBRARY] = library
    logging.getLogger("mip").setLevel(logging.CRITICAL)
    import mip

    return mip


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the solvers' own lines, written by native code, off the terminal."""
    sys.stdout.flush()
    saved = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)
