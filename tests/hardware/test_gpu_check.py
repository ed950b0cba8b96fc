"""The device check: sections do not stop each other, and what they report is complete."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from experiments.benchmarks import gpu_check

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
    assert {row["plan"] for row in rows} == {"recompute_all", "everything_on_host"}
    assert all(row["relative_error"] < 1e-5 for row in rows)
