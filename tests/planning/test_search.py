"""The whole planner on a tiny model: search, verification, report, cache, errors."""

import dataclasses
import io
import itertools
import json
import math
import re

import numpy as np
import pytest
from rich.console import Console

from lazyjax.config import ConfigError
from lazyjax.hardware.profile import ProfileError, load_profile
from lazyjax.huggingface.configs import to_hf_config
from lazyjax.models.registry import architecture
from lazyjax.planning.commands import plan as command
from lazyjax.planning.commands.report import baseline_rows, comparison, explain, plan_report
from lazyjax.planning.costs.packing import uniform_packing
from lazyjax.planning.plan import cache
from lazyjax.planning.plan.baselines import BASELINES
from lazyjax.planning.plan.document import PlanError, load_plan
from lazyjax.planning.planner import search, service
from lazyjax.planning.planner.feasibility import feasible, largest_batch
from lazyjax.planning.planner.leanest import memory_shortfall
from lazyjax.planning.planner.memory import memory_rows
from lazyjax.planning.planner.milp import Program
from lazyjax.planning.planner.question import (
    looser_settings,
    microbatch_counts,
    padding_share,
    problem_of,
    settings_of,
)
from lazyjax.planning.planner.request import build_request, request_key
from lazyjax.planning.planner.search import find_plan, predict
from lazyjax.planning.planner.service import InfeasibleError, solve_cached, verify_for
from lazyjax.planning.planner.timing import TimeModel
from lazyjax.runs import RunError
from lazyjax.specs import Part, Tier
from tests.tiny import template

ROWS, TOKENS = 8, 64
#: Seconds for a search: far more than any takes to be sure of its plan, so that no test depends on them.
LIMIT = 600.0


@pytest.fixture(scope="module")
def request_():
    """A tiny model on a slow machine, with memory for about half of what it could keep."""
    profile = load_profile("rtx3090").model_copy(
        update={"h2d_bytes_per_second": 2e8, "d2h_bytes_per_second": 2e8, "matmul_flops_per_second": 2e10}
    )
    roomy = build_request(
        template("qwen2", tied=False), profile, batch_rows=ROWS, sequence_length=TOKENS, nvme_bytes=0
    )
    lean = predict(roomy, plan_of(roomy, "recompute_all"))
    rich = predict(roomy, plan_of(roomy, "keep_all"))
    device = (lean.peak_bytes["device"] + rich.peak_bytes["device"]) // 2
    capacity = {**roomy.capacity, Tier.DEVICE: device}
    return dataclasses.replace(roomy, capacity=capacity)


@pytest.fixture(scope="module")
def found(request_):
    """What the search gives; it takes seconds."""
    return find_plan(request_, time_limit_seconds=LIMIT)


@pytest.fixture
def folder(request_, found, tmp_path):
    """A cache with the plan found."""
    cache.store(tmp_path, request_key(request_), found.plan)
    return tmp_path


def test_the_scarcer_the_host_the_more_may_go_to_nvme():
    """What there is plenty of room for stays; with all of it there, copies of a few layers are left."""
    roomy = build_request(
        template("qwen2", tied=False, blocks=24),
        load_profile("rtx3090"),
        batch_rows=1,
        sequence_length=TOKENS,
    )
    owned = roomy.static_host_bytes + sum(layer.state_bytes for layer in roomy.sizes(1).layers)
    largest = []
    for share in (2.5, 1.5, 0.4):
        capacity = {**roomy.capacity, Tier.HOST: int(share * owned), Tier.NVME: 2 * owned}
        request = dataclasses.replace(roomy, capacity=capacity)
        problem = problem_of(request, settings_of(request)[0])
        largest.append(problem.owned_sets[-1])
    assert largest == [{Part.STATE}, set(Part) - {Part.HI}, set(Part)]
    plan = plan_of(roomy, "recompute_all").model_copy(update={"batch_rows": 1})
    below = plan.model_copy(update={"layers": tuple(layer.with_on_nvme(set(Part)) for layer in plan.layers)})
    assert predict(request, plan).peak_bytes["host"] >= owned
    verify_for(request, below)


def test_a_request_can_fix_what_lives_on_nvme(request_):
    parts = frozenset([Part.LO, Part.GRADIENT])
    request = dataclasses.replace(
        request_, capacity={**request_.capacity, Tier.NVME: 10**9}, microbatches=1, on_nvme=parts
    )
    found = find_plan(request, time_limit_seconds=LIMIT)
    assert [layer.on_nvme for layer in found.plan.layers] == [parts] * len(found.plan.layers)
    verify_for(request, found.plan)
    assert request_key(request) != request_key(dataclasses.replace(request, on_nvme=None))


def plan_of(request, name):
    names = [list(layer.residual_bytes) for layer in request.sizes(1).layers]
    return BASELINES[name](request.spec, names, batch_rows=ROWS, sequence_length=TOKENS)


def test_the_plan_found_verifies_fits_and_beats_every_baseline_that_fits(request_, found):
    assert found.plan is not None
    assert found.gap <= 0.02
    verification = verify_for(request_, found.plan)
    assert verification.period_seconds == pytest.approx(found.plan.prediction.period_seconds, rel=1e-9)
    for line in baseline_rows(request_):
        if not any(line.over(request_, tier) for tier in Tier):
            assert verification.period_seconds <= line.period_seconds * 1.01
    rows = baseline_rows(request_)
    text = printed(plan_report(request_, found.plan, verification, rows, hardware="rtx3090"))
    for expected in ("simulated", "megatrain", "is within", "compute", "kept inside the layers"):
        assert expected in text
    assert "does not fit" not in text
    tight = dataclasses.replace(request_, capacity={**request_.capacity, Tier.DEVICE: 1000})
    assert "does not fit" in printed(comparison(baseline_rows(request_), tight))


def test_explain_names_alternatives_and_refuses_other_layers(request_, found):
    plan = found.plan
    text = printed(explain(request_, plan, 1))
    assert "input host" in text
    assert "The step is bound by" in text
    assert "optimizer state" not in printed(explain(request_, plan, 0))
    with pytest.raises(PlanError, match="layers 0 to"):
        explain(request_, plan, len(plan.layers))


def test_plans_are_cached_by_content(request_, tmp_path, monkeypatch):
    plan, found = solve_cached(request_, tmp_path, time_limit_seconds=LIMIT)
    assert found is not None
    monkeypatch.setattr(service, "find_plan", None)
    again, found = solve_cached(request_, tmp_path, time_limit_seconds=LIMIT)
    assert found is None
    assert again == plan
    assert request_key(request_) != request_key(dataclasses.replace(request_, batch_rows=4))


def test_infeasible_names_tier_bytes_and_a_batch_that_fits(request_):
    batch_of_two = find_plan(dataclasses.replace(request_, batch_rows=2), time_limit_seconds=LIMIT).plan
    device = batch_of_two.prediction.peak_bytes["device"]
    small = dataclasses.replace(request_, capacity={**request_.capacity, Tier.DEVICE: device // 4})
    with pytest.raises(InfeasibleError) as caught:
        solve_cached(small, None, time_limit_seconds=LIMIT)
    assert "\n" not in str(caught.value)
    sum_ = r"device memory: [\d,]+ bytes at least, [\d,]+ may be used, ([\d,]+) short"
    short = re.search(sum_, str(caught.value))
    assert short is not None
    enough = {**small.capacity, Tier.DEVICE: device // 4 + int(short[1].replace(",", ""))}
    enlarged = dataclasses.replace(small, capacity=enough)
    assert find_plan(enlarged, time_limit_seconds=LIMIT).plan is not None


def test_largest_batch_fits_and_one_more_does_not(request_):
    host = request_.static_host_bytes + sum(layer.state_bytes for layer in request_.sizes(1).layers)
    finest = plan_of(request_, "recompute_all").model_copy(update={"batch_rows": 4, "microbatches": 4})
    device = predict(dataclasses.replace(request_, batch_rows=4), finest).peak_bytes["device"]
    capacity = {Tier.DEVICE: device, Tier.HOST: host + 4096, Tier.NVME: 0}
    tight = dataclasses.replace(request_, capacity=capacity)
    rows = largest_batch(tight, below=16)
    assert 4 <= rows < 15
    # Whatever the microbatches, one row more does not fit.
    beyond = dataclasses.replace(tight, batch_rows=rows + 1)
    assert all(memory_shortfall(problem_of(beyond, settings, lean=True)) for settings in settings_of(beyond))
    assert not all(
        memory_shortfall(problem_of(fitting, settings, lean=True))
        for fitting in [dataclasses.replace(tight, batch_rows=rows)]
        for settings in settings_of(fitting)
    )


def test_counts_of_microbatches():
    assert microbatch_counts(72) == (1, 2, 3, 6, 9, 18, 36, 72)
    assert microbatch_counts(5) == (1, 5)
    assert microbatch_counts(28, devices=4) == (1, 7)
    for rows in (*range(1, 200), 1009, 4093, 4096):
        counts = microbatch_counts(rows)
        assert counts[0] == 1
        assert counts[-1] == rows
        assert len(counts) <= 2 + math.log(rows, 1.5)
        assert all(padding_share(rows, count) <= 1 / 8 for count in counts)
        # Enough of them: from one to the next less than threefold, where rows are not very few.
        assert all(b < 3 * a for a, b in itertools.pairwise(counts)) or rows < 60


def test_what_is_shared_between_layers_of_one_kind_is_right_for_each():
    model = template("qwen3_5", tied=False, blocks=6)
    assert len({layer.kind for layer in model.spec.layers}) == 4
    request = build_request(
        model, load_profile("rtx3090"), batch_rows=ROWS, sequence_length=TOKENS, nvme_bytes=10**9
    )
    problem = problem_of(request, settings_of(request)[0])
    assert problem.kinds is not None
    shared, own = (TimeModel(p) for p in (problem, dataclasses.replace(problem, kinds=None)))
    for mine, its in zip(shared.operations, own.operations, strict=True):
        assert mine.seconds.constant == pytest.approx(its.seconds.constant, rel=1e-12)
        assert mine.seconds.terms == pytest.approx(its.seconds.terms, rel=1e-12)
    mine, its = (memory_rows(model.problem, model.choices) for model in (shared, own))
    np.testing.assert_array_equal(mine.matrix, its.matrix)
    np.testing.assert_array_equal(mine.constants, its.constants)


def test_command_writes_a_plan_a_picture_and_a_trace(tmp_path, capsys):
    question = "--model SmolLM2-135M --hardware rtx3090 --batch 2 --seq 64 --microbatches 2"
    arguments = [*question.split(), "--no-cache", "--time-limit", "4"]
    files = [tmp_path / name for name in ("plan.json", "step.png", "step.trace.json", "page.html")]
    outputs = ["--out", str(files[0]), "--png", str(files[1]), "--trace", str(files[2])]
    outputs += ["--plot", str(files[3])]
    command.plan_command([*arguments, *outputs])
    plan = load_plan(files[0])
    assert (plan.batch_rows, plan.sequence_length, plan.prediction is not None) == (2, 64, True)
    assert files[1].read_bytes()[:4] == b"\x89PNG"
    assert files[2].stat().st_size > 1000
    page = files[3].read_text()
    # A map of the blocks, and a step of the plan and of each baseline.
    assert page.count('src="data:image/png;base64,') == 1 + 1 + len(BASELINES)
    assert all(f"<h2>{name}: " in page for name in ("LazyJAX", *BASELINES))
    assert f"{plan.prediction.period_seconds:.4g} s a step" in page
    assert "<script" not in page
    printed_lines = capsys.readouterr().out
    assert "executed" in printed_lines
    assert "critical" in printed_lines


def test_command_plans_for_several_devices_and_hosts(capsys, monkeypatch):
    """Memory is said of one device and of one host, whose devices share it."""
    monkeypatch.setenv("COLUMNS", "160")
    words = "--model SmolLM2-135M --hardware h100-sxm --batch 8 --seq 64 --microbatches 2 --no-cache"
    question = words.split()
    command.plan_command([*question, "--devices", "4", "--hosts", "2", "--time-limit", "4"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "h100-sxm (NVIDIA H100 SXM 80 GB), 4 devices in 2 hosts, fits" in printed
    memory = r"of 81\.6 GB of each device's memory and \S+ of 1,100 GB of each host's memory"
    assert re.search(memory, printed)
    assert re.search(r"interconnect \S+ \S+%", printed)
    narrow = [*question, "--devices", "4", "--hosts", "1", "--host-gb", "0.5"]
    with pytest.raises(InfeasibleError, match=r"host memory: .* 0\.50 may be used"):
        command.plan_command(narrow)


def test_command_plans_packed_rows(capsys, monkeypatch):
    """The same question but for the segments takes less time."""
    monkeypatch.setenv("COLUMNS", "160")
    small = template("qwen2", tied=True, blocks=1)
    monkeypatch.setattr(command, "build_template", lambda architecture, attention: small)
    words = "--model SmolLM2-135M --hardware rtx3090 --batch 2 --seq 4096 --microbatches 2 --no-cache"
    words += " --interlayer-home device --time-limit 0"
    periods = []
    for more in ([], ["--packed-segment-tokens", "200"]):
        command.plan_command([*words.split(), *more])
        printed = " ".join(capsys.readouterr().out.split())
        periods.append(float(re.search(r"([\d.]+) s a step", printed)[1]))
    assert periods[1] < periods[0]
    visited, pairs = uniform_packing(200, 2, 4096).visits(4096, 1)
    assert (visited < 20, pairs) == (True, 36)
    sentence = f"segments of 200 tokens: attention visits {visited} of 36 pairs of blocks."
    assert sentence in printed
    with pytest.raises(PlanError, match="--attention cudnn sees one segment a row"):
        command.plan_command([*words.split(), "--packed-segment-tokens", "200", "--attention", "cudnn"])


def test_hosts_share_what_a_model_owns():
    """The parts of all devices of a host are on it: as many hosts, as little on each."""
    model, machine = template("qwen2", tied=False), load_profile("h100-sxm")
    requests = {
        (devices, hosts): build_request(
            model, machine.spread(devices, hosts, source="test"), batch_rows=4, sequence_length=TOKENS
        )
        for devices, hosts in ((1, 1), (4, 1), (4, 2), (4, 4))
    }
    for tier in (Tier.HOST, Tier.NVME):
        for request in requests.values():
            whole = request.in_one_place(tier, request.capacity[tier])
            assert whole == pytest.approx(requests[1, 1].capacity[tier], rel=1e-9)
    owned = {key: request.static_host_bytes for key, request in requests.items()}
    assert owned[4, 1] == owned[4, 2] == owned[4, 4]
    on_a_host = {key: requests[key].in_one_place(Tier.HOST, size) for key, size in owned.items()}
    assert on_a_host[4, 1] == 2 * on_a_host[4, 2] == 4 * on_a_host[4, 4]


def test_batches_that_cannot_be_cut_are_refused(request_):
    with pytest.raises(PlanError, match="microbatches: 7 cannot be made of 8 rows"):
        dataclasses.replace(request_, microbatches=7)
    with pytest.raises(PlanError, match="3 have 3 rows each, which 2 devices cannot share"):
        dataclasses.replace(request_, microbatches=3, devices=2)
    with pytest.raises(PlanError, match="rows: must be at least 1"):
        dataclasses.replace(request_, batch_rows=0)
    with pytest.raises(PlanError, match="cannot be split over 3 devices"):
        dataclasses.replace(request_, devices=3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"\xff\xfe" + text,
        lambda text: text.replace(b'"saved": {', b'"saved": {"nothing": "host",', 1),
        lambda text: text.replace(b'"architecture": "', b'"architecture": "another-', 1),
        lambda text: re.sub(rb'"gap": [0-9.e-]+', b'"gap": -5.0', text),
        lambda text: re.sub(rb'"period_seconds": [0-9.e-]+', b'"period_seconds": 99.0', text),
    ],
)
def test_damaged_plans_of_the_cache_are_solved_again(request_, found, folder, damage):
    plan = found.plan
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    again, solved = solve_cached(request_, folder, time_limit_seconds=LIMIT)
    assert solved is not None
    assert again.prediction.period_seconds == pytest.approx(plan.prediction.period_seconds, rel=0.02)


def test_an_unsure_plan_of_the_cache_is_solved_again_where_there_is_more_time(request_, found, tmp_path):
    plan = found.plan
    prediction = plan.prediction.model_copy(update={"gap": 0.4, "solve_seconds": 200.0})
    cache.store(tmp_path, request_key(request_), plan.model_copy(update={"prediction": prediction}))
    _, solved = solve_cached(request_, tmp_path, time_limit_seconds=250.0)
    assert solved is None
    again, solved = solve_cached(request_, tmp_path, time_limit_seconds=500.0)
    assert solved is not None
    assert again.prediction.period_seconds <= plan.prediction.period_seconds * (1 + 1e-6)


def test_a_fixed_number_of_microbatches_too_few_is_told(request_):
    """The message names what was tried: another number fits, and so it says."""
    device = {
        count: min(leanest_device_bytes(request_, settings) for settings in settings_of(request))
        for count in (1, 8)
        for request in [dataclasses.replace(request_, microbatches=count)]
    }
    assert device[8] < device[1]
    capacity = {**request_.capacity, Tier.DEVICE: (device[1] + device[8]) // 2}
    coarse = dataclasses.replace(request_, microbatches=1, capacity=capacity)
    with pytest.raises(InfeasibleError) as caught:
        solve_cached(coarse, None, time_limit_seconds=LIMIT, offers={"two of it": coarse, "all": request_})
    told = re.search(r"it fits with (\d+) microbatches", str(caught.value))
    assert told is not None
    assert feasible(dataclasses.replace(coarse, microbatches=int(told[1])))
    assert ", or all" in str(caught.value)
    assert "two of it" not in str(caught.value)


class WithoutBranching(Program):
    """Must not be branched on."""

    def branch(self, *arguments, **keywords):
        raise AssertionError("cases have closed everything")


def test_what_cases_close_is_not_branched_on(request_, monkeypatch):
    asked = []

    def closing(program, start, *, cutoff_seconds, **given):
        asked.append(start)
        if start is not None:
            return start, program.model.period(start)
        return None, cutoff_seconds if math.isfinite(cutoff_seconds) else program.relax()

    monkeypatch.setattr(search, "Program", WithoutBranching)
    monkeypatch.setattr(search, "divide", closing)
    found = find_plan(request_, time_limit_seconds=LIMIT, relative_gap=0.0)
    assert found.plan is not None
    assert found.gap == 0
    # First without a plan, then with one.
    assert asked[0] is None
    assert any(start is not None for start in asked)


class WithoutDeepPlans(Program):
    """Settings with a second slab have a finite relaxation, but, say, no plan."""

    def descend(self, *arguments, **keywords):
        return None if self.problem.settings.prefetch > 1 else super().descend(*arguments, **keywords)

    def branch(self, *arguments, **keywords):
        deep = self.problem.settings.prefetch > 1
        return (None, math.inf) if deep else super().branch(*arguments, **keywords)


def test_what_looks_pointless_is_looked_at_where_nothing_else_fits(request_, monkeypatch):
    """With finite relaxations of two slabs, settings with one are left out at first."""
    fixed = dataclasses.replace(request_, microbatches=2)
    found = find_plan(fixed, time_limit_seconds=LIMIT)
    assert 1 not in {attempt.settings.prefetch for attempt in found.attempts}
    monkeypatch.setattr(search, "Program", WithoutDeepPlans)
    monkeypatch.setattr(search, "leanest_plan", lambda problem: None)
    monkeypatch.setattr(search, "divide", lambda program, start, **given: (start, program.relax()))
    found = find_plan(fixed, time_limit_seconds=LIMIT)
    assert found.plan is not None
    assert {attempt.settings.prefetch for attempt in found.attempts} >= {1, 2}


def _looser(request, **fields):
    one = settings_of(dataclasses.replace(request, microbatches=1))[0].model_copy(update=fields)
    found = looser_settings(request, one)
    assert all(each.model_copy(update={f: getattr(one, f) for f in _LOOSE}) == one for each in found)
    return [tuple(getattr(each, field) for field in _LOOSE) for each in found]


_LOOSE = ("prefetch", "backward_prefetch", "offload_window")


def test_where_the_gap_stays_open_copies_get_more_time(request_, monkeypatch):
    """Offloads by layer for few microbatches only; what a request fixes stays."""
    assert _looser(request_) == [(3, 3, 4), (2, 2, 4)]
    assert _looser(request_, offload_window=4) == [(3, 3, 4)]
    assert _looser(request_, microbatches=3) == [(3, 3, 2)]
    assert _looser(dataclasses.replace(request_, prefetch=2)) == [(2, 3, 4), (2, 2, 4)]
    fixed = dataclasses.replace(request_, prefetch=2, backward_prefetch=2)
    assert _looser(fixed) == [(2, 2, 4)]
    assert _looser(fixed, microbatches=3) == []

    def close(search, candidate, *rest):
        candidate.bound_seconds = math.inf

    monkeypatch.setattr(search, "_branch", close)
    tight = dataclasses.replace(request_, microbatches=1)
    found = find_plan(tight, time_limit_seconds=LIMIT, relative_gap=0.0)
    periods = {
        tuple(getattr(attempt.settings, field) for field in _LOOSE): attempt.period_seconds
        for attempt in found.attempts
    }
    assert set(periods) >= {(2, 2, 2), (3, 3, 4)}
    assert found.layer_period_seconds == min(period for period in periods.values() if period is not None)


def test_longer_copies_need_no_plan_that_fits_to_start_from(request_, monkeypatch):
    """They hold memory for longer: where the plan found before does not fit, the relaxation leads to one."""

    class Roomless(Program):
        def fits(self, values):
            return self.problem.settings.offload_window == 2 and super().fits(values)

    monkeypatch.setattr(search, "Program", Roomless)
    monkeypatch.setattr(search, "_branch", lambda of, one, *rest: setattr(one, "bound_seconds", math.inf))
    tight = dataclasses.replace(request_, microbatches=1, prefetch=2, backward_prefetch=2)
    found = find_plan(tight, time_limit_seconds=LIMIT, relative_gap=0.0)
    periods = {attempt.settings.offload_window: attempt.period_seconds for attempt in found.attempts}
    assert periods[4] is not None


def test_command_refuses_before_it_solves(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "find_plan", None)
    question = "--model SmolLM2-135M --hardware rtx3090 --seq 64 --no-cache".split()
    with pytest.raises(PlanError, match="--batch"):
        command.plan_command(question)
    with pytest.raises(PlanError, match="--explain 99: the model has layers 0 to 31"):
        command.plan_command([*question, "--batch", "2", "--explain", "99"])
    with pytest.raises(ConfigError, match="--batch: must be a whole number from 1 on, it is '0'"):
        command.plan_command([*question, "--batch", "0"])
    with pytest.raises(ConfigError, match="--time-limit: must be a number from 0 on, it is 'nan'"):
        command.plan_command([*question, "--batch", "2", "--time-limit", "nan"])
    with pytest.raises(ConfigError, match="unrecognized arguments: --bach 2; did you mean --batch"):
        command.plan_command([*question, "--bach", "2"])
    with pytest.raises(PlanError, match="give one of them"):
        command.plan_command([*question, "--batch", "2", "--max-batch", "4"])
    with pytest.raises(PlanError, match="rows: 3 cannot be split over 2 devices"):
        command.plan_command([*question, "--batch", "3", "--devices", "2"])
    with pytest.raises(ProfileError, match="hosts: 3 does not divide 4, the number of all devices"):
        command.plan_command([*question, "--batch", "4", "--devices", "4", "--hosts", "3"])
    with pytest.raises(ProfileError, match="profile rtx3090: hosts: 2 does not divide 1"):
        command.plan_command([*question, "--batch", "4", "--hosts", "2"])
    with pytest.raises(ProfileError, match="profile gh200: interconnect_bytes_per_second: needed for more"):
        command.plan_command([*question, "--batch", "4", "--hardware", "gh200", "--devices", "2"])
    with pytest.raises(ConfigError, match="--devices: must be a whole number from 1 on"):
        command.plan_command([*question, "--batch", "4", "--devices", "0"])
    for option in ("--out", "--trace"):
        with pytest.raises(PlanError, match="there is no folder"):
            command.plan_command([*question, "--batch", "2", option, str(tmp_path / "absent" / "file")])
        with pytest.raises(PlanError, match="is a folder"):
            command.plan_command([*question, "--batch", "2", option, str(tmp_path)])
    for picture in ("absent/step.png", "step.xyz"):
        with pytest.raises(RunError, match=r"no folder|one of \.png"):
            command.plan_command([*question, "--batch", "2", "--png", str(tmp_path / picture)])
    for picture in ("absent/step.html", "step.xyz"):
        with pytest.raises(RunError, match=r"no folder|one of \.png"):
            command.plan_command([*question, "--batch", "2", "--plot", str(tmp_path / picture)])
    with pytest.raises(PlanError, match="microbatches: 3"):
        command.plan_command([*question, "--batch", "2", "--microbatches", "3"])


def test_a_plan_of_another_batch_is_refused(request_, tmp_path):
    other = plan_of(request_, "recompute_all")
    other.model_copy(update={"model": "SmolLM2-135M"}).save(tmp_path / "plan.json")
    question = f"--model SmolLM2-135M --hardware rtx3090 --batch 4 --seq 64 --plan {tmp_path / 'plan.json'}"
    with pytest.raises(PlanError, match="rows is 8, but 4 is asked for"):
        command.plan_command(question.split())
    same = question.replace("--batch 4", "--batch 8").replace("--seq 64", f"--seq {TOKENS}")
    other.model_copy(update={"optimizer": "fp32_adamw"}).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="made for optimizer fp32_adamw, but hybrid8bit is asked for"):
        command.plan_command(same.split())


def test_models_are_read_from_folders_and_files(tmp_path):
    document = to_hf_config(architecture("SmolLM2-135M"))
    (tmp_path / "config.json").write_text(json.dumps(document))
    from_folder = command.read_architecture(str(tmp_path))
    from_file = command.read_architecture(str(tmp_path / "config.json"))
    assert from_folder.model_copy(update={"name": "x"}) == from_file.model_copy(update={"name": "x"})
    assert from_folder.num_hidden_layers == architecture("SmolLM2-135M").num_hidden_layers


def leanest_device_bytes(request, settings):
    nothing = dataclasses.replace(request, capacity={**request.capacity, Tier.DEVICE: 0})
    return memory_shortfall(problem_of(nothing, settings, lean=True))[Tier.DEVICE]


def printed(renderable):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


LONG = 65536


def long_request(device_bytes, **changes):
    """One row of 65,536 tokens of a tiny model."""
    made = build_request(
        template("qwen2", tied=False), load_profile("rtx3090"), batch_rows=1, sequence_length=LONG,
        nvme_bytes=0, device_bytes=device_bytes,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_chunks_of_a_row_are_a_decision_where_a_microbatch_is_one_long_row(request_):
    assert {setting.token_chunk for setting in settings_of(request_)} == {None}
    request = long_request(10**9)
    assert {setting.token_chunk for setting in settings_of(request)} == {None, 32768, 8192, 2048}
    several = dataclasses.replace(request, batch_rows=4)
    cut = {s.microbatches for s in settings_of(several) if s.token_chunk is not None}
    assert cut == {4}
    fixed = build_request(
        template("qwen2", tied=False).in_chunks(512),
        load_profile("rtx3090"),
        batch_rows=1,
        sequence_length=LONG,
    )
    assert {setting.token_chunk for setting in settings_of(fixed)} == {512}


def test_the_planner_cuts_a_row_that_does_not_fit_whole():
    """Where the whole row does not fit, chunks do; the plan answers the question with its chunk fixed."""
    roomy = find_plan(long_request(10**10), time_limit_seconds=LIMIT).plan
    assert roomy.token_chunk is None
    whole = dataclasses.replace(long_request(10**10), chunked=None)
    least = 10**10 - 1
    low = 0
    while least - low > 10**6:
        middle = (least + low) // 2
        if feasible(dataclasses.replace(whole, capacity={**whole.capacity, Tier.DEVICE: middle})):
            least = middle
        else:
            low = middle
    tight = long_request(int(0.9 * low))
    with pytest.raises(InfeasibleError):
        solve_cached(dataclasses.replace(tight, chunked=None), None, time_limit_seconds=LIMIT)
    plan, found = solve_cached(tight, None, time_limit_seconds=LIMIT)
    assert plan.token_chunk in (32768, 8192, 2048)
    assert found.gap <= 0.02
    own = tight.at(plan)
    assert own.made_for["token_chunk"] == plan.token_chunk
    period = verify_for(own, plan).period_seconds
    assert period == verify_for(tight, plan).period_seconds
    assert period == pytest.approx(plan.prediction.period_seconds, rel=1e-9)
    assert request_key(tight) != request_key(own)
