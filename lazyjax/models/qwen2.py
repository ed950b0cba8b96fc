"""Qwen2 and Qwen2.5, and Llama-type models such as SmolLM2, which differ by having no bias."""

from __future__ import annotations

from lazyjax.models.architecture import Qwen2Architecture
from lazyjax.models.kinds import decoder_kind
from lazyjax.models.layers import AttentionBlock, AttentionShape
from lazyjax.models.template import LayerKind


def block_kinds(config: Qwen2Architecture, attention: str = "blockwise") -> tuple[LayerKind, ...]:
    """The one kind of block."""
    shape = AttentionShape(
        hidden_size=config.hidden_size,
        query_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        rope=config.rope,
        rms_norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_range,
        qkv_bias=config.qkv_bias,
        attention=attention,
    )
    return (
        decoder_kind(
            "full_attention",
            lambda rngs: AttentionBlock(shape, config.intermediate_size, rngs=rngs),
            config.hidden_size,
        ),
    )
