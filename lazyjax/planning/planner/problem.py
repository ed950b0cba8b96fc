"""The planning problem: one choice of the global settings, with all that layer decisions are weighed by.

It knows no solver, no variables and no model family: bytes, seconds, capacities, and which decisions
are open (`lazyjax.planning.planner.choices` numbers them).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lazyjax.planning.plan.document import HEAD_CHUNK, Plan
from lazyjax.planning.program.contention import NO_CONTENTION, Contention
from lazyjax.planning.program.operations import (
    RESOURCE_OF,
    Action,
    Allocation,
    ModelSizes,
    Operation,
    Place,
    WorkingBytes,
    no_working_bytes,
)
from lazyjax.planning.program.simulate import OperationSeconds
from lazyjax.specs import Part, Tier
from lazyjax.timeline import Resource


@dataclasses.dataclass(frozen=True)
class Problem:
    """Layer decisions to take under fixed global settings.

    Attributes:
        settings: a plan whose global fields hold; its layers are ignored.
        sizes: bytes of one microbatch.
        seconds: of one operation of the schedule.
        contention: what compute loses to copies and updates.
        saves: per layer the ways to keep residuals (name -> tier); the first keeps none.
        capacity: bytes that may be used per tier.
        static_host_bytes: what the host holds if nothing of it lives further down: masters, gradients,
            buffers; without optimizer state, which counts where the plan puts it.
        working_bytes: see `WorkingBytes`.
        longest_segment: most layers that share one kept boundary.
        boundary_homes: tiers on which a segment's first input may be kept.
        state_home: tier below the host to which what layers own may go; the host where it may not.
        owned_sets: what of a layer may live there together, each set within the next one; where there
            is but one, no layer has a choice.
        residents: whether slabs may stay on the device.
        head_chunks: tokens whose logits may exist at once, ascending.
        by_layer: whether time is weighed window by window, all microbatches at once, or microbatch by
            microbatch (exact, and as many times larger). Memory is always exact.
        further_decisions: makers of decisions besides the usual ones; each gets the problem, the number
            of its first variable and the segments.
        kinds: name per layer; layers of one name have the same save options and compute seconds. By
            default no two layers have.
    """

    settings: Plan
    sizes: ModelSizes
    seconds: OperationSeconds
    saves: tuple[tuple[Mapping[str, Tier], ...], ...]
    capacity: Mapping[Tier, int]
    static_host_bytes: int = 0
    working_bytes: WorkingBytes = no_working_bytes
    contention: Contention = NO_CONTENTION
    longest_segment: int = 4
    boundary_homes: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST)
    state_home: Tier = Tier.HOST
    owned_sets: tuple[frozenset[Part], ...] = (frozenset(), frozenset([Part.STATE]))
    residents: bool = True
    head_chunks: tuple[int, ...] = (HEAD_CHUNK,)
    by_layer: bool = True
    further_decisions: tuple[Callable[..., Any], ...] = ()
    kinds: tuple[str, ...] | None = None

    @functools.cached_property
    def _first_alike(self) -> tuple[int, ...]:
        """Per layer the first one of its kind, whose compute times are worked out for all of them."""
        if self.kinds is None:
            return tuple(range(len(self.sizes.layers)))
        return tuple(self.kinds.index(kind) for kind in self.kinds)

    @functools.cached_property
    def _known(self) -> dict[tuple[Action, int, tuple[str, ...], int | None], float]:
        return {}

    @property
    def head(self) -> int:
        """Number of the last layer."""
        return len(self.sizes.layers) - 1

    @property
    def microbatches(self) -> int:
        """M."""
        return self.settings.microbatches

    def compute_seconds(
        self, action: Action, layer: int, saved: tuple[str, ...] = (), head_chunk: int | None = None
    ) -> float:
        """Seconds for all microbatches of one window, the last of which emits the gradient."""
        layer = self._first_alike[layer]
        key = action, layer, saved, head_chunk
        if key not in self._known:
            self._known[key] = self._window_seconds(*key)
        return self._known[key]

    def _window_seconds(
        self, action: Action, layer: int, saved: tuple[str, ...], head_chunk: int | None
    ) -> float:
        count = self.microbatches
        tied_table = layer == 0 and action is Action.BACKWARD and self.sizes.tied

        def one(position: int) -> float:
            accumulates = position > 0 or tied_table
            return self.item_seconds(action, layer, saved, accumulates, position == count - 1, head_chunk)

        if self.sizes.shared:
            # Gradients are added up by what sums them over the devices.
            return count * self.item_seconds(action, layer, saved, False, False, head_chunk)
        if count <= 2:
            return sum(one(position) for position in range(count))
        return one(0) + (count - 2) * one(1) + one(count - 1)

    def item_seconds(
        self,
        action: Action,
        layer: int,
        saved: tuple[str, ...],
        accumulates: bool,
        last: bool,
        head_chunk: int | None = None,
    ) -> float:
        """Seconds of one compute operation."""
        operation = Operation(
            0, action, Resource.COMPUTE, layer, 0, 0,
            saved=saved, accumulates=accumulates, last=last, head_chunk=head_chunk,
        )  # fmt: skip
        return self.seconds(operation)

    def transfer_seconds(self, action: Action, layer: int, place: Place, times: int = 1) -> float:
        """Seconds for `times` transfers of what comes to `place`, or leaves it; no bytes take no time."""
        moved = self.sizes.of(place.buffer)
        if not moved or not times:
            return 0.0
        transfer = Operation(
            0, action, RESOURCE_OF[action], layer, None, 0, bytes=moved, allocates=(Allocation(place, moved),)
        )
        return times * self.seconds(transfer)


def save_options(name_sets: Sequence[Iterable[str]], tiers: Sequence[Tier]) -> tuple[Mapping[str, Tier], ...]:
    """Every set of names on every tier, the empty set once and first."""
    sets = [tuple(names) for names in name_sets]
    return ({}, *(dict.fromkeys(names, tier) for names in sets if names for tier in tiers))
