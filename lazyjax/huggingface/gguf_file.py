"""A model as one GGUF file, the format of llama.cpp, through the `gguf` library (extra `gguf`).

What llama.cpp expects of each family is facts about its converter (ggml-org/llama.cpp,
convert_hf_to_gguf.py): names, which projections have their rotation pairs side by side, norms stored
with their offset of one, value heads of the delta net in tiled order, and vectors in float32 beside
matrices of either type. Everything but -exp(A_log), the offset and a rounding to bfloat16 is a rearrangement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from lazyjax.huggingface.export import ExportDtype, check_room
from lazyjax.huggingface.gguf_vocabulary import add_vocabulary, read_vocabulary
from lazyjax.huggingface.key_maps import Entry, key_map, to_stored
from lazyjax.huggingface.parameters import ReadableStore
from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.huggingface.tokenizer import load_tokenizer
from lazyjax.models.architecture import Architecture, Llama3Scaling, Qwen2Architecture, Qwen35Architecture
from lazyjax.models.template import ModelTemplate

#: Used where a config does not say how long a context the model was made for.
_CONTEXT_LENGTH = 4096
#: Split of the rotary dimensions over text, height and width; the same angle on all of them for text.
_QWEN3_5_SECTIONS = (11, 11, 10, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Outgoing:
    """A tensor under its GGUF name; `values` gives it whole as float32, in its stored shape."""

    name: str
    shape: tuple[int, ...]
    wide: bool
    values: Callable[[], Float32[np.ndarray, "..."]]


def write_gguf(
    path: Path,
    template: ModelTemplate,
    store: ReadableStore,
    folder: Path,
    config: Mapping[str, Any],
    *,
    dtype: ExportDtype = "bfloat16",
    rule: str | None = None,
    chat_template: str | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> Path:
    """Writes the text model and its tokenizer; what else a checkpoint holds is left out.

    Args:
        path: must not exist; written under another name and renamed when it is complete.
        folder: of the tokenizer.
        config: the config.json, for what an architecture does not state.
        dtype: of matrices; vectors are float32.
        rule: llama.cpp's name of the tokenizer's splitting rule, where it is not found.
        chat_template: by default the tokenizer's own.
        stop_token_ids: the first that is not the end of sequence becomes the end of turn.

    Raises:
        CheckpointError: `path` exists, `gguf` is not installed, the tokenizer cannot be written, or the
            disk has too little room. Nothing is left behind.
    """
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError("GGUF files need the `gguf` package: pip install 'lazyjax[gguf]'")
    import gguf

    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} exists; export never overwrites, name another file")
    tokenizer = load_tokenizer(folder)
    vocabulary = read_vocabulary(tokenizer, folder, template.config.vocab_size, rule)
    tensors = _tensors(template, store)
    path.parent.mkdir(parents=True, exist_ok=True)
    widths = {True: 4, False: 4 if dtype == "float32" else 2}
    check_room(path, sum(int(np.prod(tensor.shape)) * widths[tensor.wide] for tensor in tensors))
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    writer = gguf.GGUFWriter(partial, _family(template.config))
    try:
        _add_settings(writer, template.config, config, dtype)
        add_vocabulary(writer, vocabulary, tokenizer, stop_token_ids, chat_template)
        _add_tensors(writer, tensors, dtype)
        writer.close()
        partial.chmod(0o644)
        os.rename(partial, path)
    except BaseException:
        # What is still buffered may not find room either.
        with contextlib.suppress(OSError):
            writer.close()
        partial.unlink(missing_ok=True)
        raise
    return path


def _family(config: Architecture) -> str:
    """llama.cpp's name of the architecture."""
    if isinstance(config, Qwen2Architecture):
        return "qwen2" if config.qkv_bias else "llama"
    return "qwen35" if isinstance(config, Qwen35Architecture) else "qwen3"


def _add_settings(writer: Any, config: Architecture, document: Mapping[str, Any], dtype: ExportDtype) -> None:
    import gguf

    text = document["text_config"] if "text_config" in document else document
    known = "max_position_embeddings" in text and text["max_position_embeddings"]
    writer.add_name(config.name)
    writer.add_context_length(text["max_position_embeddings"] if known else _CONTEXT_LENGTH)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_vocab_size(config.vocab_size)
    types = gguf.LlamaFileType
    writer.add_file_type(types.ALL_F32 if dtype == "float32" else types.MOSTLY_BF16)
    if isinstance(config, Qwen35Architecture):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(_interval(config))
        writer.add_rope_dimension_sections(list(_QWEN3_5_SECTIONS))


def _interval(config: Qwen35Architecture) -> int:
    """Every how manieth block has full attention; llama.cpp knows no other pattern."""
    full = [index + 1 for index, name in enumerate(config.layer_types) if name == "full_attention"]
    interval = full[0] if full else 0
    if not interval or full != list(range(interval, config.num_hidden_layers + 1, interval)):
        raise CheckpointError(
            f"{config.name}: GGUF knows full attention in every n-th block only, not these layer_types"
        )
    return interval


def _tensors(template: ModelTemplate, store: ReadableStore) -> list[_Outgoing]:
    import gguf

    config = template.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[_family(config).upper()], config.num_hidden_layers)
    tensors = []
    for entry in key_map(template):
        key = entry.key.replace(".dt_bias", ".dt_proj.bias")
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise CheckpointError(f"{entry.key}: GGUF has no name for it in {_family(config)}")
        # The kernel of a depthwise convolution is stored [channels, 1, taps] and wanted [channels, taps].
        shape = tuple(size for size in entry.stored_shape if size != 1 or len(entry.stored_shape) < 3)
        wide = len(shape) == 1 or name.endswith("_norm.weight") or "ssm_conv1d" in name
        tensors.append(_Outgoing(name, shape, wide, _values(entry, store, config, shape)))
    scaling = config.rope.scaling
    if scaling is not None:
        if not isinstance(scaling, Llama3Scaling):
            raise CheckpointError(
                f"{config.name}: of RoPE scalings only 'llama3' is written to GGUF, not {scaling.rope_type!r}"
            )
        factors = rope_factors(scaling, config.rope.theta, config.rotary_dim)
        tensors.append(_Outgoing("rope_freqs.weight", factors.shape, True, lambda: factors))
    return tensors


def _values(
    entry: Entry, store: ReadableStore, config: Architecture, shape: tuple[int, ...]
) -> Callable[[], Float32[np.ndarray, "..."]]:
    def read() -> Float32[np.ndarray, "..."]:
        chunks = store.layers[entry.layer_index].master_chunks(
            entry.parameter, lambda array: to_stored(entry.transform, array)
        )
        value = np.concatenate(list(chunks)).reshape(shape)
        if isinstance(config, Qwen2Architecture) and not config.qkv_bias:
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            for projection, count in heads.items():
                if f".{projection}." in entry.key:
                    return rotation_pairs_beside(value, count)
        if isinstance(config, Qwen35Architecture):
            return _qwen3_5(entry.key, value, config)
        return value

    return read


def rotation_pairs_beside(
    weight: Float32[np.ndarray, "out ..."], heads: int
) -> Float32[np.ndarray, "out ..."]:
    """Each head's rows as rotation pairs side by side: 0, d/2, 1, d/2 + 1, ...

    Transformers rotates the first half of a head against the second, llama.cpp's `llama` neighbours.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def tiled_heads(
    value: Float32[np.ndarray, "..."], axis: int, config: Qwen35Architecture, size: int
) -> Float32[np.ndarray, "..."]:
    """Value heads along `axis` from grouped by key head to tiled: first of each group, second of each, ..."""
    groups = config.linear_num_key_heads
    per_group = config.linear_num_value_heads // groups
    split = (*value.shape[:axis], groups, per_group, size, *value.shape[axis + 1 :])
    return np.ascontiguousarray(value.reshape(split).swapaxes(axis, axis + 1).reshape(value.shape))


def _qwen3_5(key: str, value: Float32[np.ndarray, "..."], config: Qwen35Architecture) -> np.ndarray:
    """One tensor of Qwen3.5 as llama.cpp computes with it."""
    if key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        return value + np.float32(1)
    if ".linear_attn." not in key:
        return value
    name = key.rpartition(".linear_attn.")[2]
    size = config.linear_value_head_dim
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([value[:keys], tiled_heads(value[keys:], 0, config, size)])
    if name == "in_proj_z.weight":
        return tiled_heads(value, 0, config, size)
    if name in ("in_proj_a.weight", "in_proj_b.weight", "dt_bias"):
        return tiled_heads(value, 0, config, 1)
    if name == "A_log":
        return tiled_heads(-np.exp(value), 0, config, 1)
    if name == "out_proj.weight":
        return tiled_heads(value, 1, config, size)
    return value


def rope_factors(scaling: Llama3Scaling, theta: float, rotary_dim: int) -> Float32[np.ndarray, " half"]:
    """By what each frequency is divided (Llama 3.1), which GGUF stores as a tensor."""
    frequencies = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / scaling.factor + smooth)).astype(np.float32)


def _add_tensors(writer: Any, tensors: list[_Outgoing], dtype: ExportDtype) -> None:
    import gguf

    kinds = gguf.GGMLQuantizationType
    for tensor in tensors:
        narrow = dtype == "bfloat16" and not tensor.wide
        elements = int(np.prod(tensor.shape))
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.float16 if narrow else np.float32),
            elements * (2 if narrow else 4),
            raw_dtype=kinds.BF16 if narrow else kinds.F32,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        value = tensor.values()
        narrow = dtype == "bfloat16" and not tensor.wide
        writer.write_tensor_data(value.astype(ml_dtypes.bfloat16).view(np.uint16) if narrow else value)
