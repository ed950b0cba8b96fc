"""What is exported is what is imported, and the safetensors library agrees with both."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lazyjax.huggingface.checkpoint import bind, load_into, open_checkpoint
from lazyjax.huggingface.export import export
from lazyjax.huggingface.key_maps import key_map, to_stored
from lazyjax.huggingface.tensor_files import CheckpointError
from tests.huggingface.architectures import SMALL
from tests.huggingface.folders import empty_store, masters, multimodal_folder, random_store, read_all


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_fp32_round_trip_keeps_every_bit(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    template, store = random_store(name)
    export(tmp_path / "out", template, store, dtype="float32", max_shard_bytes=max_shard_bytes)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > (max_shard_bytes < 10**9)
    _, again = empty_store(name)
    load_into(open_checkpoint(tmp_path / "out"), template, again)
    for slabs, others in zip(store.layers, again.layers, strict=True):
        np.testing.assert_array_equal(slabs.hi, others.hi)
        np.testing.assert_array_equal(slabs.lo, others.lo)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_5-tied"])
def test_the_safetensors_library_reads_what_was_written(name: str, tmp_path: Path) -> None:
    template, store = random_store(name)
    export(tmp_path / "out", template, store, dtype="float32", max_shard_bytes=20_000)
    values, stored = masters(store), read_all(tmp_path / "out")
    entries = key_map(template)
    assert stored.keys() == {entry.key for entry in entries}
    for entry in entries:
        expected = to_stored(entry.transform, values[entry.layer_index, entry.parameter])
        np.testing.assert_array_equal(stored[entry.key], expected)


def test_bf16_export_rounds_to_nearest_even(tmp_path: Path) -> None:
    template, store = random_store("llama-tied")
    # Halfway between two bf16 values: half up and half to even differ on the first.
    halves = np.array([0x3F808000, 0x3F818000, 0xBF808000], np.uint32).view(np.float32)
    table = np.resize(halves, (96, 32))
    store.layers[0].set_master("table", table)
    export(tmp_path / "out", template, store)
    stored = read_all(tmp_path / "out")["model.embed_tokens.weight"].view(np.uint16)
    np.testing.assert_array_equal(stored, np.resize(np.array([0x3F80, 0x3F82, 0xBF80], np.uint16), (96, 32)))
    _, again = empty_store("llama-tied")
    load_into(open_checkpoint(tmp_path / "out"), template, again)
    for place, value in masters(store).items():
        expected = value.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(masters(again)[place], expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_every_float_type_is_read(dtype: type, tmp_path: Path) -> None:
    template, store = random_store("qwen3")
    values = masters(store)
    tmp_path.joinpath("config.json").write_text("{}")
    tensors = {
        entry.key: np.ascontiguousarray(
            to_stored(entry.transform, values[entry.layer_index, entry.parameter]).astype(dtype)
        )
        for entry in key_map(template)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    _, again = empty_store("qwen3")
    reported: list[tuple[str, int, int]] = []
    load_into(open_checkpoint(tmp_path), template, again, lambda *step: reported.append(step))
    for place, value in values.items():
        np.testing.assert_array_equal(masters(again)[place], value.astype(dtype).astype(np.float32))
    assert sum(done for _, done, _ in reported) == reported[0][2]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-tied"])
def test_what_stands_beside_the_text_model_goes_through_unchanged(name: str, tmp_path: Path) -> None:
    template, store = multimodal_folder(tmp_path / "source", name)
    source = open_checkpoint(tmp_path / "source")
    _, again = empty_store(name)
    binding = load_into(source, template, again)
    assert binding.prefix == "model.language_model."
    assert {tensor.key for tensor in binding.rest} == {
        "model.visual.patch_embed.proj.weight",
        "model.visual.blocks.0.attn.qkv.bias",
        "mtp.fc.weight",
    }
    for place, value in masters(store).items():
        np.testing.assert_array_equal(masters(again)[place], value)

    export(tmp_path / "out", template, again, source, dtype="bfloat16", max_shard_bytes=20_000)
    before, after = read_all(tmp_path / "source"), read_all(tmp_path / "out")
    assert before.keys() == after.keys()
    for tensor in binding.rest:
        assert before[tensor.key].dtype == after[tensor.key].dtype
        np.testing.assert_array_equal(before[tensor.key], after[tensor.key])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
        "vision_config": {"depth": 1},
    }
    for file in ("tokenizer.json", "generation_config.json", "preprocessor_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "source" / file).read_bytes()
    assert bind(open_checkpoint(tmp_path / "out"), template).prefix == "model.language_model."


def test_a_tied_table_is_stored_once_and_accepted_twice(tmp_path: Path) -> None:
    template, store = random_store("qwen3-tied")
    export(tmp_path / "once", template, store, dtype="float32")
    tensors = read_all(tmp_path / "once")
    assert "lm_head.weight" not in tensors
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "config.json").write_text("{}")
    path = tmp_path / "twice" / "model.safetensors"
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, path)
    _, again = empty_store("qwen3-tied")
    load_into(open_checkpoint(tmp_path / "twice"), template, again)
    np.testing.assert_array_equal(masters(again)[0, "table"], masters(store)[0, "table"])
    export(tmp_path / "out", template, again, open_checkpoint(tmp_path / "twice"), dtype="float32")
    assert "lm_head.weight" not in read_all(tmp_path / "out")

    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    _, untouched = empty_store("qwen3-tied")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        load_into(open_checkpoint(tmp_path / "twice"), template, untouched)
    assert not any(slabs.hi.any() for slabs in untouched.layers)


def test_export_never_overwrites(tmp_path: Path) -> None:
    template, store = random_store("qwen2")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="never overwrites"):
        export(tmp_path / "out", template, store)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    template, store = random_store("qwen2")

    def fail(key: str, piece_bytes: int, total_bytes: int) -> None:
        if key.startswith("model.layers.1."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "out", template, store, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template, store = random_store("qwen2")
    monkeypatch.setattr("lazyjax.huggingface.export._free_bytes", lambda folder: 1000)
    with pytest.raises(CheckpointError, match="GB to write"):
        export(tmp_path / "out", template, store)
    assert list(tmp_path.iterdir()) == []
