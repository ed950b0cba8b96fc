"""Which Hugging Face key is which parameter, as invertible tables.

A rule pairs a parameter name of a layer with a key and a transform between the two arrays. Every
transform only rearranges axes, so it has an inverse and neither direction computes anything: what
is imported can be exported bit by bit. One table per family; nothing else in the package knows
key names.

Keys of the text model start with `model.`, or with `model.language_model.` in checkpoints that
hold more than a text model; the output table `lm_head.weight` has no prefix in either.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Collection
from typing import assert_never

import numpy as np
from jaxtyping import Shaped

from lazyjax.models.families import registered
from lazyjax.models.template import ModelTemplate


class Transform(enum.Enum):
    """How the stored array and the parameter are laid out differently."""

    IDENTITY = "identity"
    #: Stored [out, in], parameter [in, out].
    TRANSPOSE = "transpose"
    #: Depthwise convolution: stored [channels, 1, taps], parameter [taps, channels].
    CONVOLUTION = "convolution"


def to_parameter(transform: Transform, stored: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """The parameter that `stored` holds, as a view."""
    match transform:
        case Transform.IDENTITY:
            return stored
        case Transform.TRANSPOSE:
            return stored.T
        case Transform.CONVOLUTION:
            return stored[:, 0, :].T
    assert_never(transform)


def to_stored(transform: Transform, parameter: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """The inverse of `to_parameter`, as a view."""
    match transform:
        case Transform.IDENTITY:
            return parameter
        case Transform.TRANSPOSE:
            return parameter.T
        case Transform.CONVOLUTION:
            return parameter.T[:, None, :]
    assert_never(transform)


def stored_shape(transform: Transform, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stored array's shape for a parameter of `shape`."""
    match transform:
        case Transform.IDENTITY:
            return shape
        case Transform.TRANSPOSE:
            rows, columns = shape
            return columns, rows
        case Transform.CONVOLUTION:
            taps, channels = shape
            return channels, 1, taps
    assert_never(transform)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table: parameter name in its layer, key without prefixes, transform."""

    parameter: str
    key: str
    transform: Transform


def _same(*names: str) -> tuple[Rule, ...]:
    return tuple(Rule(name, name, Transform.IDENTITY) for name in names)


def _linear(*names: str) -> tuple[Rule, ...]:
    return tuple(Rule(f"{name}.kernel", f"{name}.weight", Transform.TRANSPOSE) for name in names)


_EMBED = (Rule("table", "embed_tokens.weight", Transform.IDENTITY),)
_FINAL_NORM = Rule("final_norm.weight", "norm.weight", Transform.IDENTITY)
_OUTPUT_TABLE = Rule("lm_head", "lm_head.weight", Transform.IDENTITY)

_ATTENTION_BLOCK = (
    *_same("input_layernorm.weight", "post_attention_layernorm.weight"),
    *_linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *_linear("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_QKV_BIAS = _same("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
_QK_NORM = _same("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_DELTA_NET = (
    *_same("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"),
    *_linear(
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
        "linear_attn.out_proj",
    ),
    Rule("linear_attn.conv1d.kernel", "linear_attn.conv1d.weight", Transform.CONVOLUTION),
)

#: Family -> rules of its blocks. A block uses those rules whose parameter it has.
BLOCK_RULES: dict[str, tuple[Rule, ...]] = {
    "qwen2": (*_ATTENTION_BLOCK, *_QKV_BIAS),
    "qwen3": (*_ATTENTION_BLOCK, *_QK_NORM),
    "qwen3_5": (*_ATTENTION_BLOCK, *_QK_NORM, *_DELTA_NET),
}

_PREFIXES = ("model.language_model.", "model.")
#: Family -> keys that may stand beside the text model: other towers, extra prediction layers and
#: constants that old checkpoints stored.
_REST: dict[str, str] = {
    "qwen2": r".*\.rotary_emb\.inv_freq",
    "qwen3": r".*\.rotary_emb\.inv_freq",
    "qwen3_5": r"model\.visual\..*|mtp\..*|.*\.rotary_emb\.inv_freq",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of a model and where a checkpoint keeps it.

    Attributes:
        key: the whole Hugging Face key.
        layer_index, parameter: as in `ModelSpec.layers` and `LayerSpec.parameters`.
        shape: of the parameter.
        stored_shape: of the stored array.
    """

    key: str
    layer_index: int
    parameter: str
    transform: Transform
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]


def detect_prefix(keys: Collection[str]) -> str | None:
    """The prefix of the text model's keys, or None when none of the known ones fits.

    Told by the embedding, or by the final norm where a tied model's table goes by its other name.
    """
    for name in (_EMBED[0].key, _FINAL_NORM.key):
        for prefix in _PREFIXES:
            if f"{prefix}{name}" in keys:
                return prefix
    return None


def output_table_key() -> str:
    """The key of the output table, which a tied checkpoint may hold although it repeats another."""
    return _OUTPUT_TABLE.key


def is_rest(family: str, key: str) -> bool:
    """Whether `key` belongs to what may stand beside the text model of `family`."""
    return family in _REST and re.fullmatch(_REST[family], key) is not None


def _block_rules(family: str) -> tuple[Rule, ...]:
    if family in BLOCK_RULES:
        return BLOCK_RULES[family]
    return tuple(
        Rule(parameter, key, Transform(transform))
        for parameter, (key, transform) in registered(family).keys.items()
    )


def key_map(template: ModelTemplate, prefix: str = "model.") -> tuple[Entry, ...]:
    """Every parameter of the model with its key, in slab order.

    Raises:
        KeyError: the family has no table, or a parameter no rule: the tables are incomplete.
    """
    spec = template.spec
    blocks = {rule.parameter: rule for rule in _block_rules(spec.family)}
    embed = {rule.parameter: rule for rule in _EMBED}
    head = {rule.parameter: rule for rule in (_FINAL_NORM, _OUTPUT_TABLE)}
    last = len(spec.layers) - 1
    entries = []
    for index, layer in enumerate(spec.layers):
        rules, layer_prefix = (
            (embed, prefix)
            if index == 0
            else (head, prefix)
            if index == last
            else (blocks, f"{prefix}layers.{index - 1}.")
        )
        for tensor in layer.parameters:
            rule = rules[tensor.name]
            entries.append(
                Entry(
                    key=rule.key if rule is _OUTPUT_TABLE else layer_prefix + rule.key,
                    layer_index=index,
                    parameter=tensor.name,
                    transform=rule.transform,
                    shape=tensor.shape,
                    stored_shape=stored_shape(rule.transform, tensor.shape),
                )
            )
    return tuple(entries)
