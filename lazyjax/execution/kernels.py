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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32

from lazyjax.execution.gradients import Accumulator, Gathering, GradientSlab
from lazyjax.execution.interfaces import (
    BackwardKernel,
    EmbedBackwardKernel,
    EvaluationKernel,
    ForwardKernel,
    LogitsKernel,
    LossKernel,
    ScatterKernel,
)
from lazyjax.models.cross_entropy import cross_entropy, cross_entropy_and_gradients
from lazyjax.models.residuals import backward_from, forward_saving
from lazyjax.models.template import Context, LayerKind, ModelTemplate
from lazyjax.specs import SlabLayout, slab_layout

__all__ = [
    "DeviceBatch", "DeviceSlab", "GradientSlab", "Kernels", "Parameters", "Token", "data_mesh", "first_axis",
]  # fmt: skip

DATA_AXIS = "data"
#: How arguments and results of a kernel lie on the mesh: split by rows (or elements), or the same everywhere.
_SPLIT, _WHOLE = PartitionSpec(DATA_AXIS), PartitionSpec()

#: `(hi,)`, as bfloat16, for bfloat16 compute; `(hi, lo)` for float32: the halves of the split master.
DeviceSlab = tuple[Array, ...]
#: What kernels take as a layer's parameters: see `Kernels.unpack`.
Parameters = tuple[Array, ...]
Token = Array


class DeviceBatch(NamedTuple):
    """One microbatch on the device; see `lazyjax.batch.Batch`."""

    tokens_BT: Int32[Array, "B T"]
    targets_BT: Int32[Array, "B T"]
    loss_mask_BT: Bool[Array, "B T"] | Float32[Array, "B T"]
    segment_ids_BT: Int32[Array, "B T"]
    positions_BT: Int32[Array, "B T"]

    @property
    def context(self) -> Context:
        """What the layers need of it."""
        return Context(self.positions_BT, self.segment_ids_BT)


def data_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-axis mesh over `devices` (default: the first device)."""
    chosen = list(devices) if devices is not None else jax.devices()[:1]
    return jax.make_mesh((len(chosen),), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=chosen)


def first_axis(mesh: Mesh) -> NamedSharding:
    """The first axis of an array split over the mesh."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Compiled functions for one template, dtype and mesh; compiled at first use and kept.

    Attributes:
        compute_dtype: dtype of parameters and activations, `bfloat16` or `float32`.
        gradient_dtype: dtype in which gradients leave the device.
        head_chunk_tokens: tokens whose logits exist at once.
    """

    template: ModelTemplate
    mesh: Mesh
    compute_dtype: str = "bfloat16"
    gradient_dtype: str = "bfloat16"
    head_chunk_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.compute_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"compute_dtype: {self.compute_dtype!r}, expected 'bfloat16' or 'float32'")

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def devices(self) -> int:
        """Devices that share every batch and slab."""
        return int(self.mesh.size)

    @property
    def sharded(self) -> NamedSharding:
        """First axis split over the mesh."""
        return first_axis(self.mesh)

    @property
    def replicated(self) -> NamedSharding:
        """The same value on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def layout(self, layer_index: int) -> SlabLayout:
        """The slab layout of a layer on this mesh."""
        return slab_layout(self.template.spec.layers[layer_index].parameters, devices=self.mesh.size)

    @property
    def gathering(self) -> Gathering:
        """What becomes of gradients on this mesh."""
        return Gathering(self.sharded, self.gradient_dtype)

    # Kernels, by what they are compiled for

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def unpack(self, kind: LayerKind) -> Callable[[DeviceSlab], Parameters]:
        """slab -> what all other kernels take as the parameters of `kind`: its tensors in compute dtype.

        On one device a layer of one tensor, the embedding, keeps its slab, for there is nothing to cut. Over
        several devices a slab that was not gathered before is gathered here.
        """
        if not self._cuts(kind):
            return lambda slab: slab

        @jax.jit
        def cut(slab: DeviceSlab) -> Parameters:
            return self._unflatten(kind, slab)

        return cut

    @functools.cache  # noqa: B019
    def gather(self) -> Callable[[DeviceSlab], tuple[DeviceSlab, Token]]:
        """Sharded slab -> (the whole slab on every device, token)."""

        @functools.partial(jax.jit, out_shardings=self.replicated)
        def gather_slab(slab: DeviceSlab) -> tuple[DeviceSlab, Token]:
            return slab, _token()

        return gather_slab

    @functools.cache  # noqa: B019
    def scatter(self, accumulates: bool, last: bool) -> ScatterKernel:
        """(accumulator | None, gradients of every device's own rows) -> (result, token).

        The sum over devices is one of float32 numbers. `result` is as in `backward`.
        """
        gathering = self.gathering

        def summed(own_N: Array) -> Array:
            return jax.lax.psum_scatter(own_N, DATA_AXIS, tiled=True)

        @functools.partial(jax.jit, donate_argnums=() if last else 0)
        def reduce_scatter(accumulator: Accumulator | None, partial: Accumulator) -> tuple[Any, Token]:
            (sum_N,) = map(self._on_each_device(summed, (_SPLIT,), _SPLIT), partial)
            total_N = accumulator[0] + sum_N if accumulates and accumulator is not None else sum_N
            return gathering.finished(total_N) if last else (total_N,), _token()

        return reduce_scatter

    @functools.cache  # noqa: B019
    def forward(self, kind: LayerKind, saved: tuple[str, ...]) -> ForwardKernel:
        """(parameters, x, context) -> (y_BTD, residuals named `saved`, token)."""

        def forward_layer(
            given: Parameters, x: Array, context: Context
        ) -> tuple[Array, tuple[Array, ...], Token]:
            params = self._tensors(kind, given)
            if saved:
                y_BTD, residuals = forward_saving(kind.apply, saved, params, x, context)
            else:
                y_BTD, residuals = kind.apply(params, x, context), ()
            return self._split_rows(y_BTD), tuple(map(self._split_rows, residuals)), _token()

        return jax.jit(
            self._on_each_device(forward_layer, (_WHOLE, _SPLIT, _SPLIT), (_SPLIT, _SPLIT, _WHOLE))
        )

    @functools.cache  # noqa: B019
    def parameters(self, kind: LayerKind) -> Callable[[DeviceSlab], tuple[tuple[Array, ...], Token]]:
        """slab -> (the layer's parameters in flat order and compute dtype, token)."""

        @jax.jit
        def layer_parameters(slab: DeviceSlab) -> tuple[tuple[Array, ...], Token]:
            return self._unflatten(kind, slab), _token()

        return layer_parameters

    @functools.cache  # noqa: B019
    def backward(
        self, kind: LayerKind, saved: tuple[str, ...], accumulates: bool, last: bool
    ) -> BackwardKernel:
        """(accumulator | None, parameters, x, context, residuals, y_gradient) -> (x_gradient, result, token).

        `result` is a `GradientSlab` on the last microbatch, else the fp32 accumulator, which is
        donated from call to call (but not to the gradient, which may have another dtype). Over several
        devices it is what `scatter` takes, and there is no accumulator.
        """
        gathering = self.gathering

        def backward_layer(
            accumulator: Accumulator | None,
            given: Parameters,
            x_BTD: Array,
            context: Context,
            residuals: tuple[Array, ...],
            y_gradient_BTD: Array,
        ) -> tuple[Array, Any, Token]:
            params = self._tensors(kind, given)
            gradients, x_gradient_BTD = backward_from(
                kind.apply, saved, params, x_BTD, context, residuals, y_gradient_BTD
            )
            collect = gathering.deliver if last else gathering.add
            result = collect(kind, gradients, accumulator if accumulates else None)
            return self._split_rows(x_gradient_BTD), result, _token()

        takes = (_SPLIT, _WHOLE, _SPLIT, _SPLIT, _SPLIT, _SPLIT)
        program = self._on_each_device(backward_layer, takes, (_SPLIT, _SPLIT, _WHOLE))
        return jax.jit(program, donate_argnums=() if last else 0)

    @functools.cache  # noqa: B019
    def embed_backward(self, accumulates: bool, last: bool) -> EmbedBackwardKernel:
        """(accumulator | None, tokens_BT, x_gradient_BTD) -> (result, token); needs no parameters."""
        kind, gathering = self.template.kind(0), self.gathering

        def backward_embedding(
            accumulator: Accumulator | None, tokens_BT: Array, x_gradient_BTD: Array
        ) -> tuple[Any, Token]:
            collect = gathering.deliver_rows if last else gathering.add_rows
            previous = accumulator if accumulates else None
            return collect(kind, previous, tokens_BT, x_gradient_BTD), _token()

        program = self._on_each_device(backward_embedding, (_SPLIT, _SPLIT, _SPLIT), (_SPLIT, _WHOLE))
        return jax.jit(program, donate_argnums=() if last else 0)

    @functools.cache  # noqa: B019
    def loss(self, accumulates: bool, last: bool) -> LossKernel:
        """The head and the cross-entropy, forward and backward at once.

        (accumulator | None, table accumulator | None, parameters, table parameters | None, x, batch, scale)
        -> (loss, x_gradient, result, table accumulator | None, token)

        `loss` is the sum of -log p over unmasked targets times `scale`. The table's parameters and
        accumulator are given where the table is tied, i.e. belongs to the embedding. Both accumulators are
        donated, also to a `GradientSlab`: every chunk of tokens adds to the table's in place.
        """
        head, gathering = self.template.kind(len(self.template.spec.layers) - 1), self.gathering
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
            params = self._tensors(head, given)
            table_VD = self._table(params, given_table)
            totals = accumulator if accumulates else None
            table_totals = (table_accumulator if accumulates else None) if tied else totals
            position = self.template.table.parameter_index
            start_VD = gathering.start(table_totals, position)
            normed_BTD, norm_pullback = jax.vjp(lambda p, x: head.apply(p, x, batch.context), params, x_BTD)
            loss, normed_gradient_BTD, table_gradient_VD = cross_entropy_and_gradients(
                normed_BTD, table_VD, batch.targets_BT, batch.loss_mask_BT, scale, self.head_chunk_tokens,
                start_VD,
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
            if self.devices > 1:
                loss = jax.lax.psum(loss, DATA_AXIS)
            return loss, self._split_rows(x_gradient_BTD), result, table_result, _token()

        takes = (_SPLIT, _SPLIT, _WHOLE, _WHOLE, _SPLIT, _SPLIT, _WHOLE)
        gives = (_WHOLE, _SPLIT, _SPLIT, _SPLIT, _WHOLE)
        return jax.jit(self._on_each_device(head_and_loss, takes, gives), donate_argnums=(0, 1))

    @functools.cache  # noqa: B019
    def evaluation_loss(self) -> EvaluationKernel:
        """(parameters, table parameters | None, x, batch) -> sum of -log p over unmasked targets."""

        @jax.jit
        def evaluate(
            given: Parameters, given_table: Parameters | None, x_BTD: Array, batch: DeviceBatch
        ) -> Array:
            normed_BTD, table_VD = self._normed(given, given_table, x_BTD, batch.context)
            return cross_entropy(
                normed_BTD, table_VD, batch.targets_BT, batch.loss_mask_BT, self.head_chunk_tokens
            )

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

    # Parameters inside kernels

    def _normed(
        self, given: Parameters, given_table: Parameters | None, x_BTD: Array, context: Context
    ) -> tuple[Array, Array]:
        head = self.template.kind(len(self.template.spec.layers) - 1)
        params = self._tensors(head, given)
        return head.apply(params, x_BTD, context), self._table(params, given_table)

    def _table(self, head_params: tuple[Array, ...], given_table: Parameters | None) -> Array:
        owner = self.template.kind(self.template.table.layer_index)
        params = head_params if given_table is None else self._tensors(owner, given_table)
        return params[self.template.table.parameter_index]

    def _on_each_device[**Given, Result](
        self, function: Callable[Given, Result], takes: tuple[PartitionSpec, ...], gives: Any
    ) -> Callable[Given, Result]:
        """The function, run by every device for itself on what it has of each argument."""
        if self.devices == 1:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=takes, out_specs=gives, check_vma=False)

    def _cuts(self, kind: LayerKind) -> bool:
        return self.devices > 1 or len(kind.parameters) > 1

    def _tensors(self, kind: LayerKind, given: Parameters) -> tuple[Array, ...]:
        """The parameters of `kind` in compute dtype, from what `unpack` gave."""
        return given if self._cuts(kind) else self._unflatten(kind, given)

    def _unflatten(self, kind: LayerKind, slab: DeviceSlab) -> tuple[Array, ...]:
        """The parameters of `kind` in compute dtype, from its streamed slab."""
        gathered = tuple(jax.lax.with_sharding_constraint(half, self.replicated) for half in slab)
        if self.compute_dtype == "bfloat16":
            (flat_N,) = gathered
        else:
            hi, lo = gathered
            bits = (hi.astype(jnp.uint32) << 16) + lo.astype(jnp.int32).astype(jnp.uint32)
            flat_N = jax.lax.bitcast_convert_type(bits, jnp.float32)
        layout = slab_layout(kind.parameters, devices=self.mesh.size)
        return tuple(
            jax.lax.slice(flat_N, (segment.offset,), (segment.offset + segment.elements,)).reshape(
                segment.shape
            )
            for segment in layout.segments
        )

    def _split_rows(self, array: Array) -> Array:
        # Over several devices a kernel sees its own rows only.
        return jax.lax.with_sharding_constraint(array, self.sharded) if self.devices == 1 else array


def _token() -> Token:
    return jnp.zeros((), jnp.int32)
