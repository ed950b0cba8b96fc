"""From a plan to the ordered list of operations of one step.

The schedule is the program: the simulator replays this list against costs, the executor walks the same
list and does the work. The order of the list is the order of issue. Every operation names its resource,
what it waits for, the buffers it reads, allocates and frees, and the bytes it moves; nothing about time.

A step is a chain of *windows*, each of which needs the parameters of one layer: forward through all
layers, loss, then per segment the recomputation of dropped boundaries and the backward pass. A window
holds one compute *item* per microbatch. What the operations of all plans are is said once, in
`lazyjax.planning.program.expansion`; here it is evaluated for one plan.

The list of a model of two blocks between embedding (0) and head (3), one microbatch; the plan keeps the
input of block 1 on the host and the residual `gate` of block 2 on the device. Per operation: number, queue,
what it does for which layer; the operations that it waits for, in brackets those of the step before; what
comes (+) and goes (-), on the device unless the host is named. x is a layer's input, dx its gradient, a slab
its parameters.

     0  cpu      update 0        (21) (22)
     1  cpu      update 1        (20) (21)
     2  h2d      reload 0                       + batch 0
     3  h2d      fetch 0         0              + slab 0
     4  h2d      fetch 1         1              + slab 1
     5  compute  forward 0       2 3            + x 1 - slab 0
     6  d2h      offload 0       5              + x 1 (host)
     7  cpu      update 2        (18) (21)
     8  h2d      fetch 2         5 7            + slab 2
     9  compute  forward 1       2 4 5          + x 2 - slab 1
    10  cpu      update 3        (14) (21)
    11  h2d      fetch 3         9 10           + slab 3
    12  compute  forward 2       2 6 8 9        + gate 2, x 3 - x 1
    13  compute  loss 3          2 11 12        + dx 3, gradient 3 - x 3, slab 3
    14  d2h      gradient_out 3  13             - gradient 3
    15  h2d      reload 1        6 13           + x 1 - x 1 (host)
    16  h2d      fetch 1         1 13           + slab 1
    17  compute  backward 2      2 8 9 12 13    + dx 2, gradient 2 - x 2, gate 2, dx 3, slab 2
    18  d2h      gradient_out 2  17             - gradient 2
    19  compute  backward 1      2 14 15 16 17  + dx 1, gradient 1 - x 1, dx 2, slab 1
    20  d2h      gradient_out 1  19             - gradient 1
    21  compute  backward 0      2 18 19        + gradient 0 - batch 0, dx 1
    22  d2h      gradient_out 0  21             - gradient 0

The reload of layer 0 brings the batch. Updates of the step before run under this one's forward pass, each
before the fetch of its layer. Block 2's slab stays from the forward to the backward pass, because it is
wanted again before it could be fetched again; block 1's is fetched twice.
"""

from __future__ import annotations

import numpy as np

from lazyjax.planning.plan.document import Plan
from lazyjax.planning.program.activations import emit_activations
from lazyjax.planning.program.compute import emit_compute
from lazyjax.planning.program.evaluate import evaluate
from lazyjax.planning.program.expansion import STATE_WINDOW, Expansion
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
    emit_compute(expansion)
    emit_activations(expansion)
    emit_parameters(expansion)
    emit_updates(expansion)
    return expansion


def build_schedule(plan: Plan, sizes: ModelSizes) -> Schedule:
    """Expands `plan` to the operations of one steady-state step.

    `plan` must have passed `validate_plan`; `sizes` describe one microbatch of it.
    """
    return Schedule(plan, sizes, evaluate(expand(PlanSpace(plan), sizes), np.zeros(0)))
