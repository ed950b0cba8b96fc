"""Rounding keeps running sums; descent only ever goes down, and ends near the best plan there is."""

import dataclasses
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.benchmarks.planner_exactness import all_plans, best_by_force, draw_roomy, random_problem
from lazyjax.planning.batch_replay import BatchReplay
from lazyjax.planning.descent import changes, descend, tidy
from lazyjax.planning.milp import Program, window_period
from lazyjax.planning.problem import Choices
from lazyjax.planning.rounding import carry_round
from lazyjax.planning.window_memory import memory_rows, peak_bytes, usable_bytes
from lazyjax.planning.windows import WindowModel
from lazyjax.specs import Tier


def is_plan(choices: Choices, values: np.ndarray) -> bool:
    return set(np.unique(values)) <= {0.0, 1.0} and all(
        affine.value(values) == right for affine, right in choices.equalities()
    )


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_rounding_gives_plans_with_the_same_running_sums(seed, weights):
    model = WindowModel(draw_roomy(np.random.default_rng(seed), most_blocks=5))
    choices = model.choices
    rng = np.random.default_rng(weights)
    plans = all_plans(model, rng, most=5)
    relaxed = rng.dirichlet(np.ones(len(plans))) @ plans
    rounded = carry_round(choices, relaxed)
    assert is_plan(choices, rounded)
    for family in (choices.residents, choices.states):
        numbers = [choices.number[choice] for choice in family]
        ahead = np.cumsum(rounded[numbers]) - np.cumsum(relaxed[numbers])
        assert np.all(ahead <= 1e-5)
        assert np.all(ahead >= -1 - 1e-9)


def test_rounding_leaves_plans_alone():
    for seed in range(20):
        model = WindowModel(draw_roomy(np.random.default_rng(seed), most_blocks=5))
        for values in all_plans(model, np.random.default_rng(seed), most=3):
            np.testing.assert_array_equal(carry_round(model.choices, values), values)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 200))
def test_changes_lead_from_plans_to_other_plans(seed):
    model = WindowModel(draw_roomy(np.random.default_rng(seed), most_blocks=5))
    values = all_plans(model, np.random.default_rng(seed), most=1)[0]
    seen = set()
    for change in changes(model.choices, values):
        after = values.copy()
        assert all(values[list(change.off)] == 1)
        assert all(values[list(change.on)] == 0)
        after[list(change.off)], after[list(change.on)] = 0.0, 1.0
        assert is_plan(model.choices, after)
        seen.add(after.tobytes())
    assert values.tobytes() not in seen


def test_descent_fits_never_loses_and_comes_close_to_brute_force():
    ratios = []
    for seed in range(12):
        problem = random_problem(seed, most_plans=500)
        force = best_by_force(problem)
        program = Program(problem)
        program.relax()
        plans = all_plans(program.model, np.random.default_rng(seed), most=40)
        completed = program.model.choices.complete(plans)
        fitting = plans[program.replay.excess(completed) <= 0]
        starts = [*fitting[:1], *plans[:2]]
        for position, start in enumerate(starts):
            found = descend(program.replay, start, time.monotonic() + 20)
            if found is None:
                assert position or not len(fitting)
                continue
            assert program.replay.excess(program.model.choices.complete(found[None]))[0] == 0
            period = window_period(program.model, found)
            assert period >= force * (1 - 1e-9)
            if position == 0 and len(fitting):
                assert period <= window_period(program.model, start) * (1 + 1e-6)
                ratios.append(period / force)
    assert len(ratios) >= 4
    assert np.median(ratios) <= 1.02


def test_descent_brings_memory_within_capacity():
    """From the plan that keeps everything, on a machine that has room for half of it."""
    found = 0
    for seed in range(15):
        roomy = draw_roomy(np.random.default_rng(seed), most_blocks=5)
        model = WindowModel(roomy)
        rows = memory_rows(model)
        plans = all_plans(model, np.random.default_rng(seed), most=30)
        peaks = peak_bytes(rows, model.choices.complete(plans))[Tier.DEVICE]
        richest, leanest = int(np.argmax(peaks)), int(np.argmin(peaks))
        capacity = {**roomy.capacity, Tier.DEVICE: int(peaks[leanest] + peaks[richest]) // 2 + 1}
        tight = WindowModel(dataclasses.replace(roomy, capacity=capacity))
        replay = BatchReplay(tight, memory_rows(tight))
        if replay.excess(tight.choices.complete(plans[richest][None]))[0] > 0:
            found += descend(replay, plans[richest], time.monotonic() + 20) is not None
    assert found >= 9


def test_tidying_moves_less_in_the_same_time():
    less = 0
    for seed in range(12):
        problem = random_problem(seed, most_blocks=5, most_plans=None)
        model = WindowModel(problem)
        replay = BatchReplay(model, memory_rows(model))
        plans = all_plans(model, np.random.default_rng(seed), most=30)
        fitting = plans[replay.excess(model.choices.complete(plans)) <= 0]
        if not len(fitting):
            continue
        tidied = tidy(replay, fitting[0], time.monotonic() + 20)
        before, after = (model.choices.complete(values[None]) for values in (fitting[0], tidied))
        assert replay.excess(after)[0] == 0
        assert window_period(model, tidied) <= window_period(model, fitting[0]) * (1 + 1e-6)
        assert replay.moved_seconds(after)[0] <= replay.moved_seconds(before)[0]
        less += bool(replay.moved_seconds(after)[0] < replay.moved_seconds(before)[0])
    assert less >= 3


def test_descent_keeps_what_the_program_keeps_of_large_memories():
    """An assignment that fits to the byte would break the program's rows by the solver's tolerance."""
    assert usable_bytes(1000) == 1000
    assert 10**11 - 30_000 < usable_bytes(10**11) < 10**11 - 10_000
    problem = draw_roomy(np.random.default_rng(3), most_blocks=3)
    model = WindowModel(problem)
    rows = memory_rows(model)
    values = model.choices.complete(all_plans(model, np.random.default_rng(3), most=1))
    size = round(float(peak_bytes(rows, values)[Tier.HOST][0]))
    large = dataclasses.replace(problem, static_host_bytes=10**11 - size, capacity={**problem.capacity})
    for room, fits in ((10**11, False), (10**11 + 30_000, True)):
        capacity = {**large.capacity, Tier.HOST: room}
        tight = WindowModel(dataclasses.replace(large, capacity=capacity))
        replay = BatchReplay(tight, memory_rows(tight))
        excess = replay.excess(tight.choices.complete(values[:, : tight.choices.binaries]))
        assert bool(excess[0] <= 0) is fits
