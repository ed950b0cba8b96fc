"""Throughput against batch, and the smallest batch that loses next to nothing.

More rows share the same streamed slabs, until activations fill the memory; beyond that a larger
batch costs time to no purpose. So batches are planned from small to large, each twice the last, and
the smallest within 1 % of the best throughput is the one to take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lazyjax.planning.plan.document import Plan

#: Throughput that a smaller batch may lose.
CLOSE_TO_BEST = 0.01
#: Batches in a row without a gain, after which larger ones are not planned.
_PATIENCE = 2


class PlannedBatch(NamedTuple):
    """A batch and the plan found for it."""

    batch_rows: int
    plan: Plan

    @property
    def tokens_per_second(self) -> float:
        """Simulated; padding counted."""
        assert self.plan.prediction is not None
        return self.batch_rows * self.plan.sequence_length / self.plan.prediction.period_seconds


def batches_up_to(most: int, unit: int = 1) -> tuple[int, ...]:
    """`unit`, twice that, and so on, and the largest multiple of it up to `most`."""
    batch_rows, chosen = unit, list[int]()
    while batch_rows <= most:
        chosen.append(batch_rows)
        batch_rows *= 2
    largest = most // unit * unit
    return tuple(dict.fromkeys([*chosen, largest])) if chosen else ()


def plan_batches(
    batches: Sequence[int],
    solve: Callable[[int], Plan | None],
    show: Callable[[PlannedBatch], None] = lambda batch: None,
) -> tuple[PlannedBatch, ...]:
    """Plans batches in ascending order until larger ones bring nothing or do not fit.

    Args:
        solve: batch_rows -> plan with its prediction; None where nothing fits.
        show: gets each batch as soon as it is planned.
    """
    planned = list[PlannedBatch]()
    since_gain, best = 0, 0.0
    for batch_rows in batches:
        plan = solve(batch_rows)
        if plan is None:
            break
        planned.append(PlannedBatch(batch_rows, plan))
        show(planned[-1])
        gained = planned[-1].tokens_per_second > best * (1 + CLOSE_TO_BEST)
        best = max(best, planned[-1].tokens_per_second)
        since_gain = 0 if gained else since_gain + 1
        if since_gain >= _PATIENCE:
            break
    return tuple(planned)


def recommended(planned: Sequence[PlannedBatch]) -> PlannedBatch:
    """The smallest batch within `CLOSE_TO_BEST` of the best throughput; `planned` is not empty."""
    best = max(batch.tokens_per_second for batch in planned)
    return next(batch for batch in planned if batch.tokens_per_second >= best * (1 - CLOSE_TO_BEST))
