"""What becomes of the gradients inside a kernel: they are added up, and leave as one slab.

On one device every tensor has a float32 accumulator of its own. Adding to it happens in place, because
kernels donate accumulators, and costs one pass over it; the slab is formed on a layer's last microbatch.
Over several devices kernels leave the flat slab of the gradient of a device's own rows. A program of its own
sums it over the devices, of which each keeps its part and adds it to its part of a flat accumulator.

Pure functions for the kernels of `lazyjax.execution.kernels`.

Axes: B rows, T tokens, D hidden, V vocabulary, U rows of a table, N elements of a slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from lazyjax.models.layers import sums_by_token
from lazyjax.models.template import LayerKind
from lazyjax.specs import SlabLayout, slab_layout

#: Float32: one array for each tensor of a layer, or the flat slab of several devices.
Accumulator = tuple[Array, ...]


class GradientSlab(NamedTuple):
    """A layer's finished gradient and the sum of its squares (of the values as delivered).

    Attributes:
        spent: accumulators that the kernel wrote to on the way. They are of no use: a kernel may write to
            what it is given only if it also returns it.
    """

    gradient_N: Float[Array, " N"]
    squared_norm: Float32[Array, ""]
    spent: Accumulator = ()


class Gathering(NamedTuple):
    """How gradients of one mesh and dtype are gathered.

    Attributes:
        sharded: first axis split over the mesh.
        gradient_dtype: in which gradients leave the device.
    """

    sharded: NamedSharding
    gradient_dtype: str

    @property
    def whole(self) -> bool:
        """Whether there is one device, and so an accumulator for every tensor."""
        return int(self.sharded.mesh.size) == 1

    def layout(self, kind: LayerKind) -> SlabLayout:
        """The slab of a layer on this mesh."""
        return slab_layout(kind.parameters, devices=self.sharded.mesh.size)

    def shapes(self, kind: LayerKind) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The accumulator of a layer."""
        shapes = [tensor.shape for tensor in kind.parameters] if self.whole else [(self.layout(kind).length,)]
        # Of one device every axis is whole, however long: only a name is needed for it.
        replicated = NamedSharding(self.sharded.mesh, PartitionSpec())
        sharding = replicated if self.whole else self.sharded
        return tuple(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes)

    def start(self, accumulator: Accumulator | None, position: int) -> Array | None:
        """What the sum of a tensor's gradient may begin with, so that it is `included` (see `add`)."""
        return accumulator[position] if self.whole and accumulator is not None else None

    def add(
        self,
        kind: LayerKind,
        gradients: Sequence[Array],
        accumulator: Accumulator | None,
        *,
        included: int | None = None,
    ) -> Accumulator:
        """The accumulator with `gradients` added; a new one if there was none.

        Over several devices, where this is about a device's own rows, there is none.

        Args:
            included: position of a tensor whose gradient contains the accumulator's already.
        """
        if not self.whole:
            assert accumulator is None
            return (_joined(self.layout(kind), [gradient.astype(jnp.float32) for gradient in gradients]),)
        return tuple(
            gradient.astype(jnp.float32)
            if accumulator is None or position == included
            else accumulator[position] + gradient.astype(jnp.float32)
            for position, gradient in enumerate(gradients)
        )

    def deliver(
        self,
        kind: LayerKind,
        gradients: Sequence[Array],
        accumulator: Accumulator | None,
        *,
        included: int | None = None,
        spends: bool = False,
    ) -> GradientSlab:
        """The slab of the last microbatch's `gradients` and those in the accumulator.

        Args:
            included: see `add`.
            spends: whether the accumulator is written to, see `GradientSlab.spent`.
        """
        totals = self.add(kind, gradients, accumulator, included=included)
        finished = self.finished(self._slab(kind, totals))
        return finished._replace(spent=totals) if spends else finished

    def finished(self, total_N: Array) -> GradientSlab:
        """The slab of a flat gradient."""
        delivered_N = total_N.astype(self.gradient_dtype)
        delivered_N = jax.lax.with_sharding_constraint(delivered_N, self.sharded)
        return GradientSlab(delivered_N, jnp.sum(jnp.square(delivered_N.astype(jnp.float32))))

    def add_rows(
        self, kind: LayerKind, accumulator: Accumulator | None, tokens_BT: Array, gradient_BTD: Array
    ) -> Accumulator:
        """As `add`, for a table of which only the rows `tokens_BT` have a gradient."""
        if not self.whole:
            return self.add(kind, [_table_gradient(kind, tokens_BT, gradient_BTD)], accumulator)
        (table,) = kind.parameters
        rows_U, sums_UD = sums_by_token(tokens_BT, gradient_BTD, table.shape[0])
        before_VD = jnp.zeros(table.shape, jnp.float32) if accumulator is None else accumulator[0]
        return (before_VD.at[rows_U].add(sums_UD, mode="drop", unique_indices=True),)

    def deliver_rows(
        self, kind: LayerKind, accumulator: Accumulator | None, tokens_BT: Array, gradient_BTD: Array
    ) -> GradientSlab:
        """As `deliver`, for such a table: a float32 table exists only if the accumulator does."""
        (table,) = kind.parameters
        rows_U, sums_UD = sums_by_token(tokens_BT, gradient_BTD, table.shape[0])
        if accumulator is None:
            before_VD = jnp.zeros(table.shape, self.gradient_dtype)
        else:
            before_VD = accumulator[0].astype(self.gradient_dtype)
            sums_UD += accumulator[0].at[rows_U].get(mode="fill", fill_value=0.0, unique_indices=True)
        rounded_UD = sums_UD.astype(self.gradient_dtype)
        delivered_VD = before_VD.at[rows_U].set(rounded_UD, mode="drop", unique_indices=True)
        slab_N = self._slab(kind, [delivered_VD])
        if accumulator is not None:
            return self.finished(slab_N)
        # All other rows are zero, and so are those sums that belong to no row.
        return GradientSlab(slab_N, jnp.sum(jnp.square(rounded_UD.astype(jnp.float32))))

    def _slab(self, kind: LayerKind, totals: Sequence[Array]) -> Float[Array, " N"]:
        return _joined(self.layout(kind), [total.astype(self.gradient_dtype) for total in totals])


def _joined(layout: SlabLayout, tensors: Sequence[Array]) -> Float[Array, " N"]:
    """Tensors in slab order, with zeros in the gaps."""
    parts = []
    ends = [segment.offset for segment in layout.segments[1:]] + [layout.length]
    for segment, tensor, end in zip(layout.segments, tensors, ends, strict=True):
        parts.append(tensor.reshape(-1))
        if gap := end - segment.offset - segment.elements:
            parts.append(jnp.zeros(gap, tensor.dtype))
    return jnp.concatenate(parts)


def _table_gradient(
    kind: LayerKind, tokens_BT: Int32[Array, "B T"], gradient_BTD: Float[Array, "B T D"]
) -> Float32[Array, "V D"]:
    (table,) = kind.parameters
    return jnp.zeros(table.shape, jnp.float32).at[tokens_BT].add(gradient_BTD.astype(jnp.float32))
