"""Inputs that cannot be trained on: one message that names what is wrong, and nothing half-written."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lazyjax import cli
from lazyjax.data.sources import problems_folder
from lazyjax.huggingface.export import export
from lazyjax.models.registry import build_template
from lazyjax.storage.host import allocate_host_store
from tests.huggingface.architectures import SMALL

GOOD = {"query": "1 + 1?", "response": "2"}


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    template = build_template(SMALL["qwen3"].model_copy(update={"vocab_size": 2048}))
    store = allocate_host_store(template.spec)
    export(tmp_path / "model", template, store, tokenizer_folder=problems_folder(), dtype="float32")
    return tmp_path / "model"


def refused(capsys: Any, tmp_path: pathlib.Path, *arguments: str) -> str:
    """The message of a training run that must not begin."""
    usual = ("--data.sequence-length", "32", "--data.rows", "2", "--training.steps", "1")
    before = sorted(path for path in tmp_path.rglob("*"))
    code = cli.main(["train", *usual, "--run.folder", str(tmp_path / "runs"), *arguments])
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert "Traceback" not in captured.err
    assert sorted(path for path in tmp_path.rglob("*")) == before
    return captured.err


def conversation(weight: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": weight}]
    return {"messages": turns}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["rows.jsonl: no rows"]),
        (b"[]", ["rows.jsonl: no rows"]),
        (b'{"query": "a", "response": "\xff"}', ["rows.jsonl, row 1 (line 1)", "not UTF-8", "at byte 28"]),
        (json.dumps(conversation(0)).encode(), ["row 1", "weight 0", "nothing to learn from"]),
        (b'{"id": 1}', ["row 1", "keys id fits no known format", "messages"]),
        (b"\x1f\x8b\x08nonsense", ["rows.jsonl", "not UTF-8"]),
        (
            json.dumps({"query": "1" * 99, "response": "2"}).encode(),
            ["none of 1 rows keeps a response within 32 tokens"],
        ),
        (json.dumps(GOOD).encode(), ["train_fraction", "1 rows"]),
    ],
)
def test_rows(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, content: bytes, words: list[str]
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    error = refused(capsys, tmp_path, "--model", str(model), "--data", str(tmp_path / "rows.jsonl"))
    for word in words:
        assert word in error


def test_weights_that_are_cut_off(model: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path}: truncated" in refused(capsys, tmp_path, "--model", str(model))


def test_a_tokenizer_that_is_no_tokenizer(model: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    (model / "tokenizer.json").unlink()
    assert f"{model}: holds no tokenizer.json" in refused(capsys, tmp_path, "--model", str(model))


def test_ids_that_the_model_does_not_know(model: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    [last] = [token for token, number in tokenizer["model"]["vocab"].items() if number == 2047]
    tokenizer["model"]["vocab"][last] = 4000
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    error = refused(capsys, tmp_path, "--model", str(model))
    assert "2048 tokens with ids up to 4000" in error


def test_a_cache_folder_that_cannot_be_written(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    (tmp_path / "file").write_text("")
    keys = ("--data.cache-folder", str(tmp_path / "file" / "below"))
    assert "data.cache_folder" in refused(capsys, tmp_path, "--model", str(model), *keys)


def test_weights_that_are_not_finite(model: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    path = model / "model.safetensors"
    tensors = {key: np.array(value) for key, value in load_file(path).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan
    save_file(tensors, path, metadata={"format": "pt"})
    words = ("--model", str(model), "--plan.planner", "recompute_all")
    (tmp_path / "runs").mkdir()
    error = refused(capsys, tmp_path, *words)
    assert "1 tensor(s) hold values that are not finite" in error
    assert "model.layers.1.mlp.up_proj.weight (1 NaN)" in error
