"""Every family against recorded Transformers values: logits, loss and every gradient.

`experiments/record_reference.py` made the files and says what they hold.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lazyjax.batch import Batch
from lazyjax.huggingface.key_maps import key_map, to_parameter
from lazyjax.models.hf_config import parse_hf_config
from lazyjax.models.registry import build_template
from tests.reference import model_logits

GOLDEN = Path(__file__).parent.parent / "golden" / "models"
#: Largest relative error of logits and of gradients, against values computed in float64. The hybrid's
#: gradients lose two digits to float32: ours by 3e-5 on two kinds of processor, Transformers' by 8e-5.
TOLERANCES = {
    "llama": (3e-6, 5e-6),
    "llama3_rope_tied": (3e-6, 5e-6),
    "qwen2": (3e-6, 5e-6),
    "qwen2_tied": (3e-6, 5e-6),
    "qwen3": (3e-6, 5e-6),
    "qwen3_5": (1e-5, 1e-4),
    "qwen3_5_tied": (1e-5, 1e-4),
}


def _batch(tokens_BT, lengths_B):
    tokens = tokens_BT.shape[1]
    real_BT = np.arange(tokens)[None] < lengths_B[:, None]
    return Batch(
        tokens_BT=tokens_BT,
        targets_BT=np.roll(tokens_BT, -1, axis=1),
        loss_mask_BT=np.pad(real_BT[:, 1:], ((0, 0), (0, 1))),
        segment_ids_BT=real_BT.astype(np.int32),
        positions_BT=np.broadcast_to(np.arange(tokens, dtype=np.int32), tokens_BT.shape).copy(),
    )


def _assert_close(actual, expected, tolerance, what):
    """Compares with the largest value of the whole tensor as the scale."""
    error = np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()
    assert error < tolerance, f"{what}: relative error {error:.2e}"


def _loss_logits_and_gradients(template, parameters, batch):
    def loss_and_logits(parameters):
        logits_BTV = model_logits(template, parameters, batch)
        losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch.targets_BT)
        return jnp.sum(losses_BT * batch.loss_mask_BT) / batch.target_tokens, logits_BTV

    return jax.jit(jax.value_and_grad(loss_and_logits, has_aux=True))(parameters)


@pytest.mark.parametrize("name", TOLERANCES)
def test_parity_with_transformers(name):
    logit_tolerance, gradient_tolerance = TOLERANCES[name]
    golden = np.load(GOLDEN / f"{name}.npz")
    template = build_template(parse_hf_config(json.loads(str(golden["config"])), name=name))
    entries = key_map(template)
    assert {f"weight/{entry.key}" for entry in entries} == {
        key for key in golden if key.startswith("weight/")
    }
    parameters = [[] for _ in template.spec.layers]
    for entry in entries:
        value = to_parameter(entry.transform, golden[f"weight/{entry.key}"])
        parameters[entry.layer_index].append(jnp.asarray(value))
    parameters = [tuple(layer) for layer in parameters]
    batch = _batch(golden["tokens_BT"], golden["lengths_B"])

    (loss, logits), gradients = _loss_logits_and_gradients(template, parameters, batch)
    real_BT = batch.segment_ids_BT > 0
    _assert_close(np.asarray(logits)[real_BT], golden["logits_BTV"][real_BT], logit_tolerance, "logits")
    assert abs(float(loss) - golden["loss"]) < 1e-6 * golden["loss"]
    names = [[tensor.name for tensor in layer.parameters] for layer in template.spec.layers]
    for entry in entries:
        actual = gradients[entry.layer_index][names[entry.layer_index].index(entry.parameter)]
        expected = to_parameter(entry.transform, golden[f"gradient/{entry.key}"])
        _assert_close(actual, expected, gradient_tolerance, entry.key)
