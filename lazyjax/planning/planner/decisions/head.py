"""How many tokens' logits exist at once: one number for the step, of a few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lazyjax.planning.plan.document import Plan, PlanError
from lazyjax.planning.planner.affine import Affine
from lazyjax.planning.planner.decisions.decision import Binaries, Change, ManyBinaries, Row
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.program.conditions import ALWAYS, Condition


class HeadChunks:
    """One of the problem's numbers of tokens; a variable for every one but the least.

    What the least takes of memory, all take: it is in the constants of the rows.
    """

    def __init__(self, problem: Problem, first: int) -> None:
        self.tokens = problem.head_chunks
        self.numbers = range(first, first + len(self.tokens) - 1)
        self.count = len(self.numbers)

    def chosen(self) -> Sequence[tuple[int, Condition]]:
        """Every number of tokens with the condition under which it is the one."""
        more = Condition(0, frozenset(self.numbers))
        each = (Condition(0, frozenset([number])) for number in self.numbers)
        return list(zip(self.tokens, (ALWAYS.unless(more), *each), strict=True))

    def decided(self, values: Binaries) -> int:
        """The number of tokens that an assignment chooses."""
        return self.tokens[self._taken(values)]

    def rows(self) -> Sequence[Row]:
        """One number at most."""
        return [Row(Affine(0.0, dict.fromkeys(self.numbers, 1.0)), "<", 1.0)] if self.count > 1 else []

    def groups(self) -> Sequence[frozenset[int]]:
        """None: for the least nothing is on."""
        return []

    def encode(self, plan: Plan) -> Iterator[int]:
        """See `Decision`."""
        if plan.head_chunk not in self.tokens:
            raise PlanError(f"head_chunk: {plan.head_chunk} is not open in this problem: {self.tokens}")
        yield from self._on(self.tokens.index(plan.head_chunk))

    def decode(self, values: Binaries, layers: Sequence[dict[str, Any]]) -> None:
        """It is no layer's; see `decided`."""

    def round(self, relaxed: Binaries) -> Iterator[int]:
        """The most tokens of which at least half is on: with the larger ones."""
        due = 0.0
        for number in reversed(self.numbers):
            due += float(relaxed[number])
            if due >= 0.5:
                yield number
                return

    def repair(self, values: ManyBinaries) -> None:
        """Any assignment stays one: changes replace what is on."""

    def changes(self, values: Binaries) -> Iterator[Change]:
        """Another number."""
        now = self._taken(values)
        for other in range(len(self.tokens)):
            if other != now:
                yield Change(self._on(now), self._on(other))

    def alternatives(self) -> Sequence[Sequence[tuple[int, ...]]]:
        """The numbers."""
        return [[(), *((number,) for number in self.numbers)]] if self.count else []

    def _taken(self, values: Binaries) -> int:
        on = (position for position, number in enumerate(self.numbers, start=1) if values[number] > 0.5)
        return next(on, 0)

    def _on(self, position: int) -> tuple[int, ...]:
        return (self.numbers[position - 1],) if position else ()
