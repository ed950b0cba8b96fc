"""Costs under which nothing is kept inside blocks: what an ablation without residuals by name plans with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lazyjax.planning.costs.layers import SaveSet
from lazyjax.planning.costs.seconds import Costs, WorkSource
from lazyjax.planning.costs.trace import Work
from lazyjax.planning.program.operations import Action


@dataclasses.dataclass(frozen=True)
class BareWork:
    """A `lazyjax.planning.costs.seconds.WorkSource` as `whole`, with one set to keep: the empty one."""

    whole: WorkSource

    def work(self, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None = None) -> Work:
        """See `WorkSource`."""
        return self.whole.work(kind, phase, saved, head_chunk)

    def working_bytes(
        self, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None = None
    ) -> int:
        """See `WorkSource`."""
        return self.whole.working_bytes(kind, phase, saved, head_chunk)

    def save_sets(self, kind: str, seconds: Callable[[Work], float]) -> tuple[SaveSet, ...]:
        """The first set is the empty one."""
        return self.whole.save_sets(kind, seconds)[:1]


def without_residuals(costs: Costs) -> Costs:
    """The same costs, measured ones included, for plans that keep blocks' inputs only."""
    return dataclasses.replace(costs, source=BareWork(costs.source), _known={}, _known_sets={})
