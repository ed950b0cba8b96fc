"""The oracle: a plain in-memory training step.

The whole model as one function, `jax.grad` over it, optax for clipping and AdamW. No slabs, no
streaming, no schedule: nothing of what is being tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from lazyjax.batch import Batch
from lazyjax.models.backend import traces_for_cpu
from lazyjax.models.template import Context, ModelTemplate

#: Per layer, the layer's parameters in flat order.
Parameters = list[tuple[Array, ...]]


def random_parameters(template: ModelTemplate, seed: int, noise: float = 0.05) -> Parameters:
    """Initial parameters with noise on all of them, so that no norm or bias is trivial.

    Delta-net decays are made slow, as in trained models: at their initial strength a state forgets
    within a token or two, and the gradient of a decay is then a difference of nearly equal numbers
    that float32 cannot give to five digits, in the oracle no more than elsewhere.
    """
    parameters = []
    for index in range(len(template.spec.layers)):
        key, noise_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), index))
        tensors = template.kind(index).initialize(key)
        keys = jax.random.split(noise_key, len(tensors))
        names = [tensor.name for tensor in template.kind(index).parameters]
        parameters.append(
            tuple(
                tensor + noise * jax.random.normal(key, tensor.shape) - 3.0 * name.endswith("dt_bias")
                for tensor, key, name in zip(tensors, keys, names, strict=True)
            )
        )
    return parameters


class Rows(NamedTuple):
    """A batch's arrays, as arguments of a compiled function."""

    tokens_BT: Array
    targets_BT: Array
    loss_mask_BT: Array
    segment_ids_BT: Array
    positions_BT: Array


def model_logits(template: ModelTemplate, parameters: Parameters, batch: Batch | Rows) -> Array:
    """fp32 logits [B, T, V]."""
    context = Context(jnp.asarray(batch.positions_BT), jnp.asarray(batch.segment_ids_BT))
    x: Array = jnp.asarray(batch.tokens_BT)
    for index, params in enumerate(parameters):
        x = template.kind(index).apply(params, x, context)
    table = parameters[template.table.layer_index][template.table.parameter_index]
    return jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)


def mean_loss(template: ModelTemplate, parameters: Parameters, batch: Batch | Rows) -> Array:
    """Mean -log p over the batch's unmasked targets."""
    logits = model_logits(template, parameters, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(batch.targets_BT))
    mask = jnp.asarray(batch.loss_mask_BT)
    return jnp.sum(losses * mask) / jnp.sum(mask)


def loss_and_gradients(
    template: ModelTemplate, parameters: Parameters, batch: Batch
) -> tuple[Array, Parameters]:
    """The loss and its gradient with respect to every parameter."""
    loss, gradients = _compiled(template, "gradients", traces_for_cpu())(parameters, _rows(batch))
    return loss, gradients


def loss(template: ModelTemplate, parameters: Parameters, batch: Batch) -> float:
    """The loss, compiled."""
    return float(_compiled(template, "loss", traces_for_cpu())(parameters, _rows(batch)))


def logits(template: ModelTemplate, parameters: Parameters, batch: Batch) -> np.ndarray:
    """fp32 logits [B, T, V], compiled."""
    return np.asarray(_compiled(template, "logits", traces_for_cpu())(parameters, _rows(batch)))


def _rows(batch: Batch) -> Rows:
    return Rows(*(jnp.asarray(getattr(batch, name)) for name in Rows._fields))


@functools.cache
def _compiled(template: ModelTemplate, what: str, for_cpu: bool) -> Callable[[Parameters, Rows], Any]:
    """Compiled once per model and shape, and what it is traced for: it takes seconds."""
    del for_cpu
    mean = functools.partial(mean_loss, template)
    match what:
        case "gradients":
            return jax.jit(jax.value_and_grad(mean))
        case "loss":
            return jax.jit(mean)
    return jax.jit(functools.partial(model_logits, template))


def optimizer(
    learning_rate: float, clip_norm: float, weight_decay: float, eps: float
) -> optax.GradientTransformation:
    """Global clipping, then AdamW with decay on tensors of two or more axes."""
    decayed = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(learning_rate, b1=0.9, b2=0.999, eps=eps, weight_decay=weight_decay, mask=decayed),
    )


def train(
    template: ModelTemplate,
    parameters: Parameters,
    batches: Sequence[Batch],
    *,
    learning_rate: float,
    clip_norm: float,
    weight_decay: float,
    eps: float,
) -> tuple[list[float], Parameters]:
    """Losses before each step, and the parameters after the last."""
    transform = optimizer(learning_rate, clip_norm, weight_decay, eps)
    state: Any = transform.init(parameters)
    losses = []
    for batch in batches:
        loss, gradients = loss_and_gradients(template, parameters, batch)
        updates, state = transform.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)  # type: ignore[assignment]
        losses.append(float(loss))
    return losses, parameters


def random_batch(
    seed: int, rows: int, length: int, vocabulary: int, *, padding: bool = True, segments: bool = False
) -> Batch:
    """Random tokens with masked prompts; rows of different lengths, optionally two segments each."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, (rows, length), dtype=np.int32)
    targets = rng.integers(0, vocabulary, (rows, length), dtype=np.int32)
    segment_ids = np.ones((rows, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    mask = rng.random((rows, length)) < 0.6
    for row in range(rows):
        if segments:
            border = int(rng.integers(1, length))
            segment_ids[row, border:] = 2
            positions[row, border:] -= border
        if padding:
            end = int(rng.integers(length // 2, length + 1))
            segment_ids[row, end:] = 0
            mask[row, end:] = False
    mask[:, 0] = True
    return Batch(tokens, targets, mask, segment_ids, positions)
