"""Plans that need no solver: other systems' rules, and the two extremes.

They run in the same executor as ours, so a comparison is between plans, not between codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from lazyjax.config.names import PLANNER_NAMES
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan, owned_homes
from lazyjax.specs import ModelSpec, Tier

#: Layers per recomputed segment in MegaTrain (arXiv 2604.05091).
MEGATRAIN_INTERVAL = 4

#: The published 27B plan (LazyTrain, arXiv 2608.11919, table 1): boundaries 0..64.
_LAZYTRAIN_BOUNDARIES = 65
_LAZYTRAIN_HOST = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 14, 26, 27, 30, 31, 33, 34, 35, 38, 49)
_LAZYTRAIN_NVME = (21,)
_LAZYTRAIN_RECOMPUTED = (6, 17, 18, 19, 25, 37, 45, 46, 47, 53, 54, 55, 61)


def recompute_all(spec: ModelSpec, residual_names: Sequence[Sequence[str]], **batch: Any) -> Plan:
    """Every boundary kept on the device, everything inside the layers recomputed."""
    del residual_names
    return _plan(spec, "recompute_all", [LayerPlan() for _ in spec.layers], **batch)


def keep_all(spec: ModelSpec, residual_names: Sequence[Sequence[str]], **batch: Any) -> Plan:
    """Every boundary and every named residual kept on the device."""
    layers = [LayerPlan(saved=dict.fromkeys(names, Tier.DEVICE)) for names in residual_names]
    return _plan(spec, "keep_all", layers, **batch)


def megatrain(spec: ModelSpec, residual_names: Sequence[Sequence[str]], **batch: Any) -> Plan:
    """MegaTrain: one boundary in four kept, segments recomputed whole, the update after everything else.

    Loads of its backward pass wait for events, not for compute, so one is ahead there as well.
    """
    del residual_names
    last = len(spec.layers) - 1
    layers = [
        LayerPlan(
            boundary=Boundary.RECOMPUTE
            if 1 < index < last and (index - 1) % MEGATRAIN_INTERVAL
            else Boundary.DEVICE
        )
        for index in range(len(spec.layers))
    ]
    rules = {"recompute": "segment", "prefetch": 2, "backward_prefetch": 2, "update": "immediate"}
    return _plan(spec, "megatrain", layers, **(rules | batch))


def lazytrain(spec: ModelSpec, residual_names: Sequence[Sequence[str]], **batch: Any) -> Plan:
    """LazyTrain's published placement, scaled to the model's number of blocks.

    Boundary j of n takes the decision of the nearest published boundary of 64; for 64 blocks
    this is the published plan itself. The update runs after everything else.
    """
    del residual_names
    blocks = spec.block_count
    homes = dict.fromkeys(_LAZYTRAIN_HOST, Boundary.HOST)
    homes |= dict.fromkeys(_LAZYTRAIN_NVME, Boundary.NVME)
    homes |= dict.fromkeys(_LAZYTRAIN_RECOMPUTED, Boundary.RECOMPUTE)
    layers = [LayerPlan()]
    for boundary in range(blocks + 1):
        published = round(boundary * (_LAZYTRAIN_BOUNDARIES - 1) / blocks)
        home = homes[published] if published in homes else Boundary.DEVICE
        if boundary in (0, blocks):
            home = Boundary.DEVICE
        layers.append(LayerPlan(boundary=home))
    return _plan(spec, "lazytrain", layers, **({"update": "immediate"} | batch))


@runtime_checkable
class Baseline(Protocol):
    """A rule that makes a plan for any model."""

    def __call__(self, spec: ModelSpec, residual_names: Sequence[Sequence[str]], **batch: Any) -> Plan:
        """The plan.

        Args:
            residual_names: of every layer.
            batch: batch_rows, sequence_length and whatever else the user fixed of the plan's fields.
        """
        ...


BASELINES: dict[str, Baseline] = {
    "recompute_all": recompute_all,
    "keep_all": keep_all,
    "megatrain": megatrain,
    "lazytrain": lazytrain,
}


def register(name: str, rule: Baseline) -> None:
    """Adds a rule from outside the package; configurations may then name it, and reports show it.

    Raises:
        ValueError: there is a planner of that name.
    """
    PLANNER_NAMES.add(name)
    BASELINES[name] = rule


#: Baselines that are a published system's rules, the whole batch at once included.
PUBLISHED = ("megatrain", "lazytrain")


def without_nvme(plan: Plan) -> Plan:
    """The same plan with NVMe homes moved to the host, for a machine without an NVMe folder."""
    layers = tuple(
        layer.model_copy(
            update={
                "boundary": Boundary.HOST if layer.boundary is Boundary.NVME else layer.boundary,
                "saved": {
                    name: Tier.HOST if tier is Tier.NVME else tier for name, tier in layer.saved.items()
                },
                **owned_homes((), Tier.HOST),
            }
        )
        for layer in plan.layers
    )
    return plan.model_copy(update={"layers": layers})


def _plan(spec: ModelSpec, planner: str, layers: Sequence[LayerPlan], **batch: Any) -> Plan:
    made_for = {"model": spec.name, "architecture": spec.architecture}
    return Plan(**made_for, planner=planner, layers=tuple(layers), **batch)
