"""Blockwise attention against the dense form: outputs, gradients, what is skipped, memory."""

from __future__ import annotations

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.attention import (
    ATTENTIONS,
    BLOCK_TOKENS,
    Layout,
    blockwise_attention,
    dense_attention,
    layout_of,
)
from lazyjax.models.backend import for_accelerator, for_description
from lazyjax.models.registry import build_template
from lazyjax.planning.costs.layers import CallShape, backward_graph, forward_graph


def _inputs(
    seed: int, rows: int, tokens: int, heads: tuple[int, int], size: int, segments: int, padding: int
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """(q, k, v, gradient of the output), and segments of random lengths followed by padding."""
    random = np.random.default_rng(seed)
    query_heads, key_heads = heads
    shapes = [(rows, tokens, count, size) for count in (query_heads, key_heads, key_heads, query_heads)]
    segment_ids = np.sort(random.integers(1, segments + 1, (rows, tokens)), axis=1)
    segment_ids[:, tokens - min(padding, tokens - 1) :] = 0
    return tuple(random.normal(size=s).astype(np.float32) for s in shapes), segment_ids.astype(np.int32)


def _run(attention, arrays, segment_ids):
    q, k, v, gradient = map(jnp.asarray, arrays)
    segment_ids = jnp.asarray(segment_ids)

    @jax.jit
    def both(q, k, v, gradient):
        out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, segment_ids), q, k, v)
        return out, *pullback(gradient)

    return both(q, k, v, gradient)


def _assert_close(actual, expected, bound: float = 1e-5) -> None:
    for name, one, other in zip(("output", "dq", "dk", "dv"), actual, expected, strict=True):
        error = float(jnp.abs(one - other).max() / jnp.maximum(jnp.abs(other).max(), 1e-6))
        assert error < bound, f"{name}: relative error {error:.1e}"


@settings(max_examples=8)
@given(
    tokens=st.integers(1, 300),
    rows=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (2, 2)]),
    size=st.sampled_from([2, 8, 40]),
    segments=st.sampled_from([1, 2, 9, 100]),
    padding=st.sampled_from([0, 1, 120]),
    window=st.one_of(st.none(), st.integers(1, 320)),
    block=st.sampled_from([1, 16, 33, 64, 512]),
    written_out=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_dense_form(
    tokens, rows, heads, size, segments, padding, window, block, written_out, seed
) -> None:
    # At most four blocks a row: every pair of blocks is compiled on its own where it is written out.
    block = max(block, -(-tokens // 4))
    arrays, segment_ids = _inputs(seed, rows, tokens, heads, size, segments, padding)
    scale = size**-0.5
    with contextlib.nullcontext() if written_out else for_accelerator():
        actual = _run(
            lambda q, k, v, s: blockwise_attention(q, k, v, s, scale, window, block), arrays, segment_ids
        )
    expected = _run(lambda q, k, v, s: dense_attention(q, k, v, s, scale, window), arrays, segment_ids)
    _assert_close(actual, expected)


@pytest.mark.parametrize("size", [128, 256])
def test_large_heads(size: int) -> None:
    arrays, segment_ids = _inputs(0, 1, 130, (2, 1), size, 2, 7)
    actual = _run(lambda q, k, v, s: blockwise_attention(q, k, v, s, 0.1, None, 64), arrays, segment_ids)
    _assert_close(actual, _run(lambda q, k, v, s: dense_attention(q, k, v, s, 0.1), arrays, segment_ids))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    """Scores of several hundred: exponentials are taken of differences only."""
    arrays, segment_ids = _inputs(1, 1, 90, (2, 1), 16, 3, 0)
    arrays = (50 * arrays[0], *arrays[1:])
    actual = _run(lambda q, k, v, s: blockwise_attention(q, k, v, s, 1.0, None, 32), arrays, segment_ids)
    assert all(bool(jnp.isfinite(array).all()) for array in actual)
    _assert_close(
        actual, _run(lambda q, k, v, s: dense_attention(q, k, v, s, 1.0), arrays, segment_ids), bound=1e-4
    )


def test_bfloat16_stays_near_the_dense_form_in_float32() -> None:
    arrays, segment_ids = _inputs(2, 2, 200, (4, 2), 32, 2, 5)
    narrow = tuple(jnp.asarray(array, jnp.bfloat16) for array in arrays)
    actual = _run(lambda q, k, v, s: blockwise_attention(q, k, v, s, 0.2, None, 64), narrow, segment_ids)
    assert all(array.dtype == jnp.bfloat16 for array in actual)
    wide = tuple(array.astype(jnp.float32) for array in narrow)
    expected = _run(lambda q, k, v, s: dense_attention(q, k, v, s, 0.2), wide, segment_ids)
    for one, other in zip(actual, expected, strict=True):
        error = jnp.linalg.norm(one.astype(jnp.float32) - other) / jnp.linalg.norm(other)
        assert float(error) < 0.01


def test_pairs_are_those_that_may_attend() -> None:
    layout = layout_of(100, window=30, block_tokens=20)
    assert (layout.number, layout.width, layout.filling) == (5, 20, 0)
    assert layout.pairs == [
        (i, j) for i in range(5) for j in range(i + 1) if i * 20 - (j * 20 + 19) < 30
    ]
    assert len(layout_of(100, block_tokens=20).pairs) == 15
    for window in (None, 1, 30, 90):
        cut = layout_of(100, window, 20)
        assert cut.pair_count == len(cut.pairs)
    assert layout_of(1025) == (3, 342, 1, None)


def test_a_long_row_is_described_without_a_list_of_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are half a million, and planning describes a program some twenty times."""
    monkeypatch.setattr(Layout, "pairs", property(lambda layout: pytest.fail("a list of all pairs")))
    config = Qwen2Architecture(
        name="long", vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope=Rope(theta=1e4), qkv_bias=False,
    )  # fmt: skip
    kind, tokens = build_template(config).kinds["full_attention"], 2**19
    blocks = tokens // BLOCK_TOKENS
    found = forward_graph(kind, CallShape(64, tokens, "bfloat16"), 1).work().flops
    products = 2 * tokens * sum(t.elements for t in kind.parameters if len(t.shape) == 2)
    assert found - products == blocks * (blocks + 1) // 2 * 2 * 2 * BLOCK_TOKENS**2 * 64


def test_blocks_without_a_common_segment_are_not_visited() -> None:
    """NaN in the keys of the other segment would reach every sum of products if its block were visited."""
    tokens, border = 96, 64
    arrays, _ = _inputs(3, 1, tokens, (2, 1), 8, 1, 0)
    segment_ids = np.where(np.arange(tokens) < border, 1, 2)[None].astype(np.int32)
    q, k, v, gradient = (array.copy() for array in arrays)
    v[:, :border] = np.nan
    arrays = (q, k, v, gradient)
    with for_accelerator():
        out, dq, dk, dv = _run(
            lambda q, k, v, s: blockwise_attention(q, k, v, s, 0.3, None, 32), arrays, segment_ids
        )
    assert bool(jnp.isnan(out[:, :border]).all())
    for array in (out, dq, dk, dv):
        assert bool(jnp.isfinite(array[:, border:]).all())


def test_memory_grows_with_the_tokens_and_not_with_their_square() -> None:
    """By XLA's own count of temporary bytes, forward and backward, the loop and written out."""

    def temporary_bytes(tokens: int) -> int:
        shape = jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

        def step(q, k, v, segments, gradient):
            attend = lambda q, k, v: blockwise_attention(q, k, v, segments, 0.25, None, 64)  # noqa: E731
            out, pullback = jax.vjp(attend, q, k, v)
            return out, pullback(gradient)

        compiled = jax.jit(step).lower(shape, shape, shape, segments, shape).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    with for_accelerator():
        sizes = [temporary_bytes(tokens) for tokens in (512, 2048, 8192)]
    assert sizes[1] < 4.5 * sizes[0]
    assert sizes[2] < 4.5 * sizes[1]


@pytest.mark.parametrize("name", ["cudnn", "tokamax"])
def test_what_describes_a_fused_kernel_computes_the_same(name: str) -> None:
    arrays, segments = _inputs(0, 2, 33, (4, 2), 8, 1, 5)
    segments = np.where(segments > 0, 1, 0).astype(np.int32)
    with for_description():
        found = _run(lambda *given: ATTENTIONS[name](*given, 0.3), arrays, segments)
    expected = _run(lambda *given: dense_attention(*given, 0.3), arrays, segments)
    for one, other in zip(found, expected, strict=True):
        real = (segments > 0)[:, :, None, None]
        np.testing.assert_allclose(np.where(real, one, 0), np.where(real, other, 0), atol=2e-5)


def test_a_fused_kernel_is_described_without_its_library_and_costs_what_it_moves() -> None:
    """The same products as ours, and in memory only operands and results; one name less to keep."""
    config = Qwen2Architecture(
        name="fused", vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, head_dim=64, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope=Rope(theta=1e4), qkv_bias=False,
    )  # fmt: skip
    shape = CallShape(256, 8192, "bfloat16")
    ours, fused = (
        build_template(config, name).kinds["full_attention"] for name in ("blockwise", "cudnn")
    )
    assert set(ours.residual_names) - set(fused.residual_names) == {"attention_lse"}
    for graph in (forward_graph, backward_graph):
        plain, one_kernel = graph(ours, shape, 1).work(), graph(fused, shape, 1).work()
        assert one_kernel.flops == plain.flops
        assert one_kernel.bytes < 0.2 * plain.bytes
    # Keeping the output alone spares no attention: its kernel gives the logarithms with it.
    kept = backward_graph(fused, shape, 1, ("attention_out",)).work()
    assert kept.flops == backward_graph(fused, shape, 1).work().flops


def test_tokamax_is_called_with_lengths_of_causal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own kernel needs a GPU; its interface is that of `jax.nn.dot_product_attention`."""
    asked = {}

    class Library:
        @staticmethod
        def dot_product_attention(q, k, v, *, implementation, **options):
            asked["implementation"] = implementation
            return jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)

    monkeypatch.setitem(sys.modules, "tokamax", Library)
    arrays, segments = _inputs(1, 2, 20, (4, 2), 8, 1, 5)
    segments = np.where(segments > 0, 1, 0).astype(np.int32)
    out = _run(lambda *given: ATTENTIONS["tokamax"](*given, 0.3), arrays, segments)[0]
    expected = dense_attention(*map(jnp.asarray, arrays[:3]), jnp.asarray(segments), 0.3)
    real = (segments > 0)[:, :, None, None]
    np.testing.assert_allclose(np.where(real, out, 0), np.where(real, expected, 0), atol=1e-5)
    assert asked == {"implementation": "mosaic"}
