"""Operations that run on host threads: NVMe in both directions, and the optimizer.

One method per kind of operation. Each hands the work, and what the work waits for, to the queue of its
resource and returns at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lazyjax.execution.buffers import StepBuffers, nvme_key
from lazyjax.execution.host_queues import HostQueues
from lazyjax.execution.host_update import HostUpdates, UpdateStep
from lazyjax.execution.interfaces import Copies
from lazyjax.execution.pending import Pending
from lazyjax.execution.recorder import Recorder
from lazyjax.planning.program.operations import ROLE_OF
from lazyjax.planning.program.schedule import Action, Buffer, Operation, Schedule
from lazyjax.specs import Part
from lazyjax.storage.nvme import Drive, DriveTransfer


class HostWork:
    """Handlers of one step; `after` is what an operation waits for.

    Attributes:
        step: what updates need; None while it is not known, or where the step is skipped.

    Args:
        deferred: the updates are those of the step before, and fetches follow them.
    """

    def __init__(
        self,
        copies: Copies,
        updates: HostUpdates,
        drive: Drive | None,
        queues: HostQueues,
        recorder: Recorder,
        buffers: StepBuffers,
        step: UpdateStep | None,
        *,
        deferred: bool,
    ) -> None:
        self._copies, self._updates, self._drive = copies, updates, drive
        self._queues, self._recorder, self._buffers = queues, recorder, buffers
        self.step, self._deferred = step, deferred

    def _transfer(
        self, operation: Operation, begin: Callable[[], Callable[[], None]], after: Sequence[Pending]
    ) -> Pending:
        timed = self._recorder.timer(operation)
        return self._queues.transfer(operation.resource, begin, after, timed)

    def spill(self, operation: Operation, after: Sequence[Pending]) -> Pending:
        """Activations, host to NVMe."""
        drive, copies = self._required_drive(), self._copies
        leaving: dict[Buffer, Any] = {}
        for place, _ in operation.allocates:
            array = leaving[place.buffer] = self._buffers.host[place.buffer]
            self._buffers.nvme[place.buffer] = copies.describe(array)

        def begin() -> Callable[[], None]:
            writes = []
            while leaving:
                buffer, array = leaving.popitem()
                writes.append(drive.write(nvme_key(buffer), copies.to_bytes(array)))
            return functools.partial(_finish, writes)

        return self._transfer(operation, begin, after)

    def load(self, operation: Operation, after: Sequence[Pending]) -> Pending:
        """Activations, NVMe to host."""
        drive, copies, buffers = self._required_drive(), self._copies, self._buffers
        coming = {place.buffer: buffers.nvme[place.buffer] for place, _ in operation.allocates}

        def begin() -> Callable[[], None]:
            targets = {buffer: copies.empty_bytes(like) for buffer, like in coming.items()}
            reads = [drive.read(nvme_key(buffer), raw) for buffer, raw in targets.items()]

            def end() -> None:
                _finish(reads)
                for buffer, raw in targets.items():
                    buffers.host[buffer] = copies.from_bytes(raw, coming[buffer])

            return end

        return self._transfer(operation, begin, after)

    def load_state(self, operation: Operation, after: Sequence[Pending]) -> Pending | None:
        """What an update needs, NVMe to copies; without an update what the fetch after it needs."""
        fetched = _halves(operation)
        if self.step is None and not (self._deferred and fetched):
            return None
        updates = self.step is not None
        load = functools.partial(self._updates.load, operation.layer, updates=updates, fetched=fetched)
        return self._transfer(operation, load, after)

    def spill_state(self, operation: Operation, after: Sequence[Pending]) -> Pending | None:
        """What an update has changed, from its copies back to NVMe."""
        if self.step is None and not (self._deferred and _halves(operation)):
            return None
        spill = functools.partial(self._updates.spill, operation.layer, updated=self.step is not None)
        return self._transfer(operation, spill, after)

    def load_parameters(self, operation: Operation, after: Sequence[Pending]) -> Pending:
        """Halves of the master weights, NVMe to copies for one fetch."""
        load = functools.partial(
            self._updates.load, operation.layer, updates=False, fetched=_halves(operation)
        )
        return self._transfer(operation, load, after)

    def spill_gradient(self, operation: Operation, after: Sequence[Pending]) -> Pending:
        """A gradient, from its copy to NVMe."""
        spill = functools.partial(self._updates.spill_gradient, operation.layer)
        return self._transfer(operation, spill, after)

    def update(self, operation: Operation, after: Sequence[Pending]) -> Pending | None:
        """The optimizer on one layer's slabs; without an update only what it waits for."""
        timed = self._recorder.timer(operation)
        if self.step is None:
            nothing = functools.partial(_finish, ())
            return self._queues.run(operation.resource, nothing, after, timed) if after else None
        work = functools.partial(self._updates.update, operation.layer, self.step)
        return self._queues.run(operation.resource, work, after, timed)

    def update_all(self, schedule: Schedule) -> list[Pending]:
        """Queues every update of a schedule, with the moves of its state, and nothing else."""
        handlers = {
            Action.LOAD_STATE: self.load_state,
            Action.UPDATE: self.update,
            Action.SPILL_STATE: self.spill_state,
        }
        issued: dict[int, Pending] = {}
        for operation in schedule.operations:
            if operation.action in handlers:
                after = [issued[waited] for waited in operation.waits if waited in issued]
                task = handlers[operation.action](operation, after)
                if task is not None:
                    issued[operation.index] = task
        return list(issued.values())

    def _required_drive(self) -> Drive:
        assert self._drive is not None
        return self._drive


def _halves(operation: Operation) -> frozenset[Part]:
    """The halves of the master weights that a move around an update or a fetch handles."""
    places = [*(allocation.place for allocation in operation.allocates), *operation.frees]
    return frozenset(part for part in (Part.HI, Part.LO) for p in places if p.buffer.role is ROLE_OF[part])


def _finish(transfers: Sequence[DriveTransfer]) -> None:
    for transfer in transfers:
        transfer.result()
