"""From a fractional assignment to a plan: rounding that carries its error along the layers.

A relaxation mixes decisions within a layer, because it may. Rounded one layer after another, each
time to the decision that is furthest behind its share so far, every running sum stays within one
layer of the relaxed one; and running sums are what memory and queues feel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.planner.problem import Choices, ResidentChoice, SaveChoice, SegmentChoice, StateChoice

Binaries = Float64[np.ndarray, "binaries"]


def carry_round(choices: Choices, relaxed: Binaries) -> Binaries:
    """The nearest assignment in running sums; it may exceed memory by about a layer's share."""
    values = np.zeros(choices.binaries)
    chosen: list[SegmentChoice | SaveChoice | ResidentChoice | StateChoice] = []
    chosen += _rounded_path(choices, relaxed)
    chosen += _rounded_saves(choices, relaxed)
    for family in (choices.residents, choices.states):
        behind = 0.0
        for choice in family:
            behind += float(relaxed[choices.number[choice]])
            # Only whole ones: they take memory.
            if behind >= 1.0 - 1e-6:
                chosen.append(choice)
                behind -= 1.0
    values[[choices.number[choice] for choice in chosen]] = 1.0
    return values


def _rounded_path(choices: Choices, relaxed: Binaries) -> Iterable[SegmentChoice]:
    behind: dict[Hashable, float] = defaultdict(float)
    following = choices.blocks.start
    for layer in choices.blocks:
        for segment in choices.segments_from(layer):
            behind[_shape(segment)] += float(relaxed[choices.number[segment]])
        if layer == following:
            # Equally far behind: the shorter one recomputes less.
            taken = max(choices.segments_from(layer), key=lambda s: (behind[_shape(s)], s.start - s.end))
            behind[_shape(taken)] -= 1.0
            following = taken.end + 1
            yield taken


def _shape(segment: SegmentChoice) -> Hashable:
    return segment.end - segment.start, segment.home


def _rounded_saves(choices: Choices, relaxed: Binaries) -> Iterable[SaveChoice]:
    # Layers with the same options share a running sum.
    behind: dict[Hashable, float] = defaultdict(float)
    for layer in choices.blocks:
        options = choices.saves_of(layer)
        if not options:
            continue
        alike = tuple(tuple(sorted(option.items())) for option in choices.problem.saves[layer])
        for choice in options:
            behind[alike, choice.option] += float(relaxed[choices.number[choice]])
        taken = max(options, key=lambda choice: behind[alike, choice.option])
        behind[alike, taken.option] -= 1.0
        yield taken
