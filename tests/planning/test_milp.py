"""The program against brute force, the replay and the schedule's own count of memory."""

import dataclasses
import functools
import math

import numpy as np
import pytest

from experiments.benchmarks.planner_exactness import (
    all_plans,
    best_by_force,
    check,
    random_problem,
    used_bytes_of,
)
from experiments.benchmarks.solving import solve as solve_within
from lazyjax.planning.plan.document import Boundary, PlanError
from lazyjax.planning.planner.batch_replay import BatchReplay
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.leanest import least_missing, memory_shortfall, nearest
from lazyjax.planning.planner.linear import Answer
from lazyjax.planning.planner.memory import memory_rows
from lazyjax.planning.planner.milp import Program
from lazyjax.planning.planner.solver_worker import _bound
from lazyjax.planning.planner.timing import TimeModel
from lazyjax.planning.program.schedule import Action
from lazyjax.specs import Tier
from tests.planning.chains import SOLVERS, random_plans

#: Without a limit that a busy machine could reach: these programs take milliseconds.
solve = functools.partial(solve_within, time_limit_seconds=600.0)
#: So that brute force takes a second.
small_problem = functools.partial(random_problem, most_plans=200)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(5))
def test_program_equals_brute_force(seed, solver):
    """On 200 chains: `experiments.benchmarks.planner_exactness`."""
    force, period, objective = check(seed, 100, solver)
    assert period == pytest.approx(force, rel=1e-6)
    assert objective == pytest.approx(force, rel=1e-6)


def test_objective_is_the_replayed_period_and_peaks_keep_within_capacity():
    """On 500 problems: `experiments.benchmarks.planner_exactness --replays 500`."""
    solved = 0
    for seed in range(1000, 1010):
        problem = random_problem(seed, most_blocks=4, most_plans=None)
        solution = solve(problem, relative_gap=1e-6)
        if solution.plan is None:
            assert sum(solution.shortfall_bytes.values()) > 0
            continue
        solved += 1
        assert solution.objective_seconds == pytest.approx(solution.period_seconds, rel=1e-6)
        assert solution.bound_seconds <= solution.period_seconds * (1 + 1e-6)
        used = used_bytes_of(problem, solution.plan)
        for tier in Tier:
            assert used[tier] <= problem.capacity[tier]
    assert solved >= 2


@pytest.mark.parametrize("solver", SOLVERS)
def test_short_durations_count_beside_long_ones(solver):
    """Solvers drop what is shorter than their tolerance; a plan is not refused for that."""
    for seed in range(1100, 1108):
        problem = random_problem(seed, most_blocks=4, most_plans=None)

        def seconds(operation, problem=problem):
            return problem.seconds(operation) * (1.0 if operation.action is Action.LOSS else 1e-7)

        program = Program(dataclasses.replace(problem, seconds=seconds), solver)
        for values in all_plans(program.model.choices, np.random.default_rng(seed), most=2):
            if program.replay.excess(program.model.choices.complete(values[None]))[0] <= 0:
                period = program.model.period(values)
                assert program.objective(values) == pytest.approx(period, rel=1e-9)


def test_decisions_survive_encoding():
    for seed in range(8):
        problem, plans = random_plans(seed)
        choices = Choices(problem)
        for plan in plans:
            assert choices.decode(choices.encode(plan), "random") == plan


def test_encoding_refuses_what_is_not_open():
    problem, plans = random_plans(1, 1)
    closed = dataclasses.replace(problem, saves=tuple(({},) for _ in problem.saves), state_home=Tier.HOST)
    layers = tuple(layer.model_copy(update={"state": "nvme", "saved": {}}) for layer in plans[0].layers)
    with pytest.raises(PlanError, match="open"):
        Choices(closed).encode(plans[0].model_copy(update={"layers": layers}))


def test_encoding_refuses_residuals_of_a_layer_within_a_longer_segment():
    problem = next(
        p
        for p, _ in map(random_plans, range(50))
        if p.longest_segment > 1 and p.head > 2 and len(p.saves[2]) > 1
    )
    layers = list(problem.settings.layers)
    changed = {"boundary": Boundary.RECOMPUTE, "saved": problem.saves[2][1]}
    layers[2] = layers[2].model_copy(update=changed)
    with pytest.raises(PlanError, match="longer segment"):
        Choices(problem).encode(problem.settings.model_copy(update={"layers": tuple(layers)}))


def test_batched_replay_agrees_with_the_simulator():
    problem = random_problem(4, most_plans=1500)
    model = TimeModel(problem)
    plans = all_plans(model.choices, np.random.default_rng(0), most=8)
    replay = BatchReplay(model, memory_rows(problem, model.choices))
    batched = replay.periods(model.choices.complete(plans), steps=14)
    assert batched.settled.any()
    for values, period in zip(plans[batched.settled], batched.seconds[batched.settled], strict=True):
        assert model.period(values) == pytest.approx(float(period), rel=1e-9)


def test_relaxation_and_cutoff():
    problem = next(p for p in map(small_problem, range(50)) if solve(p).plan is not None)
    solution = solve(problem, relative_gap=1e-9)
    assert Program(problem).relax() <= solution.period_seconds * (1 + 1e-9)
    assert solve(problem, cutoff_seconds=solution.period_seconds * 0.99).plan is None
    again = solve(problem, warm_start=solution.plan, relative_gap=1e-9)
    assert again.period_seconds == pytest.approx(solution.period_seconds, rel=1e-9)


@pytest.mark.parametrize("said", [1.7e308, 1.5])
def test_a_bound_above_a_plan_in_hand_closes_nothing(said):
    """CBC, stopped before it has a bound, gives the largest number for one."""
    problem = next(p for p in map(small_problem, range(50)) if solve(p).plan is not None)
    start = Choices(problem).encode(solve(problem).plan)
    program = Program(problem)
    relaxed, period = program.relax(), program.model.period(start)

    class Stopped:
        def solve(self, linear, question):
            return Answer("unknown", math.inf, said * period / program.linear.time_unit, None)

    program.process = Stopped()
    given = {"cutoff_seconds": math.inf, "deadline": math.inf, "relative_gap": -1.0}
    values, bound = program.branch(start, **given)
    assert (values.tolist(), bound) == (start.tolist(), relaxed)


@pytest.mark.parametrize(
    ("said", "expected"), [(None, -math.inf), (1.7e308, -math.inf), (-1e308, -math.inf), (2.5, 2.5)]
)
def test_the_largest_number_is_no_bound(said, expected):
    assert _bound(said) == expected


def test_shortfall_is_exactly_what_is_missing():
    problem = next(
        p
        for p in map(small_problem, range(50))
        if solve(p).plan is not None and p.capacity[Tier.DEVICE] > 100
    )
    assert memory_shortfall(problem) == {}
    capacity = {**problem.capacity, Tier.DEVICE: 0}
    missing = memory_shortfall(dataclasses.replace(problem, capacity=capacity))
    assert set(missing) == {Tier.DEVICE}
    enough = {**capacity, Tier.DEVICE: missing[Tier.DEVICE]}
    assert memory_shortfall(dataclasses.replace(problem, capacity=enough)) == {}
    assert math.isfinite(best_by_force(dataclasses.replace(problem, capacity=enough)))
    short = {**capacity, Tier.DEVICE: missing[Tier.DEVICE] - 1}
    assert best_by_force(dataclasses.replace(problem, capacity=short)) == math.inf


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_miss_is_put_down_to_one_tier_where_more_of_it_is_enough(seed, solver):
    """With as little device memory as can be, more of the host's may do: that is told exactly, and alone."""
    problem = small_problem(seed)
    roomy = with_capacity(problem, dict.fromkeys(Tier, 10**9))
    least_device = least_missing(with_capacity(roomy, {Tier.DEVICE: 0}), Tier.DEVICE, solver=solver)
    tight = with_capacity(roomy, {Tier.DEVICE: least_device, Tier.HOST: 0})
    missing = memory_shortfall(tight, solver=solver)
    assert set(missing) <= {Tier.HOST}
    if missing:
        assert memory_shortfall(with_capacity(tight, missing), solver=solver) == {}
        one_less = with_capacity(tight, {Tier.HOST: missing[Tier.HOST] - 1})
        assert best_by_force(one_less) == math.inf
    # Where no tier is enough by itself, all are told, of the device no more than any plan needs.
    nothing = with_capacity(roomy, dict.fromkeys(Tier, 0))
    together = memory_shortfall(nothing, solver=solver)
    assert together[Tier.DEVICE] == least_device
    assert memory_shortfall(with_capacity(nothing, together), solver=solver) == {}


def with_capacity(problem, capacity):
    return dataclasses.replace(problem, capacity={**problem.capacity, **capacity})


def test_the_nearest_of_several_misses_weighs_no_tier_against_another():
    device, little, more = {Tier.DEVICE: 1}, {Tier.HOST: 10**9}, {Tier.HOST: 2 * 10**9}
    both = {Tier.DEVICE: 1, Tier.HOST: 1}
    assert nearest([both, device, more, little]) == little
    assert nearest([both, device]) == device
    assert nearest([both, {}]) == {}
    assert nearest([]) == {}
