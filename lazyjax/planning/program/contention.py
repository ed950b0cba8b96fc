"""Compute time that is lost to copies and updates, where they run on the cores that compute.

Between a GPU and its host nothing is lost: copy engines move, the host updates, and kernels run on. On a
CPU backend all three share cores and memory. The model is of first order: every second of copies or
updates of a step costs its compute a fixed share of a second, wherever in the step it falls, because in
the steady state something always computes. Each forward, loss and backward call bears an equal part:
calls that every plan makes, so that the sum stays linear in the planner's decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lazyjax.planning.program.operations import Action, Operation
from lazyjax.timeline import Resource

#: Compute operations that every plan has, as often as it has microbatches.
BEARING = frozenset({Action.FORWARD, Action.LOSS, Action.BACKWARD})


class Contention(NamedTuple):
    """Seconds that compute loses per second of host updates, or of copies, of the same step."""

    updates: float = 0.0
    copies: float = 0.0

    def share(self, resource: Resource) -> float:
        """Seconds of compute lost per second of what `resource` serves."""
        match resource:
            case Resource.CPU:
                return self.updates
            case Resource.H2D | Resource.D2H:
                return self.copies
            case _:
                return 0.0


#: Of a device with cores and memory of its own.
NO_CONTENTION = Contention()


def contended_seconds(
    operations: Sequence[Operation], seconds: Callable[[Operation], float], contention: Contention
) -> list[float]:
    """Seconds of every operation, compute with its part of what the step loses."""
    durations = [seconds(operation) for operation in operations]
    if contention == NO_CONTENTION:
        return durations
    lost = sum(
        contention.share(operation.resource) * duration
        for operation, duration in zip(operations, durations, strict=True)
    )
    bearing = [number for number, operation in enumerate(operations) if operation.action in BEARING]
    for number in bearing:
        durations[number] += lost / len(bearing)
    return durations
