"""Every screen, as recorded in golden/screens (see tests/screens.py)."""

import dataclasses
import json
import math
import pathlib

import pytest

from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning.commands.profile import doubts, profile_table
from lazyjax.planning.commands.report import comparison_row, plan_report
from lazyjax.planning.commands.sentences import digits
from lazyjax.planning.plan.document import Prediction
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.service import baseline_plans, verify_for
from lazyjax.planning.program.contention import NO_CONTENTION
from lazyjax.runs import Run, read_run, run_table
from lazyjax.training.display import Display, format_step
from lazyjax.training.metrics import EvaluationMetrics, StepMetrics
from lazyjax.training.screens import busy_sentence, plan_sentences, same_device, show_closing, show_facts
from tests.screens import KINDS, check

each_kind = pytest.mark.parametrize("kind", KINDS)


def measured_profile() -> HardwareProfile:
    when = "measured 2026-11-30: "
    how = {
        "matmul_flops_per_second": "bfloat16 products and both gradients, 59x3584x18944, 59x18944x3584; "
        "spread 3% over 5 runs",
        "device_bandwidth_bytes_per_second": "an element-wise pass; spread 41% over 5 runs",
        "h2d_bytes_per_second": "pinned array to device, alone; spread 9% over 5 runs",
        "d2h_bytes_per_second": "device to pinned host memory, alone; spread 12% over 5 runs",
        "host_bandwidth_bytes_per_second": "passes of an update over 1073741824 bytes; spread 7% over 5 runs",
        "duplex_factor": "both at once over each alone; spread 12% over 5 runs",
        "host_update_parameters_per_second.hybrid8bit": "updates of 8388608 parameters on all usable CPUs; "
        "spread 5% over 5 runs",
        "host_update_parameters_per_second.fp32_adamw": "updates of 8388608 parameters on all usable CPUs; "
        "spread 6% over 5 runs",
        "host_update_parameters_per_second.bf16_adamw": "updates of 8388608 parameters on all usable CPUs; "
        "spread 4% over 5 runs",
        "device_total_bytes": "half of the available host memory: the device is the host",
        "device_bytes": "0.95 of device_total_bytes",
        "host_bytes": "0.95 of the other half",
    }
    return HardwareProfile(
        name="machine",
        device="AMD EPYC 7B13, 2 CPUs",
        matmul_flops_per_second=1.12e11,
        device_total_bytes=12_000_000_000,
        device_bytes=11_400_000_000,
        device_bandwidth_bytes_per_second=2.1e10,
        h2d_bytes_per_second=8.4e9,
        d2h_bytes_per_second=8.1e9,
        duplex_factor=0.55,
        host_bandwidth_bytes_per_second=2.2e10,
        host_update_parameters_per_second={"hybrid8bit": 1.1e9, "fp32_adamw": 7e8, "bf16_adamw": 9e8},
        host_bytes=11_400_000_000,
        sources={figure: when + words for figure, words in how.items()},
    )


@each_kind
def test_profile(kind):
    profile = measured_profile()

    def show(console):
        console.print(profile_table(profile))
        console.print(doubts(profile, load=3.2, cpus=2))

    text = check("profile", kind, show)
    for name in ("update hybrid8bit", "update fp32_adamw", "update bf16_adamw", "41%", "load 3.2"):
        assert name in text


def test_a_quiet_machine_leaves_no_doubt():
    profile = measured_profile()
    calm = {figure: source.replace("41%", "4%") for figure, source in profile.sources.items()}
    profile = profile.model_copy(update={"sources": calm})
    assert doubts(profile, load=0.4, cpus=2) is None
    assert "load 9.0" in (doubts(profile, load=9.0, cpus=2) or "")


class FixedCosts:
    """Costs that no measurement and no change of the cost model moves."""

    contention = NO_CONTENTION

    def operation_seconds(self, operation):
        compute = {"forward": 0.01, "recompute": 0.01, "backward": 0.03, "loss": 0.02, "update": 0.005}
        action = operation.action.value
        return compute[action] if action in compute else operation.bytes / 12e9

    def save_sets(self, kind):
        return ()

    def working_bytes(self, action, layer, saved, head_chunk=None):
        return 10**9

    def operation_flops(self, operation):
        return 2 * 10**11


@pytest.fixture(scope="module")
def planned():
    """A plan without a solver, so that it is the same on every machine, and what it takes."""
    template = build_template(architecture("Qwen2.5-0.5B"))
    request = build_request(
        template, load_profile("rtx3090"), batch_rows=8, sequence_length=1024, nvme_bytes=0,
        device_bytes=24 * 10**9, host_bytes=256 * 10**9, costs=lambda rows: FixedCosts(),
    )  # fmt: skip
    plan = baseline_plans(request)["lazytrain"]
    verification = verify_for(request, plan)
    peaks = {tier.value: size for tier, size in verification.peak_bytes.items()}
    prediction = Prediction(
        period_seconds=verification.period_seconds, bound_seconds=0.9 * verification.period_seconds, gap=0.1,
        peak_bytes=peaks, solve_seconds=1.5,
    )  # fmt: skip
    return request, plan.model_copy(update={"prediction": prediction}), verification


@each_kind
def test_plan(kind, planned):
    request, plan, verification = planned
    peaks = {tier.value: 2 * size for tier, size in request.capacity.items()}
    others = {name: other for name, other in baseline_plans(request).items() if name != "lazytrain"}
    rows = [comparison_row(request, name, other, 1.0, peaks) for name, other in others.items()]

    def show(console):
        report = plan_report(
            request, plan, verification, rows, hardware="rtx3090 (NVIDIA RTX 3090)", epoch_rows=395_000
        )
        console.print(report, highlight=False)

    text = check("plan", kind, show)
    words = " ".join(text.split())
    assert words.startswith("Qwen2.5-0.5B on rtx3090 (NVIDIA RTX 3090) fits: 8 rows x 1024 tokens take")
    assert "hybrid8bit" in words
    assert "bfloat16 compute" in words
    assert "An epoch of 395,000 rows takes" in words


STEP = StepMetrics(
    step=1, epoch=0.1, loss=1.36012, gradient_norm=10.712, learning_rate=1e-5, skipped=False,
    target_tokens=500, real_tokens=1500, padded_tokens=1536, step_seconds=12.345, compile_seconds=0.0,
    tokens_per_second=121.5, model_tflops=0.1021, peak_device_bytes=296_432_000, host_bytes=1_524_000_000,
)  # fmt: skip


@each_kind
def test_training(kind, planned, tmp_path):
    """The whole of a run: what was chosen, its steps, what it promised beside what came of it."""
    _, plan, _ = planned
    steps = [
        dataclasses.replace(STEP, step=1, step_seconds=31.5, compile_seconds=18.25),
        dataclasses.replace(STEP, step=2, skipped=True, loss=math.nan, gradient_norm=math.inf),
        *(dataclasses.replace(STEP, step=step, loss=1.36 / step) for step in range(3, 101, 32)),
    ]
    seconds = plan.prediction.period_seconds * 1.013
    records = [{"kind": "train", **dataclasses.asdict(step), "step_seconds": seconds} for step in steps]
    for record in records:
        record |= {"padded_tokens": 7000, "other_cpu_seconds": 1.7 * seconds}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    summary = {"peak_device_bytes": 296_432_000, "peak_host_bytes": 1_924_000_000}
    summary |= {"cpus": 2, "other_cpus_while_calibrated": 0.04}
    (tmp_path / "summary.json").write_text(json.dumps(summary))

    def show(console):
        facts = {
            "model": "Qwen2.5-0.5B: 494.0 M parameters in 24 blocks (qwen2), weights from models/mine",
            "data": ("problems: 4,996 rows read; 3,499 train, 1,497 held out", "one epoch: 437 batches"),
            "plan": plan_sentences(plan),
            "run": "100 steps, records in runs/20261130-074238-Qwen2.5-0.5B",
        }
        show_facts(console, facts)
        display = Display(console, steps=100, log_every=1)
        display.evaluation(EvaluationMetrics(0, 7.7144, 4958, 4.1))
        for step in steps:
            display.step(step)
        show_closing(console, plan, read_run(tmp_path), buffer_bytes=295_000_000, here="AMD EPYC, 2 CPUs")

    text = check("training", kind, show)
    steps_shown = [line for line in text.split("\n") if line.startswith("step ")]
    assert len(steps_shown) == len(steps)
    assert all(line.endswith(" left") for line in steps_shown)
    assert "SKIPPED" in steps_shown[1]
    words = " ".join(text.split())
    assert "+1.3%" in words
    assert "another kind of machine" in words
    assert "of its 2 CPUs other programs took 1.7 during these steps and 0.0 during calibration" in words
    assert "(the prediction is for rows of 1024 tokens; the steps had 85% of them" in words


@each_kind
def test_runs(kind, tmp_path):
    names = [f"20261130-0742{second}-qwen27b_smoke_model-with-a-long-name" for second in (38, 39)]
    for name in names:
        (tmp_path / name).mkdir()
        record = {"kind": "train", **dataclasses.asdict(STEP)}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")

    def show(console):
        console.print(
            run_table([read_run(tmp_path / name) for name in names]), highlight=False, soft_wrap=True
        )

    text = check("runs", kind, show)
    assert all(name in text.split("\n") for name in names)


@pytest.mark.parametrize(
    ("stepping", "calibrating", "said"),
    [(0.1, 0.1, None), (0.1, None, None), (None, None, None), (0.1, 1.2, "0.1 during these steps and 1.2"),
     (1.2, None, "took 1.2 during these steps; on"), (None, 1.2, "took 1.2 during calibration; on")],
)  # fmt: skip
def test_a_busy_machine_is_said_whenever_it_was(stepping, calibrating, said):
    step = dataclasses.asdict(STEP) | {"other_cpu_seconds": stepping and stepping * STEP.step_seconds}
    summary = {"cpus": 2, "other_cpus_while_calibrated": calibrating}
    sentence = busy_sentence(Run(pathlib.Path("run"), (step,), (), summary))
    assert (sentence is None) if said is None else (said in sentence)


def test_a_terminal_of_any_width_gets_one_line_a_step():
    for width in (60, 80, 100, 120, 200):
        line = format_step(dataclasses.replace(STEP, step=7), 1000, left="10:00:00", width=width)
        assert len(line) <= width
        assert "loss 1.3601" in line
    assert line == format_step(dataclasses.replace(STEP, step=7), 1000, left="10:00:00")


@pytest.mark.parametrize(
    ("profiled", "here", "same"),
    [
        ("NVIDIA H200 SXM 141 GB", "NVIDIA H200", True),
        ("NVIDIA H800 SXM 80 GB", "NVIDIA H200", False),
        ("NVIDIA GeForce RTX 4090 24 GB", "NVIDIA GeForce RTX 4090", True),
        ("AMD EPYC 7B13, 2 CPUs", "AMD EPYC 7B13, 2 CPUs", True),
        ("AMD EPYC 7B13, 64 CPUs", "AMD EPYC 7B13, 2 CPUs", False),
        ("NVIDIA H200 SXM 141 GB", "AMD EPYC 7B13, 2 CPUs", False),
    ],
)
def test_devices_of_one_kind(profiled, here, same):
    assert same_device(profiled, here) is same


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.003412, "0.00341"), (0.0345, "0.0345"), (1.5, "1.50"), (39.003, "39.0"), (356.5, "356.5"),
     (1099.5, "1,100"), (216.0, "216.0")],
)  # fmt: skip
def test_figures_keep_three_digits(value, text):
    assert digits(value) == text
