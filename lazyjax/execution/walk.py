"""Issues the operations of a schedule, in order, and waits only where the schedule says.

Device work is only dispatched: kernels and copies wait for each other on the device, in the order
in which they were issued. Host work goes to threads, which wait themselves. The walk blocks

- before a device operation, on host work that it waits for (an update before its fetch, a read from
  NVMe before its reload), because the device cannot wait for the host;
- before a kernel, on copies out of the device and sums over devices that it waits for: their memory is free
  only then;
- before host work, on a transfer that frees memory, such as the write to NVMe two before this one;
- before a fetch, on the window before the last, so that the device always has work queued but memory
  that the list counts as free is free.

No device work is issued past a blocked operation, although another resource could go on: a buffer that
JAX allocates after a kernel was dispatched is usable only when that kernel has ended, so a copy that was
overtaken by a kernel would wait for it. Deferred updates and the moves of their state touch nothing on the
device. They are issued as soon as what they wait for is, in the order of their queues, wherever the walk is.
A gradient's copy on its way to a drive is waited for by the thread that fills the next one.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lazyjax.execution.buffers import StepBuffers
from lazyjax.execution.copy_work import CopyWork
from lazyjax.execution.device_work import DeviceWork
from lazyjax.execution.host_order import HostOrder
from lazyjax.execution.host_work import HostWork
from lazyjax.execution.pending import Pending, Task
from lazyjax.execution.recorder import Recorder
from lazyjax.planning.program.schedule import STATE_ACTIONS, Action, Operation, Place, Schedule
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

DEVICE_RESOURCES = frozenset({Resource.COMPUTE, Resource.H2D, Resource.D2H, Resource.INTERCONNECT})
#: Writes of what layers own, which the next step waits for.
_CARRIED = frozenset({Action.SPILL_STATE, Action.SPILL_GRADIENT})
_READS_OF_OWNED = frozenset({Action.LOAD_STATE, Action.LOAD_PARAMETERS})
#: Windows whose kernels may be queued on the device when a fetch is issued.
_WINDOWS_AHEAD = 1


class Waits(NamedTuple):
    """What an operation's waits mean for the walk.

    Attributes:
        finish: operations that the walk waits for itself.
        release: copies to the device that the device waits for; what they leave is given up.
    """

    finish: tuple[int, ...]
    release: tuple[int, ...]


class Prepared(NamedTuple):
    """What follows from a schedule alone, worked out once for all of its steps.

    Attributes:
        waits: by operation.
        awaited: operations that a host thread or the walk waits for.
    """

    waits: tuple[Waits, ...]
    awaited: frozenset[int]


def prepare(schedule: Schedule) -> Prepared:
    """See `Prepared`."""
    operations = schedule.operations
    waits = []
    for operation in operations:
        finish = [waited for waited in operation.waits if _must_have_ended(operation, operations[waited])]
        # The device waits for the copy; its source is JAX's to keep until then.
        release = [
            waited
            for waited in operation.waits
            if waited not in finish and operations[waited].resource is Resource.H2D
        ]
        waits.append(Waits(tuple(finish), tuple(release)))
    awaited = {
        waited
        for operation in operations
        if operation.resource not in DEVICE_RESOURCES
        for waited in operation.waits
    }
    awaited.update(waited for own in waits for waited in own.finish)
    return Prepared(tuple(waits), frozenset(awaited))


def _must_have_ended(operation: Operation, other: Operation) -> bool:
    """Whether the walk itself waits; else the device's queues or a host thread do."""
    if operation.resource not in DEVICE_RESOURCES:
        own_threads = (
            operation.action is Action.SPILL_GRADIENT
            or other.action in STATE_ACTIONS | _CARRIED
            or other.resource in (Resource.COMPUTE, Resource.H2D)
        )
        return bool(other.frees) and not own_threads
    if other.action is Action.SPILL_GRADIENT:
        return False  # the thread that fills the copy waits
    if other.resource is Resource.D2H or other.action is Action.REDUCE_SCATTER:
        return operation.resource is Resource.COMPUTE
    return other.resource not in DEVICE_RESOURCES


#: By the address of a schedule, which is kept beside it: bucketed lengths of a running plan.
_prepared: dict[int, tuple[Schedule, Prepared]] = {}
_MOST_PREPARED = 64


def _prepared_once(schedule: Schedule) -> Prepared:
    found = _prepared.get(id(schedule))
    if found is None:
        if len(_prepared) >= _MOST_PREPARED:
            _prepared.clear()
        found = _prepared[id(schedule)] = (schedule, prepare(schedule))
    return found[1]


class Handlers(NamedTuple):
    """What does the work of each kind of operation: dispatches it, and gives what becomes ready with it.

    Attributes:
        device: on the device and its links, but for gradients that leave.
        gradient_out: also takes what the thread that fills a slab waits for.
        host: on host threads; also take what these wait for.
    """

    device: Mapping[Action, Callable[[Operation], Pending]]
    gradient_out: Callable[[Operation, list[Pending]], Pending]
    host: Mapping[Action, Callable[[Operation, list[Pending]], Pending | None]]


def handlers_of(copy_work: CopyWork, device_work: DeviceWork, host_work: HostWork) -> Handlers:
    """The handlers of a step, by kind of operation."""
    return Handlers(
        device={
            Action.FETCH: copy_work.fetch,
            Action.RELOAD: copy_work.reload,
            Action.OFFLOAD: copy_work.offload,
            Action.FORWARD: device_work.forward,
            Action.RECOMPUTE: device_work.forward,
            Action.LOSS: device_work.loss,
            Action.BACKWARD: device_work.backward,
            Action.GATHER: device_work.gather,
            Action.REDUCE_SCATTER: device_work.reduce_scatter,
        },
        gradient_out=copy_work.gradient_out,
        host={
            Action.SPILL: host_work.spill,
            Action.LOAD: host_work.load,
            Action.UPDATE: host_work.update,
            Action.LOAD_STATE: host_work.load_state,
            Action.SPILL_STATE: host_work.spill_state,
            Action.SPILL_GRADIENT: host_work.spill_gradient,
            Action.LOAD_PARAMETERS: host_work.load_parameters,
        },
    )


class Walk:
    """One pass through a schedule.

    Args:
        carried: work of the step before that this step may wait for (`Operation.waits_previous`).
        issued: called after every operation was issued, before what a kernel frees is let go.
    """

    def __init__(
        self,
        schedule: Schedule,
        handlers: Handlers,
        buffers: StepBuffers,
        recorder: Recorder,
        *,
        carried: Mapping[int, Pending],
        issued: Callable[[Operation], None],
    ) -> None:
        self._schedule, self._buffers, self._recorder = schedule, buffers, recorder
        self._carried, self._issued = carried, issued
        self._handlers = handlers
        self._carried_layers: dict[int, list[Pending]] = collections.defaultdict(list)
        for index, task in carried.items():
            self._carried_layers[schedule.operations[index].layer].append(task)
        self._pending: dict[int, Pending] = {}
        self._to_free: dict[int, tuple[Place, ...]] = {}
        self._tokens: collections.deque[tuple[int, Pending]] = collections.deque()
        self._host_order = HostOrder(
            operation for operation in schedule.operations if operation.resource not in DEVICE_RESOURCES
        )
        self._prepared = _prepared_once(schedule)

    def run(self, before: Callable[[Operation], None]) -> None:
        """Issues every operation, in order; `before` is called with each before it is issued."""
        for operation, waits in zip(self._schedule.operations, self._prepared.waits, strict=True):
            self._issue_ahead(operation.index)
            if operation.index in self._host_order.taken_ahead:
                continue
            before(operation)
            for waited in waits.finish:
                self.finish(waited)
            for waited in waits.release:
                self._free_after(waited)
            if operation.resource in DEVICE_RESOURCES:
                self._issue_on_device(operation)
            else:
                self._host_order.take(operation)
                self._issue_on_host(operation)
            self._note(operation)

    def _note(self, operation: Operation) -> None:
        """Counts what was issued."""
        self._buffers.count(operation)
        self._recorder.memory(Tier.DEVICE.value, self._buffers.live_bytes)
        self._issued(operation)
        if operation.resource is Resource.COMPUTE:
            self._buffers.free(operation.frees)
        elif operation.frees:
            self._to_free[operation.index] = operation.frees

    def _issue_ahead(self, position: int) -> None:
        """Issues deferred updates and moves of state whose turn in their queues has come."""
        if self._schedule.plan.update != "deferred":
            return  # the step has to decide first whether there are any
        for operation in self._host_order.ahead(position):
            self._issue_on_host(operation)
            self._note(operation)

    def finish(self, index: int) -> None:
        """Waits for an operation, then frees what it held."""
        pending = self._pending.pop(index, None)
        if pending is not None:
            pending.wait()
        self._free_after(index)

    def finish_all(self) -> dict[int, Pending]:
        """Waits for everything but what layers own on its way to NVMe, which the next step waits for."""
        left = {}
        for index in list(self._pending):
            if self._schedule.operations[index].action in _CARRIED:
                left[index] = self._pending.pop(index)
            else:
                self.finish(index)
        return left

    def settle(self) -> None:
        """Waits for the end of everything that was issued, whether good or bad."""
        for pending in (*self._pending.values(), *self._carried.values()):
            # The first error was raised already.
            with contextlib.suppress(Exception):
                pending.wait()
        self._pending.clear()

    def _free_after(self, index: int) -> None:
        if index in self._to_free:
            self._buffers.free(self._to_free.pop(index))

    def _issue_on_device(self, operation: Operation) -> None:
        if operation.action is Action.FETCH:
            for waited in operation.waits_previous:
                if waited in self._carried:
                    self._carried[waited].wait()
            while len(self._tokens) > _WINDOWS_AHEAD:
                self._tokens.popleft()[1].wait()
        if operation.action is Action.GRADIENT_OUT:
            pending = self._handlers.gradient_out(operation, self._issued_before(operation))
        else:
            pending = self._handlers.device[operation.action](operation)
        self._recorder.issued(operation, pending)
        if operation.resource is Resource.COMPUTE:
            if self._tokens and self._tokens[-1][0] == operation.window:
                self._tokens.pop()
            self._tokens.append((operation.window, pending))
        if operation.resource is Resource.D2H or operation.index in self._prepared.awaited:
            self._pending[operation.index] = pending

    def _issued_before(self, operation: Operation) -> list[Pending]:
        return [self._pending[waited] for waited in operation.waits if waited in self._pending]

    def _issue_on_host(self, operation: Operation) -> None:
        after = self._issued_before(operation)
        after += [self._carried[waited] for waited in operation.waits_previous if waited in self._carried]
        if operation.action in _READS_OF_OWNED and operation.layer in self._carried_layers:
            # In its queue the write is long done; if it failed, what is there is older.
            after += self._carried_layers[operation.layer]
        pending = self._handlers.host[operation.action](operation, after)
        if pending is not None:
            assert isinstance(pending, Task)
            self._pending[operation.index] = pending
