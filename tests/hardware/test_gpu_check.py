"""The device check: sections do not stop each other, and what they report is complete."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from experiments.benchmarks import gpu_check, gpu_sections

MIB = 2**20
SMALL = gpu_check.Sizes(
    transfer_bytes=MIB, overlap_layers=2, step_rows=2, step_tokens=16, step_microbatches=2, repeats=1,
    families=("qwen2",),
)  # fmt: skip


def test_a_failing_section_is_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(size: gpu_check.Sizes) -> gpu_check.Rows:
        raise RuntimeError("no such device")

    sections = {"broken": broken, "works": lambda size: [{"figure": 1.5}, {"other": "x"}]}
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    monkeypatch.setattr(gpu_check, "set_runtime", lambda environment: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(tmp_path)])
    assert gpu_check.main() == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["sections"]["broken"]["error"] == "RuntimeError: no such device"
    assert report["sections"]["works"]["rows"][0] == {"figure": 1.5}
    text = (tmp_path / "gpu_check.md").read_text()
    assert "| figure | other |" in text
    assert "FAILED" in text
    assert report["label"] in capsys.readouterr().out
    assert "commit" in report["label"]


def test_the_time_is_kept_and_what_is_there_is_written_after_every_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    seen = []

    def first(size: gpu_check.Sizes) -> gpu_check.Rows:
        clock[0] = size.deadline
        return [{"figure": 1}]

    def never(size: gpu_check.Sizes) -> gpu_check.Rows:
        seen.append(json.loads((tmp_path / "gpu_check.json").read_text()))
        raise AssertionError("the time was over")

    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_check, "SECTIONS", {"first": first, "second": never})
    monkeypatch.setattr(gpu_check, "set_runtime", lambda environment: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(tmp_path), "--seconds", "5"])
    assert gpu_check.main() == 0
    report = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]
    assert report["first"]["rows"] == [{"figure": 1}]
    assert report["second"]["skipped"] == "the time was over"
    assert not seen


def test_ways_limits_and_attention_in_small() -> None:
    ways = {row["way"]: row for row in gpu_sections.paths(SMALL)}
    assert {"pageable", "ring"} <= ways.keys()
    assert ways["ring"]["both_ways_GB_per_second"] > 0
    assert ways["ring"]["put_milliseconds"] > 0
    limits = {row["limit"]: row for row in gpu_sections.limits(SMALL)}
    pinned = limits["pinned host memory"]
    assert pinned["reached"] == pinned["value"]
    forms = {row["form"]: row for row in gpu_sections.attention(SMALL)}
    assert forms["blockwise"]["seconds"] > 0
    assert forms["dense"]["seconds"] > 0
    assert "note" in forms["cudnn"]


@pytest.mark.slow
def test_every_kernel_is_timed_beside_its_prediction_and_the_drive_is_measured() -> None:
    rows = gpu_sections.kernels(SMALL)
    assert {row["kernel"].split()[-1] for row in rows} == {"forward", "loss", "backward"}
    assert all(row["predicted_seconds"] > 0 and row["measured_seconds"] > 0 for row in rows)
    figures = {row["figure"] for row in gpu_sections.machine(SMALL)}
    assert {"nvme_read_bytes_per_second", "nvme_write_bytes_per_second"} <= figures


@pytest.mark.slow
def test_steps_of_every_plan_are_predicted_and_measured() -> None:
    rows = gpu_sections.steps(SMALL)
    assert {row["plan"] for row in rows} == {"lazyjax", "megatrain", "lazytrain"}
    for row in rows:
        assert "note" not in row, row
        assert row["predicted_seconds"] > 0
        assert row["measured_seconds"] > 0
        assert row["counted_device_GB"] <= 1.02 * row["predicted_device_GB"]


def test_every_way_between_host_and_device_is_timed() -> None:
    rows = gpu_check.transfers(SMALL)
    assert len(rows) == 6
    assert all(row["GB_per_second"] > 0 for row in rows[:5])


def test_overlap_compares_three_orders() -> None:
    orders = [row["order"] for row in gpu_check.overlap(SMALL)]
    assert orders[-3:] == ["serial", "put after compute", "put before compute"]


@pytest.mark.slow
def test_gradients_of_streamed_steps_are_checked() -> None:
    rows = gpu_check.parity(SMALL)
    errors = {row["plan"]: row["relative_error"] for row in rows}
    assert errors.keys() == {"recompute_all", "everything_on_host", "bfloat16"}
    assert 1e-4 < errors.pop("bfloat16") < gpu_check.MOST_BFLOAT16_ERROR
    assert max(errors.values()) < 1e-5
