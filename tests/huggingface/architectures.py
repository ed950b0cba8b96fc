"""Small architectures of every family, for shapes and files."""

from typing import Any

from lazyjax.models.architecture import (
    Architecture,
    Qwen2Architecture,
    Qwen3Architecture,
    Qwen35Architecture,
    Rope,
)

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope": Rope(theta=10_000.0),
}
_QWEN3_5: dict[str, Any] = {
    **_COMMON,
    "head_dim": 16,
    "rope": Rope(theta=10_000.0, partial_rotary_factor=0.25),
    "layer_types": ("linear_attention", "linear_attention", "full_attention"),
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

#: Name -> architecture; every family, tied and untied.
SMALL: dict[str, Architecture] = {
    "qwen2": Qwen2Architecture(name="qwen2", head_dim=8, qkv_bias=True, tie_word_embeddings=False, **_COMMON),
    "llama-tied": Qwen2Architecture(
        name="llama-tied", head_dim=8, qkv_bias=False, tie_word_embeddings=True, **_COMMON
    ),
    "qwen3": Qwen3Architecture(name="qwen3", head_dim=16, tie_word_embeddings=False, **_COMMON),
    "qwen3-tied": Qwen3Architecture(name="qwen3-tied", head_dim=16, tie_word_embeddings=True, **_COMMON),
    "qwen3_5": Qwen35Architecture(name="qwen3_5", tie_word_embeddings=False, **_QWEN3_5),
    "qwen3_5-tied": Qwen35Architecture(name="qwen3_5-tied", tie_word_embeddings=True, **_QWEN3_5),
}
