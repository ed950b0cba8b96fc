"""A kind of decision from outside the package, in one file: all boundaries share one home."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from experiments.benchmarks.planner_exactness import all_plans, best_by_force, random_problem
from experiments.benchmarks.solving import solve
from lazyjax.planning.plan.document import Boundary, Plan, PlanError
from lazyjax.planning.planner.affine import Affine
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.decisions.decision import Binaries, Change, Decision, ManyBinaries, Row
from lazyjax.planning.planner.decisions.segments import Cut, Segments
from lazyjax.planning.planner.problem import Problem


class OneHome:
    """One variable per tier, one of which is on: where the first input of every segment is kept."""

    def __init__(self, problem: Problem, first: int, segments: Segments) -> None:
        self.segments = segments
        self.number = {home: first + position for position, home in enumerate(problem.boundary_homes)}
        self.count = len(self.number)

    def rows(self) -> Sequence[Row]:
        """One home; no segment has another."""
        rows = [Row(Affine(0.0, dict.fromkeys(self.number.values(), 1.0)), "=", 1.0)]
        for number, cut in self.segments.cuts.items():
            rows.append(Row(Affine(0.0, {number: 1.0, self.number[cut.home]: -1.0}), "<", 0.0))
        return rows

    def groups(self) -> Sequence[frozenset[int]]:
        """The homes."""
        return [frozenset(self.number.values())]

    def encode(self, plan: Plan) -> Iterator[int]:
        """The home of all boundaries."""
        kept = {layer.boundary for layer in plan.layers[1:-1]} - {Boundary.RECOMPUTE}
        if len(kept) != 1:
            raise PlanError(f"boundaries on several tiers: {', '.join(sorted(kept))}")
        (boundary,) = kept
        assert boundary.tier is not None
        yield self.number[boundary.tier]

    def decode(self, values: Binaries, layers: Sequence[dict[str, Any]]) -> None:
        """The segments say it."""

    def round(self, relaxed: Binaries) -> Iterator[int]:
        """The home that most is on."""
        yield max(self.number.values(), key=lambda number: relaxed[number])

    def repair(self, values: ManyBinaries) -> None:
        """Brings every segment to the home that is on."""
        for home, own in self.number.items():
            chosen = values[:, own] > 0.5
            for number, cut in self.segments.cuts.items():
                wrong = chosen & (values[:, number] > 0.5)
                if cut.home is not home:
                    values[wrong, number] = 0.0
                    values[wrong, self.segments.number[Cut(cut.segment, home)]] = 1.0

    def changes(self, values: Binaries) -> Iterator[Change]:
        """Another home."""
        current = next(number for number in self.number.values() if values[number] > 0.5)
        yield from (Change((current,), (other,)) for other in self.number.values() if other != current)

    def alternatives(self) -> Sequence[Sequence[tuple[int, ...]]]:
        """The homes."""
        return [[(number,) for number in self.number.values()]]


def homes_of(plan: Plan) -> set[Boundary]:
    return {layer.boundary for layer in plan.layers[1:-1]} - {Boundary.RECOMPUTE}


def test_it_is_a_decision() -> None:
    problem = dataclasses.replace(random_problem(3), further_decisions=(OneHome,))
    choices = Choices(problem)
    assert isinstance(choices.decisions[-1], Decision)
    for values in all_plans(choices, np.random.default_rng(0), most=10):
        plan = choices.decode(values, "random")
        assert len(homes_of(plan)) == 1
        np.testing.assert_array_equal(choices.encode(plan), values)


@pytest.mark.parametrize("seed", [0, 8, 86])
def test_planning_keeps_to_it_and_finds_the_best_plan_that_does(seed: int) -> None:
    """Instances in which a plan that keeps boundaries on two tiers is faster than all that do not."""
    free = random_problem(seed, most_plans=60, most_blocks=3)
    mixed = solve(free, relative_gap=1e-9, time_limit_seconds=600.0)
    bound = dataclasses.replace(free, further_decisions=(OneHome,))
    solution = solve(bound, relative_gap=1e-9, time_limit_seconds=600.0)
    assert solution.plan is not None
    assert len(homes_of(solution.plan)) == 1
    assert solution.period_seconds == pytest.approx(best_by_force(bound), rel=1e-6)
    assert solution.period_seconds > mixed.period_seconds * (1 + 1e-6)
