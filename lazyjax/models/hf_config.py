"""Reads a Hugging Face config.json as an architecture.

What a family allows but is not implemented here (sliding windows, other activations, other RoPE
scalings, quantised weights) is refused, never ignored: a model that runs differently than it was
trained is worse than an error. Keys that do not change the mathematics are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic

from lazyjax.models.architecture import (
    Architecture,
    ArchitectureError,
    Qwen2Architecture,
    Qwen3Architecture,
    Qwen35Architecture,
)

#: Values that a key, where it is present, must have.
_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32", None),
    "quantization_config": (None,),
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
)
_LINEAR_SIZES = (
    "linear_conv_kernel_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text")


def parse_hf_config(document: Mapping[str, Any], *, name: str | None = None) -> Architecture:
    """The architecture that a config.json describes.

    Args:
        document: the parsed file; of a multimodal model the text model is taken.
        name: of the model; by default its `model_type`.

    Raises:
        ArchitectureError: naming the key that is missing, or has a value that is not implemented.
    """
    model_type = _get(document, "model_type")
    if model_type not in MODEL_TYPES:
        raise ArchitectureError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}"
        )
    text = _text_model(document, model_type)
    for key, allowed in _REQUIRED_VALUES.items():
        if key in text and text[key] not in allowed:
            raise ArchitectureError(f"{key} = {text[key]!r} is not implemented, only {allowed[0]!r}")
    fields: dict[str, Any] = {key: _get(text, key) for key in _SIZES}
    fields["name"] = model_type if name is None else name
    heads = fields["num_attention_heads"]
    fields["num_key_value_heads"] = _either(text, "num_key_value_heads", heads)
    fields["initializer_range"] = _either(text, "initializer_range", 0.02)
    fields["tie_word_embeddings"] = _either(text, "tie_word_embeddings", False)
    fields["rope"] = _rope(text, 0.25 if model_type.startswith("qwen3_5") else 1.0)
    try:
        match model_type:
            case "llama" | "qwen2":
                fields["head_dim"] = _either(text, "head_dim", fields["hidden_size"] // heads)
                _only_full_attention(text)
                return Qwen2Architecture(**fields, qkv_bias=model_type == "qwen2")
            case "qwen3":
                fields["head_dim"] = _get(text, "head_dim")
                _only_full_attention(text)
                return Qwen3Architecture(**fields)
            case _:
                fields["head_dim"] = _get(text, "head_dim")
                fields |= {key: _get(text, key) for key in _LINEAR_SIZES}
                fields["layer_types"] = _layer_types(text, fields["num_hidden_layers"])
                return Qwen35Architecture(**fields)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ArchitectureError(f"{key}: {first['msg']}" if key else first["msg"]) from None


def _text_model(document: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """The table of the text model. What stands beside it counts for the whole checkpoint, and wins.

    Transformers saves `tie_word_embeddings` twice and goes by the outer one; the inner one may be
    a default that was never meant.
    """
    if model_type != "qwen3_5":
        return document
    text = _get(document, "text_config")
    if not isinstance(text, Mapping):
        raise ArchitectureError("text_config: expected a table")
    outer = ("tie_word_embeddings", "quantization_config")
    return dict(text) | {key: document[key] for key in outer if key in document}


def _rope(text: Mapping[str, Any], partial_by_default: float) -> dict[str, Any]:
    """Both spellings: `rope_parameters` (Transformers 5), or `rope_theta` beside `rope_scaling`."""
    merged = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if key in text}
    for table in ("rope_scaling", "rope_parameters"):
        merged |= _either(text, table, {})
    kind = _either(merged, "rope_type", _either(merged, "type", "default"))
    rope: dict[str, Any] = {
        "theta": _get(merged, "rope_theta"),
        "partial_rotary_factor": _either(merged, "partial_rotary_factor", partial_by_default),
    }
    if kind == "llama3":
        rope["scaling"] = {key: _get(merged, key) for key in _LLAMA3}
    elif kind not in ("default", "mrope"):
        # Multimodal RoPE gives text tokens the same angle on all axes: it is plain RoPE for them.
        raise ArchitectureError(f"RoPE of type {kind!r} is not implemented, only 'default' and 'llama3'")
    return rope


def _layer_types(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    if "layer_types" in text:
        return tuple(text["layer_types"])
    interval = _get(text, "full_attention_interval")
    return tuple(
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers)
    )


def _only_full_attention(text: Mapping[str, Any]) -> None:
    others = set(_either(text, "layer_types", ())) - {"full_attention"}
    if others:
        raise ArchitectureError(f"layer_types: {sorted(others)[0]!r} is not implemented for this family")


def _get(table: Mapping[str, Any], key: str) -> Any:
    if key not in table or table[key] is None:
        raise ArchitectureError(f"the config has no {key}")
    return table[key]


def _either(table: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    """The value of `key`, or what Transformers takes where it is left out or null."""
    return table[key] if key in table and table[key] is not None else otherwise
