"""Rounding keeps running sums; descent only ever goes down, and ends near the best plan there is."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.benchmarks.planner_exactness import all_plans, best_by_force, draw_roomy, random_problem
from lazyjax.planning.plan.document import LayerPlan, Plan
from lazyjax.planning.planner.batch_replay import Assignments, BatchReplay
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.descent import descend, free_device_memory, reduce_traffic
from lazyjax.planning.planner.memory import memory_rows, usable_bytes
from lazyjax.planning.planner.milp import Program
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.planner.timing import TimeModel
from lazyjax.planning.program.schedule import COMPUTE_ACTIONS, Action, LayerSizes, ModelSizes
from lazyjax.specs import Tier


def is_plan(choices: Choices, values: np.ndarray) -> bool:
    def kept(row):
        value = float(row.terms.value(values))
        return value == row.right if row.sense == "=" else value <= row.right

    return set(np.unique(values)) <= {0.0, 1.0} and all(map(kept, choices.rows()))


def replay_of(problem: Problem) -> BatchReplay:
    model = TimeModel(problem)
    return BatchReplay(model, memory_rows(problem, model.choices))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.floats(0.0, 1.0))
def test_affine_of_assignments_is_that_of_their_values(seed, count, changed):
    """Whether many decisions change, and are multiplied as they are, or few, and only those are."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 2, 40)
    values = np.where(rng.random((count, 40)) < changed, 1 - base, base).astype(float)
    matrix, constants = rng.normal(size=(40, 7)), rng.normal(size=7)
    assignments, some = Assignments(values), rng.permutation(count)[: count // 2]
    np.testing.assert_allclose(assignments.affine(matrix, constants), values @ matrix + constants, atol=1e-12)
    part = assignments[some]
    assert len(part) == len(some)
    np.testing.assert_allclose(part.affine(matrix, constants), values[some] @ matrix + constants, atol=1e-12)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_rounding_gives_plans_with_the_same_running_sums(seed, weights):
    choices = Choices(draw_roomy(np.random.default_rng(seed), most_blocks=5))
    rng = np.random.default_rng(weights)
    plans = all_plans(choices, rng, most=5)
    relaxed = rng.dirichlet(np.ones(len(plans))) @ plans
    rounded = choices.rounded(relaxed)
    assert is_plan(choices, rounded)
    firsts, sets = list(choices.state_home.number.values()), len(choices.state_home.sets) - 1
    if firsts:
        # Whether a layer has anything on NVMe, whichever set of parts.
        there = [
            sum(values[[first + option for first in firsts]] for option in range(sets))
            for values in (rounded, relaxed)
        ]
        ahead = np.cumsum(there[0]) - np.cumsum(there[1])
        assert np.all(ahead <= 1e-5)
        assert np.all(ahead >= -1 - 1e-9)


def test_rounding_leaves_plans_alone():
    for seed in range(20):
        choices = Choices(draw_roomy(np.random.default_rng(seed), most_blocks=5))
        for values in all_plans(choices, np.random.default_rng(seed), most=3):
            np.testing.assert_array_equal(choices.rounded(values), values)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 200))
def test_changes_lead_from_plans_to_other_plans(seed):
    choices = Choices(draw_roomy(np.random.default_rng(seed), most_blocks=5))
    values = all_plans(choices, np.random.default_rng(seed), most=1)[0]
    for change in choices.changes(values):
        after = values.copy()
        assert all(values[list(change.off)] == 1)
        assert all(values[list(change.on)] == 0)
        after[list(change.off)], after[list(change.on)] = 0.0, 1.0
        repaired = choices.repaired(after[None])[0]
        assert is_plan(choices, repaired)
        assert not np.array_equal(after, values)


def test_descent_fits_never_loses_and_comes_close_to_brute_force():
    """`experiments.benchmarks.planner_exactness` compares with brute force on 200 chains."""
    ratios = []
    for seed in range(6):
        problem = random_problem(seed, most_plans=60)
        force = best_by_force(problem)
        program = Program(problem)
        program.relax()
        plans = all_plans(program.model.choices, np.random.default_rng(seed), most=40)
        completed = program.model.choices.complete(plans)
        fitting = plans[program.replay.excess(completed) <= 0]
        starts = [*fitting[:1], plans[0]]
        for position, start in enumerate(starts):
            found = descend(program.replay, start, math.inf)
            if found is None:
                assert position or not len(fitting)
                continue
            assert program.replay.excess(program.model.choices.complete(found[None]))[0] == 0
            period = program.model.period(found)
            assert period >= force * (1 - 1e-9)
            if position == 0 and len(fitting):
                assert period <= program.model.period(start) * (1 + 1e-6)
                ratios.append(period / force)
    assert len(ratios) >= 3
    assert np.median(ratios) <= 1.02


def test_descent_brings_memory_within_capacity():
    """From the plan that keeps everything, on a machine that has room for half of it."""
    found = 0
    for seed in range(10):
        roomy = draw_roomy(np.random.default_rng(seed), most_blocks=5)
        choices = Choices(roomy)
        rows = memory_rows(roomy, choices)
        plans = all_plans(choices, np.random.default_rng(seed), most=30)
        peaks = rows.peak_bytes(choices.complete(plans))[Tier.DEVICE]
        richest, leanest = int(np.argmax(peaks)), int(np.argmin(peaks))
        capacity = {**roomy.capacity, Tier.DEVICE: int(peaks[leanest] + peaks[richest]) // 2 + 1}
        replay = replay_of(dataclasses.replace(roomy, capacity=capacity))
        if replay.excess(replay.model.choices.complete(plans[richest][None]))[0] > 0:
            found += descend(replay, plans[richest], math.inf) is not None
    assert found >= 6


@pytest.mark.parametrize(
    ("lower", "measure"),
    [(reduce_traffic, BatchReplay.moved_seconds), (free_device_memory, BatchReplay.device_share)],
)
def test_plans_are_tidied_and_room_is_made_in_the_same_time(lower, measure):
    less = 0
    for seed in range(8):
        problem = random_problem(seed, most_blocks=4, most_plans=None)
        replay = replay_of(problem)
        model = replay.model
        plans = all_plans(model.choices, np.random.default_rng(seed), most=30)
        fitting = plans[replay.excess(model.choices.complete(plans)) <= 0]
        if not len(fitting):
            continue
        lowered = lower(replay, fitting[0], math.inf)
        before, after = (model.choices.complete(values[None]) for values in (fitting[0], lowered))
        assert replay.excess(after)[0] == 0
        assert model.period(lowered) <= model.period(fitting[0]) * (1 + 1e-6)
        assert measure(replay, after)[0] <= measure(replay, before)[0]
        less += bool(measure(replay, after)[0] < measure(replay, before)[0])
    assert less >= 2


def test_room_that_was_made_lets_descent_go_on():
    """The device is full of boundaries: offloading one gains nothing, keeping residuals does not fit."""
    block = LayerSizes(
        parameter_bytes=5, accumulator_bytes=10, gradient_bytes=5, input_bytes=10, residual_bytes={"a": 10}
    )
    ends = dataclasses.replace(block, residual_bytes={})
    sizes = ModelSizes((dataclasses.replace(ends, input_bytes=0), *[block] * 8, ends), 1, tied=False)
    plan = Plan(
        model="chain", planner="none", batch_rows=1, sequence_length=1, microbatches=1, prefetch=2,
        backward_prefetch=2, layers=tuple(LayerPlan() for _ in sizes.layers),
    )  # fmt: skip

    def seconds(operation):
        if operation.action in COMPUTE_ACTIONS:
            return 3.0 if operation.action is Action.BACKWARD and not operation.saved else 2.0
        return 0.05 * operation.bytes

    options = tuple(({}, {"a": Tier.DEVICE}) if layer.residual_bytes else ({},) for layer in sizes.layers)
    roomy = Problem(
        plan, sizes, seconds, options, dict.fromkeys(Tier, 10**6), longest_segment=1, residents=False
    )
    choices = Choices(roomy)
    start = choices.encode(plan)
    needed = memory_rows(roomy, choices).peak_bytes(choices.complete(start[None]))[Tier.DEVICE]
    capacity = {**roomy.capacity, Tier.DEVICE: int(needed[0])}
    program = Program(dataclasses.replace(roomy, capacity=capacity))
    period = program.model.period(start)
    assert program.model.period(descend(program.replay, start, math.inf)) == period
    again = program.descend([start], math.inf)
    assert program.model.period(again) <= period - 2
    assert program.model.period(program.descend([start], math.inf, enough_seconds=period)) == period


def test_the_devices_share_is_the_mean_of_its_memory_rows():
    problem = random_problem(7, most_blocks=4, most_plans=None)
    replay = replay_of(problem)
    choices = replay.model.choices
    rows = memory_rows(problem, choices)
    values = choices.complete(all_plans(choices, np.random.default_rng(0), most=3))
    live = values @ rows.matrix + rows.constants
    on_device = [tier is Tier.DEVICE for tier in rows.tiers]
    expected = live[:, on_device].mean(axis=1) / usable_bytes(problem.capacity[Tier.DEVICE])
    np.testing.assert_allclose(replay.device_share(values), expected)


def test_descent_keeps_what_the_program_keeps_of_large_memories():
    """An assignment that fits to the byte would break the program's rows by the solver's tolerance."""
    assert usable_bytes(1000) == 1000
    assert 10**11 - 30_000 < usable_bytes(10**11) < 10**11 - 10_000
    problem = draw_roomy(np.random.default_rng(3), most_blocks=3)
    choices = Choices(problem)
    rows = memory_rows(problem, choices)
    values = all_plans(choices, np.random.default_rng(3), most=1)
    size = round(float(rows.peak_bytes(choices.complete(values))[Tier.HOST][0]))
    large = dataclasses.replace(problem, static_host_bytes=10**11 - size, capacity={**problem.capacity})
    for room, fits in ((10**11, False), (10**11 + 30_000, True)):
        replay = replay_of(dataclasses.replace(large, capacity={**large.capacity, Tier.HOST: room}))
        assert bool(replay.excess(replay.model.choices.complete(values))[0] <= 0) is fits
