"""The loss at the end of every model: logits and cross-entropy in chunks of tokens.

Logits of a whole batch never exist; a chunk's are made, used for loss and gradients, and dropped. The
executor's kernels and the planner's cost model both call these functions.

Axes: B rows, T tokens, D hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from lazyjax.models.chunks import Chunks, balanced_chunks, join_tokens, split_tokens

#: Up to this many chunks are unrolled: XLA:CPU runs the bodies of loops on one thread.
_UNROLLED_CHUNKS = 8


class LossAndGradients(NamedTuple):
    """The loss, and its gradients with respect to the normed input and the table (see `start_VD`)."""

    loss: Float32[Array, ""]
    normed_gradient_BTD: Float[Array, "B T D"]
    table_gradient_VD: Float32[Array, "V D"]


def cross_entropy(
    normed_BTD: Float[Array, "B T D"],
    table_VD: Float[Array, "V D"],
    targets_BT: Int32[Array, "B T"],
    mask_BT: Bool[Array, "B T"] | Float32[Array, "B T"],
    chunk_tokens: int,
) -> Float32[Array, ""]:
    """Sum of -log p times the mask, which may hold weights; masked targets may have any value."""

    def one_chunk(total: Array, chunk: tuple[Array, ...]) -> tuple[Array, None]:
        normed_BCD, targets_BC, mask_BC = chunk
        *_, losses_BC = _log_probabilities(normed_BCD, table_VD, targets_BC)
        return total + jnp.sum(losses_BC * mask_BC), None

    chunks, inputs = _chunked_inputs(normed_BTD, targets_BT, mask_BT, chunk_tokens)
    total, _ = jax.lax.scan(one_chunk, jnp.zeros((), jnp.float32), inputs, unroll=_unroll(chunks))
    return total


def cross_entropy_and_gradients(
    normed_BTD: Float[Array, "B T D"],
    table_VD: Float[Array, "V D"],
    targets_BT: Int32[Array, "B T"],
    mask_BT: Bool[Array, "B T"] | Float32[Array, "B T"],
    scale: Float32[Array, ""],
    chunk_tokens: int,
    start_VD: Float32[Array, "V D"] | None = None,
) -> LossAndGradients:
    """The sum of -log p times the mask, which may hold weights, and `scale`, with its gradients.

    d loss / d logits = (softmax - onehot(target)) * mask * scale. Masked targets may have any value.

    Args:
        start_VD: what the table's gradient is added to, chunk by chunk and in place; None: zero.
    """

    def one_chunk(carry: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        loss, table_gradient_VD = carry
        normed_BCD, targets_BC, mask_BC = chunk
        logits_BCV, log_total_BC, losses_BC = _log_probabilities(normed_BCD, table_VD, targets_BC)
        weight_BC = mask_BC.astype(jnp.float32) * scale
        onehot_BCV = targets_BC[..., None] == jnp.arange(table_VD.shape[0])
        gradient_BCV = (jnp.exp(logits_BCV - log_total_BC[..., None]) - onehot_BCV) * weight_BC[..., None]
        gradient_BCV = gradient_BCV.astype(normed_BTD.dtype)
        normed_gradient_BCD = jnp.einsum("bcv,vd->bcd", gradient_BCV, table_VD)
        table_gradient_VD += jnp.einsum(
            "bcv,bcd->vd", gradient_BCV, normed_BCD, preferred_element_type=jnp.float32
        )
        return (loss + jnp.sum(losses_BC * weight_BC), table_gradient_VD), normed_gradient_BCD

    chunks, inputs = _chunked_inputs(normed_BTD, targets_BT, mask_BT, chunk_tokens)
    before_VD = jnp.zeros(table_VD.shape, jnp.float32) if start_VD is None else start_VD
    start = (jnp.zeros((), jnp.float32), before_VD)
    (loss, table_gradient_VD), gradient = jax.lax.scan(one_chunk, start, inputs, unroll=_unroll(chunks))
    return LossAndGradients(loss, join_tokens(gradient, chunks), table_gradient_VD)


def _log_probabilities(
    normed_BCD: Array, table_VD: Array, targets_BC: Array
) -> tuple[Float32[Array, "B C V"], Float32[Array, "B C"], Float32[Array, "B C"]]:
    logits_BCV = jnp.einsum("bcd,vd->bcv", normed_BCD, table_VD, preferred_element_type=jnp.float32)
    log_total_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    chosen_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
    return logits_BCV, log_total_BC, log_total_BC - chosen_BC


def _chunked_inputs(
    normed_BTD: Array, targets_BT: Array, mask_BT: Array, chunk_tokens: int
) -> tuple[Chunks, tuple[Array, ...]]:
    rows, length, _ = normed_BTD.shape
    chunks = balanced_chunks(rows, length, chunk_tokens)
    # -100 and its like would be looked up outside the vocabulary: NaN, which no mask takes away.
    targets_BT = jnp.where(mask_BT != 0, targets_BT, 0)
    return chunks, tuple(split_tokens(array, chunks) for array in (normed_BTD, targets_BT, mask_BT))


def _unroll(chunks: Chunks) -> int:
    return chunks.number if chunks.number <= _UNROLLED_CHUNKS else 1
