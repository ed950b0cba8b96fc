"""Whatever a plan decides, its schedule can be run: order, buffers, memory, time."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyjax.planning.plan.document import Prediction
from lazyjax.planning.program.critical import critical_path, exposed_seconds
from lazyjax.planning.program.schedule import Action, BufferRole, build_schedule
from lazyjax.planning.program.verify import (
    VerificationError,
    check_buffers,
    check_data_flow,
    check_order,
    verify,
)
from lazyjax.specs import Part, Tier
from lazyjax.timeline import Resource
from tests.planning.chains import random_plans

SEEDS = st.integers(0, 10**6)
FEW = settings(max_examples=12)


@FEW
@given(SEEDS)
def test_random_plans_pass_all_checks(seed):
    problem, plans = random_plans(seed)
    for plan in plans:
        verification = verify(plan, problem.sizes, problem.seconds)
        assert all(
            bound <= verification.period_seconds * (1 + 1e-9)
            for bound in verification.bounds_seconds.values()
        )


@FEW
@given(SEEDS)
def test_the_batch_is_sent_once(seed):
    problem, plans = random_plans(seed)
    for plan in plans:
        reloads = [o for o in build_schedule(plan, problem.sizes).operations if o.action is Action.RELOAD]
        sent = [b.microbatch for o in reloads for b in o.reads if b.role is BufferRole.BATCH]
        assert sorted(sent) == list(range(plan.microbatches))


@FEW
@given(SEEDS)
def test_replayed_memory_ends_where_it_began_and_stays_below_the_counted_peak(seed):
    problem, plans = random_plans(seed)
    # What a plan moves to a drive leaves a host that held it.
    sizes, parts = problem.sizes, set(Part) - {Part.STATE}
    masters = sum(sizes.owned_bytes(layer, part) for layer in range(len(sizes.layers)) for part in parts)
    verification = verify(plans[0], problem.sizes, problem.seconds, static_host_bytes=masters)
    for tier in Tier:
        samples = [s.bytes for s in verification.simulation.timeline.memory if s.tier == tier.value]
        if samples:
            assert samples[-1] == 0
            assert min(samples) >= 0
            assert 0 < max(samples) <= verification.live_bytes[tier] <= verification.peak_bytes[tier]


@FEW
@given(SEEDS)
def test_compute_and_exposed_time_make_up_the_period(seed):
    problem, plans = random_plans(seed)
    simulation = verify(plans[0], problem.sizes, problem.seconds).simulation
    schedule = build_schedule(plans[0], problem.sizes)
    exposed = exposed_seconds(schedule, simulation)
    total = simulation.busy_seconds[Resource.COMPUTE] + sum(exposed.values())
    assert total == pytest.approx(simulation.period_seconds, rel=1e-6)


@FEW
@given(SEEDS)
def test_the_critical_path_has_no_pause(seed):
    problem, plans = random_plans(seed)
    simulation = verify(plans[0], problem.sizes, problem.seconds).simulation
    path = critical_path(build_schedule(plans[0], problem.sizes), simulation)
    for first, second in itertools.pairwise(path):
        assert second.event.start_seconds == pytest.approx(first.event.end_seconds, abs=1e-6)


def test_verify_names_a_tier_that_overflows_and_the_bytes():
    problem, plans = random_plans(3, 1)
    fine = verify(plans[0], problem.sizes, problem.seconds)
    capacity = {**fine.peak_bytes, Tier.DEVICE: fine.peak_bytes[Tier.DEVICE] - 7}
    with pytest.raises(VerificationError, match=r"device memory: .* 7 more than there are"):
        verify(plans[0], problem.sizes, problem.seconds, capacity=capacity)
    verify(plans[0], problem.sizes, problem.seconds, capacity=fine.peak_bytes)


def test_verify_refuses_a_plan_predicted_for_other_costs():
    problem, plans = random_plans(3, 1)
    period = verify(plans[0], problem.sizes, problem.seconds).period_seconds
    right = plans[0].model_copy(update={"prediction": Prediction(period_seconds=period)})
    verify(right, problem.sizes, problem.seconds)
    wrong = plans[0].model_copy(update={"prediction": Prediction(period_seconds=period * 1.01)})
    with pytest.raises(VerificationError, match="other costs"):
        verify(wrong, problem.sizes, problem.seconds)


def test_checks_notice_broken_schedules():
    problem, plans = random_plans(5, 1)
    schedule = build_schedule(plans[0], problem.sizes)
    freeing = next(op for op in schedule.operations if op.frees)

    def changed(**fields):
        operations = list(schedule.operations)
        operations[freeing.index] = dataclasses.replace(freeing, **fields)
        return dataclasses.replace(schedule, operations=tuple(operations))

    with pytest.raises(VerificationError, match="never freed"):
        check_buffers(changed(frees=freeing.frees[1:]))
    with pytest.raises(VerificationError, match="not there"):
        check_buffers(changed(frees=(*freeing.frees, freeing.frees[0])))
    with pytest.raises(VerificationError, match="waits for operation"):
        check_order(changed(waits=(freeing.index + 1,)))


@FEW
@given(SEEDS)
def test_operations_that_do_not_wait_for_what_they_read_are_found(seed):
    problem, plans = random_plans(seed)
    schedule = build_schedule(plans[0], problem.sizes)
    check_data_flow(schedule)
    dependent = (
        Action.FORWARD,
        Action.LOSS,
        Action.RECOMPUTE,
        Action.BACKWARD,
        Action.OFFLOAD,
        Action.GRADIENT_OUT,
    )
    dependent += (
        Action.SPILL,
        Action.LOAD,
        Action.UPDATE,
        Action.SPILL_STATE,
        Action.LOAD_STATE,
        Action.FETCH,
    )
    tried = {}
    for operation in schedule.operations:
        if operation.action in dependent and operation.action not in tried:
            tried[operation.action] = operation
    for operation in tried.values():
        careless = dataclasses.replace(operation, waits=(), waits_previous=())
        operations = list(schedule.operations)
        operations[operation.index] = careless
        with pytest.raises(VerificationError, match="wait"):
            check_data_flow(dataclasses.replace(schedule, operations=tuple(operations)))


@FEW
@given(SEEDS)
def test_late_fetches_and_missing_updates_are_found(seed):
    problem, plans = random_plans(seed)
    schedule = build_schedule(plans[0], problem.sizes)
    without = [o for o in schedule.operations if o.action is not Action.UPDATE or o.layer]
    with pytest.raises(VerificationError):
        check_data_flow(dataclasses.replace(schedule, operations=tuple(without)))
    deeper = plans[0].model_copy(update={"prefetch": plans[0].prefetch + 1})
    if plans[0].prefetch < len(plans[0].layers) - 1:
        with pytest.raises(VerificationError, match="only after"):
            check_data_flow(dataclasses.replace(schedule, plan=deeper))
