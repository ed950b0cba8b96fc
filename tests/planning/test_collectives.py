"""Slabs that several devices share: gathered for every window, gradients summed; and what the checks see."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyjax.planning.plan.document import Plan
from lazyjax.planning.program.operations import Operation
from lazyjax.planning.program.schedule import (
    COMPUTE_ACTIONS,
    Action,
    BufferRole,
    ModelSizes,
    Schedule,
    build_schedule,
)
from lazyjax.planning.program.verify import (
    VerificationError,
    check_buffers,
    check_data_flow,
    check_order,
    verify,
)
from lazyjax.specs import Tier
from lazyjax.timeline import Resource
from tests.planning.chains import random_plans

SEEDS = st.integers(0, 10**6)
COLLECTIVES = (Action.GATHER, Action.REDUCE_SCATTER)


def shared(seed: int, devices: int = 3) -> tuple[Plan, ModelSizes]:
    problem, plans = random_plans(seed, 1)
    return plans[0], dataclasses.replace(problem.sizes, devices=devices)


@functools.cache
def example() -> Schedule:
    """With microbatches, recomputation and a prefetch of two at least."""
    for seed in range(1000):
        plan, sizes = shared(seed)
        schedule = build_schedule(plan, sizes)
        actions = {operation.action for operation in schedule.operations}
        if (
            plan.microbatches > 2
            and Action.RECOMPUTE in actions
            and min(plan.prefetch, plan.backward_prefetch) > 1
        ):
            return schedule
    raise AssertionError("no such plan")


@settings(max_examples=12)
@given(SEEDS)
def test_one_device_has_none_and_several_change_nothing_else(seed: int) -> None:
    plan, sizes = shared(seed)
    alone = build_schedule(plan, dataclasses.replace(sizes, devices=1)).operations
    among = build_schedule(plan, sizes).operations
    assert not any(operation.action in COLLECTIVES for operation in alone)
    assert [(o.action, o.layer, o.microbatch) for o in alone] == [
        (o.action, o.layer, o.microbatch) for o in among if o.action not in COLLECTIVES
    ]


@settings(max_examples=12)
@given(SEEDS)
def test_every_microbatchs_gradient_is_summed_and_every_window_gathers(seed: int) -> None:
    plan, sizes = shared(seed)
    verify(plan, sizes, lambda operation: 1.0 + operation.index % 3)
    operations = build_schedule(plan, sizes).operations
    sums = [(o.layer, o.microbatch) for o in operations if o.action is Action.REDUCE_SCATTER]
    made = [(o.layer, o.microbatch) for o in operations if o.action in (Action.BACKWARD, Action.LOSS)]
    assert sorted(sums) == sorted(made)
    for layer in range(len(sizes.layers)):
        own = [o for o in operations if o.action is Action.REDUCE_SCATTER and o.layer == layer]
        assert [o.last for o in own] == [False] * (plan.microbatches - 1) + [True]
    live: set[int] = set()
    for operation in operations:
        live |= {a.place.buffer.layer for a in operation.allocates if a.place.buffer.role is BufferRole.WHOLE}
        if operation.action in COMPUTE_ACTIONS and (
            operation.action is not Action.BACKWARD or operation.layer
        ):
            assert operation.layer in live
        # The layer in use and the next one; a tied table beside the head.
        assert len(live) <= 2 + sizes.tied
        live -= {place.buffer.layer for place in operation.frees if place.buffer.role is BufferRole.WHOLE}
    assert not live


def test_gathers_are_issued_a_window_ahead() -> None:
    schedule = example()
    for operation in schedule.operations:
        if operation.action is not Action.GATHER or operation.window < 2:
            continue
        computes = [schedule.operations[wait] for wait in operation.waits]
        computes = [waited for waited in computes if waited.action in COMPUTE_ACTIONS]
        assert max(waited.window for waited in computes) == operation.window - 2


def test_the_bytes_are_those_of_whole_layers_and_at_most_two_gradients_wait() -> None:
    schedule = example()
    sizes = schedule.sizes
    for operation in schedule.operations:
        layer = sizes.layers[operation.layer]
        if operation.action is Action.GATHER and not (sizes.tied and operation.layer == 0):
            assert operation.bytes == 3 * layer.parameter_bytes
        if operation.action is Action.REDUCE_SCATTER and operation.layer:
            table = sizes.layers[0] if sizes.tied and operation.layer == len(sizes.layers) - 1 else None
            owners = [layer, *([table] if table else [])]
            assert operation.bytes == sum(3 * owner.accumulator_bytes for owner in owners)
            assert operation.resource is Resource.INTERCONNECT


def broken(change: Callable[[Operation, Schedule], Operation], action: Action) -> Schedule:
    """The example with its last operation of a kind changed."""
    schedule = example()
    operations = list(schedule.operations)
    index = max(o.index for o in operations if o.action is action and o.layer)
    operations[index] = change(operations[index], schedule)
    return dataclasses.replace(schedule, operations=tuple(operations))


def without(action: Action) -> Callable[[Operation, Schedule], Operation]:
    """Takes the waits for operations of a kind away."""

    def change(operation: Operation, schedule: Schedule) -> Operation:
        kept = [w for w in operation.waits if schedule.operations[w].action is not action]
        assert len(kept) < len(operation.waits)
        return dataclasses.replace(operation, waits=tuple(kept))

    return change


@pytest.mark.parametrize(
    ("action", "waited"),
    [
        (Action.BACKWARD, Action.GATHER),
        (Action.FORWARD, Action.GATHER),
        (Action.GATHER, Action.FETCH),
        (Action.REDUCE_SCATTER, Action.BACKWARD),
        (Action.GRADIENT_OUT, Action.REDUCE_SCATTER),
    ],
)
def test_a_wait_that_is_missing_is_named(action: Action, waited: Action) -> None:
    check_data_flow(example())
    with pytest.raises(VerificationError, match=r"does not wait for|is not summed"):
        check_data_flow(broken(without(waited), action))


def test_kernels_must_not_take_a_part_nor_keep_their_gradients() -> None:
    def part(operation: Operation, _: Schedule) -> Operation:
        reads = [
            buffer._replace(role=BufferRole.PARAMETERS) if buffer.role is BufferRole.WHOLE else buffer
            for buffer in operation.reads
        ]
        return dataclasses.replace(operation, reads=tuple(reads), waits=tuple(range(operation.index)))

    with pytest.raises(VerificationError, match="takes one device's part"):
        check_data_flow(broken(part, Action.RECOMPUTE))

    def kept(operation: Operation, _: Schedule) -> Operation:
        allocates = [a for a in operation.allocates if a.place.buffer.role is not BufferRole.PARTIAL]
        return dataclasses.replace(operation, allocates=tuple(allocates))

    with pytest.raises(VerificationError, match="leaves no gradient to be summed"):
        check_data_flow(broken(kept, Action.BACKWARD))


def test_an_update_waits_for_the_norm_of_the_sum() -> None:
    schedule = example()
    last = max(o.index for o in schedule.operations if o.action is Action.REDUCE_SCATTER)
    updates = [o for o in schedule.operations if o.action is Action.UPDATE]
    deferred = schedule.plan.update == "deferred"
    waits = [o.waits_previous if deferred else o.waits for o in updates]
    if deferred:
        assert all(last in own for own in waits)
    operations = [
        dataclasses.replace(o, waits_previous=tuple(w for w in o.waits_previous if w != last))
        for o in schedule.operations
    ]
    if deferred:
        with pytest.raises(VerificationError, match=r"\(update\) does not wait"):
            check_data_flow(dataclasses.replace(schedule, operations=tuple(operations)))


def test_memory_counts_what_is_gathered_and_what_is_to_be_summed() -> None:
    schedule = example()
    alone = build_schedule(schedule.plan, dataclasses.replace(schedule.sizes, devices=1))
    more = schedule.peak_bytes()[Tier.DEVICE] - alone.peak_bytes()[Tier.DEVICE]
    least = min(3 * layer.parameter_bytes for layer in schedule.sizes.layers[1:-1])
    assert more >= least
    check_order(schedule)
    check_buffers(schedule)
