"""Plans are verified, found again, and swapped only where measured times say so."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import pathlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from rich.console import Console

from lazyjax.config import Config, ConfigError, load_config
from lazyjax.execution.build import executor_of
from lazyjax.execution.calibrate import Calibration
from lazyjax.execution.executor import Executor
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.execution.slab_paths import PathChoice
from lazyjax.hardware.load import CpuReading
from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import build_template
from lazyjax.optim.adamw import Fp32AdamW
from lazyjax.optim.clipping import ClipRule
from lazyjax.planning.costs.seconds import Costs, MeasuredKey, measured_key
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.planning.plan.document import Plan, Prediction, load_plan
from lazyjax.planning.planner import search, service, solver
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.search import SearchResult
from lazyjax.planning.program.schedule import COMPUTE_ACTIONS, Action, Operation
from lazyjax.planning.program.simulate import simulate
from lazyjax.planning.program.verify import VerificationError
from lazyjax.storage.host import HostMemoryError
from lazyjax.storage.nvme import NvmeError, NvmeStore
from lazyjax.timeline import Resource
from lazyjax.training import calibration, replanning, setup, start_plan, timed_costs
from lazyjax.training.inputs import read_architecture
from lazyjax.training.replanning import Replanner, TimedStep, measured_costs, replan
from lazyjax.training.start_plan import choose_plan
from tests import reference, tiny

ROWS, TOKENS, RATE = 4, 12, 1e-3
TEMPLATE = tiny.template("qwen2", tied=False, blocks=2)
NAMES = tiny.residual_names(TEMPLATE)
BLOCK = TEMPLATE.spec.layers[1].kind
EVERYTHING = tuple(sorted(NAMES[1]))
REQUEST = build_request(
    TEMPLATE, load_profile("h800-paper"), batch_rows=ROWS, sequence_length=TOKENS, optimizer="fp32_adamw",
    compute_dtype="float32", gradient_dtype="float32", nvme_bytes=0,
)  # fmt: skip
START = recompute_all(TEMPLATE.spec, NAMES, batch_rows=ROWS, sequence_length=TOKENS, microbatches=2)


def profile_costs() -> Costs:
    costs = REQUEST.costs(START.microbatch_rows)
    assert isinstance(costs, Costs)
    return costs


def costs_with(recomputing_seconds: float, reading_seconds: float) -> Costs:
    """Backward calls of blocks that recompute everything or read anything; all else is quick."""
    measured = {}
    sets = itertools.chain.from_iterable(
        itertools.combinations(EVERYTHING, count) for count in range(len(EVERYTHING) + 1)
    )
    for saved, (accumulates, last) in itertools.product(sets, ((False, False), (True, True))):
        seconds = reading_seconds if saved else recomputing_seconds
        measured[MeasuredKey(BLOCK, Action.BACKWARD, saved, accumulates, last)] = seconds
    return profile_costs().with_measured(measured)


@contextlib.contextmanager
def running(nvme_folder: pathlib.Path | None = None) -> Iterator[Executor]:
    parameters = reference.random_parameters(TEMPLATE, seed=0)
    store = tiny.filled_store(TEMPLATE, parameters)
    kernels = Kernels(TEMPLATE, data_mesh(jax.devices()[:1]), "float32", "float32")
    executor = executor_of(
        kernels, START, store, Fp32AdamW(eps=1e-6), clip=ClipRule(), nvme_folder=nvme_folder
    )
    yield executor
    executor.close()


@pytest.mark.parametrize(("reading_seconds", "swaps"), [(0.1, True), (0.99, False), (1.0, False)])
def test_a_swap_needs_costs_that_are_better_by_three_percent(reading_seconds: float, swaps: bool) -> None:
    with running() as executor:
        outcome = replan(REQUEST, costs_with(1.0, reading_seconds), executor, step=3)
        assert outcome is not None
        assert outcome.swapped == swaps
        assert (executor.plan == outcome.plan) == swaps
        assert (executor.plan == START) == (not swaps)
        # Two blocks, two microbatches: four backward calls, and next to nothing besides.
        assert outcome.running_seconds == pytest.approx(4.0, rel=0.01)
        assert outcome.candidate_seconds == pytest.approx(4 * reading_seconds, rel=0.01)


def losses(swap_after: int | None) -> list[float]:
    """Losses of five steps, of which the later ones run under another plan."""
    found = []
    with running() as executor:
        for step in range(1, 6):
            batch = reference.random_batch(step, ROWS, TOKENS, tiny.VOCABULARY)
            found.append(executor.train_step(batch, RATE).loss)
            if step == swap_after:
                outcome = replan(REQUEST, costs_with(1.0, 0.1), executor, step=step)
                assert outcome is not None
                assert outcome.swapped
                assert executor.plan.layers[1].saved
                assert not START.layers[1].saved
    return found


def test_a_swap_changes_no_loss() -> None:
    assert losses(swap_after=2) == pytest.approx(losses(swap_after=None), rel=1e-5)


def test_measured_costs_are_the_times_of_the_steps() -> None:
    def seconds(operation: Operation) -> float:
        if operation.action in COMPUTE_ACTIONS:
            return 0.1 + 0.01 * operation.layer
        return 0.5 if operation.action is Action.UPDATE else operation.bytes / 3e6

    with running() as executor:
        schedule = executor.schedule
    events = simulate(schedule, seconds).timeline.events
    # Half as many tokens in half the time say the same.
    halved = tuple(
        dataclasses.replace(e, start_seconds=e.start_seconds / 2, end_seconds=e.end_seconds / 2)
        for e in events
    )
    costs = measured_costs(profile_costs(), schedule, [TimedStep(halved, 0.5)])
    # Blocks share their kernels, so that theirs is the median over both.
    by_kernel = defaultdict(list)
    for operation in schedule.operations:
        if operation.action in COMPUTE_ACTIONS:
            by_kernel[measured_key(operation, TEMPLATE.spec)].append(seconds(operation))
    for operation in schedule.operations:
        if operation.action in COMPUTE_ACTIONS:
            expected = statistics.median(by_kernel[measured_key(operation, TEMPLATE.spec)])
            assert costs.operation_seconds(operation) == pytest.approx(expected)
        elif operation.action in (Action.FETCH, Action.GRADIENT_OUT):
            assert costs.operation_seconds(operation) == pytest.approx(operation.bytes / 6e6)


def test_the_replanner_answers_once_at_its_step() -> None:
    replanner = Replanner(REQUEST, profile_costs(), after_steps=2)
    with running() as executor:
        answers = []
        for step in range(1, 5):
            batch = reference.random_batch(step, ROWS, TOKENS, tiny.VOCABULARY)
            result = executor.train_step(batch, RATE)
            answers.append(replanner.after_step(step, executor, result.padded_tokens))
    assert [answer is not None for answer in answers] == [False, True, False, False]
    assert answers[1] is not None
    assert answers[1].running_seconds > 0


@pytest.mark.parametrize("fails", [True, False])
def test_a_run_goes_on_where_planning_again_fails_or_finds_nothing(fails, monkeypatch) -> None:
    def no_plan(request, **keywords):
        if fails:
            raise VerificationError("operation 1 waits for operation 2")
        return SearchResult(None, (), math.inf, 0.0, {}, 0.0)

    monkeypatch.setattr(replanning, "find_plan", no_plan)
    replanner, said = Replanner(REQUEST, profile_costs(), after_steps=1), list[str]()
    with running() as executor:
        result = executor.train_step(reference.random_batch(1, ROWS, TOKENS, tiny.VOCABULARY), RATE)
        assert replanner.after_step(1, executor, result.padded_tokens, said.append) is None
        assert executor.plan == START
    assert "planning again after step 1" in said[0]
    assert ("operation 1 waits" in said[1]) == fails
    assert said[1].endswith("the plan stays")


def on_the_drive() -> Plan:
    """START with all optimizer state on NVMe, predicted to take next to no time."""
    layers = tuple(layer.model_copy(update={"state": "nvme"}) for layer in START.layers)
    return START.model_copy(update={"layers": layers, "prediction": Prediction(period_seconds=1e-9)})


@pytest.mark.parametrize(
    "error",
    [NvmeError("write of 'state-2-m' failed"), HostMemoryError("no host memory for a copy"), None],
    ids=["drive", "memory", "refused"],
)
def test_a_plan_that_cannot_be_taken_leaves_the_running_one(error, tmp_path, monkeypatch) -> None:
    """The drive fails in the middle of moving state, memory ends, or `set_plan` refuses the plan."""
    batches = [reference.random_batch(step, ROWS, TOKENS, tiny.VOCABULARY) for step in (1, 2, 3)]
    with running() as untouched:
        expected = [untouched.train_step(batch, RATE).loss for batch in batches]
    found = SearchResult(on_the_drive(), (), 0.0, 0.0, {}, 0.0)
    monkeypatch.setattr(replanning, "find_plan", lambda request, **keywords: found)
    monkeypatch.setattr(replanning, "verify_for", lambda request, plan: None)
    if error is not None:
        write = NvmeStore.write

        def failing(self: NvmeStore, key: str, source: np.ndarray) -> object:
            if key.startswith("state-2"):
                raise error
            return write(self, key, source)

        monkeypatch.setattr(NvmeStore, "write", failing)
    replanner, said = Replanner(REQUEST, profile_costs(), after_steps=2), list[str]()
    with running(None if error is None else tmp_path) as executor:
        losses = []
        for step, batch in enumerate(batches, start=1):
            result = executor.train_step(batch, RATE)
            losses.append(result.loss)
            assert replanner.after_step(step, executor, result.padded_tokens, said.append) is None
            assert executor.plan == START
    assert losses == expected
    words = "give a folder for it" if error is None else str(error)
    assert said[-1].startswith("planning again failed (")
    assert words in said[-1]
    assert said[-1].endswith("); the plan stays")


def test_a_run_plans_again_and_goes_on_though_the_solver_crashes(monkeypatch) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(solver, "COMMAND", [sys.executable, "-c", crash])
    solver.shared_process().close()
    replanner, said = Replanner(REQUEST, profile_costs(), after_steps=1, time_limit_seconds=2.0), list[str]()
    with running() as executor:
        batches = [reference.random_batch(step, ROWS, TOKENS, tiny.VOCABULARY) for step in (1, 2)]
        result = executor.train_step(batches[0], RATE)
        answer = replanner.after_step(1, executor, result.padded_tokens, said.append)
        assert math.isfinite(executor.train_step(batches[1], RATE).loss)
    solver.shared_process().close()
    assert answer is not None
    assert answer.plan.prediction is not None
    assert any("SIGSEGV" in line for line in said)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Gives a configuration of a short run; plans are cached in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "small.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 2048,
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
                "initializer_range": 0.02, "hidden_act": "silu", "attention_bias": False,
                "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            }
        )
    )  # fmt: skip

    def make(*words: str) -> Config:
        fixed = {
            "model.architecture": tmp_path / "small.json", "data.sequence-length": 64, "data.rows": 2,
            "data.take": 60,
            "training.steps": 3, "training.evaluate-rows": 0, "run.folder": tmp_path / "runs",
            "run.name": "run", "run.save-model": "false", "plan.planner": "recompute_all",
            "optimizer.name": "fp32_adamw",
        }  # fmt: skip
        given = {f"--{key}": str(value) for key, value in fixed.items()}
        given |= dict(zip(words[::2], words[1::2], strict=True))
        return load_config(None, [word for pair in given.items() for word in pair])

    return make


def test_a_solved_plan_is_found_again_and_verified(small, monkeypatch) -> None:
    config = small("--plan.planner", "milp", "--plan.hardware", "h800-paper")
    template = build_template(read_architecture(config)[0])
    plan = choose_plan(config, template)
    assert plan.planner == "milp"
    assert plan.prediction is not None

    def refuse(*arguments, **keywords):
        raise AssertionError("solved although the plan is known")

    monkeypatch.setattr(service, "find_plan", refuse)
    assert choose_plan(config, template) == plan


def test_a_rule_promises_a_time_where_the_machine_is_named(small) -> None:
    rule = ("--plan.planner", "megatrain")
    config = small(*rule, "--plan.hardware", "h800-paper")
    template = build_template(read_architecture(config)[0])
    plan = choose_plan(config, template)
    request = calibration.make_request(config, template, microbatches=plan.microbatches)
    assert plan.prediction == search.predict(request, plan)
    assert choose_plan(small(*rule), template).prediction is None


def test_without_residuals_nothing_is_kept_inside_blocks(small) -> None:
    config = small("--plan.planner", "milp", "--plan.hardware", "h800-paper")
    template = build_template(read_architecture(config)[0])
    free = choose_plan(config, template)
    assert any(layer.saved for layer in free.layers)
    bare = choose_plan(
        small("--plan.planner", "milp", "--plan.hardware", "h800-paper", "--plan.keep-residuals", "false"),
        template,
    )
    assert not any(layer.saved for layer in bare.layers)
    assert bare.prediction.period_seconds > free.prediction.period_seconds
    with pytest.raises(ConfigError, match="keep_residuals limits the planner milp"):
        small("--plan.planner", "megatrain", "--plan.keep-residuals", "false")


@pytest.mark.parametrize("planner", ["milp", "megatrain"])
def test_a_plan_that_fails_verification_never_runs(small, tmp_path, monkeypatch, planner) -> None:
    def fail(*arguments, **keywords):
        raise VerificationError("operation 1 waits for operation 2")

    monkeypatch.setattr(start_plan if planner == "megatrain" else service, "verify", fail)
    with pytest.raises(VerificationError):
        setup.train(
            small("--plan.planner", planner, "--plan.hardware", "h800-paper"), Console(file=io.StringIO())
        )
    assert not (tmp_path / "runs").exists()


def test_a_run_calibrates_plans_again_and_records_it(small, tmp_path, monkeypatch) -> None:
    # Another program takes a CPU and a half whenever someone looks.
    def reading() -> CpuReading:
        now = time.perf_counter()
        return CpuReading(now, 1.5 * now)

    monkeypatch.setattr(start_plan, "read_cpus", reading)
    monkeypatch.setattr(start_plan, "usable_cpus", lambda: 2)
    words = ["--plan.planner", "milp", "--plan.hardware", "calibrate", "--plan.replan-after-steps", "2"]
    # One microbatch size: few kernels to compile.
    words += ["--data.rows", "1", "--data.sequence-length", "32", "--training.steps", "3"]
    console = Console(file=io.StringIO(), width=200)
    summary = setup.train(small(*words), console)
    assert (summary["status"], summary["planner"]) == ("finished", "milp")
    assert summary["other_cpus_while_calibrated"] == pytest.approx(1.5, rel=1e-3)
    text = console.file.getvalue()
    lines = ("measuring the rates", "timing kernels of microbatches of 1 rows", "planning:", "predicted:")
    assert [line for line in lines if line not in text] == []
    folder = tmp_path / "runs" / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (record,) = [line for line in lines if line["kind"] == "replan"]
    assert record["step"] == 2
    assert (folder / "plan-until-step-2.json").exists() == record["swapped"]
    assert load_plan(folder / "plan.json").fingerprint() == summary["plan"]
    assert "planning again after step 2" in text
    assert "planned again after step 2" in text
    assert "warning: other programs took 1.5 of 2 CPUs meanwhile" in text
    assert "1.5 during calibration" in text


def test_after_a_swap_the_records_speak_of_the_new_plan(small, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(replanning.cache, "worth_swapping", lambda running, candidate: True)
    words = ["--plan.planner", "megatrain", "--plan.hardware", "h800-paper"]
    summary = setup.train(small(*words, "--plan.replan-after-steps", "2"), Console(file=io.StringIO()))
    folder = tmp_path / "runs" / "run"
    last, first = (load_plan(folder / name) for name in ("plan.json", "plan-until-step-2.json"))
    assert (first.planner, last.planner) == ("megatrain", "milp")
    assert (summary["planner"], summary["plan"]) == ("milp", last.fingerprint())
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_only_the_ends_of_the_microbatch_sizes_are_timed(small, monkeypatch) -> None:
    timed = []

    def calibrate(kernels, keys, *, microbatch_rows, **options):
        timed.append(microbatch_rows)
        return Calibration(dict.fromkeys(keys, 1e-3 * microbatch_rows), {})

    monkeypatch.setattr(timed_costs, "calibrate", calibrate)
    config = small("--plan.planner", "milp", "--plan.hardware", "calibrate", "--data.rows", "8")
    template = build_template(read_architecture(config)[0])
    request = calibration.make_request(config, template)
    # Every kernel takes time in proportion to its rows, and so does what is not timed, nearly.
    block = Operation(0, Action.FORWARD, Resource.COMPUTE, 1, 0, 0)
    assert request.costs(8).operation_seconds(block) == pytest.approx(8e-3)
    assert 1e-3 < request.costs(2).operation_seconds(block) < 4e-3
    assert timed == [1, 8]
    timed.clear()
    calibration.make_request(config, template, microbatches=2)
    assert timed == [4]


class _Asked(Exception):
    """Ends a run where the planner is asked."""


@pytest.mark.parametrize("replans", [False, True])
@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_a_run_of_packed_rows_plans_with_the_segments_of_its_data(
    small, monkeypatch, batching: str, replans: bool
) -> None:
    asked = []

    def ask(*arguments, packing, **options):
        asked.append(packing)
        raise _Asked

    words = ["--data.batching", batching, "--data.sequence-length", "2048", "--plan.hardware", "h800-paper"]
    # Without the planner costs are wanted for planning again.
    words += ["--plan.planner", "megatrain", "--plan.replan-after-steps", "2"] if replans else []
    config = small(*(words if replans else [*words, "--plan.planner", "milp"]))
    monkeypatch.setattr(start_plan, "make_request", ask)
    with pytest.raises(_Asked):
        setup.train(config, Console(file=io.StringIO()))
    (packing,) = asked
    if batching == "padded":
        assert packing is None
        return
    # Of these few rows all batches are in the sample.
    assert [len(batch) for batch in packing.batches] == [2] * len(packing.batches)
    assert all(0 < sum(row) <= 2048 for batch in packing.batches for row in batch)
    template = build_template(read_architecture(config)[0])
    block = Operation(0, Action.BACKWARD, Resource.COMPUTE, 1, 0, 0)
    whole, packed = (
        calibration.make_request(config, template, packing=each).costs(1).operation_flops(block)
        for each in (None, packing)
    )
    assert packed < whole


def test_plans_count_on_the_rate_of_the_way_that_slabs_take(small, monkeypatch) -> None:
    path = PathChoice("ring", "the fastest of pageable, ring", {"pageable": 1e9, "ring": 3e9})
    config = small("--plan.planner", "milp", "--plan.hardware", "calibrate", "--data.rows", "8")
    template = build_template(read_architecture(config)[0])
    here = load_profile("h800-paper")
    monkeypatch.setattr(calibration, "measured_profile", lambda *arguments: here)
    monkeypatch.setattr(
        timed_costs, "calibrate", lambda kernels, keys, **options: Calibration(dict.fromkeys(keys, 1e-3), {})
    )
    fetch, reload = (
        Operation(0, action, Resource.H2D, 1, 0, 0, bytes=10**9) for action in (Action.FETCH, Action.RELOAD)
    )
    for slab_path, rate in ((path, 3e9), (None, here.h2d_bytes_per_second)):
        costs = calibration.make_request(config, template, slab_path=slab_path).costs(4)
        assert costs.operation_seconds(fetch) == pytest.approx(1e9 / (rate * here.duplex_factor))
        # Activations are pinned and go the link's own way.
        of_link = here.h2d_bytes_per_second * here.duplex_factor
        assert costs.operation_seconds(reload) == pytest.approx(1e9 / of_link)


def test_planning_again_leaves_a_step_for_the_new_plan(small, tmp_path) -> None:
    words = ("--plan.hardware", "h800-paper", "--plan.replan-after-steps", "3")
    both = r"plan\.replan_after_steps \(3\) leaves nothing of training\.steps \(3\)"
    with pytest.raises(ConfigError, match=both):
        setup.train(small(*words), Console(file=io.StringIO()))
    words += ("--training.steps", "null", "--training.epochs", "0.1")
    with pytest.raises(ConfigError, match=r"training\.epochs \(0\.1: 2 steps\)"):
        setup.train(small(*words), Console(file=io.StringIO()))
    assert not (tmp_path / "runs").exists()
