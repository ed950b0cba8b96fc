"""Calibration times exactly the kernels that a step calls, and its figures take over."""

from __future__ import annotations

import pytest

from lazyjax.execution.calibrate import calibrate, kernels_of
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.profile import load_profile
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.seconds import measured_key, template_costs
from lazyjax.planning.plan.baselines import keep_all, recompute_all
from lazyjax.planning.program.schedule import COMPUTE_ACTIONS, Action, build_schedule
from tests import tiny

ROWS, TOKENS = 2, 12


@pytest.mark.parametrize("tied", [False, True])
def test_every_kernel_of_the_schedules_is_timed_and_used(tied: bool) -> None:
    template = tiny.template("qwen2", tied=tied, blocks=1)
    names = tiny.residual_names(template)
    costs = template_costs(
        template, load_profile("h800-paper"), microbatch_rows=ROWS, sequence_length=TOKENS,
        optimizer=make_host_optimizer("hybrid8bit"), compute_dtype="float32", gradient_dtype="float32",
    )  # fmt: skip
    plans = [
        planner(template.spec, names, batch_rows=2 * ROWS, sequence_length=TOKENS, microbatches=2)
        for planner in (recompute_all, keep_all)
    ]
    schedules = [build_schedule(plan, costs.sizes) for plan in plans]
    kernels = Kernels(template, data_mesh(), compute_dtype="float32", gradient_dtype="float32")
    keys = kernels_of(schedules, kernels)
    assert len(set(keys)) == len(keys)
    assert {key.phase for key in keys} == {Action.FORWARD, Action.BACKWARD, Action.LOSS}
    found = calibrate(kernels, keys, microbatch_rows=ROWS, sequence_length=TOKENS, repeats=2)
    assert set(found.seconds) == set(found.working_bytes) == set(keys)
    timed = costs.with_measured(found.seconds, found.working_bytes)
    for schedule in schedules:
        for operation in schedule.operations:
            if operation.action in COMPUTE_ACTIONS:
                key = measured_key(operation, template.spec)
                assert timed.operation_seconds(operation) == found.seconds[key] > 0
    block = template.spec.layers[1].kind
    expected = max(
        size for key, size in found.working_bytes.items() if key[:3] == (block, Action.BACKWARD, ())
    )
    assert timed.working_bytes(Action.BACKWARD, 1, ()) == expected > 0
