"""Times operations without making the program wait for them.

Device work is asynchronous: what the dispatching thread sees is only when an operation was
issued. One watcher per resource waits for the results in issue order and notes when each became
ready; an operation is taken to have started when it was issued, when the one before it on the
same resource ended, or when what it waits for ended, whichever is latest.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lazyjax.execution.pending import Pending
from lazyjax.planning.program.schedule import Operation
from lazyjax.timeline import Event, MemorySample, Resource, Timeline, shift_to_zero


class Recorder:
    """Collects the events of one step at a time.

    Args:
        now: the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._events: list[tuple[Operation, Event]] = []
        self._memory: list[MemorySample] = []
        self._step = 0
        self._queues: dict[Resource, queue.SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []
        for resource in (Resource.COMPUTE, Resource.H2D, Resource.D2H, Resource.INTERCONNECT):
            self._queues[resource] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._watch, args=(resource,), daemon=True, name=f"watch-{resource}"
            )
            thread.start()
            self._threads.append(thread)

    def begin_step(self, step: int) -> None:
        """Forgets the step before."""
        with self._lock:
            self._step, self._events, self._memory = step, [], []

    def issued(self, operation: Operation, pending: Pending) -> None:
        """Watches an operation of the device that was just issued."""
        self._queues[operation.resource].put((self._step, operation, pending, self._now()))

    def timer(self, operation: Operation) -> Callable[[float, float], None]:
        """Takes start and end of an operation of the current step that is timed where it runs."""
        return functools.partial(self._record, self._step, operation)

    def memory(self, tier: str, live_bytes: int) -> None:
        """Records the live bytes of a tier now."""
        with self._lock:
            self._memory.append(MemorySample(self._now(), tier, live_bytes))

    def timeline(self) -> Timeline:
        """The current step's events so far, after what was issued has finished."""
        for resource_queue in self._queues.values():
            drained = threading.Event()
            resource_queue.put(drained)
            drained.wait()
        with self._lock:
            events = _after_what_they_wait_for(self._events)
            origin = min((event.start_seconds for event in events), default=0.0)
            memory = tuple(
                MemorySample(max(0.0, sample.seconds - origin), sample.tier, sample.bytes)
                for sample in self._memory
            )
            return Timeline("measured", shift_to_zero(events), memory)

    def close(self) -> None:
        """Stops the watchers."""
        for resource_queue in self._queues.values():
            resource_queue.put(None)
        for thread in self._threads:
            thread.join()

    def _watch(self, resource: Resource) -> None:
        previous_end = 0.0
        while True:
            entry = self._queues[resource].get()
            if entry is None:
                return
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            step, operation, pending, issued = entry
            try:
                pending.wait()
            except Exception:
                # The walk meets the same error where it waits.
                del entry, pending
                continue
            end = self._now()
            self._record(step, operation, max(issued, previous_end), end)
            previous_end = end
            # Nothing is kept alive only because it was timed.
            del entry, pending

    def _record(self, step: int, operation: Operation, start: float, end: float) -> None:
        with self._lock:
            if step != self._step:
                return
            event = Event(
                step=step,
                operation=operation.index,
                action=operation.action.value,
                resource=operation.resource,
                layer=operation.layer,
                microbatch=operation.microbatch,
                start_seconds=start,
                end_seconds=end,
                bytes=operation.bytes,
            )
            self._events.append((operation, event))


def _after_what_they_wait_for(events: Sequence[tuple[Operation, Event]]) -> list[Event]:
    """Events with their starts moved behind the ends of what they wait for, which was issued early."""
    ends = {event.operation: event.end_seconds for _, event in events}
    moved = []
    for operation, event in events:
        ready = max((ends[wait] for wait in operation.waits if wait in ends), default=0.0)
        start = min(max(event.start_seconds, ready), event.end_seconds)
        moved.append(dataclasses.replace(event, start_seconds=start))
    return moved
