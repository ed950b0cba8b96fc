"""Compiled functions of the last layer: final norm, logits, cross-entropy and their gradients.

See `lazyjax.execution.kernels` for what kernels take and return.

Axes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from lazyjax.execution.gradients import Accumulator
from lazyjax.execution.interfaces import EvaluationKernel, LogitsKernel, LossKernel
from lazyjax.execution.placement import (
    DATA_AXIS,
    SPLIT,
    WHOLE,
    DeviceBatch,
    Parameters,
    Placement,
    Token,
    token,
)
from lazyjax.models.cross_entropy import cross_entropy, cross_entropy_and_gradients
from lazyjax.models.template import Context, ModelTemplate


class HeadKernels:
    """Kernels of one template on one placement; compiled at first use and kept.

    `chunk_tokens` are the tokens (of a device) whose logits exist at once. Losses and gradients depend on it
    by the order of sums only.
    """

    def __init__(self, template: ModelTemplate, placement: Placement) -> None:
        self.template, self.placement = template, placement
        self._kind = template.kind(len(template.spec.layers) - 1)

    @functools.cache  # noqa: B019
    def loss(self, chunk_tokens: int, accumulates: bool, last: bool) -> LossKernel:
        """The head and the cross-entropy, forward and backward at once.

        (accumulator | None, table accumulator | None, parameters, table parameters | None, x, batch, scale)
        -> (loss, x_gradient, result, table accumulator | None, token)

        `loss` is the sum of -log p over unmasked targets times `scale`. The table's parameters and
        accumulator are given where the table is tied, i.e. belongs to the embedding. Both accumulators are
        donated, also to a `GradientSlab`: every chunk of tokens adds to the table's in place.
        """
        head, gathering = self._kind, self.placement.gathering
        tied = self.template.spec.tied

        def head_and_loss(
            accumulator: Accumulator | None,
            table_accumulator: Accumulator | None,
            given: Parameters,
            given_table: Parameters | None,
            x_BTD: Array,
            batch: DeviceBatch,
            scale: Float32[Array, ""],
        ) -> tuple[Array, Array, Any, Any, Token]:
            params = self.placement.tensors(head, given)
            table_VD = self._table(params, given_table)
            totals = accumulator if accumulates else None
            table_totals = (table_accumulator if accumulates else None) if tied else totals
            position = self.template.table.parameter_index
            start_VD = gathering.start(table_totals, position)
            normed_BTD, norm_pullback = jax.vjp(lambda p, x: head.apply(p, x, batch.context), params, x_BTD)
            loss, normed_gradient_BTD, table_gradient_VD = cross_entropy_and_gradients(
                normed_BTD, table_VD, batch.targets_BT, batch.loss_mask_BT, scale, chunk_tokens, start_VD,
            )  # fmt: skip
            gradients, x_gradient_BTD = norm_pullback(normed_gradient_BTD)
            table_result = None
            included = None if start_VD is None else position
            if tied:
                table_result = gathering.add(
                    self.template.kind(0), (table_gradient_VD,), table_totals, included=included
                )
                included = None
            else:
                gradients = tuple(
                    table_gradient_VD if i == position else gradient for i, gradient in enumerate(gradients)
                )
            collect = functools.partial(gathering.deliver, spends=accumulates) if last else gathering.add
            result = collect(head, gradients, totals, included=included)
            if self.placement.devices > 1:
                loss = jax.lax.psum(loss, DATA_AXIS)
            return loss, self.placement.split_rows(x_gradient_BTD), result, table_result, token()

        takes = (SPLIT, SPLIT, WHOLE, WHOLE, SPLIT, SPLIT, WHOLE)
        gives = (WHOLE, SPLIT, SPLIT, SPLIT, WHOLE)
        return jax.jit(self.placement.on_each_device(head_and_loss, takes, gives), donate_argnums=(0, 1))

    @functools.cache  # noqa: B019
    def evaluation_loss(self, chunk_tokens: int) -> EvaluationKernel:
        """(parameters, table parameters | None, x, batch) -> sum of -log p over unmasked targets."""

        @jax.jit
        def evaluate(
            given: Parameters, given_table: Parameters | None, x_BTD: Array, batch: DeviceBatch
        ) -> Array:
            normed_BTD, table_VD = self._normed(given, given_table, x_BTD, batch.context)
            return cross_entropy(normed_BTD, table_VD, batch.targets_BT, batch.loss_mask_BT, chunk_tokens)

        return evaluate

    @functools.cache  # noqa: B019
    def logits(self) -> LogitsKernel:
        """(parameters, table parameters | None, x_BTD, context) -> fp32 logits_BTV."""

        @jax.jit
        def compute_logits(
            given: Parameters, given_table: Parameters | None, x_BTD: Array, context: Context
        ) -> Array:
            normed_BTD, table_VD = self._normed(given, given_table, x_BTD, context)
            return jnp.einsum("btd,vd->btv", normed_BTD, table_VD, preferred_element_type=jnp.float32)

        return compute_logits

    def _normed(
        self, given: Parameters, given_table: Parameters | None, x_BTD: Array, context: Context
    ) -> tuple[Array, Array]:
        params = self.placement.tensors(self._kind, given)
        return self._kind.apply(params, x_BTD, context), self._table(params, given_table)

    def _table(self, head_params: tuple[Array, ...], given_table: Parameters | None) -> Array:
        owner = self.template.kind(self.template.table.layer_index)
        params = head_params if given_table is None else self.placement.tensors(owner, given_table)
        return params[self.template.table.parameter_index]
