"""The event schema shared by the simulator and the executor.

An operation of the schedule becomes one event with a start and an end; memory becomes samples
per tier. Both sides write the same records, so that one viewer, one plot and one comparison
serve prediction and measurement alike.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from lazyjax.specs import Resource as Resource


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One operation that ran, or would run, on a resource.

    Times are seconds from the start of the recording. `operation` is its index in the schedule.
    """

    step: int
    operation: int
    action: str
    resource: Resource
    layer: int
    microbatch: int | None
    start_seconds: float
    end_seconds: float
    bytes: int = 0

    @property
    def name(self) -> str:
        """A short label such as `backward 12/3`."""
        return f"{self.action} {self.layer}" + ("" if self.microbatch is None else f"/{self.microbatch}")


@dataclasses.dataclass(frozen=True, slots=True)
class MemorySample:
    """Live bytes of one tier from `seconds` on."""

    seconds: float
    tier: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """Events and memory of one or more steps; `source` is `simulated` or `measured`."""

    source: str
    events: tuple[Event, ...]
    memory: tuple[MemorySample, ...] = ()

    def busy_seconds(self) -> dict[Resource, float]:
        """Seconds in which each resource was serving an operation."""
        busy = dict.fromkeys(Resource, 0.0)
        for event in self.events:
            busy[event.resource] += event.end_seconds - event.start_seconds
        return busy

    def to_perfetto(self) -> dict[str, Any]:
        """The Trace Event Format that ui.perfetto.dev and chrome://tracing open."""
        lanes = {resource: index for index, resource in enumerate(Resource)}
        trace: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"lazyjax ({self.source})"}}
        ]
        trace += [
            {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": str(resource)}}
            for resource, lane in lanes.items()
        ]
        trace += [
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes[event.resource],
                "name": event.name,
                "cat": event.action,
                "ts": event.start_seconds * 1e6,
                "dur": (event.end_seconds - event.start_seconds) * 1e6,
                "args": {"step": event.step, "operation": event.operation, "bytes": event.bytes},
            }
            for event in self.events
        ]
        trace += [
            {
                "ph": "C",
                "pid": 0,
                "name": f"{sample.tier} bytes",
                "ts": sample.seconds * 1e6,
                "args": {"bytes": sample.bytes},
            }
            for sample in self.memory
        ]
        return {"traceEvents": trace, "displayTimeUnit": "ms"}


def covered_seconds(events: Iterable[Event]) -> float:
    """Seconds in which at least one of the events was under way."""
    covered, until = 0.0, -math.inf
    for start, end in sorted((event.start_seconds, event.end_seconds) for event in events):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def write_perfetto(timelines: Sequence[Timeline], path: pathlib.Path) -> None:
    """Writes timelines as one trace, each as its own process row."""
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events += [{**record, "pid": process} for record in timeline.to_perfetto()["traceEvents"]]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def shift_to_zero(events: Iterable[Event]) -> tuple[Event, ...]:
    """Events sorted by start, with the earliest start moved to zero."""
    ordered = sorted(events, key=lambda event: event.start_seconds)
    origin = ordered[0].start_seconds if ordered else 0.0
    return tuple(
        dataclasses.replace(
            event, start_seconds=event.start_seconds - origin, end_seconds=event.end_seconds - origin
        )
        for event in ordered
    )
