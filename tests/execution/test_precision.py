"""A streamed step in bfloat16: every gradient near that of the same weights in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazyjax.execution.build import build_executor
from lazyjax.optim.adamw import Fp32AdamW
from lazyjax.optim.clipping import ClipRule
from lazyjax.planning.plan.baselines import BASELINES
from tests import reference, tiny

#: 16k tokens.
ROWS, LENGTH = 256, 64
#: The gradient of a decay is a difference of nearly equal numbers, see `reference.random_parameters`: what
#: rounded activations do to it is larger, however it is summed.
DECAYS = ("A_log", "dt_bias")


def _batch():
    """Few distinct targets, so that gradients have a common direction, as those of text have."""
    batch = reference.random_batch(0, ROWS, LENGTH, tiny.VOCABULARY)
    batch.targets_BT[:] %= 3
    return batch


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_5"])
def test_bfloat16_gradients_are_near_those_of_float32(family: str) -> None:
    # One block: what is summed is tested here; rounded activations add to the error layer by layer.
    model = tiny.template(family, tied=False, blocks=1)
    parameters = [
        tuple(tensor.astype(jnp.bfloat16).astype(jnp.float32) for tensor in layer)
        for layer in reference.random_parameters(model, seed=1)
    ]
    batch = _batch()
    _, expected = reference.loss_and_gradients(model, parameters, batch)
    plan = BASELINES["keep_all"](
        model.spec, tiny.residual_names(model), batch_rows=ROWS, sequence_length=LENGTH, microbatches=4
    )
    store = tiny.filled_store(model, parameters)
    executor = build_executor(model, plan, store, Fp32AdamW(), clip=ClipRule("none"))
    try:
        executor.train_step(batch, 1e-3)
    finally:
        executor.close()
    for slabs, layer, tensors in zip(store.layers, model.spec.layers, expected, strict=True):
        for segment, tensor in zip(slabs.layout.segments, tensors, strict=True):
            part = slice(segment.offset, segment.offset + segment.elements)
            actual = np.array(slabs.gradient[part]).reshape(segment.shape)
            wanted = np.asarray(jax.device_get(tensor))
            error = np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)
            bound = 0.04 if segment.name.split(".")[-1] in DECAYS else 0.02
            assert error <= bound, f"{layer.name}.{segment.name}: relative error {error:.2e}"
