"""Which tensors a layer keeps between the passes, and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from lazyjax.planning.plan.document import Plan, PlanError
from lazyjax.planning.planner.affine import Affine
from lazyjax.planning.planner.decisions.decision import Binaries, Change, ManyBinaries, Row, different
from lazyjax.planning.planner.decisions.segments import Segments
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.program.conditions import ALWAYS, NEVER, Condition
from lazyjax.planning.program.windows import Segment
from lazyjax.specs import Tier


class Residuals:
    """One of the problem's options per layer; only a layer that is a segment on its own keeps anything."""

    def __init__(self, problem: Problem, first: int, segments: Segments) -> None:
        self.saves = problem.saves
        self.numbers: dict[int, range] = {}
        self.count = 0
        for layer in segments.blocks:
            if len(self.saves[layer]) > 1:
                start = first + self.count
                self.numbers[layer] = range(start, start + len(self.saves[layer]))
                self.count += len(self.saves[layer])
        self._alone = {layer: segments.chosen([Segment(layer, layer)]) for layer in self.numbers}

    def saved_sets(self, layer: int) -> Sequence[tuple[tuple[str, ...], Condition]]:
        """Names that may be kept together."""
        if layer not in self.numbers:
            return [(tuple(sorted(self.saves[layer][0])), ALWAYS)]
        by_names: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, option in zip(self.numbers[layer], self.saves[layer], strict=True):
            by_names[tuple(sorted(option))].append(number)
        return [(names, Condition(0, frozenset(numbers))) for names, numbers in by_names.items()]

    def saved(self, layer: int, name: str, tier: Tier) -> Condition:
        """The residual is kept on `tier`."""
        if layer not in self.numbers:
            kept = self.saves[layer][0]
            return ALWAYS if name in kept and kept[name] is tier else NEVER
        numbers = [
            number
            for number, option in zip(self.numbers[layer], self.saves[layer], strict=True)
            if name in option and option[name] is tier
        ]
        return Condition(0, frozenset(numbers))

    def rows(self) -> Sequence[Row]:
        """One option per layer, the empty one unless the layer is a segment."""
        rows = []
        for layer, numbers in self.numbers.items():
            rows.append(Row(Affine(0.0, dict.fromkeys(numbers, 1.0)), "=", 1.0))
            kept = Affine(0.0, dict.fromkeys(numbers[1:], 1.0))
            rows.append(Row(kept - Affine.of(self._alone[layer]), "<", 0.0))
        return rows

    def groups(self) -> Sequence[frozenset[int]]:
        """The options of each layer."""
        return [frozenset(numbers) for numbers in self.numbers.values()]

    def encode(self, plan: Plan) -> Iterator[int]:
        """See `Decision`."""
        for layer, decided in enumerate(plan.layers):
            options = [dict(option) for option in self.saves[layer]]
            if dict(decided.saved) not in options:
                raise PlanError(f"layers.{layer}.saved: not among the options: {dict(decided.saved)}")
            if layer in self.numbers:
                yield self.numbers[layer][options.index(dict(decided.saved))]

    def decode(self, values: Binaries, layers: Sequence[dict[str, Any]]) -> None:
        """See `Decision`."""
        for layer, options in enumerate(self.saves):
            layers[layer]["saved"] = dict(options[0])
        for layer, numbers in self.numbers.items():
            for number, option in zip(numbers, self.saves[layer], strict=True):
                if values[number] > 0.5:
                    layers[layer]["saved"] = dict(option)

    def round(self, relaxed: Binaries) -> Iterator[int]:
        """See `Decision`; layers with the same options share a running sum."""
        behind: dict[Hashable, float] = defaultdict(float)
        for layer, numbers in self.numbers.items():
            alike = tuple(tuple(sorted(option.items())) for option in self.saves[layer])
            keys = [(alike, option) for option in range(len(numbers))]
            for key, number in zip(keys, numbers, strict=True):
                behind[key] += float(relaxed[number])
            taken = max(range(len(numbers)), key=lambda option: behind[keys[option]])
            behind[keys[taken]] -= 1.0
            yield numbers[taken]

    def repair(self, values: ManyBinaries) -> None:
        """Layers that are no segment keep nothing."""
        for layer, numbers in self.numbers.items():
            shared = self._alone[layer].value(values) < 0.5
            values[shared, numbers.start + 1 : numbers.stop] = 0.0
            values[shared, numbers.start] = 1.0

    def changes(self, values: Binaries) -> Iterator[Change]:
        """Another option; an exchange with a layer that has the same ones."""
        taken: dict[int, int] = {}
        for layer, numbers in self.numbers.items():
            current = next(number for number in numbers if values[number] > 0.5)
            taken[layer] = current - numbers.start
            if self._alone[layer].value(values) > 0.5:
                yield from (Change((current,), (number,)) for number in numbers if number != current)
        for one, other in different(taken):
            if self.saves[one] == self.saves[other]:
                first, second = self.numbers[one], self.numbers[other]
                yield Change(
                    (first[taken[one]], second[taken[other]]), (first[taken[other]], second[taken[one]])
                )

    def alternatives(self) -> Sequence[Sequence[tuple[int, ...]]]:
        """Layer by layer."""
        return [[(number,) for number in numbers] for numbers in self.numbers.values()]
