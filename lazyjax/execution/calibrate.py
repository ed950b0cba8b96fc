"""Times every compiled kernel that schedules call, once, on the device in use.

What comes out replaces predicted seconds and working sets in `lazyjax.planning.costs.seconds`. Kernels run
alone: what they lose to transfers or host updates on the same cores and memory is not in these figures
but in the profile's contention (`lazyjax.planning.program.contention`).

Axes: B rows, T tokens, D hidden, N elements of a slab.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Int32

from lazyjax.execution.gradients import Accumulator
from lazyjax.execution.kernels import DeviceBatch, DeviceSlab, Kernels, Parameters
from lazyjax.models.residuals import forward_saving
from lazyjax.models.template import Context
from lazyjax.planning.costs.packing import positions_of
from lazyjax.planning.costs.seconds import MeasuredKey, measured_key
from lazyjax.planning.program.schedule import COMPUTE_ACTIONS, Action, Schedule


class Calibration(NamedTuple):
    """Seconds per call, and bytes of XLA's temporary buffers, by kernel."""

    seconds: dict[MeasuredKey, float]
    working_bytes: dict[MeasuredKey, int]


def kernels_of(schedules: Iterable[Schedule], kernels: Kernels) -> tuple[MeasuredKey, ...]:
    """The kernels that the schedules call, without repetition."""
    found = {
        measured_key(operation, kernels.template.spec): None
        for schedule in schedules
        for operation in schedule.operations
        if operation.action in COMPUTE_ACTIONS
    }
    return tuple(found)


def calibrate(
    kernels: Kernels,
    keys: Iterable[MeasuredKey],
    *,
    microbatch_rows: int,
    sequence_length: int,
    segment_ids_BT: Int32[np.ndarray, "B T"] | None = None,
    repeats: int = 5,
    microbatches: int = 1,
    working_sets: bool = True,
    progress: Callable[[MeasuredKey], None] = lambda key: None,
) -> Calibration:
    """Medians over `repeats` calls on microbatches of `microbatch_rows` x `sequence_length` tokens.

    A layer's slab is unpacked before its first kernel: those that begin an accumulation have that time in
    theirs, and of a forward pass every microbatch has its share.

    Args:
        segment_ids_BT: of the rows; by default each is one segment.
        microbatches: of a batch.
        working_sets: also ask XLA for each kernel's temporary buffers, which compiles it once more.
        progress: gets each kernel before it is timed.
    """
    if segment_ids_BT is None:
        segment_ids_BT = np.ones((microbatch_rows, sequence_length), np.int32)
    calls = _Calls(kernels, segment_ids_BT)
    seconds, working_bytes = {}, {}
    for key in keys:
        progress(key)
        kernel, arguments = calls.of(key)
        seconds[key] = _median_seconds(kernel, arguments, repeats)
        if not key.accumulates:
            # Over several devices no backward pass accumulates: the time is shared by all of them.
            share = microbatches if key.phase is Action.FORWARD or kernels.devices > 1 else 1
            seconds[key] += calls.unpack_seconds(key, repeats) / share
        if working_sets:
            analysis = kernel.lower(*arguments()).compile().memory_analysis()
            working_bytes[key] = int(analysis.temp_size_in_bytes) if analysis is not None else 0
    return Calibration(seconds, working_bytes)


def _median_seconds(kernel: Callable[..., Any], arguments: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(kernel(*arguments()))
    times = []
    for _ in range(repeats):
        warming, given = jax.block_until_ready((arguments(), arguments()))
        # In a schedule a kernel follows another; one that follows a pause starts on cold caches.
        jax.block_until_ready(kernel(*warming))
        start = time.perf_counter()
        jax.block_until_ready(kernel(*given))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class _Calls:
    """Arguments of every kernel, with random values on the device."""

    def __init__(self, kernels: Kernels, segment_ids_BT: Int32[np.ndarray, "B T"]) -> None:
        self.kernels, self.spec = kernels, kernels.template.spec
        self.shape = segment_ids_BT.shape
        random = np.random.default_rng(0)
        tokens = random.integers(0, self.spec.vocabulary_size, self.shape, dtype=np.int32)
        arrays = (tokens, tokens, np.ones(self.shape, np.bool_), segment_ids_BT, positions_of(segment_ids_BT))
        self.batch = DeviceBatch(*map(self._put, arrays))
        hidden = random.standard_normal((*self.shape, self.spec.hidden_size), np.float32)
        self.x_BTD = self._put(hidden.astype(jnp.dtype(kernels.compute_dtype)))
        self.random = random

    def _put(self, array: np.ndarray, sharding: Any = None) -> jax.Array:
        return jax.device_put(np.ascontiguousarray(array), sharding or self.kernels.sharded)

    def of(self, key: MeasuredKey) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
        """The compiled function, and what makes its arguments (accumulators are donated)."""
        layer = next(i for i, spec in enumerate(self.spec.layers) if spec.kind == key.kind)
        kind = self.kernels.template.kind(layer)
        names = tuple(name for name in kind.residual_names if name in key.saved)
        params, context = self._parameters(layer), self.batch.context

        def accumulator(of_layer: int = layer) -> Accumulator | None:
            return self._zeros(of_layer) if key.accumulates else None

        match key.phase:
            case Action.FORWARD:
                x = self.batch.tokens_BT if layer == 0 else self.x_BTD
                return self.kernels.forward(kind, names), lambda: (params, x, context)
            case Action.LOSS:
                tied = self.spec.tied
                table = self._parameters(0) if tied else None
                scale = jnp.float32(1.0)
                assert key.head_chunk is not None
                return self.kernels.loss(key.head_chunk, key.accumulates, key.last), lambda: (
                    accumulator(), accumulator(0) if tied else None,
                    params, table, self.x_BTD, self.batch, scale,
                )  # fmt: skip
            case Action.BACKWARD if layer == 0:
                embed_kernel = self.kernels.embed_backward(key.accumulates, key.last)
                return embed_kernel, lambda: (accumulator(), self.batch.tokens_BT, self.x_BTD)
            case Action.BACKWARD:
                residuals = self._residuals(layer, names, context)
                kernel = self.kernels.backward(kind, names, key.accumulates, key.last)
                return kernel, lambda: (accumulator(), params, self.x_BTD, context, residuals, self.x_BTD)
        raise ValueError(f"{key.phase.value} is no compute operation")

    def unpack_seconds(self, key: MeasuredKey, repeats: int) -> float:
        """Of the slab of the layer that `key` is about; 0 where kernels take the slab itself."""
        layer = next(i for i, spec in enumerate(self.spec.layers) if spec.kind == key.kind)
        if layer == 0:
            return 0.0
        slab = self._slab(layer)
        if self.kernels.devices > 1:
            slab, _ = self.kernels.gather()(slab)
        return _median_seconds(
            self.kernels.unpack(self.kernels.template.kind(layer)), lambda: (slab,), repeats
        )

    def _parameters(self, layer: int) -> Parameters:
        return self.kernels.unpack(self.kernels.template.kind(layer))(self._slab(layer))

    def _slab(self, layer: int) -> DeviceSlab:
        """Parameters of the size that initial ones have."""
        length = self.kernels.layout(layer).length
        values_N = 0.02 * self.random.standard_normal(length, np.float32)
        hi_N = (values_N.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        is_bfloat16 = self.kernels.compute_dtype == "bfloat16"
        hi = self._put(hi_N.view(ml_dtypes.bfloat16) if is_bfloat16 else hi_N)
        if is_bfloat16:
            return (hi,)
        return hi, self._put(np.zeros(length, np.int16))

    def _zeros(self, layer: int) -> Accumulator:
        shapes = self.kernels.placement.gathering.shapes(self.kernels.template.kind(layer))
        return tuple(self._put(np.zeros(shape.shape, np.float32), shape.sharding) for shape in shapes)

    def _residuals(self, layer: int, names: tuple[str, ...], context: Context) -> tuple[jax.Array, ...]:
        """Arrays of the residuals' shapes, with normal values like those of training."""
        if not names:
            return ()
        kind = self.kernels.template.kind(layer)
        dtype = self.x_BTD.dtype
        params = tuple(jax.ShapeDtypeStruct(tensor.shape, dtype) for tensor in kind.parameters)
        _, shapes = jax.eval_shape(
            lambda p, x, c: forward_saving(kind.apply, names, p, x, c), params, self.x_BTD, context
        )
        return tuple(
            self._put(self.random.standard_normal(shape.shape, np.float32).astype(shape.dtype))
            for shape in shapes
        )
