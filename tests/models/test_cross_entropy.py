"""The chunked loss: equal to the plain one, no more work than there are tokens, any masked target."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.models.chunks import balanced_chunks
from lazyjax.models.cross_entropy import cross_entropy, cross_entropy_and_gradients
from lazyjax.planning.costs.trace import trace

HIDDEN, VOCABULARY = 8, 13


def _inputs(rows: int, length: int, masked_target: int = -100, *, weighted: bool = False):
    random = np.random.default_rng(rows * 1000 + length)
    mask_BT = random.random((rows, length)) < 0.7
    targets_BT = random.integers(0, VOCABULARY, (rows, length))
    return (
        jnp.asarray(random.normal(size=(rows, length, HIDDEN)), jnp.float32),
        jnp.asarray(random.normal(size=(VOCABULARY, HIDDEN)), jnp.float32),
        jnp.asarray(np.where(mask_BT, targets_BT, masked_target), jnp.int32),
        jnp.asarray(mask_BT * random.uniform(0.1, 3, mask_BT.shape) if weighted else mask_BT),
    )


def _plain(normed_BTD, table_VD, targets_BT, mask_BT):
    logits_BTV = normed_BTD @ table_VD.T
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, jnp.where(mask_BT, targets_BT, 0))
    return jnp.sum(losses_BT * mask_BT)


@given(rows=st.integers(1, 4), length=st.integers(1, 40), chunk=st.integers(1, 60))
def test_equals_the_plain_loss(rows: int, length: int, chunk: int) -> None:
    _check(_inputs(rows, length), chunk)


def test_equals_the_plain_loss_with_weights() -> None:
    _check(_inputs(3, 29, weighted=True), 20)


def _check(inputs: tuple[jax.Array, ...], chunk: int) -> None:
    normed_BTD, table_VD, targets_BT, mask_BT = inputs
    scale = 0.25
    loss, normed_gradient, table_gradient = cross_entropy_and_gradients(
        normed_BTD, table_VD, targets_BT, mask_BT, jnp.float32(scale), chunk
    )
    expected, gradients = jax.value_and_grad(_plain, argnums=(0, 1))(
        normed_BTD, table_VD, targets_BT, mask_BT
    )
    np.testing.assert_allclose(loss, scale * expected, rtol=1e-5)
    np.testing.assert_allclose(normed_gradient, scale * gradients[0], atol=1e-6)
    np.testing.assert_allclose(table_gradient, scale * gradients[1], atol=1e-5)
    alone = cross_entropy(normed_BTD, table_VD, targets_BT, mask_BT, chunk)
    np.testing.assert_allclose(alone, expected, rtol=1e-5)


@pytest.mark.parametrize("masked_target", [-100, -1, VOCABULARY, 2**31 - 1])
def test_masked_targets_may_have_any_value(masked_target: int) -> None:
    """They used to be looked up outside the vocabulary, which gave NaN in loss and gradients."""
    inputs = _inputs(2, 9, masked_target)
    found = cross_entropy_and_gradients(*inputs, jnp.float32(1), 5)
    expected = cross_entropy_and_gradients(*_inputs(2, 9, 0), jnp.float32(1), 5)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isfinite(cross_entropy(*inputs, 5))


@given(rows=st.integers(1, 100), length=st.integers(1, 5000), most=st.integers(1, 5000))
def test_chunks_are_balanced(rows: int, length: int, most: int) -> None:
    count, width, padding = balanced_chunks(rows, length, most)
    assert count * width == length + padding
    assert padding < count
    assert rows * width <= max(most, rows)
    assert count == 1 or rows * -(-length // (count - 1)) > most  # one chunk less would be too wide


@pytest.mark.parametrize(("rows", "length"), [(3, 1024), (2, 768), (1, 1025), (1, 1024)])
def test_the_head_does_no_work_for_padding(rows: int, length: int) -> None:
    """At most one token in a thousand; equal chunks of the greatest length took up to twice the work."""

    def shape(*sizes: int, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    arguments = (
        shape(rows, length, HIDDEN),
        shape(VOCABULARY, HIDDEN),
        shape(rows, length, dtype=jnp.int32),
        shape(rows, length, dtype=jnp.bool_),
        shape(),
    )
    graph = trace(lambda *inputs: cross_entropy_and_gradients(*inputs, 1024), *arguments)
    needed = 3 * 2 * rows * length * HIDDEN * VOCABULARY
    assert needed <= graph.work().flops <= 1.001 * needed
