"""The whole planner on a tiny model: search, verification, report, cache, errors."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from lazyjax.hardware.profile import load_profile
from lazyjax.planning import command
from lazyjax.planning.baselines import BASELINES
from lazyjax.planning.command import InfeasibleError, baseline_lines, solve_cached, verify_for
from lazyjax.planning.milp import memory_shortfall
from lazyjax.planning.plan import PlanError, load_plan
from lazyjax.planning.report import explain, plan_report
from lazyjax.planning.request import build_request, request_key
from lazyjax.planning.search import (
    divisors,
    find_plan,
    largest_batch,
    lean_problem,
    microbatch_counts,
    predict,
    settings_of,
)
from lazyjax.specs import Tier
from tests.tiny import template

ROWS, TOKENS = 8, 64
#: Seconds for searches whose gap does not matter.
LIMIT = 3.0


@pytest.fixture(scope="module")
def request_():
    """A tiny model on a slow machine, with memory for about half of what it could keep."""
    profile = load_profile("rtx3090").model_copy(
        update={"h2d_bytes_per_second": 2e8, "d2h_bytes_per_second": 2e8, "matmul_flops_per_second": 2e10}
    )
    roomy = build_request(
        template("qwen2", tied=False), profile, rows=ROWS, sequence_length=TOKENS, nvme_bytes=0
    )
    lean = predict(roomy, plan_of(roomy, "recompute_all"))
    rich = predict(roomy, plan_of(roomy, "keep_all"))
    device = (lean.peak_bytes["device"] + rich.peak_bytes["device"]) // 2
    capacity = {**roomy.capacity, Tier.DEVICE: device}
    return dataclasses.replace(roomy, capacity=capacity)


def plan_of(request, name):
    names = [list(layer.residual_bytes) for layer in request.sizes(1).layers]
    return BASELINES[name](request.spec, names, rows=ROWS, sequence_length=TOKENS)


def test_the_plan_found_verifies_fits_and_beats_every_baseline_that_fits(request_):
    found = find_plan(request_, time_limit_seconds=20.0)
    assert found.plan is not None
    assert found.gap <= 0.02
    verification = verify_for(request_, found.plan)
    assert verification.period_seconds == pytest.approx(found.plan.prediction.period_seconds, rel=1e-9)
    for line in baseline_lines(request_):
        if not any(line.over(request_, tier) for tier in Tier):
            assert verification.period_seconds <= line.period_seconds * 1.01
    text = printed(plan_report(request_, found.plan, found, verification, baseline_lines(request_)))
    for expected in ("simulated", "megatrain", "does not fit", "gap", "compute", "kept inside the layers"):
        assert expected in text


def test_explain_names_alternatives_and_refuses_other_layers(request_):
    plan = find_plan(request_, time_limit_seconds=LIMIT).plan
    text = printed(explain(request_, plan, 1))
    assert "input host" in text
    with pytest.raises(PlanError, match="blocks are layers 1 to"):
        explain(request_, plan, 0)


def test_plans_are_cached_by_content(request_, tmp_path, monkeypatch):
    plan, found = solve_cached(request_, tmp_path, time_limit_seconds=LIMIT)
    assert found is not None
    monkeypatch.setattr(command, "find_plan", None)
    again, found = solve_cached(request_, tmp_path, time_limit_seconds=20.0)
    assert found is None
    assert again == plan
    assert request_key(request_) != request_key(dataclasses.replace(request_, rows=4))


def test_infeasible_names_tier_bytes_and_a_batch_that_fits(request_):
    batch_of_two = find_plan(dataclasses.replace(request_, rows=2), time_limit_seconds=LIMIT).plan
    device = batch_of_two.prediction.peak_bytes["device"]
    small = dataclasses.replace(request_, capacity={**request_.capacity, Tier.DEVICE: device // 4})
    with pytest.raises(InfeasibleError) as caught:
        solve_cached(small, None, time_limit_seconds=LIMIT)
    short = re.search(r"device memory is short of (\d+) bytes", str(caught.value))
    assert short is not None
    enough = {**small.capacity, Tier.DEVICE: device // 4 + int(short[1])}
    enlarged = dataclasses.replace(small, capacity=enough)
    assert find_plan(enlarged, time_limit_seconds=LIMIT).plan is not None


def test_largest_batch_fits_and_one_more_does_not(request_):
    host = request_.static_host_bytes + sum(layer.state_bytes for layer in request_.sizes(1).layers)
    finest = plan_of(request_, "recompute_all").model_copy(update={"rows": 4, "microbatches": 4})
    device = predict(dataclasses.replace(request_, rows=4), finest).peak_bytes["device"]
    # The rows of the program count a few inputs more than the schedule does.
    device += 16 * request_.sizes(1).layers[1].input_bytes
    capacity = {Tier.DEVICE: device, Tier.HOST: host + 4096, Tier.NVME: 0}
    tight = dataclasses.replace(request_, capacity=capacity)
    rows = largest_batch(tight, below=16)
    assert 0 < rows < 15
    # Whatever the microbatches, one row more does not fit.
    beyond = dataclasses.replace(tight, rows=rows + 1)
    assert all(memory_shortfall(lean_problem(beyond, settings)) for settings in settings_of(beyond))
    assert not all(
        memory_shortfall(lean_problem(fitting, settings))
        for fitting in [dataclasses.replace(tight, rows=rows)]
        for settings in settings_of(fitting)
    )


def test_counts_of_microbatches():
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert microbatch_counts(72) == (1, 2, 3, 6, 9, 18, 36, 72)


def test_command_writes_a_plan_a_picture_and_a_trace(tmp_path, capsys):
    question = "--model SmolLM2-135M --hardware rtx3090 --batch 2 --seq 64 --microbatches 2"
    arguments = [*question.split(), "--no-cache", "--time-limit", "4"]
    files = [tmp_path / name for name in ("plan.json", "step.png", "step.trace.json")]
    outputs = ["--out", str(files[0]), "--png", str(files[1]), "--trace", str(files[2])]
    command.plan_command([*arguments, *outputs])
    plan = load_plan(files[0])
    assert (plan.rows, plan.sequence_length, plan.prediction is not None) == (2, 64, True)
    assert files[1].read_bytes()[:4] == b"\x89PNG"
    assert files[2].stat().st_size > 1000
    printed_lines = capsys.readouterr().out
    assert "executed" in printed_lines
    assert "on the critical" in printed_lines


def printed(renderable):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()
