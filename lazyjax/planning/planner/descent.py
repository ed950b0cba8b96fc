"""Steepest descent over plans: change what saves most, until nothing does.

All single changes of an assignment, and exchanges between two layers, are replayed at once. First
memory is brought within the capacities, at the least cost in time, then time goes down. Changes
that help alone are tried together too, the best ones first, so that a round takes many steps.
Finds good plans where a solver proves bounds; knows no solver.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from lazyjax.planning.planner.batch_replay import BatchReplay, Completed, PerAssignment
from lazyjax.planning.planner.problem import Choices, SaveChoice, SegmentChoice
from lazyjax.planning.planner.rounding import Binaries

#: Replayed steps: queues that begin empty are in step after a few, those of a neighbour sooner.
_STEPS_FROM_EMPTY, _STEPS = 6, 4
#: Relative gain below which a change is not worth making.
_LEAST_GAIN = 1e-5
#: Relative difference of periods that are the same.
_SAME_PERIOD = 1e-7
#: Changes that are tried together.
_MOST_TOGETHER = 64


class Change(NamedTuple):
    """Decisions, by number, that are taken back and taken instead."""

    off: tuple[int, ...]
    on: tuple[int, ...]


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
        found = changes(choices, values)
        each = choices.complete(np.array([_changed(values, change) for change in found]))
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
        tried = np.array(list(itertools.islice(_cumulative(values, found, order), _MOST_TOGETHER)))
        if not len(tried):
            break
        together = choices.complete(tried)
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
        found = changes(choices, values)
        each = choices.complete(np.array([_changed(values, change) for change in found]))
        less = level - measure(each)
        useful = np.flatnonzero((less > _LEAST_GAIN * level) & (replay.excess(each) <= 0))
        if not len(useful):
            break
        seconds = replay.periods(each[useful], steps=_STEPS, before=end).seconds
        free = useful[seconds <= slowest]
        order = free[np.argsort(-less[free])]
        tried = np.array(list(itertools.islice(_cumulative(values, found, order), _MOST_TOGETHER)))
        if not len(tried):
            break
        together = choices.complete(tried)
        replayed = replay.periods(together, steps=_STEPS, before=end)
        allowed = (replay.excess(together) <= 0) & (replayed.seconds <= slowest)
        levels = measure(together)
        best = int(np.argmin(np.where(allowed, levels, np.inf)))
        values, level = tried[best], float(levels[best])
    return values


def changes(choices: Choices, values: Binaries) -> list[Change]:
    """All single changes, and exchanges between layers that decide differently."""
    return [
        *_save_changes(choices, values),
        *_flips(choices, values),
        *_segment_changes(choices, values),
        *_exchanges(choices, values),
    ]


def _changed(values: Binaries, change: Change) -> Binaries:
    after = values.copy()
    after[list(change.off)] = 0.0
    after[list(change.on)] = 1.0
    return after


def _cumulative(
    values: Binaries, found: Sequence[Change], order: Int[np.ndarray, "changes"]
) -> Iterator[Binaries]:
    """After the first change, the first two, and so on; leaves out those that touch an earlier one."""
    touched: set[int] = set()
    after = values
    for index in order:
        own = {*found[index].off, *found[index].on}
        if touched.isdisjoint(own):
            touched |= own
            after = _changed(after, found[index])
            yield after


def _save_changes(choices: Choices, values: Binaries) -> Iterator[Change]:
    for layer in choices.blocks:
        numbers = [choices.number[choice] for choice in choices.saves_of(layer)]
        current = [number for number in numbers if values[number] > 0.5]
        yield from (Change(tuple(current), (number,)) for number in numbers if number not in current)


def _flips(choices: Choices, values: Binaries) -> Iterator[Change]:
    for family in (choices.residents, choices.states):
        for number in (choices.number[choice] for choice in family):
            yield Change((number,), ()) if values[number] > 0.5 else Change((), (number,))


def _chosen_segments(choices: Choices, values: Binaries) -> list[SegmentChoice]:
    chosen = [segment for segment in choices.segments if values[choices.number[segment]] > 0.5]
    return sorted(chosen, key=lambda segment: segment.start)


def _segment_changes(choices: Choices, values: Binaries) -> Iterator[Change]:
    """Another home; a cut into two; a union with the next; another border with it."""
    segments = _chosen_segments(choices, values)
    for segment, following in itertools.zip_longest(segments, segments[1:]):
        for home in choices.homes:
            if home is not segment.home:
                yield _replaced(choices, [segment], [segment._replace(home=home)])
            for cut in range(segment.start + 1, segment.end + 1):
                parts = [segment._replace(end=cut - 1), SegmentChoice(cut, segment.end, home)]
                yield _replaced(choices, [segment], parts)
        if following is None:
            continue
        pair = [segment, following]
        united = segment._replace(end=following.end)
        moved = [
            [segment._replace(end=cut - 1), following._replace(start=cut)]
            for cut in (following.start - 1, following.start + 1)
        ]
        for after in ([united], *moved):
            if all(part.start <= part.end and part in choices.number for part in after):
                yield _replaced(choices, pair, after)


def _replaced(choices: Choices, before: list[SegmentChoice], after: list[SegmentChoice]) -> Change:
    return Change(
        tuple(choices.number[segment] for segment in before),
        tuple(choices.number[segment] for segment in after),
    )


def _exchanges(choices: Choices, values: Binaries) -> Iterator[Change]:
    """Two layers exchange what they decide: each with the nearest and the furthest that differs."""
    for family in (choices.residents, choices.states):
        numbers = {choice.layer: choices.number[choice] for choice in family}
        decided = {layer: bool(values[number] > 0.5) for layer, number in numbers.items()}
        for one, other in _different(decided):
            on, off = (one, other) if decided[other] else (other, one)
            yield Change((numbers[off],), (numbers[on],))
    chosen = [choice for choice in choices.saves if values[choices.number[choice]] > 0.5]
    options = {choice.layer: choice.option for choice in chosen}
    for one, other in _different(options):
        if choices.problem.saves[one] == choices.problem.saves[other]:
            before = SaveChoice(one, options[one]), SaveChoice(other, options[other])
            after = SaveChoice(one, options[other]), SaveChoice(other, options[one])
            yield Change(*(tuple(choices.number[choice] for choice in pair) for pair in (before, after)))
    segments = {segment.start: segment for segment in _chosen_segments(choices, values)}
    for one, other in _different({start: segment.home for start, segment in segments.items()}):
        first, second = segments[one], segments[other]
        after_both = [first._replace(home=second.home), second._replace(home=first.home)]
        yield _replaced(choices, [first, second], after_both)


def _different(decided: Mapping[int, Hashable]) -> Iterator[tuple[int, int]]:
    layers = sorted(decided)
    seen: set[tuple[int, int]] = set()
    for position, one in enumerate(layers):
        later = layers[position + 1 :]
        for order in (later, later[::-1]):
            other = next((layer for layer in order if decided[layer] != decided[one]), None)
            if other is not None and (one, other) not in seen:
                seen.add((one, other))
                yield one, other
