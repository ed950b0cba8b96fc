"""Damaged and foreign folders: one clear error, and no slab touched."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lazyjax.huggingface.checkpoint import load_into, open_checkpoint
from lazyjax.huggingface.tensor_files import CheckpointError, OutgoingTensor, read_header, write_file
from tests.huggingface.folders import empty_store, multimodal_folder, plain_folder, read_all


def test_missing_surplus_and_misshaped_tensors_are_listed_together(tmp_path: Path) -> None:
    template, _ = plain_folder(tmp_path / "model", "qwen2")
    tensors = read_all(tmp_path / "model")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros(3, np.float32)
    tensors["model.visual.patch_embed.proj.weight"] = np.zeros(3, np.float32)
    tensors["model.norm.weight"] = np.zeros((2, 16), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.int8)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    _, store = empty_store("qwen2")
    with pytest.raises(CheckpointError) as error:
        load_into(open_checkpoint(tmp_path / "model"), template, store)
    message = str(error.value)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in message
    # A vision tower belongs beside qwen3_5 only.
    assert "2 surplus: model.layers.3.mlp.up_proj.weight, model.visual.patch_embed.proj.weight" in message
    assert "1 wrong shape: model.norm.weight (2, 16), expected (32,)" in message
    assert "1 type not among BF16, F16, F32: model.layers.0.self_attn.q_proj.bias I8" in message
    assert not any(slabs.hi.any() or slabs.lo.any() for slabs in store.layers)


def test_another_model_names_both(tmp_path: Path) -> None:
    plain_folder(tmp_path / "model", "qwen3")
    template, store = empty_store("qwen2")
    with pytest.raises(CheckpointError, match=r"model does not hold qwen2 \(qwen2\)"):
        load_into(open_checkpoint(tmp_path / "model"), template, store)


def test_an_untied_model_needs_its_table(tmp_path: Path) -> None:
    plain_folder(tmp_path / "model", "qwen3-tied")
    template, store = empty_store("qwen3")
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        load_into(open_checkpoint(tmp_path / "model"), template, store)


def test_no_text_model(tmp_path: Path) -> None:
    plain_folder(tmp_path / "model", "qwen2")
    save_file({"encoder.weight": np.zeros(3, np.float32)}, tmp_path / "model" / "model.safetensors")
    template, store = empty_store("qwen2")
    with pytest.raises(CheckpointError, match="holds no text model"):
        load_into(open_checkpoint(tmp_path / "model"), template, store)


@pytest.mark.parametrize("file", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_missing_file_is_named(file: str, tmp_path: Path) -> None:
    multimodal_folder(tmp_path / "model", "qwen3_5")
    (tmp_path / "model" / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file}: no such file"):
        open_checkpoint(tmp_path / "model")


def test_missing_folder_and_missing_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_config_that_is_no_table(text: str, tmp_path: Path) -> None:
    plain_folder(tmp_path / "model", "qwen2")
    (tmp_path / "model" / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path / "model")


def test_an_index_that_contradicts_a_shard(tmp_path: Path) -> None:
    multimodal_folder(tmp_path / "model", "qwen3_5")
    path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index differ in model\.layers\.9\.weight"):
        open_checkpoint(tmp_path / "model")
    index["weight_map"] = {"model.norm.weight": "../other/model.safetensors"}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not a file of the folder"):
        open_checkpoint(tmp_path / "model")
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(("kept_bytes", "message"), [(-1, "truncated"), (100, "header"), (3, "header")])
def test_a_truncated_file(kept_bytes: int, message: str, tmp_path: Path) -> None:
    plain_folder(tmp_path / "model", "qwen2")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(tmp_path / "model")
    assert str(path) in str(error.value)


def _file(tmp_path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "not a table"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "do not hold F32"),
        ({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, "entry not understood"),
        ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "entry not understood"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, "do not hold"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "hole"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, "4 bytes after the last"),
        (
            {
                "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
            },
            "overlaps",
        ),
    ],
)
def test_a_header_that_does_not_describe_its_file(header: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(_file(tmp_path, header, bytes(8)))


def test_a_tensor_must_give_all_its_bytes(tmp_path: Path) -> None:
    short = OutgoingTensor("a", "F32", (2,), lambda: iter([b"1234"]))
    with pytest.raises(ValueError, match="4 bytes given for 8"):
        write_file(tmp_path / "out.safetensors", [short])
