"""Where a step's time goes: the critical path, and the time each resource keeps compute waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lazyjax.planning.program.schedule import Schedule
from lazyjax.planning.program.simulate import Simulation
from lazyjax.timeline import Event, Resource


class Stretch(NamedTuple):
    """A part of the critical path: one operation, and why the next one had to wait for it."""

    event: Event
    because: str


def critical_path(schedule: Schedule, simulation: Simulation) -> tuple[Stretch, ...]:
    """The chain of operations, first to last, that ends with the step's last compute operation.

    Each starts when the one before ends, because it waits for it or stands behind it in a queue.
    The chain begins where an operation waited for the step before.
    """
    events = _by_operation(simulation)
    before = _queue_predecessors(schedule)
    slack = 1e-9 * max(simulation.period_seconds, 1e-30)
    compute = [event for event in events if event.resource is Resource.COMPUTE]
    current: int | None = max(compute, key=lambda event: event.end_seconds).operation
    path: list[Stretch] = []
    because = "end of step"
    while current is not None:
        path.append(Stretch(events[current], because))
        start = events[current].start_seconds
        waits = [
            wait for wait in schedule.operations[current].waits if events[wait].end_seconds >= start - slack
        ]
        queue = before[current]
        if queue is not None and events[queue].end_seconds >= start - slack:
            current, because = queue, "same queue"
        elif waits:
            current, because = waits[0], "waited for"
        else:
            current = None
    return tuple(reversed(path))


def exposed_seconds(schedule: Schedule, simulation: Simulation) -> dict[Resource, float]:
    """Seconds in which compute stands still, by the resource that it is waiting for.

    A pause is charged to the operation whose end compute waits for, back along its own waits,
    until the pause is covered. What is left waits for the step before and counts as CPU, the
    only resource that carries a step's end into the next (host updates).
    """
    events = _by_operation(simulation)
    before = _queue_predecessors(schedule)
    slack = 1e-9 * max(simulation.period_seconds, 1e-30)
    exposed = dict.fromkeys(Resource, 0.0)
    compute = sorted(
        (event for event in events if event.resource is Resource.COMPUTE),
        key=lambda event: event.start_seconds,
    )
    busy_until = compute[-1].end_seconds - simulation.period_seconds if compute else 0.0
    for event in compute:
        moment, current = event.start_seconds, event.operation
        while moment > busy_until + slack:
            found = [
                wait
                for wait in (*schedule.operations[current].waits, before[current])
                if wait is not None and abs(events[wait].end_seconds - moment) <= slack
            ]
            candidates = [wait for wait in found if events[wait].resource is not Resource.COMPUTE]
            if not candidates:
                exposed[Resource.CPU] += moment - busy_until
                break
            current = candidates[0]
            start = max(events[current].start_seconds, busy_until)
            exposed[events[current].resource] += moment - start
            if start <= busy_until + slack or events[current].start_seconds >= moment:
                break
            moment = start
        busy_until = max(busy_until, event.end_seconds)
    del exposed[Resource.COMPUTE]
    return exposed


def _by_operation(simulation: Simulation) -> Sequence[Event]:
    return sorted(simulation.timeline.events, key=lambda event: event.operation)


def _queue_predecessors(schedule: Schedule) -> list[int | None]:
    last: dict[Resource, int] = {}
    before: list[int | None] = []
    for operation in schedule.operations:
        before.append(last[operation.resource] if operation.resource in last else None)
        last[operation.resource] = operation.index
    return before
