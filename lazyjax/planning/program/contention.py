"""Time that resources lose to each other, because they share cores, memory or engines.

Between a GPU and its host nothing is lost: copy engines move, the host updates, and kernels run on. On a
CPU backend all three share cores and memory. The model is of first order: every second of copies or
updates of a step costs its compute a fixed share of a second, wherever in the step it falls, because in
the steady state something always computes. Each forward, loss and backward call bears an equal part:
calls that every plan makes, so that the sum stays linear in the planner's decisions.

Collectives are programs of the device. Where it runs one program at a time, as JAX has it, each of their
seconds is one that compute loses. The devices of a host share its memory: rates of updates hold beside the
copies of one device, and what the copies of the others take of the memory's rate, updates lose. They, too,
bear it in equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lazyjax.planning.program.operations import Action, Operation
from lazyjax.timeline import Resource

#: Who loses time, and the operations that bear it: those that every plan has, equally often.
BEARING = {
    Resource.COMPUTE: frozenset({Action.FORWARD, Action.LOSS, Action.BACKWARD}),
    Resource.CPU: frozenset({Action.UPDATE}),
}


class Contention(NamedTuple):
    """Seconds lost per second of something else in the same step.

    Attributes:
        updates, copies, collectives: that compute loses to these.
        updates_to_h2d, updates_to_d2h: that updates lose to copies.
    """

    updates: float = 0.0
    copies: float = 0.0
    collectives: float = 0.0
    updates_to_h2d: float = 0.0
    updates_to_d2h: float = 0.0

    def share(self, loser: Resource, busy: Resource) -> float:
        """Seconds that `loser` loses per second of what `busy` serves."""
        match loser, busy:
            case Resource.COMPUTE, Resource.CPU:
                return self.updates
            case Resource.COMPUTE, Resource.H2D | Resource.D2H:
                return self.copies
            case Resource.COMPUTE, Resource.INTERCONNECT:
                return self.collectives
            case Resource.CPU, Resource.H2D:
                return self.updates_to_h2d
            case Resource.CPU, Resource.D2H:
                return self.updates_to_d2h
            case _:
                return 0.0


#: Of a device with cores and memory of its own.
NO_CONTENTION = Contention()


def contended_seconds(
    operations: Sequence[Operation], seconds: Callable[[Operation], float], contention: Contention
) -> list[float]:
    """Seconds of every operation, with its part of what the step loses."""
    alone = [seconds(operation) for operation in operations]
    if contention == NO_CONTENTION:
        return alone
    durations = list(alone)
    for loser, actions in BEARING.items():
        lost = sum(
            contention.share(loser, operation.resource) * duration
            for operation, duration in zip(operations, alone, strict=True)
        )
        bearing = [number for number, operation in enumerate(operations) if operation.action in actions]
        for number in bearing:
            durations[number] += lost / len(bearing)
    return durations
