"""Copies between host and device, which are only dispatched.

One method per kind of operation. None of them waits for a copy; each returns what becomes ready when the
operation is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazyjax.batch import Batch
from lazyjax.execution.buffers import StepBuffers
from lazyjax.execution.host_queues import HostQueues
from lazyjax.execution.interfaces import Copies
from lazyjax.execution.pending import Arrays, Pending
from lazyjax.planning.program.schedule import Buffer, BufferRole, Operation, Schedule
from lazyjax.specs import Part
from lazyjax.storage.host import HostStore
from lazyjax.timeline import Resource


def _untimed(start: float, end: float) -> None:
    """The copies themselves are timed where they run."""


class CopyWork:
    """Handlers of one step."""

    def __init__(
        self,
        copies: Copies,
        store: HostStore,
        queues: HostQueues,
        buffers: StepBuffers,
        schedule: Schedule,
        batch: Batch,
    ) -> None:
        self._copies, self._store, self._queues = copies, store, queues
        self._buffers, self._schedule, self._batch = buffers, schedule, batch

    def fetch(self, operation: Operation) -> Pending:
        """Parameters, host slab to device."""
        layer, owned = operation.layer, self._store.owned
        fetched = owned.on_nvme(layer).intersection(self._schedule.sizes.fetched)
        slab = self._copies.slab_to_device(self._store.slabs(layer), lasting=not fetched)
        self._buffers.device[Buffer(BufferRole.PARAMETERS, layer)] = slab
        if not self._schedule.sizes.shared:
            self._buffers.packed.add(layer)
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
        device, host = self._buffers.device, self._buffers.host
        rows = self._schedule.plan.microbatch_rows
        waiting = []
        for buffer in operation.reads:
            if buffer.role is BufferRole.BATCH:
                part = self._batch.slice_rows(buffer.microbatch * rows, (buffer.microbatch + 1) * rows)
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
