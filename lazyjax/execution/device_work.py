"""Kernels, and what devices exchange: operations that are only dispatched to the device.

One method per kind of operation. None of them waits for the device; each returns what becomes ready
when the operation is done.
"""

from __future__ import annotations

from typing import Any

from lazyjax.batch import Batch
from lazyjax.execution.buffers import StepBuffers
from lazyjax.execution.interfaces import Copies, LayerKernels
from lazyjax.execution.kernels import DeviceBatch, GradientSlab
from lazyjax.execution.pending import Arrays, Pending
from lazyjax.planning.costs.trace import saved_in_order
from lazyjax.planning.program.schedule import Buffer, BufferRole, Operation, Schedule


class DeviceWork:
    """Handlers of one step.

    Attributes:
        losses: of the microbatches so far.
        squared_norms: of the finished gradients, by layer.
    """

    def __init__(
        self,
        kernels: LayerKernels,
        copies: Copies,
        buffers: StepBuffers,
        schedule: Schedule,
        batch: Batch,
    ) -> None:
        self._kernels, self._buffers, self._schedule = kernels, buffers, schedule
        self._template = kernels.template.in_chunks(schedule.plan.token_chunk)
        # The loss is a mean over the whole batch's target tokens, by their weights.
        self._scale = copies.scalar_to_device(1.0 / batch.target_weight)
        self.losses: list[Any] = []
        self.squared_norms: dict[int, Any] = {}

    # Between devices

    def gather(self, operation: Operation) -> Pending:
        """Parameters of which every device has its part, whole on each."""
        device, token = self._buffers.device, None
        for place, _ in operation.allocates:
            part = place.buffer._replace(role=BufferRole.PARAMETERS)
            device[place.buffer], token = self._kernels.gather()(device[part])
            self._buffers.packed.add(place.buffer.layer)
        return Arrays(token)

    def reduce_scatter(self, operation: Operation) -> Pending:
        """A microbatch's gradients, summed over the devices; of a tied table those of the head as well."""
        device, tokens = self._buffers.device, []
        for partial in operation.reads:
            last = operation.last and partial.layer == operation.layer
            accumulator = Buffer(BufferRole.ACCUMULATOR, partial.layer)
            scatter = self._kernels.scatter(operation.accumulates, last)
            previous = device[accumulator] if operation.accumulates else None
            result, token = scatter(previous, device[partial])
            self._keep(partial.layer, result, last=last)
            tokens.append(token)
        return Arrays(tokens)

    # Kernels

    def forward(self, operation: Operation) -> Pending:
        """Forward pass, also where it is repeated."""
        layer, (microbatch, batch) = operation.layer, self._microbatch(operation)
        kind = self._template.kind(layer)
        names = saved_in_order(kind.residual_names, operation.saved)
        kernel = self._kernels.forward(kind, names)
        device = self._buffers.device
        parameters = self._parameters(layer)
        y, residuals, token = kernel(parameters, self._input(layer, microbatch), batch.context)
        if any(place.buffer.role is BufferRole.INPUT for place, _ in operation.allocates):
            device[Buffer(BufferRole.INPUT, layer + 1, microbatch)] = y
        for name, residual in zip(names, residuals, strict=True):
            device[Buffer(BufferRole.RESIDUAL, layer, microbatch, name)] = residual
        return Arrays(token)

    def loss(self, operation: Operation) -> Pending:
        """Head and loss, forward and backward."""
        layer, (microbatch, batch) = operation.layer, self._microbatch(operation)
        tied, device = self._schedule.sizes.tied, self._buffers.device
        assert operation.head_chunk is not None
        accumulator, table = Buffer(BufferRole.ACCUMULATOR, layer), Buffer(BufferRole.ACCUMULATOR, 0)
        kernel = self._kernels.loss(operation.head_chunk, operation.accumulates, operation.last)
        loss, x_gradient, result, table_result, token = kernel(
            device[accumulator] if operation.accumulates else None,
            device[table] if tied and operation.accumulates else None,
            self._parameters(layer),
            self._parameters(0) if tied else None,
            self._input(layer, microbatch),
            batch,
            self._scale,
        )
        self.losses.append(loss)
        device[Buffer(BufferRole.INPUT_GRADIENT, layer, microbatch)] = x_gradient
        if tied and self._schedule.sizes.shared:
            device[Buffer(BufferRole.PARTIAL, 0, microbatch)] = table_result
        elif tied:
            device[table] = table_result
        self._store_gradient(operation, result)
        return Arrays(token)

    def backward(self, operation: Operation) -> Pending:
        """Backward pass; the embedding has no input gradient."""
        layer, (microbatch, batch) = operation.layer, self._microbatch(operation)
        device = self._buffers.device
        y_gradient = device[Buffer(BufferRole.INPUT_GRADIENT, layer + 1, microbatch)]
        accumulator = device[Buffer(BufferRole.ACCUMULATOR, layer)] if operation.accumulates else None
        if layer == 0:
            embed_kernel = self._kernels.embed_backward(operation.accumulates, operation.last)
            result, token = embed_kernel(accumulator, batch.tokens_BT, y_gradient)
        else:
            kind = self._template.kind(layer)
            names = saved_in_order(kind.residual_names, operation.saved)
            kernel = self._kernels.backward(kind, names, operation.accumulates, operation.last)
            x_gradient, result, token = kernel(
                accumulator,
                self._parameters(layer),
                self._input(layer, microbatch),
                batch.context,
                tuple(device[Buffer(BufferRole.RESIDUAL, layer, microbatch, name)] for name in names),
                y_gradient,
            )
            device[Buffer(BufferRole.INPUT_GRADIENT, layer, microbatch)] = x_gradient
        self._store_gradient(operation, result)
        return Arrays(token)

    def _parameters(self, layer: int) -> Any:
        """What kernels take; a slab is unpacked for the first that needs it, in the queue of the kernels."""
        buffer = Buffer(self._schedule.sizes.kernel_parameters, layer)
        if layer in self._buffers.packed:
            unpack = self._kernels.unpack(self._template.kind(layer))
            self._buffers.device[buffer] = unpack(self._buffers.device[buffer])
            self._buffers.packed.remove(layer)
        return self._buffers.device[buffer]

    def _microbatch(self, operation: Operation) -> tuple[int, DeviceBatch]:
        assert operation.microbatch is not None
        return operation.microbatch, self._buffers.device[Buffer(BufferRole.BATCH, 0, operation.microbatch)]

    def _input(self, layer: int, microbatch: int) -> Any:
        if layer == 0:
            return self._buffers.device[Buffer(BufferRole.BATCH, 0, microbatch)].tokens_BT
        return self._buffers.device[Buffer(BufferRole.INPUT, layer, microbatch)]

    def _store_gradient(self, operation: Operation, result: Any) -> None:
        if self._schedule.sizes.shared:
            assert operation.microbatch is not None
            partial = Buffer(BufferRole.PARTIAL, operation.layer, operation.microbatch)
            self._buffers.device[partial] = result
            return
        self._keep(operation.layer, result, last=operation.last)

    def _keep(self, layer: int, result: Any, *, last: bool) -> None:
        if not last:
            self._buffers.device[Buffer(BufferRole.ACCUMULATOR, layer)] = result
            return
        assert isinstance(result, GradientSlab)
        self._buffers.device[Buffer(BufferRole.GRADIENT, layer)] = result.gradient_N
        self.squared_norms[layer] = result.squared_norm
