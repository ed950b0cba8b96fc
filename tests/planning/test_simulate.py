"""The replay finds the true steady state."""

import pytest

from lazyjax.planning.plan.document import LayerPlan, Plan
from lazyjax.planning.program.schedule import Action, LayerSizes, ModelSizes, Operation, Schedule
from lazyjax.planning.program.simulate import simulate
from lazyjax.timeline import Resource

SIZES = ModelSizes((LayerSizes(1, 1, 1, 1, {}),) * 3, 1, False)
PLAN = Plan(model="m", planner="p", rows=1, sequence_length=1, layers=(LayerPlan(),) * 3)


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
