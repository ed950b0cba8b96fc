"""Narrow models, one per family, small enough to compile in seconds."""

from __future__ import annotations

from lazyjax.models.architecture import Qwen2Architecture, Qwen3Architecture, Qwen35Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.specs import ModelSpec
from lazyjax.storage.host import HostStore, allocate_host_store
from tests.reference import Parameters

VOCABULARY = 61


def template(family: str, *, tied: bool, blocks: int = 5) -> ModelTemplate:
    """A random-size-free template of `family`: hidden 32, vocabulary 61."""
    common = {
        "name": f"tiny-{family}-{'tied' if tied else 'untied'}-{blocks}",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }
    match family:
        case "qwen2":
            return build_template(Qwen2Architecture(**common, rope=Rope(theta=1e4), qkv_bias=True))
        case "qwen3":
            return build_template(Qwen3Architecture(**common, rope=Rope(theta=1e4)))
        case "qwen3_5":
            return build_template(
                Qwen35Architecture(
                    **common,
                    rope=Rope(theta=1e4, partial_rotary_factor=0.5),
                    layer_types=tuple(
                        "full_attention" if index % 4 == 3 else "linear_attention" for index in range(blocks)
                    ),
                    linear_conv_kernel_dim=4,
                    linear_num_key_heads=2,
                    linear_num_value_heads=4,
                    linear_key_head_dim=8,
                    linear_value_head_dim=8,
                )
            )
    raise ValueError(family)


def residual_names(model: ModelTemplate) -> list[tuple[str, ...]]:
    """What each layer can save, in layer order."""
    return [model.kind(index).residual_names for index in range(len(model.spec.layers))]


def filled_store(
    model: ModelTemplate, parameters: Parameters, *, gradient_dtype: str = "float32", devices: int = 1
) -> HostStore:
    """Host slabs holding `parameters`."""
    store = allocate_host_store(model.spec, gradient_dtype=gradient_dtype, devices=devices)
    for slabs, layer, tensors in zip(store.layers, model.spec.layers, parameters, strict=True):
        for spec, value in zip(layer.parameters, tensors, strict=True):
            slabs.set_master(spec.name, _numpy(value))
    return store


def _numpy(value: object) -> object:
    import jax
    import numpy as np

    return np.asarray(jax.device_get(value))


def spec_of(model: ModelTemplate) -> ModelSpec:
    """The model's spec."""
    return model.spec
