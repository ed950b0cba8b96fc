"""One expansion: a plan's schedule, the rows for memory and the model of time say the same."""

import dataclasses
import functools

import numpy as np
import pytest

from experiments.benchmarks.planner_exactness import all_plans, compare_memory, draw_roomy, used_bytes_of
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.memory import memory_rows
from lazyjax.planning.planner.timing import TimeModel
from lazyjax.planning.program.conditions import ALWAYS, NEVER, Condition
from lazyjax.planning.program.contention import NO_CONTENTION, Contention
from lazyjax.planning.program.evaluate import evaluate
from lazyjax.planning.program.schedule import build_schedule, expand
from lazyjax.planning.program.simulate import simulate
from lazyjax.planning.program.verify import verify
from lazyjax.specs import Part, Tier

SEEDS = range(24)


@functools.cache
def instance(seed: int):
    """A random problem of up to five blocks, its choices, and some assignments."""
    problem = draw_roomy(np.random.default_rng(seed), most_blocks=5)
    choices = Choices(problem)
    return problem, choices, all_plans(choices, np.random.default_rng(seed + 1), most=4)


def in_any_order(operation):
    fields = ("allocates", "frees", "reads")
    return dataclasses.replace(operation, **{f: tuple(sorted(getattr(operation, f))) for f in fields})


@pytest.mark.parametrize("seed", SEEDS)
def test_the_expansion_of_all_plans_holds_the_schedule_of_each(seed):
    problem, choices, plans = instance(seed)
    expansion = expand(choices, problem.sizes)
    for values in plans:
        alone = build_schedule(choices.decode(values, "random"), problem.sizes).operations
        among_all = evaluate(expansion, choices.complete(values))
        assert list(map(in_any_order, among_all)) == list(map(in_any_order, alone))


@pytest.mark.parametrize("contention", [NO_CONTENTION, Contention(updates=0.9, copies=0.4)])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_model_of_time_is_the_schedules_own(seed, contention):
    problem, _, plans = instance(seed)
    problem = dataclasses.replace(problem, contention=contention)
    model = TimeModel(problem)
    for values in plans:
        schedule = build_schedule(model.choices.decode(values, "random"), problem.sizes)
        own = simulate(schedule, problem.seconds, contention).period_seconds
        assert model.period(values) == pytest.approx(own, rel=1e-9)


SETS = {
    "state": (frozenset(), frozenset([Part.STATE])),
    "all, step by step": (frozenset(), *(frozenset([*Part][:count]) for count in (1, 2, 3, 4))),
    "nothing or all": (frozenset(), frozenset(Part)),
    "no choice": (frozenset(Part),),
}


@pytest.mark.parametrize("update", ["deferred", "immediate"])
@pytest.mark.parametrize("sets", SETS)
def test_what_layers_own_on_the_drive_waits_for_what_is_there(update, sets):
    """Copies wait for those of a layer before that are on their way down, where there are any."""
    problem = next(p for p in map(long_chain, range(100)) if p.microbatches == 1 and p.sizes.both_halves)
    settings = problem.settings.model_copy(update={"update": update})
    problem = dataclasses.replace(problem, settings=settings, state_home=Tier.NVME, owned_sets=SETS[sets])
    model, rng = TimeModel(problem), np.random.default_rng(0)
    rows = memory_rows(problem, model.choices, model.expansion)
    for position in range(12):
        values = model.choices.encode(settings)
        for first in model.choices.state_home.number.values():
            if rng.random() < (position + 1) / 12:
                values[first + int(rng.integers(len(SETS[sets]) - 1))] = 1.0
        plan = model.choices.decode(values, "random")
        verified = verify(plan, problem.sizes, problem.seconds)
        assert model.period(values) == pytest.approx(verified.period_seconds, rel=1e-9)
        peaks = rows.peak_bytes(model.choices.complete(values[None]))
        assert {tier: peak[0] for tier, peak in peaks.items()} == used_bytes_of(problem, plan)


def long_chain(seed: int):
    """Of ten blocks, so that many states are on their way at once."""
    return draw_roomy(np.random.default_rng(seed), most_blocks=10, fewest_blocks=10)


@pytest.mark.parametrize("seed", range(36))
def test_memory_rows_are_the_schedules_own_count_on_every_tier(seed):
    """1 to 9 microbatches, both homes between layers, everything on any tier."""
    compared = compare_memory(seed)
    assert compared.rows_bytes == compared.schedule_bytes


@pytest.mark.parametrize("window", [1, 4])
def test_copies_may_be_under_way_for_longer(window):
    """Memory rows of other windows are among those above; here the model of time and all checks."""
    for seed in range(8):
        problem, _, plans = instance(seed)
        settings = problem.settings.model_copy(update={"offload_window": window})
        problem = dataclasses.replace(problem, settings=settings)
        model = TimeModel(problem)
        for values in plans[:2]:
            plan = model.choices.decode(values, "random")
            verified = verify(plan, problem.sizes, problem.seconds)
            assert model.period(values) == pytest.approx(verified.period_seconds, rel=1e-9)


def test_by_layer_takes_nearly_the_same_time():
    """Layer by layer is an approximation where there are microbatches; how good a one is seen here."""
    ratios = []
    for seed in range(30):
        problem, _, plans = instance(seed)
        coarse = TimeModel(dataclasses.replace(problem, by_layer=True))
        for values in plans:
            schedule = build_schedule(coarse.choices.decode(values, "random"), problem.sizes)
            ratios.append(coarse.period(values) / simulate(schedule, problem.seconds).period_seconds)
    assert abs(np.median(ratios) - 1) <= 0.005
    assert np.mean(np.abs(np.array(ratios) - 1) <= 0.03) >= 0.8
    assert min(ratios) >= 0.8
    assert max(ratios) <= 1.2


@pytest.mark.parametrize("seed", range(8))
def test_segments_recomputed_whole_pass_all_checks(seed):
    problem, choices, plans = instance(seed)
    for values in plans:
        plan = choices.decode(values, "random").model_copy(update={"recompute": "segment"})
        verify(plan, problem.sizes, problem.seconds)


def test_conditions_are_affine():
    one, other = Condition(0, frozenset({1})), Condition(0, frozenset({2}))
    both = one.either(other)
    assert both == Condition(0, frozenset({1, 2}))
    assert both.unless(other) == one
    assert ALWAYS.unless(one) == Condition(1, frozenset(), frozenset({1}))
    assert both.both(other) == other
    assert both.both(ALWAYS.unless(one)) == other
    assert one.both(other) == NEVER
    values = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert ALWAYS.unless(one).value(values).tolist() == [0.0, 1.0]
    assert [bool(both.holds(row)) for row in values] == [True, False]
