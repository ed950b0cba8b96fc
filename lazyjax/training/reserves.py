"""Host memory that a run takes beside its plan: no schedule counts it, and no plan may use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lazyjax.planning.program.expansion import GRADIENT_WINDOW
from lazyjax.planning.program.operations import ModelSizes
from lazyjax.specs import Part


class Beside(NamedTuple):
    """What a run keeps on the host beside its plan.

    Attributes:
        checkpoints: whether it saves some: of the layer that is being saved, what lives on NVMe is copied.
        data_bytes: of the data in memory.
    """

    checkpoints: bool = False
    data_bytes: int = 0


NOTHING_BESIDE: Beside = Beside()


def reserved_bytes(sizes: ModelSizes, beside: Beside, *, devices: int) -> int:
    """Host bytes that no plan may use: the most that is counted beside any (`lazyjax.training.capacity`)."""
    below = [frozenset(Part)] * len(sizes.layers) if beside.checkpoints else None
    return beside.data_bytes + sum(fixed_bytes(sizes, devices, below).values())


def fixed_bytes(sizes: ModelSizes, devices: int, below: Sequence[frozenset[Part]] | None) -> dict[str, int]:
    """Copies that no schedule counts: in pinned memory, and of the layer that a checkpoint is at.

    Args:
        below: what of every layer lives on NVMe; None where nothing is saved.
    """
    largest = max(layer.gradient_bytes for layer in sizes.layers)
    saved = 0
    for layer, parts in enumerate(below or ()):
        saved = max(saved, sum(sizes.owned_bytes(layer, part) for part in parts - {Part.GRADIENT}))
    return {
        "gradients on their way": devices * (GRADIENT_WINDOW + 1) * largest,
        "a checkpoint's copies": devices * saved,
    }
