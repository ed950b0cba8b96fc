"""Blocks run chunk by chunk, from the state that the chunk before left, against the whole row at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazyjax.models.decode import Span
from lazyjax.models.delta_net import (
    chunked_gated_delta_rule,
    continued_gated_delta_rule,
    recurrent_gated_delta_rule,
)
from lazyjax.models.template import Context
from tests import reference, tiny

#: Tokens of the two rows, and how they are cut: a prompt, single tokens, a longer chunk.
LENGTHS = (83, 70)
CHUNKS = ((70, 67), (1, 1), (1, 1), (11, 1))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_5"])
def test_chunks_of_rows_equal_whole_rows(family: str) -> None:
    model = tiny.template(family, tied=True, blocks=4)
    parameters = reference.random_parameters(model, seed=3)
    names = [layer.kind for layer in model.spec.layers]
    for kind_name in sorted(set(names) - {"embed", "head"}):
        kind = model.kinds[kind_name]
        assert kind.decoding is not None
        params = parameters[names.index(kind_name)]
        x_BTD = jax.random.normal(jax.random.key(1), (2, max(LENGTHS), model.spec.hidden_size))
        positions = jnp.broadcast_to(jnp.arange(max(LENGTHS), dtype=jnp.int32), x_BTD.shape[:2])
        whole = jax.jit(kind.apply)(params, x_BTD, Context(positions, jnp.ones_like(positions)))
        step = jax.jit(kind.decoding.step)
        state = tuple(
            jnp.zeros(shape.shape, shape.dtype) for shape in kind.decoding.state_shapes(2, 96, "float32")
        )
        starts = np.zeros(2, np.int32)
        for counts in CHUNKS:
            width = max(counts)
            chunk = np.full((2, width, x_BTD.shape[2]), 7.0, np.float32)  # filling must not matter
            for row, count in enumerate(counts):
                chunk[row, :count] = x_BTD[row, starts[row] : starts[row] + count]
            out, state = step(params, chunk, state, Span(jnp.asarray(starts), jnp.asarray(counts, jnp.int32)))
            for row, count in enumerate(counts):
                expected = whole[row, starts[row] : starts[row] + count]
                np.testing.assert_allclose(out[row, :count], expected, rtol=2e-5, atol=2e-5)
            starts += np.asarray(counts, np.int32)
        assert tuple(starts) == LENGTHS


def test_the_rule_continues_from_any_token() -> None:
    """Cut anywhere, the chunked rule gives the outputs and the state of the token-by-token rule."""
    rng = np.random.default_rng(0)
    rows, tokens, heads, groups, key_size, value_size = 2, 150, 2, 2, 8, 4

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(rows, tokens, *shape)), jnp.float32)

    q, k, v = draw(heads, key_size), draw(heads, key_size), draw(heads, groups, value_size)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -0.1 * jnp.abs(draw(heads, groups)), jax.nn.sigmoid(draw(heads, groups))
    one_segment = jnp.ones((rows, tokens), jnp.int32)
    whole = recurrent_gated_delta_rule(q, k, v, g, beta, one_segment)
    state = jnp.zeros((rows, heads, groups, key_size, value_size), jnp.float32)
    outputs, start = [], 0
    for stop in (1, 2, 66, 67, 131, 150):
        chunk = slice(start, stop)
        out, state = continued_gated_delta_rule(
            q[:, chunk], k[:, chunk], v[:, chunk], g[:, chunk], beta[:, chunk], state
        )
        outputs.append(out)
        start = stop
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, rtol=1e-4, atol=1e-5)
    chunked = chunked_gated_delta_rule(q, k, v, g, beta, one_segment)
    np.testing.assert_allclose(chunked, whole, rtol=1e-4, atol=1e-5)
