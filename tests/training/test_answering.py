"""Exact match before, during and after training: in the records, with the answers beside them."""

from __future__ import annotations

import io
import json
import pathlib
from typing import Any

import pytest
from rich.console import Console

from lazyjax.config import Config, ConfigError, load_config
from lazyjax.training import setup
from tests.training.test_setup import ARCHITECTURE

FULL = pathlib.Path(__file__).parents[2] / "experiments" / "configs" / "qwen27b_full.yaml"


def small_config(tmp_path: pathlib.Path, **keys: object) -> Config:
    (tmp_path / "small.json").write_text(json.dumps(ARCHITECTURE))
    fixed: dict[str, object] = {
        "model.architecture": tmp_path / "small.json",
        "model.compute-dtype": "float32",
        "data.sequence-length": 128,
        "data.rows": 4,
        "data.take": 60,
        "plan.planner": "recompute_all",
        "training.steps": 2,
        "training.evaluate-every": 1,
        "training.evaluate-rows": 4,
        "training.evaluate-exact-match-rows": 3,
        "training.exact-match-rows-before": 2,
        "training.exact-match-rows-after": 5,
        "training.exact-match-new-tokens": 4,
        "run.folder": tmp_path,
        "run.name": "run",
        "run.save-model": "false",
    }
    return load_config(
        None, [word for key, value in (fixed | keys).items() for word in (f"--{key}", str(value))]
    )


def records(tmp_path: pathlib.Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == "exact_match"]


def test_every_stage_answers_its_rows(tmp_path: pathlib.Path) -> None:
    screen = io.StringIO()
    summary = setup.train(small_config(tmp_path), Console(file=screen, width=200))
    found = records(tmp_path)
    assert [(record["step"], record["rows"]) for record in found] == [(0, 2), (1, 3), (2, 5)]
    for record in found:
        assert record["low"] <= record["exact_match"] == record["correct"] / record["rows"] <= record["high"]
        assert 0 < record["answer_tokens"] <= 4 * record["rows"]
    assert (summary["last_exact_match"], summary["last_exact_match_rows"]) == (found[-1]["exact_match"], 5)
    files = sorted(path.name for path in (tmp_path / "run").glob("answers-*"))
    assert files == [f"answers-{stage}.jsonl" for stage in ("after-step-2", "before-step-0", "during-step-1")]
    rows = {}
    for name in files:
        lines = [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        rows[name] = {line["row"] for line in lines if line["kind"] == "row"}
    assert rows[files[1]] < rows[files[2]] < rows[files[0]]
    assert "exact match before training: " in screen.getvalue()
    assert "exact match after step 2: " in screen.getvalue()


def test_scores_need_rows_that_are_held_out(tmp_path: pathlib.Path) -> None:
    config = small_config(tmp_path, **{"data.train-fraction": 1})
    with pytest.raises(ConfigError, match="evaluate_exact_match_rows: no rows are held out"):
        setup.train(config, Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


def test_the_papers_protocol_is_a_configuration() -> None:
    """A tenth of the held-out rows before, 10,000 each tenth of an epoch, all of them at the end."""
    training = load_config(FULL, ["--model", "folder"]).training
    assert training.exact_match_rows_before == 118_501 // 10
    assert training.evaluate_exact_match_rows == 10_000
    assert training.evaluate_every == 3841 // 10
    assert training.exact_match_rows_after == 118_501
