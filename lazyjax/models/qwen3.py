"""Qwen3: every query and key head is normalised, projections have no bias."""

from __future__ import annotations

from lazyjax.models.architecture import Qwen3Architecture
from lazyjax.models.kinds import decoder_kind
from lazyjax.models.layers import AttentionBlock, AttentionShape
from lazyjax.models.template import LayerKind


def block_kinds(config: Qwen3Architecture, attention: str = "blockwise") -> tuple[LayerKind, ...]:
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
        qk_norm=True,
        attention=attention,
    )
    return (
        decoder_kind(
            "full_attention",
            lambda rngs: AttentionBlock(shape, config.intermediate_size, rngs=rngs),
            config.hidden_size,
        ),
    )
