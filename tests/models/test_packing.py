"""Rows packed into one sequence give the outputs and gradients of the rows alone; padding is harmless."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazyjax.batch import Batch
from lazyjax.models.registry import build_template
from tests.huggingface.architectures import SMALL
from tests.reference import model_logits, random_parameters

#: One longer than a chunk of the delta rule, one a single token; then padding.
LENGTHS = (70, 1, 23)
PADDED_TOKENS = 101


def _alone(rows):
    """One row each, padded at the end with tokens that must not matter; a row may be all padding."""
    tokens_BT = np.full((len(rows), PADDED_TOKENS), 7, np.int32)
    segment_ids_BT = np.zeros_like(tokens_BT)
    for index, row in enumerate(rows):
        tokens_BT[index, : len(row)] = row
        segment_ids_BT[index, : len(row)] = 1
    positions_BT = np.broadcast_to(np.arange(PADDED_TOKENS, dtype=np.int32), tokens_BT.shape)
    return _batch(tokens_BT, segment_ids_BT, positions_BT.copy())


def _packed(rows):
    tail = PADDED_TOKENS - sum(map(len, rows))
    tokens_T = np.concatenate([*rows, np.zeros(tail, np.int32)])
    segment_ids_T = np.repeat([1, 2, 3, 0], [*map(len, rows), tail])
    positions_T = np.concatenate([np.arange(length) for length in [*map(len, rows), tail]])
    return _batch(*(x[None].astype(np.int32) for x in (tokens_T, segment_ids_T, positions_T)))


def _batch(tokens_BT, segment_ids_BT, positions_BT):
    targets_BT = (3 * tokens_BT + 1) % 96
    return Batch(tokens_BT, targets_BT, segment_ids_BT > 0, segment_ids_BT, positions_BT)


def _run(template, parameters, batch):
    def loss(parameters):
        logits_BTV = model_logits(template, parameters, batch)
        losses_BT = -jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), batch.targets_BT[..., None], -1)[
            ..., 0
        ]
        return jnp.sum(losses_BT * batch.loss_mask_BT), logits_BTV

    gradients, logits_BTV = jax.jit(jax.grad(loss, has_aux=True))(parameters)
    return gradients, np.asarray(logits_BTV)[batch.loss_mask_BT]


@pytest.mark.parametrize("name", ["qwen2", "qwen3_5"])
def test_packed_equals_alone(name):
    template = build_template(SMALL[name])
    parameters = random_parameters(template, seed=3)
    random = np.random.default_rng(4)
    rows = [random.integers(0, 96, length).astype(np.int32) for length in LENGTHS]
    gradients, logits = _run(template, parameters, _packed(rows))
    expected_gradients, expected_logits = _run(template, parameters, _alone([*rows, rows[0][:0]]))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(expected_gradients))
    np.testing.assert_allclose(logits, expected_logits, atol=2e-6 * np.abs(expected_logits).max())
    for index, layer in enumerate(template.spec.layers):
        for tensor, one, other in zip(
            layer.parameters, gradients[index], expected_gradients[index], strict=True
        ):
            error = float(jnp.abs(one - other).max() / jnp.abs(other).max())
            assert error < 1e-5, f"{layer.name} {tensor.name}: relative error {error:.1e}"
