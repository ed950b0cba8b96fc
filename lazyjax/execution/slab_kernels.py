"""Compiled functions of slabs as a whole: cut into tensors, gathered from all devices, summed over them.

See `lazyjax.execution.kernels` for why.

Axes: N elements of a slab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from lazyjax.execution.gradients import Accumulator
from lazyjax.execution.interfaces import ScatterKernel
from lazyjax.execution.placement import DATA_AXIS, SPLIT, DeviceSlab, Parameters, Placement, Token, token
from lazyjax.models.template import LayerKind


class SlabKernels:
    """Kernels of one placement; compiled at first use and kept."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def unpack(self, kind: LayerKind) -> Callable[[DeviceSlab], Parameters]:
        """slab -> what all other kernels take as the parameters of `kind`: its tensors in compute dtype.

        On one device a layer of one tensor, the embedding, keeps its slab, for there is nothing to cut. Over
        several devices a slab that was not gathered before is gathered here.
        """
        if not self.placement.cuts(kind):
            return lambda slab: slab

        @jax.jit
        def cut(slab: DeviceSlab) -> Parameters:
            return self.placement.unflatten(kind, slab)

        return cut

    @functools.cache  # noqa: B019
    def gather(self) -> Callable[[DeviceSlab], tuple[DeviceSlab, Token]]:
        """Sharded slab -> (the whole slab on every device, token)."""

        @functools.partial(jax.jit, out_shardings=self.placement.replicated)
        def gather_slab(slab: DeviceSlab) -> tuple[DeviceSlab, Token]:
            return slab, token()

        return gather_slab

    @functools.cache  # noqa: B019
    def scatter(self, accumulates: bool, last: bool) -> ScatterKernel:
        """(accumulator | None, gradients of every device's own rows) -> (result, token).

        The sum over devices is one of float32 numbers. `result` is as in `backward`.
        """
        gathering = self.placement.gathering

        def summed(own_N: Array) -> Array:
            return jax.lax.psum_scatter(own_N, DATA_AXIS, tiled=True)

        @functools.partial(jax.jit, donate_argnums=() if last else 0)
        def reduce_scatter(accumulator: Accumulator | None, partial: Accumulator) -> tuple[Any, Token]:
            (sum_N,) = map(self.placement.on_each_device(summed, (SPLIT,), SPLIT), partial)
            total_N = accumulator[0] + sum_N if accumulates and accumulator is not None else sum_N
            return gathering.finished(total_N) if last else (total_N,), token()

        return reduce_scatter

    @functools.cache  # noqa: B019
    def parameters(self, kind: LayerKind) -> Callable[[DeviceSlab], tuple[tuple[Array, ...], Token]]:
        """slab -> (the layer's parameters in flat order and compute dtype, token)."""

        @jax.jit
        def layer_parameters(slab: DeviceSlab) -> tuple[tuple[Array, ...], Token]:
            return self.placement.unflatten(kind, slab), token()

        return layer_parameters
