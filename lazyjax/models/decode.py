"""Layers that go on from what they remember: keys and values, and the inputs of a short convolution.

A row is decoded in chunks: first its prompt, then token by token. Every chunk is a `Span`, and every
layer gets the state that the chunk before left behind. Chunks of one call have one width T; a row that
has fewer tokens there is filled up at its end, and what stands in that filling reaches neither the
state nor the outputs of the tokens before it.

Axes: see the legend in `lazyjax.models.layers`; U = W - 1 inputs that the convolution remembers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


class Span(NamedTuple):
    """Which tokens of its rows a call is about.

    Attributes:
        starts_B: tokens of the row that the state holds already: the position of the call's first.
        counts_B: real tokens in the call, 0 to T; the rest is filling.
    """

    starts_B: Int32[Array, " B"]
    counts_B: Int32[Array, " B"]

    def positions_BT(self, tokens: int) -> Int32[Array, "B T"]:
        """Position of every token in its row."""
        return self.starts_B[:, None] + jnp.arange(tokens, dtype=jnp.int32)

    def inside_BT(self, tokens: int) -> Bool[Array, "B T"]:
        """True for real tokens."""
        return jnp.arange(tokens, dtype=jnp.int32) < self.counts_B[:, None]


def cached_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    cache: tuple[Array, ...],
    span: Span,
    scale: float,
) -> tuple[Float[Array, "B T N H"], tuple[Array, ...]]:
    """Attends to the cached tokens and to the call's own, which join the cache.

    The cache is (k_BKSH, v_BKSH); its tokens come next to last, so that products with it need no
    transposed copy. Scores and softmax in float32, as in `lazyjax.models.layers.Attention`.
    """
    rows, tokens, query_heads, head_dim = q_BTNH.shape
    k_BKSH, v_BKSH = cache
    key_heads, capacity = k_BKSH.shape[1:3]
    positions_BT = span.positions_BT(tokens)
    # Filling is written beyond the end, where it is dropped.
    places_BT = jnp.where(span.inside_BT(tokens), positions_BT, capacity)
    rows_B1 = jnp.arange(rows, dtype=jnp.int32)[:, None]
    k_BKSH = k_BKSH.at[rows_B1, :, places_BT].set(k_BTKH, mode="drop")
    v_BKSH = v_BKSH.at[rows_B1, :, places_BT].set(v_BTKH, mode="drop")
    q_BTKGH = q_BTNH.reshape(rows, tokens, key_heads, query_heads // key_heads, head_dim)
    scores = jnp.einsum("btkgh,bksh->bkgts", q_BTKGH, k_BKSH, preferred_element_type=jnp.float32) * scale
    seen_BTS = jnp.arange(capacity, dtype=jnp.int32) <= positions_BT[:, :, None]
    scores = jnp.where(seen_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BKSH.dtype)
    out_BTKGH = jnp.einsum("bkgts,bksh->btkgh", weights, v_BKSH)
    return out_BTKGH.reshape(q_BTNH.shape), (k_BKSH, v_BKSH)


def continued_convolution(
    x_BTP: Float[Array, "B T P"],
    kernel_WP: Float[Array, "W P"],
    earlier_BUP: Float[Array, "B U P"],
    span: Span,
) -> tuple[Float[Array, "B T P"], Float[Array, "B U P"]]:
    """`lazyjax.models.delta_net.causal_convolution` after the U inputs before, and the last U inputs.

    At the start of a row the inputs before are zeros.
    """
    tokens, taps = x_BTP.shape[1], kernel_WP.shape[0]
    inputs = jnp.concatenate([earlier_BUP, x_BTP], axis=1)
    total_BTP = jnp.zeros(x_BTP.shape, jnp.float32)
    for back in range(taps):
        first = taps - 1 - back
        tap_P = kernel_WP[first].astype(jnp.float32)
        total_BTP += inputs[:, first : first + tokens].astype(jnp.float32) * tap_P
    last_BU = span.counts_B[:, None] + jnp.arange(taps - 1, dtype=jnp.int32)
    return total_BTP.astype(x_BTP.dtype), jnp.take_along_axis(inputs, last_BU[..., None], axis=1)
