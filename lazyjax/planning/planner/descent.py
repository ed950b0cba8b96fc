"""Steepest descent over plans: change what saves most, until nothing does.

All single changes of an assignment, and exchanges between two layers, are replayed at once. First
memory is brought within the capacities, at the least cost in time, then time goes down. Changes
that help alone are tried together too, the best ones first, so that a round takes many steps.
Finds good plans where a solver proves bounds; knows no solver.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from lazyjax.planning.planner.batch_replay import Assignments, BatchReplay, Completed, PerAssignment
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.decisions.decision import Binaries, Change, ManyBinaries

#: Replayed steps: queues that begin empty are in step after a few, those of a neighbour sooner.
_STEPS_FROM_EMPTY, _STEPS = 6, 4
#: Relative gain below which a change is not worth making.
_LEAST_GAIN = 1e-5
#: Relative difference of periods that are the same.
_SAME_PERIOD = 1e-7
#: Changes that are tried together.
_MOST_TOGETHER = 64


def descend(replay: BatchReplay, values: Binaries, deadline: float) -> Binaries | None:
    """The assignment that descent from `values` ends with; None where it does not come to fit.

    Args:
        deadline: of `time.monotonic`; what was reached until then is returned.
    """
    choices = replay.model.choices
    start = choices.complete(values[None])
    excess = float(replay.excess(start)[0])
    replayed = replay.periods(start, steps=_STEPS_FROM_EMPTY)
    period, end = float(replayed.seconds[0]), replayed.end[:, 0]
    while time.monotonic() < deadline:
        found = choices.changes(values)
        each = Assignments(choices.complete(_changed_each(choices, values, found)))
        exceeding = replay.excess(each)
        useful = np.flatnonzero(exceeding < excess * (1 - 1e-9) if excess > 0 else exceeding <= 0)
        if not len(useful):
            break
        lost = replay.periods(each[useful], steps=_STEPS, before=end).seconds - period
        if excess > 0:
            freed = excess - exceeding[useful]
            # Cheapest per byte first; of those that cost nothing the largest.
            order = useful[np.lexsort((-freed, np.maximum(lost, 0.0) / freed))]
        else:
            worth = lost < -_LEAST_GAIN * period
            order = useful[worth][np.argsort(lost[worth])]
        tried = _cumulative(choices, values, found, order)
        if not len(tried):
            break
        together = Assignments(choices.complete(tried))
        exceeding = replay.excess(together)
        replayed = replay.periods(together, steps=_STEPS, before=end)
        if excess > 0:
            fitting = np.flatnonzero(exceeding <= 0)
            best = int(fitting[0]) if len(fitting) else int(np.argmin(exceeding))
        else:
            best = int(np.argmin(np.where(exceeding <= 0, replayed.seconds, np.inf)))
        values, excess = tried[best], float(exceeding[best])
        period, end = float(replayed.seconds[best]), replayed.end[:, best]
    return values if excess <= 0 else None


def free_device_memory(replay: BatchReplay, values: Binaries, deadline: float) -> Binaries:
    """A plan as fast that needs less device memory, where links have time to spare.

    Descent ends where no change gains time by itself; with the room made here another may.

    Args:
        values: an assignment that fits.
        deadline: of `time.monotonic`; what was reached until then is returned.
    """
    return _lowered(replay, values, deadline, replay.device_share)


def reduce_traffic(replay: BatchReplay, values: Binaries, deadline: float) -> Binaries:
    """A plan as fast that moves less: whatever waits elsewhere for no gain in time comes back.

    Args:
        values: an assignment that fits.
        deadline: of `time.monotonic`; what was reached until then is returned.
    """
    return _lowered(replay, values, deadline, replay.moved_seconds)


def _lowered(
    replay: BatchReplay,
    values: Binaries,
    deadline: float,
    measure: Callable[[Completed], PerAssignment],
) -> Binaries:
    """Descent in `measure` that makes no plan slower."""
    choices = replay.model.choices
    start = choices.complete(values[None])
    replayed = replay.periods(start, steps=_STEPS_FROM_EMPTY)
    slowest = float(replayed.seconds[0]) * (1 + _SAME_PERIOD)
    level, end = float(measure(start)[0]), replayed.end[:, 0]
    while time.monotonic() < deadline:
        found = choices.changes(values)
        each = Assignments(choices.complete(_changed_each(choices, values, found)))
        less = level - measure(each.values)
        useful = np.flatnonzero((less > _LEAST_GAIN * level) & (replay.excess(each) <= 0))
        if not len(useful):
            break
        seconds = replay.periods(each[useful], steps=_STEPS, before=end).seconds
        free = useful[seconds <= slowest]
        order = free[np.argsort(-less[free])]
        tried = _cumulative(choices, values, found, order)
        if not len(tried):
            break
        together = Assignments(choices.complete(tried))
        replayed = replay.periods(together, steps=_STEPS, before=end)
        allowed = (replay.excess(together) <= 0) & (replayed.seconds <= slowest)
        levels = measure(together.values)
        best = int(np.argmin(np.where(allowed, levels, np.inf)))
        values, level = tried[best], float(levels[best])
    return values


def _changed_each(choices: Choices, values: Binaries, changes: Sequence[Change]) -> ManyBinaries:
    """The assignment after each of the changes by itself."""
    after = np.repeat(values[None], len(changes), axis=0)
    for numbers, value in (([c.off for c in changes], 0.0), ([c.on for c in changes], 1.0)):
        rows = np.repeat(np.arange(len(changes)), [len(own) for own in numbers])
        after[rows, list(itertools.chain.from_iterable(numbers))] = value
    return choices.repaired(after)


def _cumulative(
    choices: Choices, values: Binaries, found: Sequence[Change], order: Int[np.ndarray, "changes"]
) -> ManyBinaries:
    """After the first change, the first two, and so on; leaves out those that touch an earlier one."""
    touched: set[int] = set()
    taken: list[Change] = []
    for index in order:
        change = found[index]
        if len(taken) < _MOST_TOGETHER and touched.isdisjoint((*change.off, *change.on)):
            touched.update(change.off, change.on)
            taken.append(change)
    after = np.repeat(values[None], len(taken), axis=0)
    for position, change in enumerate(taken):
        after[position:, list(change.off)] = 0.0
        after[position:, list(change.on)] = 1.0
    return choices.repaired(after)
