"""The chunked gated delta rule against the token-by-token recurrence, alone and packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from lazyjax.models.backend import for_accelerator
from lazyjax.models.delta_net import (
    CHUNK_TOKENS,
    causal_convolution,
    chunked_gated_delta_rule,
    gated_delta_rule_from,
    recurrent_gated_delta_rule,
    segment_starts,
)
from lazyjax.models.delta_states import inverse_of_unit_triangular, states_through_chunks

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
    """The written-out backward pass equals differentiating the loop, also with respect to the first state."""
    random = np.random.default_rng(0)
    chunks, tokens, keys, values = 3, 8, 4, 6
    heads = (chunks, 2, 1, 2)
    system = 0.5 * np.tril(random.normal(size=(*heads, tokens, tokens)), -1)
    shapes = [(chunks, 2, 1, 2 * tokens, keys), (*heads, tokens, values), (*heads, tokens), (*heads, tokens)]
    arrays = [system, *(random.normal(size=shape) for shape in shapes)]
    arrays += [random.uniform(0, 1, size=heads), random.normal(size=(2, 1, keys, 2, values))]
    arrays = [jnp.asarray(array, jnp.float32) for array in arrays]
    results = [(*heads, tokens, values), (chunks, 2, 1, tokens, 2, values), (2, 1, keys, 2, values)]
    weights = [random.normal(size=shape).astype(np.float32) for shape in results]

    def loop(system, both, values, reads, lasts, kept, s):
        written, read = [], []
        for c in range(chunks):
            k, q = both[c, :, :, :tokens], both[c, :, :, tokens:]
            old = jnp.einsum("bkle,bkegf->bkglf", k, s)
            right = values[c] - reads[c][..., None] * old
            written.append(jnp.linalg.solve(jnp.eye(tokens) + system[c], right))
            read.append(jnp.einsum("bkle,bkegf->bklgf", q, s))
            new = jnp.einsum("bkle,bkglf->bkegf", k, lasts[c][..., None] * written[-1])
            s = kept[c][:, :, None, :, None] * s + new
        return jnp.stack(written), jnp.stack(read), s

    def total(function):
        return lambda *arrays: sum(jnp.sum(x * w) for x, w in zip(function(*arrays), weights, strict=True))

    expected = jax.grad(total(loop), argnums=range(7))(*arrays)
    actual = jax.grad(total(states_through_chunks), argnums=range(7))(*arrays)
    strict = np.tril(np.ones((tokens, tokens)), -1)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        # Above the diagonal the system is zero by construction, whatever a solver's gradient says.
        _close(*((one * strict, other * strict) if index == 0 else (one, other)), 2e-6)


def test_a_row_in_two_pieces_has_the_gradient_of_the_whole():
    """Through the state that goes from piece to piece, in the middle of a segment."""
    segments_BT = np.ones((1, 150), np.int32)
    segments_BT[0, 40:] = 2
    inputs = _inputs(3, segments_BT, 1.0)
    weights = np.random.default_rng(4).normal(size=inputs[2].shape).astype(np.float32)

    def pieces(*inputs):
        state = jnp.zeros((1, KEY_HEADS, GROUPS, KEY_SIZE, VALUE_SIZE))
        parts = []
        for part in (slice(0, 90), slice(90, 150)):
            given = (*(x[:, part] for x in inputs), jnp.asarray(segments_BT[:, part]))
            out, state = gated_delta_rule_from(*given, state)
            parts.append(out)
        return jnp.concatenate(parts, axis=1)

    expected_out, expected = _recurrent(inputs, segments_BT, weights)
    _close(pieces(*map(jnp.asarray, inputs)), expected_out, 1e-5)
    actual = jax.grad(lambda *given: jnp.sum(pieces(*given) * weights), argnums=range(5))(*inputs)
    for one, other in zip(actual, expected, strict=True):
        _close(one, other, 2e-5)


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


def _products(jaxpr):
    """All matrix products of a program, with those of loops and calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _products(inner)


def test_products_of_bfloat16_read_bfloat16():
    """On an accelerator: only inverses inside chunks are float32, and so are sums."""
    heads, length = (2, 128, KEY_HEADS), jnp.bfloat16
    shapes = [(*heads, KEY_SIZE), (*heads, KEY_SIZE), (*heads, GROUPS, VALUE_SIZE)]
    given = [jax.ShapeDtypeStruct(shape, length) for shape in shapes]
    given += [jax.ShapeDtypeStruct((*heads, GROUPS), jnp.float32)] * 2
    segments = jax.ShapeDtypeStruct(heads[:2], jnp.int32)

    def both(*inputs):
        out, pullback = jax.vjp(lambda *a: chunked_gated_delta_rule(*a, inputs[-1]), *inputs[:-1])
        return pullback(out)

    with for_accelerator():
        traced = jax.make_jaxpr(both)(*given, segments).jaxpr
    found = list(_products(traced))
    wide = [e for e in found if any(atom.aval.dtype == jnp.float32 for atom in e.invars)]
    assert len(found) > len(wide) > 0
    for equation in wide:
        assert equation.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
        assert all(size <= CHUNK_TOKENS // 2 for size in equation.outvars[0].aval.shape[-2:])


def test_segment_starts():
    segments = np.array([[1, 1, 2, 0, 0, 3], [0, 0, 1, 1, 1, 1]], np.int32)
    expected = [[1, 0, 1, 1, 0, 1], [1, 0, 1, 0, 0, 0]]
    np.testing.assert_array_equal(segment_starts(jnp.asarray(segments)), np.array(expected, bool))
