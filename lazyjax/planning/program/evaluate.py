"""The operations of one plan: those of an expansion whose conditions hold, and what each waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.program.conditions import Condition
from lazyjax.planning.program.expansion import Change, Expansion, LiftedOperation
from lazyjax.planning.program.operations import (
    COMPUTE_ACTIONS,
    Action,
    Allocation,
    Buffer,
    BufferRole,
    Operation,
    Place,
)
from lazyjax.planning.program.seam import waits_across
from lazyjax.planning.program.tiers import DOWN, STATE_UP, UP
from lazyjax.planning.program.windows import Window
from lazyjax.specs import Tier

#: Of what is no compute: these wait for what they read on the device.
_READING = frozenset({Action.GRADIENT_OUT, Action.GATHER, Action.REDUCE_SCATTER})
_WITH_RESIDUALS = (Action.FORWARD, Action.BACKWARD)
#: In a step that applies its own gradients: nothing is updated, or fetched for that, before all are known.
_AFTER_GRADIENTS = frozenset({Action.UPDATE, *STATE_UP})


def evaluate(expansion: Expansion, values: Float64[np.ndarray, "variables"]) -> tuple[Operation, ...]:
    """The operations of an assignment, in order of issue."""
    return tuple(_Evaluation(expansion, values).operations())


class _Evaluation:
    def __init__(self, expansion: Expansion, values: Float64[np.ndarray, "variables"]) -> None:
        self.expansion, self.sizes = expansion, expansion.sizes
        self.values = values
        self.known: dict[Condition, bool] = {}
        self.present: list[tuple[LiftedOperation, list[Place], list[Place]]] = []
        for lifted in expansion.ordered():
            allocates, frees = self._places(lifted.allocates), self._places(lifted.frees)
            if allocates or frees if lifted.condition is None else self.holds(lifted.condition):
                self.present.append((lifted, allocates, frees))
        self.index = {lifted.slot: number for number, (lifted, _, _) in enumerate(self.present)}
        # The operation that made what is on a tier now.
        self.made: dict[Place, int] = {}
        self.updates: dict[int, int] = {}
        self.last_compute: int | None = None

    def holds(self, condition: Condition) -> bool:
        if condition not in self.known:
            self.known[condition] = condition.holds(self.values)
        return self.known[condition]

    def operations(self) -> Iterator[Operation]:
        windows = self._window_numbers()
        for index, (lifted, allocates, frees) in enumerate(self.present):
            saved = self._saved(lifted)
            reads = tuple(self._reads(lifted, allocates, frees, saved))
            moves = 0 if lifted.condition else sum(map(self._bytes, self._places(lifted.moves)))
            yield Operation(
                index=index,
                action=lifted.action,
                resource=lifted.resource,
                layer=lifted.layer,
                microbatch=lifted.microbatch,
                window=windows[lifted.window],
                waits=tuple(sorted({*self._waits(lifted, allocates, reads)})),
                waits_previous=tuple(sorted({*self._waits_previous(lifted)})),
                reads=reads,
                allocates=tuple(Allocation(place, self._bytes(place)) for place in allocates),
                frees=tuple(frees),
                bytes=moves,
                saved=saved,
                accumulates=lifted.accumulates,
                last=lifted.last,
                head_chunk=self._head_chunk(lifted),
            )
            self.made.update(dict.fromkeys(allocates, index))
            if lifted.action in COMPUTE_ACTIONS:
                self.last_compute = index
            elif lifted.action is Action.UPDATE:
                self.updates[lifted.layer] = index

    def _bytes(self, place: Place) -> int:
        return self.sizes.of(place.buffer)

    def _places(self, changes: Mapping[Change, Condition]) -> list[Place]:
        return [change.place for change, condition in changes.items() if self.holds(condition)]

    def _window_numbers(self) -> dict[Window, int]:
        """Windows of the plan in order; those that it does not need have no number."""
        computing = (lifted.window for lifted, _, _ in self.present if lifted.action in COMPUTE_ACTIONS)
        return {window: number for number, window in enumerate(dict.fromkeys(computing))}

    def _saved(self, lifted: LiftedOperation) -> tuple[str, ...]:
        if lifted.action not in _WITH_RESIDUALS:
            return ()
        sets = self.expansion.space.saved_sets(lifted.layer)
        return next(names for names, condition in sets if self.holds(condition))

    def _head_chunk(self, lifted: LiftedOperation) -> int | None:
        if lifted.action is not Action.LOSS:
            return None
        chunks = self.expansion.space.head_chunks()
        return next(tokens for tokens, condition in chunks if self.holds(condition))

    def _reads(
        self,
        lifted: LiftedOperation,
        allocates: Iterable[Place],
        frees: Iterable[Place],
        saved: Iterable[str],
    ) -> Iterator[Buffer]:
        """Device buffers that an operation uses, and what a reload reads on the host."""
        layer, microbatch, action = lifted.layer, lifted.microbatch, lifted.action
        if action in (Action.RELOAD, Action.OFFLOAD):
            yield from (place.buffer for place in allocates)
        elif action is Action.GRADIENT_OUT:
            yield from (place.buffer for place in frees)
        elif action is Action.GATHER:
            yield from (place.buffer._replace(role=BufferRole.PARAMETERS) for place in allocates)
        elif action is Action.REDUCE_SCATTER:
            yield from (place.buffer for place in frees if place.buffer.role is BufferRole.PARTIAL)
        if action not in COMPUTE_ACTIONS or microbatch is None:
            return
        if action is not Action.BACKWARD or layer:
            yield Buffer(self.sizes.kernel_parameters, layer)
        if action is Action.LOSS and self.sizes.tied:
            yield Buffer(self.sizes.kernel_parameters, 0)
        yield Buffer(BufferRole.BATCH, 0, microbatch)
        if layer:
            yield Buffer(BufferRole.INPUT, layer, microbatch)
        if action is Action.BACKWARD:
            yield from (Buffer(BufferRole.RESIDUAL, layer, microbatch, name) for name in saved)
            yield Buffer(BufferRole.INPUT_GRADIENT, layer + 1, microbatch)

    def _waits(
        self, lifted: LiftedOperation, allocates: Iterable[Place], reads: Iterable[Buffer]
    ) -> Iterator[int]:
        for slot, conditions in lifted.throttles.items():
            if slot in self.index and any(map(self.holds, conditions)):
                yield self.index[slot]
        action = lifted.action
        if action in COMPUTE_ACTIONS or action in _READING:
            yield from (self.made[Place(buffer, Tier.DEVICE)] for buffer in reads)
        if action in (Action.FETCH, Action.LOAD_PARAMETERS, Action.GATHER) or action in UP:
            # Not issued before the compute operation ahead of it: it takes memory from then on.
            if self.last_compute is not None:
                yield self.last_compute
            if action is Action.FETCH and lifted.layer in self.updates:
                yield self.updates[lifted.layer]
        if action in UP or action in DOWN:
            source = UP[action].lower if action in UP else DOWN[action].upper
            sources = [place._replace(tier=source) for place in allocates]
            # The batch comes from nowhere.
            yield from (self.made[place] for place in sources if place in self.made)
        elif action in _AFTER_GRADIENTS and self.expansion.settings.update == "immediate":
            layers = range(self.expansion.head + 1)
            yield from (self.index[self.expansion.order.gradient(layer)] for layer in layers)

    def _waits_previous(self, lifted: LiftedOperation) -> Iterator[int]:
        """What the first operations of a step wait for in the step before it."""
        for slots, conditions in waits_across(self.expansion, lifted):
            present = [self.index[slot] for slot in slots if slot in self.index]
            if present and any(map(self.holds, conditions)):
                yield max(present)
