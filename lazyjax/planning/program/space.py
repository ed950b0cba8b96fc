"""What an expansion has to know of the decisions: which there are, and under which condition each holds.

A finished plan is the smallest space: every condition is `ALWAYS` or `NEVER`. The planner's space has
variables (`lazyjax.planning.planner.choices`). The expansion is the same for both, so that the schedule
of a plan and the rows of a program cannot disagree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from lazyjax.planning.plan.document import Plan, segment_start
from lazyjax.planning.program.conditions import ALWAYS, NEVER, Condition
from lazyjax.planning.program.windows import Segment
from lazyjax.specs import Part, Tier


@runtime_checkable
class Space(Protocol):
    """Decisions about the layers of a step, under fixed settings.

    Attributes:
        settings: a plan whose global fields hold.
        segments: those that a plan may consist of.
    """

    settings: Plan
    segments: Sequence[Segment]

    def chosen(self, segments: Collection[Segment], homes: Collection[Tier] | None = None) -> Condition:
        """One of the segments, which exclude each other, is run, with its first input on one of `homes`."""
        ...

    def homes(self, segment: Segment) -> Sequence[Tier]:
        """Where the segment's first input may be kept."""
        ...

    def streamed(self, segment: Segment, layer: int) -> Condition:
        """The segment is run and the slab of its `layer` does not stay on the device."""
        ...

    def resident(self, layer: int) -> Condition:
        """The layer's slab stays on the device."""
        ...

    def saved_sets(self, layer: int) -> Sequence[tuple[tuple[str, ...], Condition]]:
        """Names of the residuals that may be kept together, in order; where one holds, no other does."""
        ...

    def saved(self, layer: int, name: str, tier: Tier) -> Condition:
        """The residual is kept on `tier`."""
        ...

    def head_chunks(self) -> Sequence[tuple[int, Condition]]:
        """Tokens whose logits may exist at once; one of the conditions holds."""
        ...

    def owned(self, layer: int, part: Part, tier: Tier) -> Condition:
        """A part of what the layer owns lives on `tier`."""
        ...

    def reduced(self, condition: Condition) -> Condition:
        """The same condition, in the simplest form."""
        ...

    def product(self, one: Condition, other: Condition) -> Condition:
        """Both conditions, which may be about different decisions."""
        ...


class PlanSpace:
    """A finished plan."""

    def __init__(self, plan: Plan) -> None:
        self.settings = plan
        self.segments: Sequence[Segment] = segments_of(plan)

    def chosen(self, segments: Collection[Segment], homes: Collection[Tier] | None = None) -> Condition:
        """Its segments are those of the plan."""
        return _certain(any(homes is None or self.homes(segment)[0] in homes for segment in segments))

    def homes(self, segment: Segment) -> Sequence[Tier]:
        """The home in the plan."""
        home = self.settings.layers[segment.start].boundary.tier
        assert home is not None
        return (home,)

    def streamed(self, segment: Segment, layer: int) -> Condition:
        """Unless the plan keeps the slab."""
        del segment
        return _certain(not self.settings.layers[layer].resident)

    def resident(self, layer: int) -> Condition:
        """What the plan says."""
        return _certain(self.settings.layers[layer].resident)

    def saved_sets(self, layer: int) -> Sequence[tuple[tuple[str, ...], Condition]]:
        """The one set of the plan."""
        return [(tuple(sorted(self.settings.layers[layer].saved)), ALWAYS)]

    def saved(self, layer: int, name: str, tier: Tier) -> Condition:
        """What the plan says."""
        kept = self.settings.layers[layer].saved
        return _certain(name in kept and kept[name] is tier)

    def head_chunks(self) -> Sequence[tuple[int, Condition]]:
        """That of the plan."""
        return [(self.settings.head_chunk, ALWAYS)]

    def owned(self, layer: int, part: Part, tier: Tier) -> Condition:
        """What the plan says."""
        return _certain(self.settings.layers[layer].owned_home(part) is tier)

    def reduced(self, condition: Condition) -> Condition:
        """It is simple already."""
        assert condition in (ALWAYS, NEVER)
        return condition

    def product(self, one: Condition, other: Condition) -> Condition:
        """Both are certain."""
        return _certain(one == other == ALWAYS)


def segments_of(plan: Plan) -> list[Segment]:
    """The segments into which a plan cuts the blocks, the last one first."""
    segments = []
    layer = len(plan.layers) - 2
    while layer >= 1:
        segments.append(Segment(segment_start(plan, layer), layer))
        layer = segments[-1].start - 1
    return segments


def _certain(holds: bool) -> Condition:
    return ALWAYS if holds else NEVER
