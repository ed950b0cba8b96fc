"""A device that only takes time: kernels, links, drives and host updates at given rates, no mathematics.

The executor, its walk, its host threads and its waits are the real ones; what they call is replaced. Every
resource is a queue that serves its jobs one after another: a job begins when the one before it has ended,
its operands are there, and it was issued. So its end is known when it is issued, and nobody has to
run: an array carries the moment at which it is there, and waiting for it means waiting for that moment.
As with JAX on a GPU, a buffer on the device can be filled only when the kernels that were issued before it
was allocated have ended.

Two clocks. `WallClock` lets real time pass, scaled: whatever Python, threads and locks take is in the result.
`ThreadClock` lets none pass: each thread has its own time, which moves when it waits. The result then depends
on nothing but who waits for what, the same on a busy machine as on an idle one, so tests can use it.

With a `RealHost` only the device and its links are emulated; slabs, updates and the drive are those of the
machine in use, as fast as they are there beside a device that takes none of its cores (wall clock, scale 1).

Nothing here is measured on a device, nor says how fast one is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from lazyjax.batch import Batch
from lazyjax.execution.executor import Executor
from lazyjax.execution.host_queues import HostQueues, Timed
from lazyjax.execution.host_update import HostUpdates
from lazyjax.execution.interfaces import (
    BackwardKernel,
    EmbedBackwardKernel,
    EvaluationKernel,
    ForwardKernel,
    LogitsKernel,
    LossKernel,
    ScatterKernel,
)
from lazyjax.execution.kernels import DeviceBatch, GradientSlab
from lazyjax.execution.pending import Arrays, Pending, Task
from lazyjax.execution.recorder import Recorder
from lazyjax.models.template import LayerKind, ModelTemplate
from lazyjax.optim.base import HostOptimizer, HostState, StateDescription
from lazyjax.optim.clipping import ClipRule
from lazyjax.planning.costs.seconds import Costs
from lazyjax.planning.plan.document import Plan
from lazyjax.planning.program.contention import BEARING, contended_seconds
from lazyjax.planning.program.schedule import Action, ModelSizes, Operation, Schedule, build_schedule
from lazyjax.specs import Part, SlabLayout, slab_layout
from lazyjax.storage.host import HostStore, LayerOnDrive, LayerSlabs
from lazyjax.storage.nvme import Drive
from lazyjax.timeline import Resource


class Clock(Protocol):
    """Emulated seconds."""

    def now(self) -> float:
        """The calling thread's time."""
        ...

    def wait_until(self, moment: float) -> None:
        """Returns when it is `moment`."""
        ...


class WallClock:
    """Real time, `scale` real seconds to an emulated one."""

    def __init__(self, scale: float) -> None:
        self._scale, self._origin = scale, time.perf_counter()

    def now(self) -> float:
        """Since the clock was made."""
        return (time.perf_counter() - self._origin) / self._scale

    def wait_until(self, moment: float) -> None:
        """Sleeps."""
        left = moment - self.now()
        if left > 0:
            time.sleep(left * self._scale)


class ThreadClock:
    """A time of each thread's own, which moves only when the thread waits."""

    def __init__(self) -> None:
        self._local = threading.local()

    def now(self) -> float:
        """Of this thread; 0 before it has waited."""
        moment: float = getattr(self._local, "moment", 0.0)
        return moment

    def wait_until(self, moment: float) -> None:
        """Moves this thread's time forward."""
        self._local.moment = max(self.now(), moment)


class Job(NamedTuple):
    """When a queue served something."""

    begin: float
    end: float


class Device:
    """All queues of one machine."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.jobs: dict[Resource, list[Job]] = {resource: [] for resource in Resource}
        self._free = dict.fromkeys(Resource, 0.0)
        self._lock = threading.Lock()

    def serve(self, resource: Resource, seconds: float, operands: Sequence[float] = ()) -> float:
        """Queues a job whose operands are there at the given moments; returns when it will have ended."""
        issued = self.clock.now()
        with self._lock:
            begin = max(self._free[resource], issued, *operands, 0.0)
            self._free[resource] = begin + seconds
            self.jobs[resource].append(Job(begin, begin + seconds))
        return begin + seconds

    def kernels_end(self) -> float:
        """When the kernels that were issued so far will have ended."""
        return self._free[Resource.COMPUTE]


class EmulatedArray:
    """Bytes that will be there at some moment."""

    def __init__(self, device: Device, nbytes: int, there: float) -> None:
        self._device, self.nbytes, self.there = device, nbytes, there

    def block_until_ready(self) -> EmulatedArray:
        """Waits for that moment; `jax.block_until_ready` calls this."""
        self._device.clock.wait_until(self.there)
        return self


class EmulatedKernels:
    """Kernels that take the seconds which `Costs` says; operands and results are `EmulatedArray`s.

    Of several devices one is emulated: all do the same at the same time, and arrays are what it has of them.

    Args:
        lost_seconds: that every kernel loses to what runs beside it.
    """

    def __init__(
        self, template: ModelTemplate, device: Device, costs: Costs, lost_seconds: float = 0.0
    ) -> None:
        self.template, self.devices = template, costs.sizes.devices
        self._device, self._costs, self._lost_seconds = device, costs, lost_seconds
        self._layer_of = {template.kind(index).name: index for index in range(len(template.spec.layers))}

    def _array(self, nbytes: int, there: float) -> EmulatedArray:
        return EmulatedArray(self._device, nbytes, there)

    def _run(self, kind: LayerKind, action: Action, operands: Sequence[Any], **facts: Any) -> float:
        """Queues a kernel; returns when it ends."""
        layer = self._layer_of[kind.name]
        operation = Operation(
            index=0, action=action, resource=Resource.COMPUTE, layer=layer, microbatch=0, window=0, **facts
        )
        there = [array.there for array in operands if isinstance(array, EmulatedArray)]
        seconds = self._costs.operation_seconds(operation) + self._lost_seconds
        return self._device.serve(Resource.COMPUTE, seconds, there)

    def _gradient(self, kind: LayerKind, last: bool, end: float) -> Any:
        sizes = self._costs.sizes.layers[self._layer_of[kind.name]]
        if last:
            return GradientSlab(self._array(sizes.gradient_bytes, end), self._array(4, end))  # type: ignore[arg-type]
        # Over several devices that of a device's own rows, of the whole layer.
        return self._array(sizes.accumulator_bytes * self.devices, end)

    def _exchange(self, action: Action, whole_bytes: int, operands: Sequence[float]) -> float:
        """Queues a collective; returns when it ends."""
        operation = Operation(0, action, Resource.INTERCONNECT, 0, None, 0, bytes=whole_bytes)
        seconds = self._costs.operation_seconds(operation)
        return self._device.serve(Resource.INTERCONNECT, seconds, operands)

    def gather(self) -> Callable[[Any], tuple[Any, Any]]:
        """See `Kernels.gather`; what it fills was allocated when it was issued."""

        def run(slab: Any) -> tuple[Any, Any]:
            whole_bytes = slab.nbytes * self.devices
            end = self._exchange(Action.GATHER, whole_bytes, (slab.there, self._device.kernels_end()))
            return self._array(whole_bytes, end), self._array(0, end)

        return run

    def scatter(self, accumulates: bool, last: bool) -> ScatterKernel:
        """See `Kernels.scatter`."""
        layer = self._costs.sizes.layers[0]
        gradient_share = layer.gradient_bytes / layer.accumulator_bytes

        def run(accumulator: Any, partial: Any) -> tuple[Any, Any]:
            there = (partial.there, *([accumulator.there] if accumulates else []))
            end = self._exchange(Action.REDUCE_SCATTER, partial.nbytes, there)
            kept_bytes = partial.nbytes // self.devices
            if not last:
                return self._array(kept_bytes, end), self._array(0, end)
            gradient = self._array(int(kept_bytes * gradient_share), end)
            return GradientSlab(gradient, self._array(4, end)), self._array(0, end)  # type: ignore[arg-type]

        return run

    @property
    def _hidden_bytes(self) -> int:
        return self._costs.sizes.layers[-1].input_bytes

    def unpack(self, kind: LayerKind) -> Callable[[Any], Any]:
        """Takes no time: costs do not know it."""
        return lambda slab: slab

    def forward(self, kind: LayerKind, saved: tuple[str, ...]) -> ForwardKernel:
        """See `Kernels.forward`."""
        residual_bytes = self._costs.sizes.layers[self._layer_of[kind.name]].residual_bytes

        def run(slab: Any, x: Any, context: Any) -> Any:
            end = self._run(kind, Action.FORWARD, [slab, x], saved=tuple(sorted(saved)))
            residuals = tuple(self._array(residual_bytes[name], end) for name in saved)
            return self._array(self._hidden_bytes, end), residuals, self._array(0, end)

        return run

    def backward(
        self, kind: LayerKind, saved: tuple[str, ...], accumulates: bool, last: bool
    ) -> BackwardKernel:
        """See `Kernels.backward`."""

        def run(
            accumulator: Any, slab: Any, x: Any, context: Any, residuals: tuple[Any, ...], y_gradient: Any
        ) -> Any:
            facts = {"saved": tuple(sorted(saved)), "accumulates": accumulates, "last": last}
            operands = [accumulator, slab, x, *residuals, y_gradient]
            end = self._run(kind, Action.BACKWARD, operands, **facts)
            return self._array(self._hidden_bytes, end), self._gradient(kind, last, end), self._array(0, end)

        return run

    def embed_backward(self, accumulates: bool, last: bool) -> EmbedBackwardKernel:
        """See `Kernels.embed_backward`."""
        kind = self.template.kind(0)

        def run(accumulator: Any, tokens: Any, x_gradient: Any) -> Any:
            facts = {"accumulates": accumulates, "last": last}
            end = self._run(kind, Action.BACKWARD, [accumulator, tokens, x_gradient], **facts)
            return self._gradient(kind, last, end), self._array(0, end)

        return run

    def loss(self, head_chunk: int, accumulates: bool, last: bool) -> LossKernel:
        """See `Kernels.loss`."""
        head, embed = self.template.kind(len(self.template.spec.layers) - 1), self.template.kind(0)
        tied = self.template.spec.tied

        def run(
            accumulator: Any, table_accumulator: Any, slab: Any, table: Any, x: Any, batch: Any, scale: Any
        ) -> Any:
            facts = {"accumulates": accumulates, "last": last, "head_chunk": head_chunk}
            end = self._run(head, Action.LOSS, [accumulator, table_accumulator, slab, table, x], **facts)
            table_result = self._gradient(embed, False, end) if tied else None
            return (
                self._array(4, end),
                self._array(self._hidden_bytes, end),
                self._gradient(head, last, end),
                table_result,
                self._array(0, end),
            )

        return run

    def evaluation_loss(self, head_chunk: int) -> EvaluationKernel:
        """Not emulated."""
        raise NotImplementedError("evaluation is not emulated")

    def logits(self) -> LogitsKernel:
        """Not emulated."""
        raise NotImplementedError("evaluation is not emulated")


class EmulatedCopies:
    """Links of given rates, one queue per direction."""

    def __init__(self, device: Device, costs: Costs) -> None:
        profile = costs.profile
        self._device, self._sizes = device, costs.sizes
        self._h2d, self._d2h, self._slabs = profile.h2d_rate(), profile.d2h_rate(), profile.slab_rate()

    def _to_device(self, nbytes: int, there: float, rate: float) -> EmulatedArray:
        operands = (there, self._device.kernels_end())
        return EmulatedArray(self._device, nbytes, self._device.serve(Resource.H2D, nbytes / rate, operands))

    def slab_to_device(self, slabs: LayerSlabs | LayerOnDrive, *, lasting: bool = True) -> Any:
        """A layer's parameters, as bfloat16."""
        return self._to_device(slabs.hi.nbytes, 0.0, self._slabs)

    def batch_to_device(self, batch: Batch) -> Any:
        """One microbatch: one transfer for all of its arrays."""
        whole = self._to_device(self._sizes.batch_bytes, 0.0, self._h2d)
        empty = EmulatedArray(self._device, 0, whole.there)
        return DeviceBatch(whole, empty, empty, empty, empty)  # type: ignore[arg-type]

    def scalar_to_device(self, value: float) -> Any:
        """Takes no time."""
        return EmulatedArray(self._device, 4, 0.0)

    def to_host(self, arrays: Sequence[Any]) -> list[Any]:
        """To pinned memory, one after another."""
        return [
            EmulatedArray(
                self._device,
                array.nbytes,
                self._device.serve(Resource.D2H, array.nbytes / self._d2h, (array.there,)),
            )
            for array in arrays
        ]

    def to_device(self, arrays: Sequence[Any]) -> list[Any]:
        """From pinned memory, one after another."""
        return [self._to_device(array.nbytes, array.there, self._h2d) for array in arrays]

    def to_bytes(self, array: Any) -> np.ndarray:
        """Bytes without memory, when the array is there."""
        array.block_until_ready()
        return weightless(array.nbytes)

    def describe(self, array: Any) -> Any:
        """Its size."""
        return array.nbytes

    def empty_bytes(self, like: Any) -> np.ndarray:
        """Bytes without memory."""
        return weightless(like)

    def from_bytes(self, raw: np.ndarray, like: Any) -> Any:
        """There at once: what took time was the drive."""
        return EmulatedArray(self._device, raw.nbytes, self._device.clock.now())

    def into_slab(self, delivered: Any, gradient_N: np.ndarray) -> None:
        """Takes no time, as in the schedule."""

    def read_scalars(self, values: Any) -> list[float]:
        """Ones, when the arrays are there."""
        for array in values:
            array.block_until_ready()
        return [1.0 for _ in values]

    def device_bytes(self, tree: Any) -> int:
        """Bytes of all arrays."""
        if isinstance(tree, EmulatedArray):
            return tree.nbytes
        return sum(array.nbytes for array in tree)


class _DriveTransfer(NamedTuple):
    device: Device
    end: float

    def result(self) -> None:
        self.device.clock.wait_until(self.end)


class EmulatedDrive:
    """A drive that keeps nothing, one queue per direction; all devices of a host write and read as much.

    Raises:
        ValueError: the profile's drive shares its rate between the directions, which queues do not.
    """

    def __init__(self, device: Device, costs: Costs) -> None:
        if costs.profile.nvme_shared_bytes_per_second is not None:
            raise ValueError("nvme_shared_bytes_per_second: not emulated")
        self._device, self._profile = device, costs.profile

    def write(self, key: str, source: np.ndarray) -> _DriveTransfer:
        """Takes its time."""
        rate = self._profile.nvme_write_bytes_per_second
        assert rate is not None
        seconds = source.nbytes * self._profile.devices_per_host / rate
        return _DriveTransfer(self._device, self._device.serve(Resource.NVME_WRITE, seconds))

    def read(self, key: str, target: np.ndarray) -> _DriveTransfer:
        """Takes its time."""
        rate = self._profile.nvme_read_bytes_per_second
        assert rate is not None
        seconds = target.nbytes * self._profile.devices_per_host / rate
        return _DriveTransfer(self._device, self._device.serve(Resource.NVME_READ, seconds))

    def delete(self, key: str) -> None:
        """Has nothing to do."""

    def close(self) -> None:
        """Has nothing to do."""


class EmulatedOptimizer:
    """Updates that take the seconds which `Costs` says; a layer is known by its number of parameters.

    Args:
        lost_seconds: that every update loses to what runs beside it.
    """

    name = "hybrid8bit"
    master_bytes = 4
    state_version = "emulated"

    def __init__(self, device: Device, costs: Costs, lost_seconds: float = 0.0) -> None:
        self._device = device
        layers = costs.sizes.layers
        lengths = [layer.accumulator_bytes // 4 for layer in layers]
        self._seconds = {
            length: costs.update_seconds(index) + lost_seconds for index, length in enumerate(lengths)
        }
        self._state_bytes = dict(zip(lengths, (layer.state_bytes for layer in layers), strict=True))

    def describe_state(self, layout: SlabLayout) -> StateDescription:
        """All state as one array of bytes."""
        return {"state": ((self._state_bytes[layout.length],), "uint8")}

    def create_state(self, layout: SlabLayout) -> HostState:
        """Bytes without memory."""
        return {"state": weightless(self._state_bytes[layout.length])}

    def update(
        self, slabs: LayerSlabs, state: HostState, *, learning_rate: float, count: int, scale: float
    ) -> None:
        """Takes its time."""
        self._device.clock.wait_until(self._device.serve(Resource.CPU, self._seconds[slabs.layout.length]))


@dataclasses.dataclass(frozen=True, slots=True)
class _TimedTask(Task):
    """A task that tells the thread which waits for it when it ended."""

    clock: Clock
    ends: list[float]

    def wait(self) -> None:
        self.future.result()
        self.clock.wait_until(self.ends[0])


class EmulatedQueues(HostQueues):
    """The executor's host threads, which also hand on the time of a `ThreadClock`."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device, self._clock = device, device.clock

    def _queued(self) -> Pending:
        """Moves a host thread's time to the moment at which its task was queued."""
        return Arrays(EmulatedArray(self._device, 0, self._clock.now()))

    def run(
        self, resource: Resource, work: Callable[[], None], after: Sequence[Pending], timed: Timed
    ) -> Task:
        """See `HostQueues.run`."""
        begins: list[float] = []
        ends: list[float] = []

        def timed_work() -> None:
            begins.append(self._clock.now())
            work()

        def noted(start: float, end: float) -> None:
            ends.append(self._clock.now())
            timed(begins[0], ends[0])

        return _TimedTask(
            super().run(resource, timed_work, [self._queued(), *after], noted).future, self._clock, ends
        )

    def transfer(
        self,
        resource: Resource,
        begin: Callable[[], Callable[[], None]],
        after: Sequence[Pending],
        timed: Timed,
    ) -> Task:
        """See `HostQueues.transfer`."""
        begins: list[float] = []
        ends: list[float] = []

        def noted(start: float, end: float) -> None:
            ends.append(self._clock.now())
            timed(begins[0], ends[0])

        def noted_begin() -> Callable[[], None]:
            begins.append(self._clock.now())
            complete = begin()
            since = self._clock.now()

            def noted_complete() -> None:
                self._clock.wait_until(since)
                complete()

            return noted_complete

        task = super().transfer(resource, noted_begin, [self._queued(), *after], noted)
        return _TimedTask(task.future, self._clock, ends)


class RealHost(NamedTuple):
    """What of a machine is not emulated."""

    store: HostStore
    optimizer: HostOptimizer
    open_drive: Callable[[], Drive]


def weightless(nbytes: int) -> np.ndarray:
    """An array of `nbytes` bytes that takes the memory of one."""
    return np.broadcast_to(np.zeros(1, np.uint8), (nbytes,))


def weightless_store(template: ModelTemplate, devices: int = 1) -> HostStore:
    """Slabs of the lengths that one device has of them, which take no memory."""
    layouts = [
        dataclasses.replace(layout, length=layout.length // devices)
        for layout in (slab_layout(layer.parameters, devices=devices) for layer in template.spec.layers)
    ]

    def make(part: Part, layer: int) -> np.ndarray:
        del part  # each has two bytes for every parameter
        return weightless(2 * layouts[layer].length)

    return HostStore(template.spec, layouts, "uint16", make)


@contextlib.contextmanager
def emulated_executor(
    template: ModelTemplate, plan: Plan, costs: Costs, clock: Clock, host: RealHost | None = None
) -> Iterator[tuple[Executor, Device]]:
    """The executor on an emulated machine with the rates of `costs`, whose microbatches are the plan's.

    Args:
        host: slabs, optimizer and drive that are to be real; only the device and its links are emulated then.
    """
    device = Device(clock)
    sizes: ModelSizes = costs.sizes
    schedule = build_schedule(plan, sizes)
    lost = _lost_seconds(schedule, costs)
    if host is None:
        store = weightless_store(template, sizes.devices)
        optimizer: HostOptimizer = EmulatedOptimizer(device, costs, lost[Resource.CPU])
    else:
        store, optimizer = host.store, host.optimizer
    executor = Executor(
        EmulatedKernels(template, device, costs, lost[Resource.COMPUTE]),
        EmulatedCopies(device, costs),
        lambda plan, sequence_length: schedule,
        plan,
        store,
        HostUpdates(store, optimizer),
        clip=ClipRule(),
        open_drive=(lambda: EmulatedDrive(device, costs)) if host is None else host.open_drive,
        queues=EmulatedQueues(device),
        recorder=Recorder(clock.now),
    )
    try:
        yield executor, device
    finally:
        executor.close()


def _lost_seconds(schedule: Schedule, costs: Costs) -> dict[Resource, float]:
    """What operations lose to others, by resource and in equal parts.

    Also recomputation has its part, which kernels cannot tell from a forward pass.
    """
    contended = contended_seconds(schedule.operations, costs.operation_seconds, costs.contention)
    lost, count = dict.fromkeys(BEARING, 0.0), dict.fromkeys(BEARING, 0)
    for operation, seconds in zip(schedule.operations, contended, strict=True):
        if operation.resource in BEARING:
            lost[operation.resource] += seconds - costs.operation_seconds(operation)
            count[operation.resource] += 1
    return {resource: seconds / count[resource] for resource, seconds in lost.items()}


def blank_batch(plan: Plan) -> Batch:
    """A batch of zeros, every token of it a target."""
    shape = (plan.batch_rows, plan.sequence_length)
    zeros, ones = np.zeros(shape, np.int32), np.ones(shape, np.int32)
    return Batch(zeros, zeros, ones > 0, ones, zeros)
