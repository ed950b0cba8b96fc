"""When operations run, for all plans of a problem: durations and waits over the decisions.

Derived from the expansion. An operation that a plan does not need takes no time and holds up nobody:
its duration is 0, and every wait for it that could matter is conditional. What an operation waits for
because it reads it is looked up by who makes it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.planner.affine import Affine
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.program.conditions import ALWAYS, NEVER, Condition, weakest
from lazyjax.planning.program.contention import BEARING, NO_CONTENTION
from lazyjax.planning.program.expansion import Change, Expansion, LiftedOperation
from lazyjax.planning.program.operations import COMPUTE_ACTIONS, Action, Operation, Place, Schedule
from lazyjax.planning.program.schedule import expand
from lazyjax.planning.program.seam import waits_across
from lazyjax.planning.program.simulate import simulate
from lazyjax.planning.program.tiers import DOWN, STATE_UP, UP
from lazyjax.planning.program.windows import Item
from lazyjax.timeline import Resource

#: An earlier operation, by index, and the condition of the wait.
Wait = tuple[int, Condition]


@dataclasses.dataclass(slots=True)
class TimedOperation:
    """One operation of some plan.

    Attributes:
        seconds: affine in the decisions.
        waits: for operations of this step, ended before this one starts.
        waits_previous: the same, of the step before.
        exists: it is there where one of these holds.
        binding: those of `waits` that do not follow from others, as long as operations that a plan does not
            need stay in their queues and take no time.
    """

    index: int
    action: Action
    resource: Resource
    layer: int
    seconds: Affine
    waits: list[Wait]
    waits_previous: list[Wait]
    exists: list[Condition]
    binding: list[Wait] = dataclasses.field(default_factory=list)


class TimeModel:
    """All operations of a problem with their durations and waits."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices = Choices(problem)
        self.expansion = expand(self.choices, problem.sizes, by_layer=problem.by_layer)
        lifted = self.expansion.ordered()
        waits = _Waits(self.expansion, lifted)
        self.operations = [
            TimedOperation(
                index, operation.action, operation.resource, operation.layer, self._seconds(operation),
                _merged(waits.of(operation)), _merged(waits.previous(operation)), operation.exists,
            )
            for index, operation in enumerate(lifted)
        ]  # fmt: skip
        self._contend()
        _find_binding(self.operations)
        #: Of assignments that were asked about.
        self._periods: dict[bytes, float] = {}

    def _contend(self) -> None:
        """Adds what resources lose to each other (`lazyjax.planning.program.contention`)."""
        contention = self.problem.contention
        if contention == NO_CONTENTION:
            return
        alone = [operation.seconds for operation in self.operations]
        for loser, actions in BEARING.items():
            bearing = [operation for operation in self.operations if operation.action in actions]
            lost = Affine()
            for operation, seconds in zip(self.operations, alone, strict=True):
                lost += seconds * contention.share(loser, operation.resource)
            for operation in bearing:
                operation.seconds += lost * (1 / len(bearing))

    def _seconds(self, operation: LiftedOperation) -> Affine:
        total = Affine()
        if operation.action is Action.UPDATE:
            update = Operation(0, Action.UPDATE, operation.resource, operation.layer, None, 0)
            return Affine(self.problem.seconds(update))
        if operation.action not in COMPUTE_ACTIONS:
            for change, condition in operation.moves.items():
                seconds = self.problem.transfer_seconds(
                    operation.action, operation.layer, change.place, change.times
                )
                total.add(condition, seconds)
            return total
        if operation.action is Action.LOSS:
            for tokens, condition in self.choices.head_chunks():
                total.add(condition, self._compute_seconds(operation, operation.layer, (), tokens))
            return total
        if operation.action not in (Action.FORWARD, Action.BACKWARD):
            for layer, condition in operation.parts:
                total.add(condition, self._compute_seconds(operation, layer, ()))
            return total
        for names, condition in self.choices.saved_sets(operation.layer):
            total.add(condition, self._compute_seconds(operation, operation.layer, names))
        return total

    def _compute_seconds(
        self,
        operation: LiftedOperation,
        layer: int,
        saved: tuple[str, ...],
        head_chunk: int | None = None,
    ) -> float:
        if self.problem.by_layer:
            return self.problem.compute_seconds(operation.action, layer, saved, head_chunk)
        return self.problem.item_seconds(
            operation.action, layer, saved, operation.accumulates, operation.last, head_chunk
        )

    def least_seconds(self) -> float:
        """What the busiest resource must do, whatever is decided."""
        busy = dict.fromkeys(Resource, Affine())
        for operation in self.operations:
            busy[operation.resource] += operation.seconds
        return max(total.constant + sum(min(0.0, c) for c in total.terms.values()) for total in busy.values())

    def period(self, binaries: Float64[np.ndarray, "binaries"]) -> float:
        """Steady-state period of an assignment, by replay.

        At layer granularity where the problem asks for that.
        """
        key = binaries.tobytes()
        if key not in self._periods:
            self._periods[key] = self._replayed(self.choices.complete(binaries))
        return self._periods[key]

    def _replayed(self, values: Float64[np.ndarray, "variables"]) -> float:
        present = [any(c.holds(values) for c in operation.exists) for operation in self.operations]
        waits = [_held(operation.waits, values) for operation in self.operations]
        previous = [_held(operation.waits_previous, values) for operation in self.operations]
        # An absent operation takes no time and has none of its own: it is there only if waited for.
        needed: set[int] = set()
        waiting = [index for index, there in enumerate(present) if there]
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                waiting += waits[index] + previous[index]
        kept = [operation for operation in self.operations if operation.index in needed]
        number = {operation.index: position for position, operation in enumerate(kept)}
        operations = tuple(
            Operation(
                number[o.index], o.action, o.resource, o.layer, None, 0,
                waits=tuple(number[wait] for wait in waits[o.index]),
                waits_previous=tuple(number[wait] for wait in previous[o.index]),
            )
            for o in kept
        )  # fmt: skip
        seconds = [float(operation.seconds.value(values)) for operation in kept]
        schedule = Schedule(self.problem.settings, self.problem.sizes, operations)
        return simulate(schedule, lambda operation: seconds[operation.index]).period_seconds


def _held(waits: list[Wait], values: Float64[np.ndarray, "variables"]) -> list[int]:
    return sorted({index for index, condition in waits if condition.holds(values)})


class _Waits:
    """What every operation waits for, in order of issue."""

    def __init__(self, expansion: Expansion, lifted: list[LiftedOperation]) -> None:
        self.expansion = expansion
        self.index = {operation.slot: index for index, operation in enumerate(lifted)}
        self.made: dict[Place, list[Wait]] = defaultdict(list)
        #: Transfers by the item that they serve.
        self.serving: dict[Item, list[LiftedOperation]] = defaultdict(list)
        self.last_compute: int | None = None
        #: Whether reads for updates are in the queue of those for compute.
        self.shares_queue = bool(expansion.state_writes)
        for operation in lifted:
            if (
                operation.action in (Action.FETCH, Action.RELOAD, Action.GATHER)
                and operation.item is not None
            ):
                self.serving[operation.item].append(operation)

    def of(self, operation: LiftedOperation) -> Iterator[Wait]:
        """Waits for operations of the same step; to be asked for in order."""
        for slot, conditions in operation.throttles.items():
            for condition in conditions:
                yield self.index[slot], condition
        action = operation.action
        if action in COMPUTE_ACTIONS:
            assert operation.item is not None
            for transfer in self.serving[operation.item]:
                for condition in transfer.exists:
                    yield self.index[transfer.slot], condition
        elif self.shares_queue and operation.resource is Resource.NVME_READ and operation.item is not None:
            # In its queue reads for updates follow, which an absent one must not hold up.
            if self.last_compute is not None:
                for condition in operation.exists:
                    yield self.last_compute, condition
        elif action is Action.SPILL_GRADIENT:
            pass  # it follows the copy out of the device
        elif action is not Action.UPDATE and operation.item is not None and self.last_compute is not None:
            # Moves up are not issued before; moves down copy what it made.
            yield self.last_compute, ALWAYS
        if action is Action.FETCH and self.expansion.settings.update == "deferred":
            yield self.index[self.expansion.order.update(operation.layer)], ALWAYS
        if action in (Action.UPDATE, *STATE_UP) and self.expansion.settings.update == "immediate":
            for layer in range(self.expansion.head + 1):
                yield self.index[self.expansion.order.gradient(layer)], ALWAYS
        if action in UP or action in DOWN:
            source = UP[action].lower if action in UP else DOWN[action].upper
            for change, condition in operation.allocates.items():
                yield from self._makers(change, change.place._replace(tier=source), condition)
        index = self.index[operation.slot]
        for change, condition in operation.allocates.items():
            if action not in COMPUTE_ACTIONS:
                self.made[change.place].append((index, condition))
        if action in COMPUTE_ACTIONS:
            self.last_compute = index

    def _makers(self, change: Change, source: Place, condition: Condition) -> Iterator[Wait]:
        if change.pipelined:
            return
        for maker, made in self.made[source]:
            both = condition.both(made)
            if both != NEVER:
                yield maker, both

    def previous(self, operation: LiftedOperation) -> Iterator[Wait]:
        """Waits for operations of the step before."""
        for slots, conditions in waits_across(self.expansion, operation):
            # Where a plan does not need the last one, it ends with the last one before it.
            for condition in conditions:
                yield self.index[slots[-1]], condition


def _merged(waits: Iterator[Wait]) -> list[Wait]:
    """Without repetitions and what follows from others."""
    found: dict[int, list[Condition]] = {}
    for index, condition in waits:
        found.setdefault(index, []).append(condition)
    return [(index, condition) for index, conditions in found.items() for condition in weakest(conditions)]


def _find_binding(operations: Sequence[TimedOperation]) -> None:
    """Leaves out waits that queues make certain: they serve in order, and an operation before has waited."""
    waited: dict[tuple[Resource, Resource], int] = {}
    for operation in operations:
        kept = []
        for index, condition in operation.waits:
            other = operations[index].resource
            pair = operation.resource, other
            if other is operation.resource or (pair in waited and index <= waited[pair]):
                continue
            kept.append((index, condition))
        operation.binding = kept
        for index, condition in kept:
            if condition == ALWAYS:
                pair = operation.resource, operations[index].resource
                waited[pair] = max(index, waited[pair]) if pair in waited else index
