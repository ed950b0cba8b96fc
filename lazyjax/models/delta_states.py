"""The sequential part of the gated delta rule: the state from chunk to chunk, and what each chunk writes.

All value heads of a key head share its keys: a state is [E, G, F], so that they are read and written by one
product. The backward pass is written out to save memory traffic: for heads of 128 a state is twice as large
as a chunk's values, a matrix between a chunk's tokens half as large.

Axes: see the legend in `lazyjax.models.layers`; X both keys and queries of a chunk, 2 L.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from lazyjax.models.backend import traces_for_cpu

#: Triangular blocks up to this size are inverted by a power series: its terms stay below
#: binomial(7, 3) = 35 times the entries, so that float32 does not cancel.
_SERIES_SIZE = 8


@jax.custom_vjp
def states_through_chunks(
    system_CBKGLL: Float32[Array, "C B K G L L"],
    both_CBKXE: Float[Array, "C B K X E"],
    values_CBKGLF: Float[Array, "C B K G L F"],
    reads_CBKGL: Float32[Array, "C B K G L"],
    lasts_CBKGL: Float32[Array, "C B K G L"],
    kept_CBKG: Float32[Array, "C B K G"],
    start_BKEGF: Float32[Array, "B K E G F"],
) -> tuple[Float[Array, "C B K G L F"], Float[Array, "C B K L G F"], Float32[Array, "B K E G F"]]:
    """What every token writes, what it reads of the state before its chunk, and the state behind all chunks.

    Of each chunk, with its keys k and queries q (`both`, keys first) and S the state before it:

        (I + system) written = values - reads (k S);   read = q S;   S <- kept S + k^T (lasts written)

    `both` and `values` have the dtype of every product's operands and results, and of the states that are
    kept; decays, the inverse, sums over tokens and the state that goes from chunk to chunk are float32.

    The states before each chunk are named `delta_states` [B, C, K, E, G, F]: whoever keeps them never runs
    the sequence again. The backward pass needs no gradient of the inverse: with y that of the right side, the
    gradient of `system` is -y written^T.
    """
    return _forward(
        system_CBKGLL, both_CBKXE, values_CBKGLF, reads_CBKGL, lasts_CBKGL, kept_CBKG, start_BKEGF
    )[0]


def _forward(
    system: Array, both: Array, values: Array, reads: Array, lasts: Array, kept: Array, start: Array
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    inverse = inverse_of_unit_triangular(system).astype(both.dtype)
    keys, _ = jnp.split(both, 2, axis=-2)

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        keys, inverse, values, reads, lasts, kept = chunk
        held = state.astype(keys.dtype)
        written = _written(inverse, values, reads, _read(keys, held))
        return _next(state, keys, written, lasts, kept), held

    end, states = jax.lax.scan(step, start, (keys, inverse, values, reads, lasts, kept))
    states = jnp.moveaxis(checkpoint_name(jnp.moveaxis(states, 0, 1), "delta_states"), 1, 0)
    # Again, and of all chunks at once: from states that were kept, this is all there is to do.
    key_read, query_read = jnp.split(_read(both, states), 2, axis=-3)
    written = _written(inverse, values, reads, key_read)
    return (written, query_read, end), (inverse, both, reads, lasts, kept, key_read, written, states)


def _backward(saved: tuple[Array, ...], gradients: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    inverse, both, reads, lasts, kept, key_read, written, states = saved
    written_gradient, query_read_gradient, end_gradient = gradients

    def step(after: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        """`after`: gradient of the state behind the chunk."""
        inverse, both, reads, lasts, kept, written_gradient, query_read_gradient = chunk
        keys, _ = jnp.split(both, 2, axis=-2)
        held = after.astype(keys.dtype)
        key_after = _read(keys, held)
        right_gradient = written_gradient.astype(jnp.float32) + _scaled(lasts, _swap(key_after))
        right = product("...ji,...jf->...if", inverse, right_gradient.astype(keys.dtype))
        read_gradient = _both_gradient(right, reads, query_read_gradient)
        before = _kept(kept, after) + float32_product("...xe,...xgf->...egf", both, read_gradient)
        return before, (held, key_after, right)

    given = (inverse, both, reads, lasts, kept, written_gradient, query_read_gradient)
    start_gradient, (after, key_after, right) = jax.lax.scan(step, end_gradient, given, reverse=True)
    both_gradient = product("...xgf,...egf->...xe", _both_gradient(right, reads, query_read_gradient), states)
    added = product("...lgf,...egf->...le", _swap(_scaled(lasts, written).astype(written.dtype)), after)
    keys_gradient, queries_gradient = jnp.split(both_gradient, 2, axis=-2)
    return (
        -float32_product("...if,...jf->...ij", right, written),
        jnp.concatenate([keys_gradient + added, queries_gradient], axis=-2),
        right,
        -_float32_sum(right, _swap(key_read)),
        _float32_sum(written, _swap(key_after)),
        float32_product("...egf,...egf->...g", states, after),
        start_gradient,
    )


states_through_chunks.defvjp(_forward, _backward)


def float32_product(axes: str, one: Array, other: Array) -> Float32[Array, "..."]:
    """The product of arrays in their dtype, with its result in float32."""
    if traces_for_cpu():
        # XLA:CPU has no such product of bfloat16 for all axes, and computes it in float32 anyway.
        return jnp.einsum(axes, one.astype(jnp.float32), other.astype(jnp.float32))
    return jnp.einsum(axes, one, other, preferred_element_type=jnp.float32)


def product(axes: str, one: Array, other: Array) -> Array:
    """The product of arrays in their dtype, added up in float32: on XLA:CPU by asking for that."""
    if traces_for_cpu():
        return float32_product(axes, one, other).astype(one.dtype)
    return jnp.einsum(axes, one, other)


def _float32_sum(one: Array, other: Array) -> Array:
    """Of the elements' products, over the last axis."""
    return jnp.sum(one.astype(jnp.float32) * other.astype(jnp.float32), axis=-1)


def _scaled(factors: Array, rows: Array) -> Float32[Array, "..."]:
    """Every row by its factor."""
    return factors[..., None] * rows.astype(jnp.float32)


def _written(inverse: Array, values: Array, reads: Array, key_read: Array) -> Array:
    right = values.astype(jnp.float32) - _scaled(reads, _swap(key_read))
    return product("...ij,...jf->...if", inverse, right.astype(values.dtype))


def _read(rows: Array, state: Array) -> Array:
    """[... X E] of a state [... E G F]: [... X G F]."""
    return product("...xe,...egf->...xgf", rows, state)


def _next(state: Array, keys: Array, written: Array, lasts: Array, kept: Array) -> Array:
    return _kept(kept, state) + float32_product(
        "...le,...lgf->...egf", keys, _swap(_scaled(lasts, written).astype(written.dtype))
    )


def _both_gradient(right: Array, reads: Array, query_read_gradient: Array) -> Array:
    """Of what keys and queries read: [... X G F]."""
    return jnp.concatenate([-_swap(_scaled(reads, right).astype(right.dtype)), query_read_gradient], axis=-3)


def _kept(kept: Array, state: Array) -> Array:
    return kept[..., None, :, None] * state


def _swap(x: Array) -> Array:
    """[... G L F] <-> [... L G F]."""
    return jnp.swapaxes(x, -3, -2)


def inverse_of_unit_triangular(n_LL: Float32[Array, "*batch L L"]) -> Float32[Array, "*batch L L"]:
    """(I + N)^-1 for strictly lower triangular N, L a power of two.

    Halves are inverted together and joined, [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]],
    down to blocks of 8, which are inverted by their finite power series. This is as accurate as
    forward substitution, and made of matrix products only; they run in full float32, for errors
    made here reach every later token of the chunk.
    """
    size = n_LL.shape[-1]
    if size <= _SERIES_SIZE:
        identity = jnp.eye(size, dtype=n_LL.dtype)
        inverse, power, terms = identity - n_LL, n_LL, 2
        while terms < size:
            power = _product(power, power)
            inverse = _product(inverse, identity + power)
            terms *= 2
        return inverse
    half = size // 2
    diagonal = jnp.stack([n_LL[..., :half, :half], n_LL[..., half:, half:]])
    first, second = inverse_of_unit_triangular(diagonal)
    corner = -_product(_product(second, n_LL[..., half:, :half]), first)
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
