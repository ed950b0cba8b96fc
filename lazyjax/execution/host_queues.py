"""Host threads that serve the resources of a schedule, each in the order of the schedule.

One thread runs host updates, one starts reads from NVMe, one starts writes to it, two copy
gradients into their slabs, one gives up what was copied to the device. Each waits itself for what its
operation waits for, so that the thread that issues operations does not. A drive's transfers are
started in order and completed in order, two at a time: while one moves, the bytes of the one before
are checked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lazyjax.execution.pending import Pending, Task
from lazyjax.timeline import Resource

#: Called with start and end of an operation, in `time.perf_counter` seconds.
Timed = Callable[[float, float], None]

_IN_FLIGHT = 2
_THREADS = {
    Resource.CPU: 1,
    Resource.NVME_READ: 1,
    Resource.NVME_WRITE: 1,
    Resource.H2D: 1,
    Resource.D2H: 2,
}
_DRIVES = (Resource.NVME_READ, Resource.NVME_WRITE)


class HostQueues:
    """Queues of host work by resource.

    `D2H` here is the copy from pinned memory into a slab, `H2D` the wait for copies whose source is needed.
    """

    def __init__(self) -> None:
        self._threads = {
            resource: ThreadPoolExecutor(count, thread_name_prefix=f"host-{resource.value}")
            for resource, count in _THREADS.items()
        }
        self._finishers = {
            resource: ThreadPoolExecutor(1, thread_name_prefix=f"finish-{resource.value}")
            for resource in _DRIVES
        }
        self._room = {resource: threading.BoundedSemaphore(_IN_FLIGHT) for resource in _DRIVES}

    def run(
        self, resource: Resource, work: Callable[[], None], after: Sequence[Pending], timed: Timed
    ) -> Task:
        """Queues `work`, which begins when all of `after` are done and all before it in its queue."""

        def task() -> None:
            _wait_for_all(after)
            start = time.perf_counter()
            work()
            timed(start, time.perf_counter())

        return Task(self._threads[resource].submit(task))

    def transfer(
        self,
        resource: Resource,
        begin: Callable[[], Callable[[], None]],
        after: Sequence[Pending],
        timed: Timed,
    ) -> Task:
        """Queues a drive's transfer: `begin` starts it and returns what waits for its end."""
        done: Future[None] = Future()
        room = self._room[resource]

        def end(start: float, complete: Callable[[], None]) -> None:
            try:
                complete()
                timed(start, time.perf_counter())
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            finally:
                room.release()

        def task() -> None:
            try:
                _wait_for_all(after)
            except BaseException as error:
                done.set_exception(error)
                return
            room.acquire()
            start = time.perf_counter()
            try:
                complete = begin()
            except BaseException as error:
                room.release()
                done.set_exception(error)
                return
            self._finishers[resource].submit(end, start, complete)

        self._threads[resource].submit(task)
        return Task(done)

    def close(self) -> None:
        """Waits for everything that was queued, and ends the threads."""
        for pool in (*self._threads.values(), *self._finishers.values()):
            pool.shutdown(wait=True)


def _wait_for_all(after: Sequence[Pending]) -> None:
    for pending in after:
        pending.wait()
