"""From a plan to the ordered list of operations of one step.

The schedule is the program: the simulator replays this list against costs, the executor walks the same
list and does the work. The order of the list is the order of issue. Every operation names its resource,
what it waits for, the buffers it reads, allocates and frees, and the bytes it moves; nothing about time.

A step is a chain of *windows*, each of which needs the parameters of one layer: forward through all
layers, loss, then per segment the recomputation of dropped boundaries and the backward pass. A window
holds one compute *item* per microbatch. What the operations of all plans are is said once, in
`lazyjax.planning.program.expansion`; here it is evaluated for one plan.
"""

from __future__ import annotations

import numpy as np

from lazyjax.planning.plan.document import Plan
from lazyjax.planning.program.activations import emit_activations
from lazyjax.planning.program.evaluate import evaluate
from lazyjax.planning.program.expansion import OFFLOAD_WINDOW_ITEMS, STATE_WINDOW, Expansion
from lazyjax.planning.program.operations import (
    COMPUTE_ACTIONS,
    STATE_ACTIONS,
    Action,
    Allocation,
    Buffer,
    BufferRole,
    LayerSizes,
    ModelSizes,
    Operation,
    Place,
    Schedule,
)
from lazyjax.planning.program.parameters import emit_parameters
from lazyjax.planning.program.space import PlanSpace, Space
from lazyjax.planning.program.updates import emit_updates

__all__ = [
    "COMPUTE_ACTIONS",
    "OFFLOAD_WINDOW_ITEMS",
    "STATE_ACTIONS",
    "STATE_WINDOW",
    "Action",
    "Allocation",
    "Buffer",
    "BufferRole",
    "LayerSizes",
    "ModelSizes",
    "Operation",
    "Place",
    "Schedule",
    "build_schedule",
    "expand",
]


def expand(space: Space, sizes: ModelSizes, *, by_layer: bool = False) -> Expansion:
    """All operations that plans of `space` could need; see `Expansion`."""
    expansion = Expansion(space, sizes, by_layer=by_layer)
    emit_activations(expansion)
    emit_parameters(expansion)
    emit_updates(expansion)
    return expansion


def build_schedule(plan: Plan, sizes: ModelSizes) -> Schedule:
    """Expands `plan` to the operations of one steady-state step.

    `plan` must have passed `validate_plan`; `sizes` describe one microbatch of it.
    """
    return Schedule(plan, sizes, evaluate(expand(PlanSpace(plan), sizes), np.zeros(0)))
