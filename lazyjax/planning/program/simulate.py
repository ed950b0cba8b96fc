"""Replays a schedule against costs.

Every resource serves its operations one after another in list order; an operation starts when
its resource is free and everything it waits for has finished. Steps are repeated until one step
takes as long as the one before: the period of the steady state.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from lazyjax.planning.program.contention import NO_CONTENTION, Contention, contended_seconds
from lazyjax.planning.program.schedule import Operation, Place, Schedule
from lazyjax.specs import Tier
from lazyjax.timeline import Event, MemorySample, Resource, Timeline

#: Seconds an operation takes once started.
OperationSeconds = Callable[[Operation], float]

_MOST_STEPS = 512
#: Steps after which queues that started with slack are brought up to the others.
_PATIENCE_STEPS = 8
#: Relative accuracy of the period.
_ACCURACY = 1e-9
#: The pattern of a steady state may span this many steps.
_LONGEST_CYCLE = 4


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


def simulate(
    schedule: Schedule, seconds: OperationSeconds, contention: Contention = NO_CONTENTION
) -> Simulation:
    """Iterates steps of `schedule` until every operation advances by one and the same period.

    Only then is the state steady: a queue that is slower than the rest, but started early, would
    show in the finish of a step only many steps later. Such slack is taken away on the way.

    Args:
        seconds: of one operation that has its resource to itself.
    """
    operations = schedule.operations
    durations = contended_seconds(operations, seconds, contention)
    history: list[list[float]] = []
    start: list[float] = []
    for step in range(1, _MOST_STEPS + 1):
        start, end = _replay(operations, durations, history[-1] if history else None)
        history.append(end)
        found = _common_period(history)
        if found is not None:
            period = found
            break
        if step % _PATIENCE_STEPS == 0:
            history = [_caught_up(operations, durations, history)]
    else:
        raise RuntimeError(f"the schedule does not settle within {_MOST_STEPS} steps")
    origin = min(start)
    events = tuple(
        Event(
            step=step,
            operation=operation.index,
            action=operation.action.value,
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


def _replay(
    operations: Sequence[Operation], durations: Sequence[float], previous_end: Sequence[float] | None
) -> tuple[list[float], list[float]]:
    """Start and end of every operation in one step, given the ends of the step before."""
    start, end = [0.0] * len(operations), [0.0] * len(operations)
    free: dict[Resource, float] = dict.fromkeys(Resource, 0.0)
    if previous_end is not None:
        for operation in operations:
            free[operation.resource] = previous_end[operation.index]
    for index, operation in enumerate(operations):
        begin = free[operation.resource]
        for waited in operation.waits:
            if end[waited] > begin:
                begin = end[waited]
        if previous_end is not None:
            for waited in operation.waits_previous:
                if previous_end[waited] > begin:
                    begin = previous_end[waited]
        start[index] = begin
        end[index] = free[operation.resource] = begin + durations[index]
    return start, end


def _common_period(history: Sequence[Sequence[float]]) -> float | None:
    """The period, if all operations advanced equally over the last one (or few) steps."""
    for cycle in range(1, min(_LONGEST_CYCLE, len(history) - 1) + 1):
        advances = [now - before for now, before in zip(history[-1], history[-1 - cycle], strict=True)]
        low, high = min(advances), max(advances)
        if high - low <= _ACCURACY * cycle * max(high, 1e-30):
            return max(0.0, (low + high) / 2 / cycle)
    return None


def _caught_up(
    operations: Sequence[Operation], durations: Sequence[float], history: Sequence[Sequence[float]]
) -> list[float]:
    """Ends of a step in which nothing leads: as late as the fastest growing operation demands."""
    cycle = min(_LONGEST_CYCLE, len(history) - 1)
    period = max(now - before for now, before in zip(history[-1], history[-1 - cycle], strict=True)) / cycle
    latest = list(history[-1])
    for _ in range(_MOST_STEPS):
        _, end = _replay(operations, durations, latest)
        moved = [max(old, new - period) for old, new in zip(latest, end, strict=True)]
        if max(new - old for old, new in zip(latest, moved, strict=True)) <= _ACCURACY * period:
            return moved
        latest = moved
    return latest


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
