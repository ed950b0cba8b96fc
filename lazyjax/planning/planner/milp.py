"""The planner's mixed-integer program: start times and decisions that minimise the period.

Every resource serves its operations in a fixed order, so a start time is a continuous variable
and each wait is one linear row (design: `t[w+1] >= t[w] + seconds`). The period T closes the ring
from one step to the next; its minimum for given decisions is the largest ratio of seconds to
steps over all cycles of the schedule, which is what a replay settles to. Solved in a process of its
own (`lazyjax.planning.planner.solver`); where that fails, descent and replay go on without it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from lazyjax.planning.plan.document import LayerPlan, Plan
from lazyjax.planning.planner.affine import Affine
from lazyjax.planning.planner.batch_replay import BatchReplay
from lazyjax.planning.planner.decisions.decision import Binaries
from lazyjax.planning.planner.descent import descend, free_device_memory, reduce_traffic
from lazyjax.planning.planner.linear import Answer, LinearProgram, Question, Sense
from lazyjax.planning.planner.memory import SOLVER_TOLERANCE, memory_rows, usable_bytes
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.planner.solver import SolverFailure, SolverProcess, shared_process, solvers
from lazyjax.planning.planner.timing import TimeModel
from lazyjax.planning.program.conditions import ALWAYS, Condition
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

#: Seconds for a linear relaxation (27B: 1 s), after which it does without.
_RELAX_SECONDS = 30.0
#: Units of time in a rough period. Solvers drop durations of less than about 1e-6 units, and are slow
#: where units are much smaller than what they decide about; the exact number is for fixed decisions.
_TIME_UNITS, _EXACT_TIME_UNITS = 4e2, 4e6
#: Relative gain for which descent is worth another round.
_LEAST_GAIN = 1e-4


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
        start, bound = program.branch(
            start, cutoff_seconds=cutoff_seconds, deadline=deadline, relative_gap=relative_gap
        )
    shortfall: Mapping[Tier, int] = {}
    if start is None and bound == math.inf and cutoff_seconds == math.inf:
        shortfall = memory_shortfall(problem, time_limit_seconds=time_limit_seconds, solver=solver)
    if start is None:
        return Solution(None, math.inf, math.inf, bound, shortfall, time.monotonic() - begun)
    plan = program.model.choices.decode(start, "milp")
    period = program.model.period(start)
    objective = program.objective(start)
    return Solution(plan, period, objective, bound, {}, time.monotonic() - begun)


def memory_shortfall(
    problem: Problem, *, time_limit_seconds: float = 10.0, solver: str | None = None
) -> dict[Tier, int]:
    """Bytes missing per tier in the nearest miss; empty where some plan fits."""
    return Program(problem, solver, timed=False).leanest(time_limit_seconds)[1]


def leanest_plan(
    problem: Problem, *, time_limit_seconds: float = 10.0, solver: str | None = None
) -> Plan | None:
    """Some plan that fits, whatever time it takes; None where there is none."""
    program = Program(problem, solver, timed=False)
    values, shortfall = program.leanest(time_limit_seconds)
    return None if values is None or shortfall else program.model.choices.decode(values, "milp")


class Program:
    """The program of one problem: relaxed for a bound, descended from for a plan, branched for both.

    Times are in small parts of a rough period and bytes in units of the smallest memory, so that the
    solver's tolerances mean the same for every model. Where the solver fails, `failures` says how.

    Args:
        solver: `CBC` or `HIGHS`; the preferred one by default.
        timed: whether there are start times; without them only memory is asked for.
        time_units: units of time in a rough period.
        process: that solves; by default the one that everybody shares.
        model: of the problem, where there is one already.
    """

    def __init__(
        self,
        problem: Problem,
        solver: str | None = None,
        *,
        timed: bool = True,
        time_units: float = _TIME_UNITS,
        process: SolverProcess | None = None,
        model: TimeModel | None = None,
    ) -> None:
        self.problem = problem
        self.model = model or TimeModel(problem)
        self.rows = memory_rows(problem, self.model.choices, self.model.expansion)
        self.replay = BatchReplay(self.model, self.rows)
        self.solver = solver or solvers()[0]
        self.process = process or shared_process()
        self.failures: list[str] = []
        self.program = LinearProgram()
        self.byte_unit = float(min([size for size in problem.capacity.values() if size], default=1))
        self._decide()
        self.binaries = self.variables[: self.model.choices.binaries]
        self.bound: float | None = None
        self.relaxed: Binaries | None = None
        if timed:
            self._limit_memory()
            self._time(time_units)

    def _decide(self) -> None:
        choices = self.model.choices
        self.variables = [self.program.add_column(upper=1.0, integral=True) for _ in range(choices.binaries)]
        for row in choices.rows():
            self._add(self._terms(row.terms), row.terms.constant - row.right, row.sense)
        for pair in choices.products:
            variable = self.program.add_column(upper=1.0)
            self.variables.append(variable)
            both = Affine(1.0)
            for condition in pair:
                terms = self._terms(Affine.of(condition, -1.0))
                self._add({**terms, variable: 1.0}, -float(condition.constant), "<")
                both.add(condition, -1.0)
            self._add({**self._terms(both), variable: 1.0}, both.constant, ">")

    def _terms(self, affine: Affine, factor: float = 1.0) -> dict[int, float]:
        """Columns of `factor` times an affine expression, without its constant."""
        return {
            self.variables[v]: coefficient * factor for v, coefficient in affine.terms.items() if coefficient
        }

    def _add(self, terms: Mapping[int, float], constant: float, sense: Sense) -> None:
        """Adds the row `terms + constant (sense) 0`."""
        self.program.add_row(terms, sense, -constant)

    def _limit_memory(self, slack: Mapping[Tier, int] | None = None) -> None:
        """Adds live bytes moment by moment, where some assignment exceeds the capacity."""
        matrix, constants = self.rows.matrix, self.rows.constants
        highest = constants + np.maximum(matrix, 0.0).sum(axis=0)
        before: tuple[Tier, int, int] | None = None
        for row, tier in enumerate(self.rows.tiers):
            if slack is None and highest[row] <= self.problem.capacity[tier]:
                continue
            limit = usable_bytes(self.problem.capacity[tier]) / self.byte_unit
            live = self.program.add_column(upper=math.inf if slack is not None else max(0.0, limit))
            change, constant = matrix[:, row], constants[row]
            terms = {live: 1.0}
            if before is not None and before[0] is tier:
                change, constant = change - matrix[:, before[1]], constant - constants[before[1]]
                terms[before[2]] = -1.0
            variables = np.flatnonzero(change)
            terms |= {self.variables[v]: -float(change[v]) / self.byte_unit for v in variables}
            self._add(terms, -float(constant) / self.byte_unit, "=")
            if slack is not None:
                self._add({live: 1.0, slack[tier]: -1.0}, -limit, "<")
            before = tier, row, live

    def _hopeless(self) -> bool:
        """Whether a capacity cannot hold whatever is decided."""
        lowest = self.rows.constants + np.minimum(self.rows.matrix, 0.0).sum(axis=0)
        capacity = np.array([self.problem.capacity[tier] for tier in self.rows.tiers])
        return bool((lowest > capacity).any())

    def _time(self, time_units: float) -> None:
        model = self.model
        rough = sum(max(0.0, operation.seconds.constant) for operation in model.operations)
        rough += sum(max((0.0, *operation.seconds.terms.values())) for operation in model.operations)
        self.time_unit = max(rough, 1e-12) / time_units
        self.period = self.program.add_column()
        self.start = [self.program.add_column() for _ in model.operations]
        self.seconds = [self._seconds(operation.seconds) for operation in model.operations]
        # No plan worth having takes longer than everything after everything.
        self.horizon = 2 * rough / self.time_unit
        last: dict[Resource, int] = {}
        first: dict[Resource, int] = {}
        for operation in model.operations:
            index, resource = operation.index, operation.resource
            if resource in last:
                self._after(index, last[resource], ALWAYS)
            else:
                first[resource] = index
            last[resource] = index
            for wait, condition in operation.binding:
                self._after(index, wait, condition)
            for wait, condition in operation.waits_previous:
                self._after(index, wait, condition, previous=True)
        for resource, index in first.items():
            self._after(index, last[resource], ALWAYS, previous=True)
            own = [self.seconds[o.index] for o in model.operations if o.resource is resource]
            busy = {column: -1.0 for column in own if isinstance(column, int)}
            fixed = sum((seconds for seconds in own if isinstance(seconds, float)), 0.0)
            self._add({**busy, self.period: 1.0}, -fixed, ">")
        self.program.objective = {self.period: 1.0}

    def _seconds(self, seconds: Affine) -> int | float:
        """A column for what an operation takes, in units of time; a number where that is certain."""
        if not seconds.terms:
            return seconds.constant / self.time_unit
        column = self.program.add_column()
        terms = {**self._terms(seconds, -1.0 / self.time_unit), column: 1.0}
        self._add(terms, -seconds.constant / self.time_unit, "=")
        return column

    def _total_seconds(self, resource: Resource) -> Affine:
        total = Affine()
        for operation in self.model.operations:
            if operation.resource is resource:
                total += operation.seconds
        return total

    def _after(self, later: int, earlier: int, condition: Condition, *, previous: bool = False) -> None:
        duration = Affine() if condition == ALWAYS else self.horizon * (1.0 - Affine.of(condition))
        terms = self._terms(duration)
        seconds = self.seconds[earlier]
        if isinstance(seconds, float):
            duration.constant -= seconds
        else:
            terms[seconds] = -1.0
        if later != earlier:
            terms[self.start[later]], terms[self.start[earlier]] = 1.0, -1.0
        if previous:
            terms[self.period] = 1.0
        self._add(terms, duration.constant, ">")

    @staticmethod
    def _lowest(affine: Affine) -> float:
        """No assignment makes `affine` smaller."""
        return affine.constant + sum(min(0.0, coefficient) for coefficient in affine.terms.values())

    def _ask(self, question: Question) -> Answer | None:
        """The solver's answer; None, and one more of `failures`, where it has none."""
        try:
            return self.process.solve(self.program, question)
        except SolverFailure as failure:
            self.failures.append(str(failure))
            return None

    def _binaries_of(self, answer: Answer) -> Binaries:
        assert answer.values is not None
        return np.array([answer.values[column] for column in self.binaries])

    def relax(self) -> float:
        """Seconds that the linear relaxation takes, a bound; infinite where not even that fits.

        Where the solver fails, what the busiest resource must do at least.
        """
        if self.bound is None:
            self.bound = math.inf
            if not self._hopeless():
                answer = self._ask(Question(self.solver, relaxed=True, max_seconds=_RELAX_SECONDS))
                if answer is None or answer.status == "unknown":
                    self.bound = max(self._lowest(self._total_seconds(resource)) for resource in Resource)
                elif answer.status != "infeasible":
                    self.bound = answer.objective * self.time_unit
                    self.relaxed = self._binaries_of(answer)
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
            found = descend(self.replay, self._plainest(), deadline)
        best = math.inf if found is None else self.model.period(found)
        fitting = [values for values in starts if self._fits(values)]
        period, start = min(
            ((self.model.period(values), position) for position, values in enumerate(fitting)),
            default=(math.inf, None),
        )
        if start is not None and period < best:
            better = descend(self.replay, fitting[start], deadline)
            found = fitting[start] if better is None else better
        return None if found is None else self._improved(found, deadline, enough_seconds)

    def _plainest(self) -> Binaries:
        """Every boundary kept on the device, nothing inside the layers: where no solver says better."""
        settings = self.problem.settings
        layers = tuple(LayerPlan(saved=dict(options[0])) for options in self.problem.saves)
        return self.model.choices.encode(settings.model_copy(update={"layers": layers}))

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

    def _fits(self, values: Binaries) -> bool:
        completed = self.model.choices.complete(values[None])
        return bool(self.replay.excess(completed)[0] <= 0)

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
        left_seconds = deadline - time.monotonic()
        if bound >= min(period * (1 - relative_gap), cutoff_seconds) or left_seconds <= 0:
            return start, bound
        known = {} if start is None else dict(zip(self.binaries, map(float, start), strict=True))
        answer = self._ask(
            Question(
                self.solver,
                bounds={self.period: (0.0, cutoff_seconds / self.time_unit)},
                start=known,
                relative_gap=relative_gap,
                max_seconds=max(0.1, left_seconds),
            )
        )
        if answer is None:
            return start, bound
        # With a plan in hand, CBC means by "infeasible" that there is no better one.
        proven = period if answer.status == "infeasible" else answer.bound * self.time_unit
        if answer.values is not None:
            found = self._binaries_of(answer).round()
            if self.model.period(found) < period:
                start = found
        return start, max(bound, min(proven, cutoff_seconds))

    def objective(self, values: Binaries) -> float:
        """Seconds that the program gives an assignment; a replay must give the same.

        Asked of the same rows in finer units of time, so that no duration is too short to count.
        Infinite where the solver gives up.
        """
        exact = Program(
            self.problem, self.solver, time_units=_EXACT_TIME_UNITS, process=self.process, model=self.model
        )
        for column, value in zip(exact.binaries, values, strict=True):
            exact.program.lower[column] = exact.program.upper[column] = float(value)
        answer = exact._ask(Question(self.solver, relaxed=True, max_seconds=_RELAX_SECONDS))
        self.failures += exact.failures
        if answer is None or answer.status != "optimal":
            return math.inf
        return answer.objective * exact.time_unit

    def leanest(self, time_limit_seconds: float) -> tuple[Binaries | None, dict[Tier, int]]:
        """The assignment that lacks the fewest bytes, as shares of each capacity, and what it lacks.

        Where the solver fails, that of descent.
        """
        slack = {tier: self.program.add_column() for tier in Tier}
        self._limit_memory(slack)
        # Relative to what there is; a tier of which there is nothing must not drown the others.
        least = self.byte_unit / 1e3
        self.program.objective = {
            slack[tier]: self.byte_unit / max(least, float(self.problem.capacity[tier])) for tier in Tier
        }
        answer = self._ask(Question(self.solver, max_seconds=time_limit_seconds))
        if answer is None:
            return self._leanest_by_descent(time_limit_seconds)
        if answer.values is None:
            return None, {}
        # Less than this is the solver's tolerance.
        missing = {}
        for tier in Tier:
            capacity = self.problem.capacity[tier]
            short = math.ceil(answer.values[slack[tier]] * self.byte_unit - 1e-3)
            if short > 0:
                # With so much more the row holds, tightened as it is.
                needed = capacity + short
                short = max(needed, math.ceil((needed - 0.5) / (1 - SOLVER_TOLERANCE))) - capacity
            missing[tier] = short
        values = self._binaries_of(answer).round()
        return values, {tier: value for tier, value in missing.items() if value > 1e-7 * self.byte_unit}

    def _leanest_by_descent(self, time_limit_seconds: float) -> tuple[Binaries | None, dict[Tier, int]]:
        plainest = self._plainest()
        found = descend(self.replay, plainest, time.monotonic() + time_limit_seconds)
        if found is not None:
            return found, {}
        peaks = self.rows.peak_bytes(self.model.choices.complete(plainest[None]))
        missing = {tier: math.ceil(peaks[tier][0]) - self.problem.capacity[tier] for tier in Tier}
        return plainest, {tier: size for tier, size in missing.items() if size > 0}
