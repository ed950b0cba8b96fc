"""Cheap refusals, and which batch is worth taking."""

import dataclasses

import pytest

from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.planning.planner import feasibility, search
from lazyjax.planning.planner.batches import batches_up_to, plan_batches, recommended
from lazyjax.planning.planner.necessary import necessary_shortfall
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.search import find_plan, predict
from lazyjax.specs import Tier


def test_what_cannot_fit_is_refused_without_a_solver(monkeypatch):
    """72B's masters, gradients and state alone exceed 256 GiB."""
    asked = build_request(
        build_template(architecture("Qwen2.5-72B")),
        load_profile("rtx4090"),
        batch_rows=8,
        sequence_length=1024,
        nvme_bytes=0,
    )

    def refuse(*arguments, **keywords):
        raise AssertionError("a program was built")

    monkeypatch.setattr(search, "Program", refuse)
    monkeypatch.setattr(feasibility, "some_plan_fits", refuse)
    found = find_plan(asked)
    assert found.plan is None
    state = sum(layer.state_bytes for layer in asked.sizes(1).layers)
    assert found.shortfall_bytes == {Tier.HOST: asked.static_host_bytes + state - asked.capacity[Tier.HOST]}
    assert not feasibility.feasible(asked)
    assert feasibility.largest_batch(asked, below=64) == 0


@pytest.mark.parametrize("rows", [1, 4])
def test_necessary_conditions_hold_for_what_fits(rows):
    """No plan that fits is refused: its own peaks as capacities meet the conditions."""
    roomy = build_request(
        build_template(architecture("SmolLM2-135M")),
        load_profile("rtx3090"),
        batch_rows=rows,
        sequence_length=64,
    )
    names = [list(layer.residual_bytes) for layer in roomy.sizes(1).layers]
    plan = recompute_all(roomy.spec, names, batch_rows=rows, sequence_length=64, microbatches=rows)
    peaks = predict(roomy, plan).peak_bytes
    tight = dataclasses.replace(roomy, capacity={tier: peaks[tier.value] for tier in Tier})
    assert necessary_shortfall(tight) == {}
    none = dataclasses.replace(tight, capacity={**tight.capacity, Tier.DEVICE: peaks["device"] // 100})
    assert set(necessary_shortfall(none)) == {Tier.DEVICE}


def test_batches_are_planned_until_larger_ones_bring_nothing():
    asked = build_request(
        build_template(architecture("SmolLM2-135M")),
        load_profile("rtx3090"),
        batch_rows=1,
        sequence_length=64,
    )
    names = [list(layer.residual_bytes) for layer in asked.sizes(1).layers]
    rates = {1: 50.0, 2: 90.0, 4: 99.5, 8: 100.0, 16: 60.0, 32: 60.0}
    solved = []

    def solve(rows):
        solved.append(rows)
        plan = recompute_all(asked.spec, names, batch_rows=rows, sequence_length=64)
        prediction = predict(asked, plan).model_copy(update={"period_seconds": rows * 64 / rates[rows]})
        return plan.model_copy(update={"prediction": prediction})

    assert batches_up_to(20) == (1, 2, 4, 8, 16, 20)
    assert batches_up_to(3, unit=4) == ()
    planned = plan_batches(batches_up_to(32), solve)
    # 8 gains less than 1 % over 4, and so does 16: then enough was seen.
    assert solved == [1, 2, 4, 8, 16]
    assert recommended(planned).batch_rows == 4
    assert plan_batches((1, 2), lambda rows: None) == ()
