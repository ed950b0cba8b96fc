"""The same training without any of this project's machinery: the whole model and AdamW in memory, one jit.

Streaming, slabs, the split master, 8-bit state and host updates must not change the losses over steps, up to
rounding. Whole float32 model, gradients by `jax.value_and_grad`, clipping and AdamW from optax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lazyjax.batch import Batch
from lazyjax.config import OptimizerConfig
from lazyjax.models.template import Context, ModelTemplate
from lazyjax.storage.host import HostStore

#: Per layer, its parameters in flat order.
Parameters = list[tuple[jax.Array, ...]]


def masters(template: ModelTemplate, store: HostStore) -> Parameters:
    """The float32 master weights of every layer."""
    return [
        tuple(jnp.asarray(slabs.master(tensor.name)) for tensor in layer.parameters)
        for layer, slabs in zip(template.spec.layers, store.layers, strict=True)
    ]


def train_in_memory(
    template: ModelTemplate,
    parameters: Parameters,
    batches: Iterator[Batch],
    rates: np.ndarray,
    config: OptimizerConfig,
) -> tuple[list[float], Parameters]:
    """The loss before each step, and the parameters after the last; global clipping only.

    Args:
        rates: the learning rate of every step.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.inject_hyperparams(optax.adamw)(
            learning_rate=0.0,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2 or config.decay_vectors, params),
        ),
    )
    state: Any = optimizer.init(parameters)

    @jax.jit
    def step(parameters: Parameters, state: Any, batch: tuple[jax.Array, ...], rate: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: _mean_loss(template, p, batch))(parameters)
        state[1].hyperparams["learning_rate"] = rate
        updates, state = optimizer.update(gradients, state, parameters)
        return loss, optax.apply_updates(parameters, updates), state

    losses = []
    for rate in rates:
        batch = next(batches)
        arrays = (
            batch.tokens_BT,
            batch.targets_BT,
            batch.loss_mask_BT,
            batch.segment_ids_BT,
            batch.positions_BT,
        )
        loss, parameters, state = step(parameters, state, tuple(map(jnp.asarray, arrays)), jnp.float32(rate))
        losses.append(float(loss))
    return losses, parameters


def _mean_loss(template: ModelTemplate, parameters: Parameters, batch: tuple[jax.Array, ...]) -> jax.Array:
    tokens_BT, targets_BT, mask_BT, segment_ids_BT, positions_BT = batch
    context = Context(positions_BT, segment_ids_BT)
    x: jax.Array = tokens_BT
    for index, params in enumerate(parameters):
        x = template.kind(index).apply(params, x, context)
    table = parameters[template.table.layer_index][template.table.parameter_index]
    logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits, targets_BT)
    return jnp.sum(losses_BT * mask_BT) / jnp.sum(mask_BT)
