"""A GGUF file, read back by the gguf library, holds the model; the ways to read it back are written here."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from experiments.convert_smollm2 import huggingface_key, unpermute_heads
from lazyjax.huggingface import gguf_file
from lazyjax.huggingface.key_maps import key_map, to_stored
from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.models.architecture import Llama3Scaling, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.storage.host import HostStore, allocate_host_store
from tests.huggingface.architectures import SMALL
from tests.huggingface.folders import masters

gguf = pytest.importorskip("gguf")

QWEN2_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
#: More tokens than the tokenizer below has, so that some are padding.
VOCABULARY = 270


def model(name: str, **changes: Any) -> tuple[ModelTemplate, HostStore]:
    template = build_template(SMALL[name].model_copy(update={"vocab_size": VOCABULARY, **changes}))
    store = allocate_host_store(template.spec)
    random = np.random.default_rng(0)
    for layer, slabs in zip(template.spec.layers, store.layers, strict=True):
        for tensor in layer.parameters:
            slabs.set_master(tensor.name, random.standard_normal(tensor.shape).astype(np.float32))
    return template, store


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A byte-level BPE tokenizer with two merges, one control token and one of the user's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_RULE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<mine>", normalized=False)])
    (tmp_path / "folder").mkdir()
    tokenizer.save(str(tmp_path / "folder" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "folder" / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    return tmp_path / "folder"


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """Settings; tensors as float32 in stored shape; their types."""
    reader = gguf.GGUFReader(path)
    settings = {name: field.contents() for name, field in reader.fields.items()}
    tensors, types = {}, {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        types[tensor.name] = tensor.tensor_type.name
        if types[tensor.name] == "BF16":
            values = tensor.data.view(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
        else:
            values = np.asarray(tensor.data, np.float32)
        tensors[tensor.name] = values.reshape(shape)
    return settings, tensors, types


def untiled(value: np.ndarray, axis: int, keys: int, values: int, size: int) -> np.ndarray:
    """Value head h of the model is the (h // per_group)-th group's (h % per_group)-th: one head at a time."""
    per_group = values // keys
    parts = np.split(value, values, axis)
    heads = [parts[(head % per_group) * keys + head // per_group] for head in range(values)]
    assert all(part.shape[axis] == size for part in heads)
    return np.concatenate(heads, axis)


def expected(template: ModelTemplate, store: HostStore) -> dict[str, np.ndarray]:
    values = masters(store)
    return {
        entry.key: to_stored(entry.transform, values[entry.layer_index, entry.parameter])
        for entry in key_map(template)
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama_comes_back(dtype: Any, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    template, store = model("llama-tied")
    gguf_file.write_gguf(tmp_path / "m.gguf", template, store, folder, {}, dtype=dtype)
    settings, tensors, types = read(tmp_path / "m.gguf")
    assert settings["general.architecture"] == "llama"
    config = template.config
    found = {}
    for name, value in tensors.items():
        key = huggingface_key(name)
        for projection, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if f".{projection}_proj." in key:
                value = unpermute_heads(value, heads)
        found[key] = value
        assert types[name] == ("F32" if value.ndim == 1 or dtype == "float32" else "BF16")
    wanted = expected(template, store)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        rounds = dtype == "bfloat16" and value.ndim > 1
        exact = value.astype(ml_dtypes.bfloat16).astype(np.float32) if rounds else value
        np.testing.assert_array_equal(found[key], exact, err_msg=key)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3-tied"])
def test_qwen_comes_back(name: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    template, store = model(name)
    gguf_file.write_gguf(tmp_path / "m.gguf", template, store, folder, {}, dtype="float32")
    settings, tensors, _ = read(tmp_path / "m.gguf")
    assert settings["general.architecture"] == name.removesuffix("-tied")
    names = {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.o_proj.weight": "attn_output.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
    }
    names |= {f"self_attn.{p}_proj.{kind}": f"attn_{p}.{kind}" for p in "qkv" for kind in ("weight", "bias")}
    names |= {f"mlp.{p}_proj.weight": f"ffn_{p}.weight" for p in ("gate", "up", "down")}
    outside = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    wanted = expected(template, store)
    assert len(tensors) == len(wanted)
    for key, value in wanted.items():
        inner = key.removeprefix("model.")
        if inner.startswith("layers."):
            _, block, name_ = inner.split(".", 2)
            there = f"blk.{block}.{names[name_]}"
        else:
            there = "output.weight" if key == "lm_head.weight" else outside[inner]
        np.testing.assert_array_equal(tensors[there], value, err_msg=key)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-tied"])
def test_the_delta_net_comes_back(name: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    template, store = model(name, linear_num_key_heads=2, linear_num_value_heads=6)
    gguf_file.write_gguf(tmp_path / "m.gguf", template, store, folder, {}, dtype="float32")
    settings, tensors, types = read(tmp_path / "m.gguf")
    config = template.config
    keys, values, size = 2, 6, config.linear_value_head_dim
    rows = 2 * keys * config.linear_key_head_dim
    assert settings["general.architecture"] == "qwen35"
    assert settings["qwen35.full_attention_interval"] == 3
    assert settings["qwen35.ssm.time_step_rank"] == values
    assert settings["qwen35.rope.dimension_count"] == config.rotary_dim
    assert types["blk.0.ssm_conv1d.weight"] == "F32"
    wanted = {key.removeprefix("model.layers."): value for key, value in expected(template, store).items()}
    checked = 0
    for block in range(2):
        there = {name_: value for name_, value in tensors.items() if name_.startswith(f"blk.{block}.")}
        here = {key: value for key, value in wanted.items() if key.startswith(f"{block}.")}
        assert len(there) == len(here)

        def at(name_: str, there: dict[str, np.ndarray] = there, block: int = block) -> np.ndarray:
            return there[f"blk.{block}.{name_}"]

        found = {
            "linear_attn.in_proj_z.weight": untiled(at("attn_gate.weight"), 0, keys, values, size),
            "linear_attn.in_proj_a.weight": untiled(at("ssm_alpha.weight"), 0, keys, values, 1),
            "linear_attn.in_proj_b.weight": untiled(at("ssm_beta.weight"), 0, keys, values, 1),
            "linear_attn.dt_bias": untiled(at("ssm_dt.bias"), 0, keys, values, 1),
            "linear_attn.out_proj.weight": untiled(at("ssm_out.weight"), 1, keys, values, size),
            "linear_attn.norm.weight": at("ssm_norm.weight"),
            "mlp.up_proj.weight": at("ffn_up.weight"),
        }
        for joined, key in (("attn_qkv.weight", "in_proj_qkv"), ("ssm_conv1d.weight", "conv1d")):
            value = np.concatenate(
                [at(joined)[:rows], untiled(at(joined)[rows:], 0, keys, values, size)]
            )
            found[f"linear_attn.{key}.weight"] = value[:, None, :] if key == "conv1d" else value
        for key, value in found.items():
            np.testing.assert_array_equal(value, here[f"{block}.{key}"], err_msg=key)
        # exp and the offset of one are computed, in float32.
        decay = untiled(at("ssm_a"), 0, keys, values, 1)
        np.testing.assert_array_equal(decay, -np.exp(here[f"{block}.linear_attn.A_log"]))
        norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
        for key, name_ in norms.items():
            np.testing.assert_array_equal(
                at(f"{name_}.weight"), here[f"{block}.{key}.weight"] + np.float32(1)
            )
        checked += len(found) + 1 + len(norms)
    assert checked == 2 * (len(here) - 2)  # all but two more projections of the MLP


def test_the_tokenizer(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    template, store = model("qwen2")
    gguf_file.write_gguf(tmp_path / "m.gguf", template, store, folder, {"max_position_embeddings": 77})
    settings, _, _ = read(tmp_path / "m.gguf")
    tokens, types = settings["tokenizer.ggml.tokens"], settings["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == VOCABULARY
    assert tokens[256:261] == ["ab", "abc", "<|im_end|>", "<mine>", "[PAD260]"]
    assert types[257:261] == [1, 3, 4, 5]  # llama.cpp's normal, control, user defined, unused
    assert settings["tokenizer.ggml.merges"] == ["a b", "ab c"]
    assert settings["tokenizer.ggml.pre"] == "qwen2"
    assert settings["tokenizer.ggml.eos_token_id"] == 258
    assert settings["tokenizer.ggml.add_bos_token"] is False
    assert settings["tokenizer.chat_template"] == TEMPLATE
    assert settings["qwen2.context_length"] == 77
    assert "tokenizer.ggml.eot_token_id" not in settings
    gguf_file.write_gguf(tmp_path / "n.gguf", template, store, folder, {}, stop_token_ids=(258, 259))
    assert read(tmp_path / "n.gguf")[0]["tokenizer.ggml.eot_token_id"] == 259


def test_scaled_frequencies_are_those_that_were_trained_with(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from lazyjax.models.rope import inverse_frequencies

    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    rope = Rope(theta=1e4, scaling=scaling)
    template, store = model("llama-tied", rope=rope, head_dim=16)
    gguf_file.write_gguf(tmp_path / "m.gguf", template, store, folder, {})
    factors = read(tmp_path / "m.gguf")[1]["rope_freqs.weight"]
    plain = jnp.asarray(inverse_frequencies(Rope(theta=1e4), 16))
    np.testing.assert_allclose(plain / factors, inverse_frequencies(rope, 16), rtol=1e-6)
    assert (factors.min(), factors.max()) == (1, 8)


def test_what_cannot_be_written_leaves_nothing(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, store = model("qwen2")
    out = tmp_path / "out"
    (tmp_path / "there.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="never overwrites"):
        gguf_file.write_gguf(tmp_path / "there.gguf", template, store, folder, {})
    document = json.loads((folder / "tokenizer.json").read_text())
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[a-z]+"
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"splitting rule .*\[a-z\]\+.* --rule .*qwen2"):
        gguf_file.write_gguf(out / "m.gguf", template, store, folder, {})
    gguf_file.write_gguf(tmp_path / "named.gguf", template, store, folder, {}, rule="qwen2")
    monkeypatch.setattr("lazyjax.huggingface.export._free_bytes", lambda folder: 10)
    with pytest.raises(CheckpointError, match="GB to write"):
        gguf_file.write_gguf(out / "m.gguf", template, store, folder, {}, rule="qwen2")
    monkeypatch.undo()

    def full(writer: Any, value: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(OSError, match="No space left"):
        gguf_file.write_gguf(out / "m.gguf", template, store, folder, {}, rule="qwen2")
    assert list(out.iterdir()) == []
    small, _ = model("qwen2", vocab_size=100)
    with pytest.raises(CheckpointError, match="the model knows 100"):
        gguf_file.write_gguf(out / "m.gguf", small, store, folder, {}, rule="qwen2")
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"lazyjax\[gguf\]"):
        gguf_file.write_gguf(out / "m.gguf", template, store, folder, {})
