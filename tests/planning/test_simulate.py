"""The replay finds the true steady state."""

import pytest

from lazyjax.planning.plan.document import LayerPlan, Plan
from lazyjax.planning.program.contention import Contention
from lazyjax.planning.program.schedule import Action, LayerSizes, ModelSizes, Operation, Schedule
from lazyjax.planning.program.simulate import simulate
from lazyjax.timeline import Resource

SIZES = ModelSizes((LayerSizes(1, 1, 1, 1, {}),) * 3, 1, False)
PLAN = Plan(model="m", planner="p", batch_rows=1, sequence_length=1, layers=(LayerPlan(),) * 3)


def schedule(*operations):
    return Schedule(PLAN, SIZES, tuple(Operation(i, *rest) for i, rest in enumerate(operations)))


def test_a_slow_queue_that_started_early_is_not_overlooked():
    # Compute takes 10 a step; the drive takes 10.1, but compute waits for what it read long before.
    steps = schedule(
        (Action.LOAD, Resource.NVME_READ, 0, None, 0),
        (Action.FORWARD, Resource.COMPUTE, 0, 0, 0, (), ()),
        (Action.FORWARD, Resource.COMPUTE, 1, 0, 1, (0,), ()),
    )
    seconds = [10.1, 9.0, 1.0]
    result = simulate(steps, lambda operation: seconds[operation.index])
    assert result.period_seconds == pytest.approx(10.1, rel=1e-9)


def test_compute_loses_its_share_of_what_the_step_copies_and_updates():
    steps = schedule(
        (Action.UPDATE, Resource.CPU, 0, None, 0, (), (5,)),
        (Action.RELOAD, Resource.H2D, 0, 0, 0, (), (5,)),
        (Action.LOAD, Resource.NVME_READ, 0, 0, 0, (), (5,)),
        (Action.FORWARD, Resource.COMPUTE, 0, 0, 0, (0, 1, 2)),
        (Action.RECOMPUTE, Resource.COMPUTE, 0, 0, 1),
        (Action.BACKWARD, Resource.COMPUTE, 0, 0, 2),
    )
    seconds = [2.0, 1.0, 5.0, 3.0, 3.0, 4.0]
    alone = simulate(steps, lambda operation: seconds[operation.index])
    shared = simulate(steps, lambda operation: seconds[operation.index], Contention(updates=0.5, copies=0.2))
    assert alone.period_seconds == pytest.approx(15.0)
    # A drive has a processor of its own.
    assert shared.period_seconds == pytest.approx(15.0 + 0.5 * 2 + 0.2 * 1)
    spans = [event.end_seconds - event.start_seconds for event in shared.timeline.events]
    assert spans == pytest.approx([2.0, 1.0, 5.0, 3.6, 3.0, 4.6])


def test_waits_on_the_step_before_close_the_ring():
    steps = schedule(
        (Action.UPDATE, Resource.CPU, 0, None, 0, (), (1,)),
        (Action.FORWARD, Resource.COMPUTE, 0, 0, 0, (0,), ()),
    )
    seconds = [2.0, 3.0]
    assert simulate(steps, lambda operation: seconds[operation.index]).period_seconds == pytest.approx(5.0)


def test_steps_that_alternate_settle_on_their_mean():
    # Two updates in flight: each step's first waits for the step before, on another queue.
    steps = schedule(
        (Action.UPDATE, Resource.CPU, 0, None, 0, (), (1,)),
        (Action.FETCH, Resource.H2D, 0, None, 0, (), (0,)),
        (Action.FORWARD, Resource.COMPUTE, 0, 0, 0, (), (0,)),
    )
    seconds = [2.0, 3.0, 0.5]
    result = simulate(steps, lambda operation: seconds[operation.index])
    assert result.period_seconds == pytest.approx(3.0)
