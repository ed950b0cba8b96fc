"""Hugging Face config.json from an architecture: the inverse of reading one.

Reading belongs to `lazyjax.models`, which owns the architectures; this is only needed to export a
model that was not started from a Hugging Face folder.
"""

from __future__ import annotations

from typing import Any

from lazyjax.models.architecture import (
    Architecture,
    DynamicScaling,
    Qwen2Architecture,
    Qwen3Architecture,
    Qwen35Architecture,
    Rope,
)
from lazyjax.models.families import registered


def to_hf_config(config: Architecture) -> dict[str, Any]:
    """A config.json that Transformers builds the same model from.

    What an architecture does not state (e.g. the longest context, unless the rotary embedding depends
    on it) is left to Transformers' defaults.
    """
    if not isinstance(config, Qwen2Architecture | Qwen3Architecture | Qwen35Architecture):
        return registered(config.family).write_config(config)
    rope = _rope_parameters(config.rope)
    common = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        # Transformers before version 5 read this one only, and silently assume 10000 without.
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
    }
    if isinstance(config.rope.scaling, DynamicScaling):
        common["max_position_embeddings"] = rope.pop("max_position_embeddings")
    if isinstance(config, Qwen2Architecture):
        if config.qkv_bias:
            # Qwen2 always has this bias and knows no switch for it.
            del common["attention_bias"]
            return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **common}
        return {"architectures": ["LlamaForCausalLM"], "mlp_bias": False, "model_type": "llama", **common}
    if isinstance(config, Qwen3Architecture):
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **common}
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **common,
        "layer_types": list(config.layer_types),
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "linear_value_head_dim": config.linear_value_head_dim,
    }


def _rope_parameters(rope: Rope) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "partial_rotary_factor": rope.partial_rotary_factor,
        "rope_theta": rope.theta,
        "rope_type": "default",
    }
    if rope.scaling is not None:
        parameters |= rope.scaling.model_dump(exclude_none=True)
    return parameters
