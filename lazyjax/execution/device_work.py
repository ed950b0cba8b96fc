"""Operations that run on the device and its links: kernels and copies, which are only dispatched.

One method per kind of operation. None of them waits for the device; each returns what becomes ready
when the operation is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazyjax.batch import Batch
from lazyjax.execution.buffers import StepBuffers
from lazyjax.execution.host_queues import HostQueues
from lazyjax.execution.interfaces import Copies, LayerKernels
from lazyjax.execution.kernels import DeviceBatch, GradientSlab
from lazyjax.execution.pending import Arrays, Pending
from lazyjax.planning.program.schedule import Buffer, BufferRole, Operation, Schedule
from lazyjax.specs import Part
from lazyjax.storage.host import HostStore
from lazyjax.timeline import Resource


def _untimed(start: float, end: float) -> None:
    """The copies themselves are timed where they run."""


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
        store: HostStore,
        queues: HostQueues,
        buffers: StepBuffers,
        schedule: Schedule,
        batch: Batch,
    ) -> None:
        self._kernels, self._copies, self._store, self._queues = kernels, copies, store, queues
        self._buffers, self._schedule, self._batch = buffers, schedule, batch
        self._template = kernels.template.in_chunks(schedule.plan.token_chunk)
        # The loss is a mean over the whole batch's target tokens, by their weights.
        self._scale = copies.scalar_to_device(1.0 / batch.target_weight)
        self._packed: set[int] = set()
        self.losses: list[Any] = []
        self.squared_norms: dict[int, Any] = {}

    # Copies

    def fetch(self, operation: Operation) -> Pending:
        """Parameters, host slab to device."""
        layer, owned = operation.layer, self._store.owned
        fetched = owned.on_nvme(layer).intersection(self._schedule.sizes.fetched)
        slab = self._copies.slab_to_device(self._store.slabs(layer), lasting=not fetched)
        self._buffers.device[Buffer(BufferRole.PARAMETERS, layer)] = slab
        if not self._schedule.sizes.shared:
            self._packed.add(layer)
        if not fetched:
            return Arrays(slab)
        # The copies are used again once they are on the device. What waits for that must not hold the slab.
        spent = [owned.copies.take_copy(layer, part) for part in fetched] if operation.frees else []

        def give_back() -> None:
            for lent in spent:
                owned.copies.pool.give_back(lent)

        return self._queues.run(Resource.H2D, give_back, [Arrays(slab)], _untimed)

    def reload(self, operation: Operation) -> Pending:
        """The batch or activations, host to device."""
        device, host, microbatch_rows = (
            self._buffers.device,
            self._buffers.host,
            self._schedule.plan.microbatch_rows,
        )
        waiting = []
        for buffer in operation.reads:
            if buffer.role is BufferRole.BATCH:
                part = self._batch.slice_rows(
                    buffer.microbatch * microbatch_rows, (buffer.microbatch + 1) * microbatch_rows
                )
                device[buffer] = self._copies.batch_to_device(part)
            else:
                waiting.append(buffer)
        if waiting:
            device.update(zip(waiting, self._copies.to_device([host[b] for b in waiting]), strict=True))
        return Arrays([device[buffer] for buffer in operation.reads])

    def offload(self, operation: Operation) -> Pending:
        """Activations, device to host."""
        device = self._buffers.device
        copies = self._copies.to_host([device[buffer] for buffer in operation.reads])
        self._buffers.host.update(zip(operation.reads, copies, strict=True))
        return Arrays(copies)

    def gradient_out(self, operation: Operation, after: Sequence[Pending] = ()) -> Pending:
        """A layer's gradient, device to pinned memory, and from there on a host thread into its slab.

        Args:
            after: what that thread waits for: writes of earlier gradients, whose copies are used again.
        """
        layer, owned = operation.layer, self._store.owned
        (delivered,) = self._copies.to_host([self._buffers.device[Buffer(BufferRole.GRADIENT, layer)]])

        def copy() -> None:
            if Part.GRADIENT in owned.on_nvme(layer):
                target = owned.copies.make_new(layer, Part.GRADIENT)[Part.GRADIENT.value]
            else:
                target = self._store.slabs(layer).gradient
            self._copies.into_slab(delivered, target)

        return self._queues.run(Resource.D2H, copy, [Arrays(delivered), *after], _untimed)

    # Between devices

    def gather(self, operation: Operation) -> Pending:
        """Parameters of which every device has its part, whole on each."""
        device, token = self._buffers.device, None
        for place, _ in operation.allocates:
            part = place.buffer._replace(role=BufferRole.PARAMETERS)
            device[place.buffer], token = self._kernels.gather()(device[part])
            self._packed.add(place.buffer.layer)
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
        names = self._names(operation)
        kernel = self._kernels.forward(self._template.kind(layer), names)
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
        accumulator, table = Buffer(BufferRole.ACCUMULATOR, layer), Buffer(BufferRole.ACCUMULATOR, 0)
        loss, x_gradient, result, table_result, token = self._kernels.loss(
            operation.accumulates, operation.last
        )(
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
            names = self._names(operation)
            kernel = self._kernels.backward(
                self._template.kind(layer), names, operation.accumulates, operation.last
            )
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
        if layer in self._packed:
            unpack = self._kernels.unpack(self._template.kind(layer))
            self._buffers.device[buffer] = unpack(self._buffers.device[buffer])
            self._packed.remove(layer)
        return self._buffers.device[buffer]

    def _names(self, operation: Operation) -> tuple[str, ...]:
        kind = self._template.kind(operation.layer)
        return tuple(name for name in kind.residual_names if name in operation.saved)

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
