"""Emits compute operations: one per window and microbatch; those that compute again under a condition."""

from __future__ import annotations

from lazyjax.planning.program.conditions import ALWAYS, Condition
from lazyjax.planning.program.expansion import Expansion, LiftedOperation, Phase, Slot
from lazyjax.planning.program.operations import Action
from lazyjax.planning.program.windows import Item, Window
from lazyjax.timeline import Resource


def emit_compute(expansion: Expansion) -> None:
    """All windows in order."""
    for window in expansion.windows.order:
        condition = ALWAYS
        if window.action is Action.RECOMPUTE:
            condition = expansion.space.chosen(expansion.windows.recomputing(window))
        if expansion.lump(window) != window:
            _add_to_lump(expansion, window, condition)
            continue
        for position in range(expansion.items):
            _emit_item(expansion, Item(window, position), condition)


def _add_to_lump(expansion: Expansion, window: Window, condition: Condition) -> None:
    """By layer a segment's recomputation is one operation, of which this window is a part."""
    lump = expansion.compute(Item(expansion.lump(window), 0))
    lump.parts.append((window.layer, condition))
    lump.condition = expansion.space.chosen(
        [segment for segment in expansion.windows.ending[window.end] if not segment.single]
    )


def _emit_item(expansion: Expansion, item: Item, condition: Condition) -> None:
    window, position = item
    slot = Slot(expansion.windows.number[window], position, Phase.COMPUTE)
    tied_table = window.action is Action.BACKWARD and window.layer == 0 and expansion.sizes.tied
    # Where gradients are summed over devices, that is what adds them up.
    shared = expansion.sizes.shared
    expansion.operations[slot] = LiftedOperation(
        slot, window.action, Resource.COMPUTE, window.layer,
        expansion.windows.position(window, position), window, item, condition,
        accumulates=(position > 0 or tied_table) and not shared,
        last=position == expansion.items - 1 and not shared,
        parts=[(window.layer, condition)],
    )  # fmt: skip
