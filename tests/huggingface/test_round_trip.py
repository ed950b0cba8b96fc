"""What is exported is what is imported, and the safetensors library agrees with both."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lazyjax.huggingface.checkpoint import bind, load_into, open_checkpoint
from lazyjax.huggingface.export import export
from lazyjax.huggingface.finite import nonfinite_tensors
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


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_tied_table_under_its_other_name(dtype: type, tmp_path: Path) -> None:
    template, store = random_store("qwen3_5-tied")
    export(tmp_path / "usual", template, store, dtype="float32")
    tensors = read_all(tmp_path / "usual")
    table = tensors.pop("model.embed_tokens.weight")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    save_file({**tensors, "lm_head.weight": table.astype(dtype)}, tmp_path / "other" / "model.safetensors")
    _, again = empty_store("qwen3_5-tied")
    load_into(open_checkpoint(tmp_path / "other"), template, again)
    np.testing.assert_array_equal(masters(again)[0, "table"], table.astype(dtype).astype(np.float32))
    export(tmp_path / "out", template, again, open_checkpoint(tmp_path / "other"), dtype="float32")
    assert read_all(tmp_path / "out").keys() == read_all(tmp_path / "usual").keys()


@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("repeated_is_narrow", [True, False])
def test_a_repeated_table_of_another_type(narrow: type, repeated_is_narrow: bool, tmp_path: Path) -> None:
    template, store = random_store("qwen3-tied")
    export(tmp_path / "once", template, store, dtype="float32")
    tensors = read_all(tmp_path / "once")
    table = tensors["model.embed_tokens.weight"]
    pair = (table, table.astype(narrow))
    kept, repeated = pair if repeated_is_narrow else pair[::-1]
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "config.json").write_text("{}")
    path = tmp_path / "twice" / "model.safetensors"
    save_file({**tensors, "model.embed_tokens.weight": kept, "lm_head.weight": repeated}, path)
    _, again = empty_store("qwen3-tied")
    load_into(open_checkpoint(tmp_path / "twice"), template, again)
    np.testing.assert_array_equal(masters(again)[0, "table"], kept.astype(np.float32))
    repeated = repeated.copy()
    repeated[-1, -1] += 1
    save_file({**tensors, "model.embed_tokens.weight": kept, "lm_head.weight": repeated}, path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        load_into(open_checkpoint(tmp_path / "twice"), template, empty_store("qwen3-tied")[1])


def test_the_single_file_is_read_where_shards_lie_beside_it(tmp_path: Path) -> None:
    template, store = random_store("qwen2")
    export(tmp_path / "model", template, store, dtype="float32")
    _, zeros = empty_store("qwen2")
    export(tmp_path / "shards", template, zeros, dtype="float32", max_shard_bytes=20_000)
    for path in (tmp_path / "shards").glob("model*"):
        path.rename(tmp_path / "model" / path.name)
    _, again = empty_store("qwen2")
    load_into(open_checkpoint(tmp_path / "model"), template, again)
    for place, value in masters(store).items():
        np.testing.assert_array_equal(masters(again)[place], value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float32", "torch_dtype": "float16"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({}, {"dtype": "bfloat16"}),
        (
            {"dtype": "float32", "text_config": {"torch_dtype": "float32"}},
            {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}},
        ),
    ],
)
def test_every_key_says_the_type_that_is_written(
    config: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    template, store = random_store("qwen2")
    export(tmp_path / "source", template, store, dtype="float32")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    export(tmp_path / "out", template, store, open_checkpoint(tmp_path / "source"))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected


def test_the_tokenizer_that_was_trained_with_is_exported(tmp_path: Path) -> None:
    template, store = random_store("qwen2")
    export(tmp_path / "source", template, store, dtype="float32")
    for name in ("tokenizer.json", "vocab.json", "LICENSE"):
        (tmp_path / "source" / name).write_text("of the source")
    (tmp_path / "mine").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        (tmp_path / "mine" / name).write_text("mine")
    source = open_checkpoint(tmp_path / "source")
    export(tmp_path / "out", template, store, source, tokenizer_folder=tmp_path / "mine")
    written = {
        path.name: path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"
    }
    del written["config.json"]
    assert written == {
        "tokenizer.json": "mine",
        "tokenizer_config.json": "mine",
        "chat_template.jinja": "mine",
        "LICENSE": "of the source",
    }


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({"eos_token_id": 1, "top_p": 0.5}, {}, {"eos_token_id": [1, 7], "top_p": 0.5}),
        ({"eos_token_id": [1, 7]}, {}, {"eos_token_id": [1, 7]}),
        ({"eos_token_id": 7}, {}, {"eos_token_id": 7}),
        ({}, {"eos_token_id": 1}, {"eos_token_id": 7}),
        (None, {"eos_token_id": 1, "pad_token_id": 3}, {"eos_token_id": [1, 7], "pad_token_id": 3}),
        (None, {"text_config": {"eos_token_id": [1]}}, {"eos_token_id": [1, 7]}),
        (None, {"eos_token_id": 7}, None),
        (None, {}, {"eos_token_id": 7}),
    ],
)
def test_generation_stops_at_what_training_taught(
    settings: dict[str, object] | None,
    config: dict[str, object],
    expected: dict[str, object] | None,
    tmp_path: Path,
) -> None:
    template, store = random_store("qwen2")
    export(tmp_path / "source", template, store, dtype="float32")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    if settings is not None:
        (tmp_path / "source" / "generation_config.json").write_text(json.dumps(settings))
    export(tmp_path / "out", template, store, open_checkpoint(tmp_path / "source"), stop_token_ids=[7])
    path = tmp_path / "out" / "generation_config.json"
    assert (json.loads(path.read_text()) if path.exists() else None) == expected


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_values_that_are_not_finite_are_named(dtype: type, tmp_path: Path) -> None:
    template, store = random_store("qwen3_5")
    assert nonfinite_tensors(template, store) == ()
    export(tmp_path / "model", template, store, dtype="float32")
    tensors = {key: value.astype(dtype) for key, value in read_all(tmp_path / "model").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    tensors["model.norm.weight"][:3] = (np.inf, -np.inf, np.nan)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    _, again = empty_store("qwen3_5")
    words = r"layers\.1\.mlp\.up_proj\.weight \(1 NaN\), model\.norm\.weight \(1 NaN, 2 infinite\)"
    with pytest.raises(CheckpointError, match=r"2 tensor\(s\).*" + words):
        load_into(open_checkpoint(tmp_path / "model"), template, again)
    assert list(map(str, nonfinite_tensors(template, again))) == [
        "model.layers.1.mlp.up_proj.weight (1 NaN)",
        "model.norm.weight (1 NaN, 2 infinite)",
    ]


def test_export_never_overwrites(tmp_path: Path) -> None:
    template, store = random_store("qwen2")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="never overwrites"):
        export(tmp_path / "out", template, store)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    template, store = random_store("qwen2")

    def fail(key: str, chunk_bytes: int, total_bytes: int) -> None:
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
