"""Emits host updates, and what lives on a drive until an update needs it.

A layer's update works on its optimizer state, both halves of its master weights and its gradient. What of
these lives further down than the host is read before the update, by one operation for all of it, and what
the update has changed is written back by another, which gives up the copies. Few layers are between the
two at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from lazyjax.planning.program.conditions import ALWAYS, NEVER, Condition, weakest
from lazyjax.planning.program.expansion import STATE_WINDOW, Expansion, LiftedOperation, Slot
from lazyjax.planning.program.operations import RESOURCE_OF, ROLE_OF, Action, Buffer
from lazyjax.planning.program.tiers import LINKS, Link
from lazyjax.specs import Part


def emit_updates(expansion: Expansion) -> None:
    """One host update per layer, in forward order, with the moves around it."""
    for layer in range(expansion.head + 1):
        update = _emit(expansion, Action.UPDATE, layer, expansion.order.update(layer))
        update.condition = ALWAYS
        above_load = above_spill = update
        for depth, link in enumerate(LINKS[1:], start=1):
            moved = _moved(expansion, layer, depth)
            if not moved or link.state_up is None or link.state_down is None:
                continue
            load = _emit(expansion, link.state_up, layer, expansion.order.update(layer, -depth))
            spill = _emit(expansion, link.state_down, layer, expansion.order.after_update(layer, depth))
            for part, condition in moved.items():
                # The copy above comes into being with the read and goes with the write.
                copy = Buffer(ROLE_OF[part], layer)
                expansion.add(load.allocates, copy, link.upper, condition)
                expansion.add(spill.frees, copy, link.upper, condition)
            for condition in weakest(moved.values()):
                expansion.throttle(above_load, load, condition)
                expansion.throttle(spill, above_spill, condition)
            _bound(expansion, link, layer, load)
            _share_with_fetches(expansion, layer, moved, spill)
            if Part.GRADIENT in moved and not expansion.order.deferred:
                written = expansion.operations[expansion.order.gradient_write(layer)]
                expansion.throttle(load, written, moved[Part.GRADIENT])
            expansion.state_writes.setdefault(link, {})[layer] = spill.slot
            above_load, above_spill = load, spill


def _emit(expansion: Expansion, action: Action, layer: int, slot: Slot) -> LiftedOperation:
    window = expansion.windows.order[min(slot.window, len(expansion.windows.order) - 1)]
    operation = LiftedOperation(slot, action, RESOURCE_OF[action], layer, None, window)
    expansion.operations[slot] = operation
    return operation


def _moved(expansion: Expansion, layer: int, depth: int) -> dict[Part, Condition]:
    """What of a layer lives below the link at `depth`, and when."""
    moved = {}
    for part in Part:
        condition = NEVER
        for below in LINKS[depth:]:
            condition = condition.either(expansion.space.owned(layer, part, below.lower))
        if condition != NEVER:
            moved[part] = condition
    return moved


def _bound(expansion: Expansion, link: Link, layer: int, load: LiftedOperation) -> None:
    """Nothing is read before what an earlier layer has changed is written."""
    written = expansion.state_writes[link] if link in expansion.state_writes else {}
    if layer - STATE_WINDOW not in written:
        return
    earlier = expansion.operations[written[layer - STATE_WINDOW]]
    if earlier.slot > load.slot:
        return  # so many slabs are fetched ahead that those are the bound
    for leaving in earlier.exists:
        for coming in load.exists:
            expansion.throttle(load, earlier, expansion.space.product(leaving, coming))


def _share_with_fetches(
    expansion: Expansion, layer: int, moved: Mapping[Part, Condition], spill: LiftedOperation
) -> None:
    """A deferred update's copy of the parameters also serves the fetch after it; others read them again."""
    if not expansion.order.deferred:
        return
    fetched = [moved[part] for part in expansion.sizes.fetched if part in moved]
    for condition in weakest(fetched):
        expansion.throttle(spill, expansion.first_fetches[layer], condition)
    for again in (expansion.parameter_loads[layer] if layer in expansion.parameter_loads else ()):
        for condition in again.exists:
            expansion.throttle(again, spill, condition)
