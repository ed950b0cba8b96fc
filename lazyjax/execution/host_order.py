"""Which deferred updates and moves of state may be issued before the walk comes to them.

Every host resource serves its operations in the order of the schedule. One whose turn has come and whose
waits have all been issued can be handed to its queue, wherever the walk is: it touches nothing on the device.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator

from lazyjax.planning.program.schedule import STATE_ACTIONS, Operation
from lazyjax.timeline import Resource


class HostOrder:
    """The operations of the host queues that have not been issued.

    Args:
        operations: all of them, in the order of the schedule.

    Attributes:
        taken_ahead: indices of those issued before the walk came to them.
    """

    def __init__(self, operations: Iterable[Operation]) -> None:
        self.taken_ahead: set[int] = set()
        self._queues: dict[Resource, collections.deque[Operation]] = collections.defaultdict(
            collections.deque
        )
        for operation in operations:
            self._queues.setdefault(operation.resource, collections.deque()).append(operation)

    def take(self, operation: Operation) -> None:
        """Notes that the walk issues an operation."""
        first = self._queues[operation.resource].popleft()
        assert first is operation

    def ahead(self, position: int) -> Iterator[Operation]:
        """Takes every operation that can be issued ahead; each has to be issued before the next is asked for.

        Args:
            position: all operations before this one have been issued.
        """
        found = True
        while found:
            found = False
            for queue in self._queues.values():
                while queue and queue[0].action in STATE_ACTIONS and self._ready(queue[0], position):
                    operation = queue.popleft()
                    self.taken_ahead.add(operation.index)
                    found = True
                    yield operation

    def _ready(self, operation: Operation, position: int) -> bool:
        return all(waited < position or waited in self.taken_ahead for waited in operation.waits)
