"""Rotary position embedding and the scalings with which released models reach longer contexts.

Frequencies are computed where they are used: an array made outside would be a constant that every layer's
backward pass has to be handed. Axes: see the legend in `lazyjax.models.layers`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from lazyjax.models.architecture import DynamicScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling
from lazyjax.models.template import Context


def depends_on_length(rope: Rope) -> bool:
    """Whether angles depend on the length of the text besides the position."""
    return isinstance(rope.scaling, DynamicScaling)


def segment_lengths(context: Context) -> Int32[Array, "B T"]:
    """Length of every token's own segment.

    Transformers takes the longest row of a batch; that would make a row's result depend on its neighbours,
    and on how a batch is cut. For a row alone it is the same.
    """
    segments_BT = context.segment_ids_BT
    rows, tokens = segments_BT.shape
    here_T = jnp.arange(tokens, dtype=jnp.int32)
    last_BT = jnp.concatenate(
        [segments_BT[:, 1:] != segments_BT[:, :-1], jnp.ones((rows, 1), jnp.bool_)], axis=1
    )
    ends_BT = jax.lax.cummin(jnp.where(last_BT, here_T + 1, tokens), axis=1, reverse=True)
    return ends_BT - here_T + context.positions_BT


def inverse_frequencies(rope: Rope, rotary_dim: int) -> Float32[Array, "half_R"]:
    """Radians per position of each rotated pair, up to the original context (RoFormer, equation 15)."""
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    frequencies = 1.0 / jnp.power(jnp.float32(rope.theta), exponents)
    match rope.scaling:
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case LinearScaling():
            return frequencies / rope.scaling.factor
        case YarnScaling():
            return _yarn(frequencies, rope, rope.scaling, rotary_dim)
        case _:
            return frequencies


def attention_factor(rope: Rope) -> float:
    """What cosines and sines are multiplied by: 1 except for YaRN (there: section 3.4)."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)


def rotary_angles(
    positions_BT: Int32[Array, "B T"],
    lengths_BT: Int32[Array, "B T"] | None,
    rope: Rope,
    rotary_dim: int,
) -> tuple[Float32[Array, "B T 1 half_R"], Float32[Array, "B T 1 half_R"]]:
    """Cosine and sine of every position's angles, to be broadcast over heads.

    Args:
        lengths_BT: of the tokens' segments; only read where `depends_on_length`.
    """
    frequencies = inverse_frequencies(rope, rotary_dim)
    if isinstance(rope.scaling, DynamicScaling):
        assert lengths_BT is not None
        frequencies = _dynamic(lengths_BT, rope, rope.scaling, rotary_dim)[:, :, None]
    angles = positions_BT.astype(jnp.float32)[:, :, None, None] * frequencies
    factor = attention_factor(rope)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x_BTNH: Float[Array, "B T N H"],
    cosine: Float32[Array, "B T 1 half_R"],
    sine: Float32[Array, "B T 1 half_R"],
) -> Float[Array, "B T N H"]:
    """Rotates the first 2 * half_R elements of every head; element i pairs with i + half_R."""
    half = cosine.shape[-1]
    wide = x_BTNH.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    rotated = [first * cosine - second * sine, second * cosine + first * sine, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)


def _llama3(frequencies: Array, scaling: Llama3Scaling) -> Array:
    """As in Llama 3.1's reference code."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn(frequencies: Array, rope: Rope, scaling: YarnScaling, rotary_dim: int) -> Array:
    """YaRN, section 3.2: the ramp of equation 18 over elements in place of wavelengths."""

    def element(turns: float) -> float:
        """The element that turns so often within the original context."""
        original = scaling.original_max_position_embeddings
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = element(scaling.beta_fast), element(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretched = jnp.clip((jnp.arange(rotary_dim // 2, dtype=jnp.float32) - low) / width, 0.0, 1.0)
    return stretched * frequencies / scaling.factor + (1 - stretched) * frequencies


def _dynamic(
    lengths_BT: Array, rope: Rope, scaling: DynamicScaling, rotary_dim: int
) -> Float32[Array, "B T half_R"]:
    """Dynamic NTK: theta grows by (factor L / M - factor + 1)^(R / (R - 2)) for L > M tokens."""
    longest = scaling.max_position_embeddings
    lengths_BT = jnp.maximum(lengths_BT, longest).astype(jnp.float32)
    growth_BT = scaling.factor * lengths_BT / longest - (scaling.factor - 1)
    theta_BT = rope.theta * growth_BT ** (rotary_dim / (rotary_dim - 2))
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    return 1.0 / theta_BT[:, :, None] ** exponents
