"""Replays a schedule against costs.

Every resource serves its operations one after another in list order; an operation starts when
its resource is free and everything it waits for has finished. Steps are repeated until one step
takes as long as the one before: the period of the steady state.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable

from lazyjax.planning.schedule import Operation, Place, Schedule
from lazyjax.specs import Tier
from lazyjax.timeline import Event, MemorySample, Resource, Timeline

#: Seconds an operation takes once started.
OperationSeconds = Callable[[Operation], float]

_MOST_STEPS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Simulation:
    """Outcome of a replay.

    Attributes:
        period_seconds: from one step to the next, in the steady state.
        busy_seconds: per resource, within one step.
        peak_bytes: per tier, counted in list order (what the executor will hold).
        timeline: the last step, starting at 0.
        steps: how many steps it took to settle.
    """

    period_seconds: float
    busy_seconds: dict[Resource, float]
    peak_bytes: dict[Tier, int]
    timeline: Timeline
    steps: int


def simulate(schedule: Schedule, seconds: OperationSeconds) -> Simulation:
    """Iterates steps of `schedule` to a fixed period (relative change below 1e-12)."""
    operations = schedule.operations
    durations = [seconds(operation) for operation in operations]
    free: dict[Resource, float] = dict.fromkeys(Resource, 0.0)
    previous_end: list[float] | None = None
    previous_finish, previous_period = 0.0, -1.0
    for step in range(1, _MOST_STEPS + 1):
        start, end = [0.0] * len(operations), [0.0] * len(operations)
        for operation, duration in zip(operations, durations, strict=True):
            begin = max([free[operation.resource], *(end[waited] for waited in operation.waits)])
            if previous_end is not None:
                begin = max([begin, *(previous_end[waited] for waited in operation.waits_previous)])
            start[operation.index] = begin
            end[operation.index] = free[operation.resource] = begin + duration
        finish = max(end)
        period = finish - previous_finish
        settled = abs(period - previous_period) <= 1e-12 * max(period, 1e-30)
        previous_end, previous_finish, previous_period = end, finish, period
        if settled:
            break
    origin = min(start)
    events = tuple(
        Event(
            step=step,
            operation=operation.index,
            kind=operation.kind.value,
            resource=operation.resource,
            layer=operation.layer,
            microbatch=operation.microbatch,
            start_seconds=start[operation.index] - origin,
            end_seconds=end[operation.index] - origin,
            bytes=operation.bytes,
        )
        for operation in operations
    )
    timeline = Timeline("simulated", events, _memory(schedule, start, end, origin))
    return Simulation(period, timeline.busy_seconds(), schedule.peak_bytes(), timeline, step)


def _memory(
    schedule: Schedule, start: list[float], end: list[float], origin: float
) -> tuple[MemorySample, ...]:
    """Live bytes over time: allocated when an operation starts, freed when the freeing one ends."""
    changes: dict[Tier, list[tuple[float, int]]] = defaultdict(list)

    def note(place: Place, moment: float, sign: int) -> None:
        changes[place.tier].append((moment - origin, sign * schedule.sizes.of(place.buffer)))

    for operation in schedule.operations:
        for allocation in operation.allocates:
            note(allocation.place, start[operation.index], 1)
        for place in operation.frees:
            note(place, end[operation.index], -1)
    samples = []
    for tier, moments in changes.items():
        live = 0
        for moment, change in sorted(moments):
            live += change
            samples.append(MemorySample(moment, tier.value, live))
    return tuple(samples)
