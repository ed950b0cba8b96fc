"""Where a step is joined to the next one: what its first operations wait for in the step before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lazyjax.planning.program.conditions import ALWAYS, Condition
from lazyjax.planning.program.expansion import Expansion, LiftedOperation, Slot
from lazyjax.planning.program.operations import Action
from lazyjax.planning.program.tiers import STATE_UP


def waits_across(
    expansion: Expansion, operation: LiftedOperation
) -> Iterator[tuple[Sequence[Slot], Sequence[Condition]]]:
    """What an operation waits for: of each of some sequences the last operation that a plan has.

    A wait is there where one of its conditions holds.
    """
    order, layer, action = expansion.order, operation.layer, operation.action
    if action in STATE_UP:
        yield [*expansion.state_writes[STATE_UP[action]].values()], operation.exists
        gradient = order.gradient_write(layer)
        if order.deferred and gradient in expansion.operations:
            yield [gradient], expansion.operations[gradient].exists
    elif order.deferred:
        if action is Action.UPDATE:
            # The clip factor needs every layer's norm, hence the last backward.
            yield [order.gradient(layer)], [ALWAYS]
            yield [order.last_norm], [ALWAYS]
    elif action is Action.FETCH:
        yield [order.update(expansion.head)], [ALWAYS]
    elif action is Action.LOAD_PARAMETERS:
        for written in expansion.state_writes.values():
            if layer in written:
                yield [written[layer]], operation.exists
