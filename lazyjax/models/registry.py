"""Which families and released models exist, and templates and initial parameters for any of them."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
import types

import jax
import numpy as np
from jaxtyping import Float32, PRNGKeyArray

from lazyjax.models import qwen2, qwen3, qwen3_5
from lazyjax.models.architecture import (
    Architecture,
    ArchitectureError,
    Qwen2Architecture,
    Qwen3Architecture,
    Qwen35Architecture,
)
from lazyjax.models.families import registered
from lazyjax.models.hf_config import parse_hf_config
from lazyjax.models.kinds import block_kind, embed_kind
from lazyjax.models.layers import Embed, Head
from lazyjax.models.template import LayerKind, ModelTemplate, ParameterRef
from lazyjax.specs import LayerSpec, ModelSpec


def architecture_names() -> tuple[str, ...]:
    """Names of the released models whose configs are in the package."""
    folder = importlib.resources.files("lazyjax.models") / "architectures"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json")))


def architecture(name: str) -> Architecture:
    """The architecture of a released model, e.g. `Qwen2.5-7B`; nothing is downloaded.

    Raises:
        ArchitectureError: no such model in the package.
    """
    names = architecture_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ArchitectureError(f"there is no architecture {name!r}{hint} (known: {', '.join(names)})")
    resource = importlib.resources.files("lazyjax.models") / "architectures" / f"{name}.json"
    return parse_hf_config(json.loads(resource.read_text()), name=name)


def _blocks(config: Architecture, attention: str) -> tuple[tuple[LayerKind, ...], tuple[str, ...]]:
    """The kinds of block, and the kind of every block."""
    match config:
        case Qwen2Architecture():
            return qwen2.block_kinds(config, attention), ("full_attention",) * config.num_hidden_layers
        case Qwen3Architecture():
            return qwen3.block_kinds(config, attention), ("full_attention",) * config.num_hidden_layers
        case Qwen35Architecture():
            return qwen3_5.block_kinds(config, attention), config.layer_types
        case _:
            return registered(config.family).blocks(config, attention)


def build_template(config: Architecture, attention: str = "blockwise") -> ModelTemplate:
    """The template of `config`; equal arguments give the same object, and so share compiled functions.

    Args:
        attention: a key of `lazyjax.models.attention.ATTENTIONS`.

    Raises:
        ValueError: `jax_remat3` is on, and names in custom gradients would be lost.
    """
    if getattr(jax.config, "jax_remat3", False):
        raise ValueError("jax_remat3 (JAX_REMAT3) is on: layers cannot keep tensors by name; switch it off")
    return _build(config, attention)


@functools.cache
def _build(config: Architecture, attention: str) -> ModelTemplate:
    if isinstance(config, Qwen2Architecture | Qwen3Architecture | Qwen35Architecture):
        zero_centered = isinstance(config, Qwen35Architecture)
    else:
        zero_centered = registered(config.family).zero_centered
    embed = embed_kind(
        lambda rngs: Embed(config.vocab_size, config.hidden_size, stddev=config.initializer_range, rngs=rngs)
    )
    head = block_kind(
        "head",
        lambda rngs: Head(
            config.vocab_size,
            config.hidden_size,
            eps=config.rms_norm_eps,
            zero_centered=zero_centered,
            tied=config.tie_word_embeddings,
            stddev=config.initializer_range,
            rngs=rngs,
        ),
        config.hidden_size,
    )
    blocks, block_names = _blocks(config, attention)
    kinds = {kind.name: kind for kind in (embed, *blocks, head)}
    layers = [LayerSpec("embed", "embed", embed.parameters)]
    for index, name in enumerate(block_names):
        layers.append(LayerSpec(f"layers.{index}", name, kinds[name].parameters))
    layers.append(LayerSpec("head", "head", head.parameters))
    spec = ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=config.hidden_size,
        vocabulary_size=config.vocab_size,
        tied=config.tie_word_embeddings,
        layers=tuple(layers),
        heads=(config.num_attention_heads, config.num_key_value_heads, config.head_dim),
    )
    table = ParameterRef(0, 0) if config.tie_word_embeddings else ParameterRef(len(layers) - 1, 1)
    return ModelTemplate(config, spec, types.MappingProxyType(kinds), table)


def init_parameters(
    template: ModelTemplate, layer_index: int, key: PRNGKeyArray
) -> dict[str, Float32[np.ndarray, "..."]]:
    """Initial parameters of one layer, by name, as the family initialises them.

    The same key gives every layer other values: it is folded with the layer's index.
    """
    kind = template.kind(layer_index)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        values = jax.device_get(kind.initialize(jax.random.fold_in(key, layer_index)))
    return {tensor.name: value for tensor, value in zip(kind.parameters, values, strict=True)}
