"""`lazyjax export`: a run's model in another form."""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lazyjax import cli
from lazyjax.config import dump_config, load_config
from lazyjax.data.sources import problems_folder
from lazyjax.huggingface.configs import to_hf_config
from lazyjax.huggingface.export import export
from lazyjax.huggingface.key_maps import key_map, to_stored
from lazyjax.models.registry import build_template
from lazyjax.storage.host import allocate_host_store
from lazyjax.training.checkpoints import Position, identity_of, save
from lazyjax.training.inputs import make_optimizer, read_architecture
from tests.huggingface.architectures import SMALL
from tests.huggingface.folders import masters


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """The remains of a run: its folder with a bfloat16 model and the tokenizer."""
    template = build_template(SMALL["qwen3"].model_copy(update={"vocab_size": 2048}))
    store = allocate_host_store(template.spec)
    random = np.random.default_rng(0)
    for layer, slabs in zip(template.spec.layers, store.layers, strict=True):
        for tensor in layer.parameters:
            slabs.set_master(tensor.name, random.standard_normal(tensor.shape).astype(np.float32))
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    export(folder / "model", template, store, tokenizer_folder=problems_folder(), stop_token_ids=[2])
    return folder


def test_a_run_as_a_folder(run: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    text = capsys.readouterr().out
    assert "tensors in float32" in text
    assert "widened" in text
    before = load_file(run / "model" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert after[key].dtype == np.float32
        np.testing.assert_array_equal(after[key], value.astype(np.float32))
    names = {path.name for path in (run / "model").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    # A model's own folder does as well.
    assert cli.main(["export", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    again = load_file(tmp_path / "back" / "model.safetensors")
    for key, value in before.items():
        np.testing.assert_array_equal(again[key], value)


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> tuple[pathlib.Path, dict[str, np.ndarray]]:
    """A run with checkpoints of two steps and no model; the later one's masters by Hugging Face key."""
    architecture = SMALL["qwen3-tied"].model_copy(update={"vocab_size": 2048})
    (tmp_path / "small.json").write_text(json.dumps(to_hf_config(architecture)))
    config = load_config(None, ["--model.architecture", str(tmp_path / "small.json")])
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    template = build_template(read_architecture(config)[0])
    optimizer = make_optimizer(config)
    store = allocate_host_store(template.spec)
    states = [optimizer.create_state(slabs.layout) for slabs in store.layers]
    random = np.random.default_rng(0)
    for step in (3, 12):
        for layer, slabs in zip(template.spec.layers, store.layers, strict=True):
            for tensor in layer.parameters:
                slabs.set_master(tensor.name, random.standard_normal(tensor.shape).astype(np.float32))
        position = Position(step, step, 0, 0, 1e-5, 20, {}, {}, {}, None)
        identity = identity_of(template.spec, optimizer)
        save(
            run / "checkpoints",
            template.spec,
            lambda layer: contextlib.nullcontext((store.slabs(layer), states[layer])),
            position,
            identity,
            plan={},
            config={},
            attention="blocks",
        )
    values = masters(store)
    wanted = {
        entry.key: to_stored(entry.transform, values[entry.layer_index, entry.parameter])
        for entry in key_map(template)
    }
    return run, wanted


@pytest.mark.parametrize("step", ["12", "last"])
def test_the_masters_of_a_checkpoint(
    saved: tuple[pathlib.Path, dict[str, np.ndarray]], tmp_path: pathlib.Path, capsys: Any, step: str
) -> None:
    run, wanted = saved
    out = tmp_path / "out"
    words = ["export", str(run), str(out), "--dtype", "float32", "--checkpoint", step]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert "widened" not in capsys.readouterr().out
    found = load_file(out / "model.safetensors")
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_array_equal(found[key], value)
    assert (out / "tokenizer.json").read_bytes() == (problems_folder() / "tokenizer.json").read_bytes()
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2


def test_checkpoints_that_are_not_there_or_damaged(
    saved: tuple[pathlib.Path, dict[str, np.ndarray]], tmp_path: pathlib.Path, capsys: Any
) -> None:
    run, _ = saved
    out = str(tmp_path / "out")
    assert cli.main(["export", str(run), out, "--checkpoint", "4"]) == 2
    assert "no checkpoint of step 4; there are 12, 3" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), out, "--checkpoint", "4"]) == 2
    assert "no run (no config.yaml)" in capsys.readouterr().err
    largest = max((run / "checkpoints" / "step-00000012").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(bytes(data))
    assert cli.main(["export", str(run), out, "--checkpoint", "12"]) == 2
    assert "step-00000012" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_run_as_a_gguf_file(run: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    gguf = pytest.importorskip("gguf")
    out = tmp_path / "model.gguf"
    arguments = ["export", str(run), str(out), "--dtype", "float32"]
    code = cli.main(arguments)
    if code:  # how the packaged tokenizer splits has no name in llama.cpp
        assert "--rule" in capsys.readouterr().err
        assert cli.main([*arguments, "--rule", "gpt-2"]) == 0
    reader = gguf.GGUFReader(out)
    stored = load_file(run / "model" / "model.safetensors")
    assert len(reader.tensors) == len(stored)
    [table] = [tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    np.testing.assert_array_equal(table.data, stored["model.embed_tokens.weight"].astype(np.float32))


def test_what_is_not_there_is_named(run: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "unsaved").mkdir()
    (tmp_path / "unsaved" / "config.yaml").write_text("")
    (tmp_path / "there").mkdir()
    for arguments, words in (
        (["absent", "out"], "absent: no such folder"),
        ([str(tmp_path / "empty"), "out"], "neither config.json nor model/ is there"),
        ([str(tmp_path / "unsaved"), "out"], "the run saved none"),
        ([str(run), str(tmp_path / "there")], "never overwrites"),
    ):
        assert cli.main(["export", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_truncated_model_leaves_nothing(run: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    path = run / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    for out in ("out", "out.gguf"):
        assert cli.main(["export", str(run), str(tmp_path / out)]) == 2
        error = capsys.readouterr().err
        assert str(path) in error
        assert "truncated" in error
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["runs"]
