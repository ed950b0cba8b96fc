"""Reads a Hugging Face config.json as an architecture.

What a family allows but is not implemented here (sliding windows, other activations, other RoPE
scalings, quantised weights) is refused, never ignored: a model that runs differently than it was
trained is worse than an error. Keys that do not change the mathematics, or that the family's class in
Transformers does not read, are passed over; keys that are left out have that class's defaults.
"""

from __future__ import annotations

import functools
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
from lazyjax.models.families import family_of, registered_model_types

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
_QWEN3_5 = ("qwen3_5", "qwen3_5_text")
#: Model types whose class in Transformers reads a key at all; keys not listed here concern every type.
#: Qwen2 for instance always has biases on queries, keys and values, whatever its config says of them.
_READ_BY: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("llama", "qwen3", *_QWEN3_5),
    "mlp_bias": ("llama",),
    "use_sliding_window": ("qwen2", "qwen3"),
    "attn_output_gate": _QWEN3_5,
    "mamba_ssm_dtype": _QWEN3_5,
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
#: RoPE scalings: keys that must be given, and keys that may be. Lengths are taken from the model's own
#: `max_position_embeddings` where they are left out, as in Transformers.
_ROPE_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor", "max_position_embeddings"), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
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
    own = family_of(model_type) if isinstance(model_type, str) else None
    if own is not None:
        return own.read_config(document, model_type if name is None else name)
    if model_type not in MODEL_TYPES:
        known = ", ".join((*MODEL_TYPES, *registered_model_types()))
        raise ArchitectureError(f"model_type {model_type!r} is not supported; supported: {known}")
    text = _text_model(document, model_type)
    for key, allowed in _REQUIRED_VALUES.items():
        read = key not in _READ_BY or model_type in _READ_BY[key]
        if read and key in text and text[key] not in allowed:
            raise ArchitectureError(f"{key} = {text[key]!r} is not implemented, only {allowed[0]!r}")
    table = _WithDefaults(text, model_type)
    fields: dict[str, Any] = {key: table.value(key) for key in _SIZES}
    fields["name"] = model_type if name is None else name
    heads = fields["num_attention_heads"]
    fields["num_key_value_heads"] = table.value("num_key_value_heads", null=heads)
    fields["initializer_range"] = table.value("initializer_range")
    fields["tie_word_embeddings"] = table.value("tie_word_embeddings")
    fields["rope"] = _rope(table, 0.25 if model_type in _QWEN3_5 else 1.0)
    try:
        match model_type:
            case "llama" | "qwen2":
                fields["head_dim"] = _head_dim(text, fields["hidden_size"], heads)
                _only_full_attention(text)
                return Qwen2Architecture(**fields, qkv_bias=model_type == "qwen2")
            case "qwen3":
                fields["head_dim"] = table.value("head_dim")
                _only_full_attention(text)
                return Qwen3Architecture(**fields)
            case _:
                fields["head_dim"] = table.value("head_dim")
                fields |= {key: table.value(key) for key in _LINEAR_SIZES}
                fields["layer_types"] = tuple(table.value("layer_types", null=None) or table.layer_types())
                return Qwen35Architecture(**fields)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ArchitectureError(f"{key}: {first['msg']}" if key else first["msg"]) from None


class _WithDefaults:
    """The keys of a config.json; for those left out, what Transformers' config class puts there.

    The class is asked (and Transformers imported) only when a key is left out: it knows defaults that
    depend on other keys, and a second table of them would grow stale.
    """

    def __init__(self, text: Mapping[str, Any], model_type: str) -> None:
        self.text, self._model_type = text, model_type

    def value(self, key: str, **null: Any) -> Any:
        """The value of `key`; for an explicit null, `null=...` where that is allowed.

        Raises ArchitectureError where the key is left out and the class has no default either.
        """
        if key in self.text and self.text[key] is not None:
            return self.text[key]
        if key in self.text:
            if "null" in null:
                return null["null"]
            raise ArchitectureError(f"the config has no {key}")
        found = getattr(self._filled, key, None)
        if found is None and "null" not in null:
            raise ArchitectureError(f"the config has no {key}")
        return found

    def rope_theta(self) -> float:
        """The base of the rotary embedding where no key gives it."""
        return float(self._filled.rope_parameters["rope_theta"])

    def layer_types(self) -> tuple[str, ...]:
        """The mixers of all blocks where `layer_types` is null."""
        return tuple(self._filled.layer_types)

    @functools.cached_property
    def _filled(self) -> Any:
        import transformers

        model_type = "qwen3_5_text" if self._model_type in _QWEN3_5 else self._model_type
        # Only keys that defaults follow from: everything else is not this class's to judge.
        known = (*_SIZES, "full_attention_interval")
        given = {
            key: self.text[key]
            for key in known
            if key in self.text and isinstance(self.text[key], int | float) and self.text[key] > 0
        }
        try:
            return transformers.CONFIG_MAPPING[model_type](**given)
        except Exception as error:  # the library has an exception of its own for each field's type
            raise ArchitectureError(" ".join(str(error).split())) from error


def _head_dim(text: Mapping[str, Any], hidden_size: Any, heads: Any) -> Any:
    if "head_dim" in text and text["head_dim"] is not None:
        return text["head_dim"]
    if not isinstance(hidden_size, int) or not isinstance(heads, int) or heads < 1:
        raise ArchitectureError(
            f"hidden_size ({hidden_size!r}) and num_attention_heads ({heads!r}) must be whole numbers from 1"
        )
    return hidden_size // heads


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


def _rope(table: _WithDefaults, partial_by_default: float) -> dict[str, Any]:
    """Both spellings: `rope_parameters` (Transformers 5), or `rope_theta` beside `rope_scaling`."""
    text = table.text
    merged = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if key in text}
    for group in ("rope_scaling", "rope_parameters"):
        merged |= _either(text, group, {})
    kind = _either(merged, "rope_type", _either(merged, "type", "default"))
    rope: dict[str, Any] = {
        "theta": _either(merged, "rope_theta", None) or table.rope_theta(),
        "partial_rotary_factor": _either(merged, "partial_rotary_factor", partial_by_default),
    }
    if kind in _ROPE_KEYS:
        rope["scaling"] = _rope_scaling(kind, merged, text)
    elif kind not in ("default", "mrope"):
        # Multimodal RoPE gives text tokens the same angle on all axes: it is plain RoPE for them.
        known = ", ".join(repr(name) for name in ("default", *sorted(_ROPE_KEYS)))
        raise ArchitectureError(f"RoPE of type {kind!r} is not implemented, only {known}")
    return rope


def _rope_scaling(kind: str, merged: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    required, optional = _ROPE_KEYS[kind]
    given = {key: value for key, value in merged.items() if value is not None}
    for key in ("original_max_position_embeddings", "max_position_embeddings"):
        # Beside the table the first counts more than in it; left out, it is the longest context.
        if key in required and key in text and text[key] is not None:
            given[key] = text[key]
        elif key in required and key not in given:
            given[key] = _get(text, "max_position_embeddings")
    if kind == "yarn" and "factor" not in given:
        given["factor"] = _get(text, "max_position_embeddings") / given["original_max_position_embeddings"]
    return {
        "rope_type": kind,
        **{key: _get(given, key) for key in required},
        **{key: given[key] for key in optional if key in given},
    }


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
