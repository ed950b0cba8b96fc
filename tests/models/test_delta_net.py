"""The chunked gated delta rule against the token-by-token recurrence, alone and packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyjax.models.delta_net import (
    CHUNK_TOKENS,
    border_states,
    causal_convolution,
    chunked_gated_delta_rule,
    inverse_of_unit_triangular,
    recurrent_gated_delta_rule,
    segment_starts,
)

KEY_HEADS, GROUPS, KEY_SIZE, VALUE_SIZE = 2, 2, 8, 12


def _inputs(seed: int, segments_BT: np.ndarray, decay: float) -> tuple[np.ndarray, ...]:
    """Random inputs; log decays are log-uniform down to -decay, keys are alike (hard to invert)."""
    random = np.random.default_rng(seed)
    shape = (*segments_BT.shape, KEY_HEADS)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q = unit(random.normal(size=(*shape, KEY_SIZE)))
    k = unit(random.normal(size=(*shape, KEY_SIZE)) + 1.0)
    v = random.normal(size=(*shape, GROUPS, VALUE_SIZE))
    g = -decay * 10.0 ** random.uniform(-5, 0, size=(*shape, GROUPS))
    beta = random.uniform(0, 1, size=(*shape, GROUPS))
    return tuple(x.astype(np.float32) for x in (q, k, v, g, beta))


def _value_and_gradients(rule, inputs, segments_BT, weights):
    def total(*inputs):
        return jnp.sum(rule(*inputs, segments_BT) * weights)

    return rule(*inputs, segments_BT), jax.grad(total, argnums=range(5))(*inputs)


_chunked = jax.jit(lambda *args: _value_and_gradients(chunked_gated_delta_rule, *args))
_recurrent = jax.jit(lambda *args: _value_and_gradients(recurrent_gated_delta_rule, *args))


def _close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    scale = max(float(np.abs(expected).max()), 1e-6)
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), atol=tolerance * scale, rtol=0)


def _compare(inputs, segments_BT, seed: int, gradient_tolerance: float = 2e-5) -> None:
    weights = np.random.default_rng(seed + 1).normal(size=inputs[2].shape).astype(np.float32)
    out, gradients = _chunked(inputs, segments_BT, weights)
    expected_out, expected_gradients = _recurrent(inputs, segments_BT, weights)
    assert all(np.isfinite(x).all() for x in (out, *gradients))
    _close(out, expected_out, 1e-5)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        _close(actual, expected, gradient_tolerance)


@settings(deadline=None, max_examples=12)
@given(
    tokens=st.sampled_from([1, 37, 64, 65, 150]),
    cuts=st.lists(st.integers(0, 149), max_size=4),
    decay=st.sampled_from([0.0, 0.3, 20.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_chunked_equals_recurrent(tokens, cuts, decay, seed):
    segments_BT = np.ones((2, tokens), np.int32)
    for cut in cuts:
        segments_BT[0, cut:] += 1
    segments_BT[1, (3 * tokens) // 4 :] = 0
    _compare(_inputs(seed, segments_BT, decay), segments_BT, seed)


def test_identical_keys():
    """The worst case for the inverse: N is all ones below the diagonal, its powers reach 1e17."""
    segments_BT = np.ones((1, 130), np.int32)
    q, k, v, g, beta = _inputs(0, segments_BT, 0.0)
    k = np.broadcast_to(k[:, :1], k.shape).copy()
    # Writing nearly in full leaves the decay almost no effect: its gradient is what is left of large
    # terms that cancel, in the recurrence as well.
    _compare((q, k, v, g, np.full_like(beta, 0.95)), segments_BT, 0, gradient_tolerance=2e-4)


def test_inverse():
    n = np.tril(np.random.default_rng(0).uniform(-1, 1, size=(3, 64, 64)), -1).astype(np.float32) * 0.3
    exact = np.linalg.inv(np.eye(64) + n.astype(np.float64))
    _close(inverse_of_unit_triangular(jnp.asarray(n)), exact, 1e-6)


def test_states_gradient_against_autodiff():
    """The written-out backward pass of the border states equals differentiating the loop."""
    random = np.random.default_rng(0)
    chunks, tokens = 3, 5
    kept = random.uniform(0, 1, size=(chunks, 2, 1, 2)).astype(np.float32)
    shapes = [(chunks, 2, 1, 2, tokens, size) for size in (4, 6, 4)]
    k, u, w = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    weights = random.normal(size=(chunks, 2, 1, 2, 4, 6)).astype(np.float32)

    def loop(kept, k, u, w):
        s = jnp.zeros((2, 1, 2, 4, 6))
        states = []
        for c in range(chunks):
            states.append(s)
            s = kept[c][..., None, None] * s + jnp.matrix_transpose(k[c]) @ (u[c] - w[c] @ s)
        return jnp.stack(states)

    arrays = [jnp.asarray(x) for x in (kept, k, u, w)]
    expected = jax.grad(lambda *a: jnp.sum(loop(*a) * weights), argnums=range(4))(*arrays)
    actual = jax.grad(lambda *a: jnp.sum(border_states(*a) * weights), argnums=range(4))(*arrays)
    for one, other in zip(actual, expected, strict=True):
        _close(one, other, 1e-6)


@pytest.mark.parametrize("rule", [chunked_gated_delta_rule, recurrent_gated_delta_rule])
def test_a_packed_row_equals_its_segments_alone(rule):
    lengths = (CHUNK_TOKENS - 3, 1, 70, 30)
    segments_BT = np.repeat(np.arange(1, 5, dtype=np.int32), lengths)[None]
    inputs = _inputs(5, segments_BT, 1.0)
    packed = np.asarray(jax.jit(rule)(*inputs, segments_BT))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = rule(*(jnp.asarray(x[:, part]) for x in inputs), jnp.ones((1, length), jnp.int32))
        _close(packed[:, part], alone, 2e-6)
        start += length


def test_convolution():
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 9, 3)).astype(np.float32)
    kernel = random.normal(size=(4, 3)).astype(np.float32)
    segments = np.array([[1, 1, 1, 1, 1, 2, 2, 0, 0]], np.int32)
    out = np.asarray(causal_convolution(*map(jnp.asarray, (x, kernel, segments))))
    for t, start in enumerate([0, 0, 0, 0, 0, 5, 5, 7, 7]):
        expected = sum(kernel[3 - (t - s)] * x[0, s] for s in range(max(start, t - 3), t + 1))
        np.testing.assert_allclose(out[0, t], expected, rtol=1e-5)


def test_segment_starts():
    segments = np.array([[1, 1, 2, 0, 0, 3], [0, 0, 1, 1, 1, 1]], np.int32)
    expected = [[1, 0, 1, 1, 0, 1], [1, 0, 1, 0, 0, 0]]
    np.testing.assert_array_equal(segment_starts(jnp.asarray(segments)), np.array(expected, bool))
