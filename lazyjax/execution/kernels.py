"""Every compiled function of layer mathematics.

A layer crosses the link as one flat slab, and its gradient leaves as one. On one device there are no slabs in
between: `unpack` cuts a fetched slab into its tensors once, however many microbatches use them, and gradients
are added up tensor by tensor (`lazyjax.execution.gradients`). So a microbatch passes over the parameters and
over the accumulators once, and over nothing else of their size. Layers of one kind share kernels.

Over several devices slabs and batches are sharded over the mesh axis `data`. Programs of their own exchange
what devices have: `gather` makes a sharded slab whole on every device (an all-gather), `scatter` sums the
gradients that devices have of their own rows, of which each keeps its part (a reduce-scatter). Kernels
between the two run on every device for itself, on its rows and whole parameters (`jax.shard_map`), and
exchange nothing but the loss.

Besides its results every kernel returns a `Token`, a scalar that becomes ready with them and
can be waited for without holding on to a large array.

This module does not know what is kept, moved or recomputed; the schedule says so.

Axes: B rows, T tokens, D hidden, V vocabulary, N elements of a slab.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from lazyjax.execution.gradients import Accumulator, GradientSlab
from lazyjax.execution.head_kernels import HeadKernels
from lazyjax.execution.interfaces import (
    BackwardKernel,
    EmbedBackwardKernel,
    EvaluationKernel,
    ForwardKernel,
    LogitsKernel,
    LossKernel,
    ScatterKernel,
)
from lazyjax.execution.placement import (
    SPLIT,
    WHOLE,
    DeviceBatch,
    DeviceSlab,
    Parameters,
    Placement,
    Token,
    data_mesh,
    first_axis,
    token,
)
from lazyjax.execution.slab_kernels import SlabKernels
from lazyjax.models.residuals import backward_from, forward_saving
from lazyjax.models.template import Context, LayerKind, ModelTemplate
from lazyjax.specs import SlabLayout, slab_layout

__all__ = [
    "DeviceBatch", "DeviceSlab", "GradientSlab", "Kernels", "Parameters", "Token", "data_mesh", "first_axis",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Compiled functions for one template, dtype and mesh; compiled at first use and kept.

    Attributes:
        compute_dtype: dtype of parameters and activations, `bfloat16` or `float32`.
        gradient_dtype: dtype in which gradients leave the device.
    """

    template: ModelTemplate
    mesh: Mesh
    compute_dtype: str = "bfloat16"
    gradient_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        assert self.placement  # says what is wrong with a dtype

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @functools.cached_property
    def placement(self) -> Placement:
        """How everything lies on the mesh."""
        return Placement(self.mesh, self.compute_dtype, self.gradient_dtype)

    @functools.cached_property
    def slabs(self) -> SlabKernels:
        """What is done with slabs as a whole."""
        return SlabKernels(self.placement)

    @functools.cached_property
    def head(self) -> HeadKernels:
        """The kernels of the last layer."""
        return HeadKernels(self.template, self.placement)

    @property
    def devices(self) -> int:
        """Devices that share every batch and slab."""
        return self.placement.devices

    @property
    def sharded(self) -> NamedSharding:
        """First axis split over the mesh."""
        return self.placement.sharded

    def layout(self, layer_index: int) -> SlabLayout:
        """The slab layout of a layer on this mesh."""
        return slab_layout(self.template.spec.layers[layer_index].parameters, devices=self.devices)

    # Kernels, by what they are compiled for

    def unpack(self, kind: LayerKind) -> Callable[[DeviceSlab], Parameters]:
        """See `SlabKernels.unpack`."""
        return self.slabs.unpack(kind)

    def parameters(self, kind: LayerKind) -> Callable[[DeviceSlab], tuple[Parameters, Token]]:
        """See `SlabKernels.parameters`."""
        return self.slabs.parameters(kind)

    def gather(self) -> Callable[[DeviceSlab], tuple[DeviceSlab, Token]]:
        """See `SlabKernels.gather`."""
        return self.slabs.gather()

    def scatter(self, accumulates: bool, last: bool) -> ScatterKernel:
        """See `SlabKernels.scatter`."""
        return self.slabs.scatter(accumulates, last)

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def forward(self, kind: LayerKind, saved: tuple[str, ...]) -> ForwardKernel:
        """(parameters, x, context) -> (y_BTD, residuals named `saved`, token)."""

        def forward_layer(
            given: Parameters, x: Array, context: Context
        ) -> tuple[Array, tuple[Array, ...], Token]:
            params = self.placement.tensors(kind, given)
            if saved:
                y_BTD, residuals = forward_saving(kind.apply, saved, params, x, context)
            else:
                y_BTD, residuals = kind.apply(params, x, context), ()
            return self.placement.split_rows(y_BTD), tuple(map(self.placement.split_rows, residuals)), token()

        return jax.jit(
            self.placement.on_each_device(forward_layer, (WHOLE, SPLIT, SPLIT), (SPLIT, SPLIT, WHOLE))
        )

    @functools.cache  # noqa: B019
    def backward(
        self, kind: LayerKind, saved: tuple[str, ...], accumulates: bool, last: bool
    ) -> BackwardKernel:
        """(accumulator | None, parameters, x, context, residuals, y_gradient) -> (x_gradient, result, token).

        `result` is a `GradientSlab` on the last microbatch, else the fp32 accumulator, which is
        donated from call to call (but not to the gradient, which may have another dtype). Over several
        devices it is what `scatter` takes, and there is no accumulator.
        """
        gathering = self.placement.gathering

        def backward_layer(
            accumulator: Accumulator | None,
            given: Parameters,
            x_BTD: Array,
            context: Context,
            residuals: tuple[Array, ...],
            y_gradient_BTD: Array,
        ) -> tuple[Array, Any, Token]:
            params = self.placement.tensors(kind, given)
            gradients, x_gradient_BTD = backward_from(
                kind.apply, saved, params, x_BTD, context, residuals, y_gradient_BTD
            )
            collect = gathering.deliver if last else gathering.add
            result = collect(kind, gradients, accumulator if accumulates else None)
            return self.placement.split_rows(x_gradient_BTD), result, token()

        takes = (SPLIT, WHOLE, SPLIT, SPLIT, SPLIT, SPLIT)
        program = self.placement.on_each_device(backward_layer, takes, (SPLIT, SPLIT, WHOLE))
        return jax.jit(program, donate_argnums=() if last else 0)

    @functools.cache  # noqa: B019
    def embed_backward(self, accumulates: bool, last: bool) -> EmbedBackwardKernel:
        """(accumulator | None, tokens_BT, x_gradient_BTD) -> (result, token); needs no parameters."""
        kind, gathering = self.template.kind(0), self.placement.gathering

        def backward_embedding(
            accumulator: Accumulator | None, tokens_BT: Array, x_gradient_BTD: Array
        ) -> tuple[Any, Token]:
            collect = gathering.deliver_rows if last else gathering.add_rows
            previous = accumulator if accumulates else None
            return collect(kind, previous, tokens_BT, x_gradient_BTD), token()

        program = self.placement.on_each_device(backward_embedding, (SPLIT, SPLIT, SPLIT), (SPLIT, WHOLE))
        return jax.jit(program, donate_argnums=() if last else 0)

    def loss(self, head_chunk: int, accumulates: bool, last: bool) -> LossKernel:
        """See `HeadKernels.loss`."""
        return self.head.loss(head_chunk, accumulates, last)

    def evaluation_loss(self, head_chunk: int) -> EvaluationKernel:
        """See `HeadKernels.evaluation_loss`."""
        return self.head.evaluation_loss(head_chunk)

    def logits(self) -> LogitsKernel:
        """See `HeadKernels.logits`."""
        return self.head.logits()
