"""How the blocks are cut into segments, and where each segment's first input is kept."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from lazyjax.planning.plan.document import Boundary, Plan, PlanError
from lazyjax.planning.planner.affine import Affine
from lazyjax.planning.planner.decisions.decision import Binaries, Change, ManyBinaries, Row, different
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.program.conditions import Condition
from lazyjax.planning.program.space import segments_of
from lazyjax.planning.program.windows import Segment
from lazyjax.specs import Tier


class Cut(NamedTuple):
    """A segment with the home of its first input."""

    segment: Segment
    home: Tier


class Segments:
    """A path of segments through the blocks, each with a home."""

    def __init__(self, problem: Problem, first: int) -> None:
        self.blocks = range(1, problem.head)
        self.homes = problem.boundary_homes
        self.segments = [
            Segment(start, end)
            for start in self.blocks
            for end in range(start, min(start + problem.longest_segment, problem.head))
        ]
        cuts = [Cut(segment, home) for segment in self.segments for home in self.homes]
        self.cuts = dict(enumerate(cuts, start=first))
        self.number = {cut: number for number, cut in self.cuts.items()}
        self.count = len(cuts)
        self._starting: dict[int, list[int]] = defaultdict(list)
        self._ending: dict[int, list[int]] = defaultdict(list)
        self._covering: dict[int, list[int]] = defaultdict(list)
        for number, (segment, _) in self.cuts.items():
            self._starting[segment.start].append(number)
            self._ending[segment.end].append(number)
            for layer in range(segment.start, segment.end + 1):
                self._covering[layer].append(number)

    def chosen(self, segments: Collection[Segment], homes: Collection[Tier] | None = None) -> Condition:
        """One of the segments is run, its first input on one of `homes`."""
        among = self.homes if homes is None else homes
        return Condition(0, frozenset(self.number[Cut(s, home)] for s in segments for home in among))

    def rows(self) -> Sequence[Row]:
        """The segments follow one another."""
        rows = []
        for block in self.blocks:
            starts = Affine(0.0, dict.fromkeys(self._starting[block], 1.0))
            ends = Affine(0.0, dict.fromkeys(self._ending[block - 1], 1.0))
            rows.append(Row(starts - ends, "=", float(block == 1)))
        return rows

    def groups(self) -> Sequence[frozenset[int]]:
        """Every block belongs to one segment."""
        return [frozenset(self._covering[block]) for block in self.blocks]

    def encode(self, plan: Plan) -> Iterator[int]:
        """See `Decision`."""
        for segment in segments_of(plan):
            home = plan.layers[segment.start].boundary.tier
            assert home is not None
            cut = Cut(segment, home)
            if cut not in self.number:
                raise PlanError(
                    f"layers.{segment.start}: not open in this problem: {home.value} for layers "
                    f"{segment.start} to {segment.end}"
                )
            yield self.number[cut]

    def decode(self, values: Binaries, layers: Sequence[dict[str, Any]]) -> None:
        """See `Decision`."""
        for block in self.blocks:
            layers[block]["boundary"] = Boundary.RECOMPUTE
        for number, (segment, home) in self.cuts.items():
            if values[number] > 0.5:
                layers[segment.start]["boundary"] = Boundary(home.value)

    def round(self, relaxed: Binaries) -> Iterator[int]:
        """See `Decision`."""
        behind: dict[tuple[int, Tier], float] = defaultdict(float)

        def shape(number: int) -> tuple[int, Tier]:
            segment, home = self.cuts[number]
            return segment.end - segment.start, home

        following = self.blocks.start
        for block in self.blocks:
            for number in self._starting[block]:
                behind[shape(number)] += float(relaxed[number])
            if block == following:
                # Equally far behind: the shorter one recomputes less.
                taken = max(self._starting[block], key=lambda n: (behind[shape(n)], -shape(n)[0]))
                behind[shape(taken)] -= 1.0
                following = self.cuts[taken].segment.end + 1
                yield taken

    def repair(self, values: ManyBinaries) -> None:
        """A path stays one: its changes replace whole segments."""

    def changes(self, values: Binaries) -> Iterator[Change]:
        """Another home; a cut into two; a union with the next; another border with it; an exchange."""
        chosen = sorted((cut for number, cut in self.cuts.items() if values[number] > 0.5))
        for cut, following in itertools.zip_longest(chosen, chosen[1:]):
            (start, end), home = cut
            for other in self.homes:
                if other is not home:
                    yield self._replaced([cut], [Cut(cut.segment, other)])
                for middle in range(start + 1, end + 1):
                    parts = [Cut(Segment(start, middle - 1), home), Cut(Segment(middle, end), other)]
                    yield self._replaced([cut], parts)
            if following is None:
                continue
            (middle, last), after = following
            borders = [[Cut(Segment(start, last), home)]]
            borders += [
                [Cut(Segment(start, border - 1), home), Cut(Segment(border, last), after)]
                for border in (middle - 1, middle + 1)
            ]
            for parts in borders:
                if all(part in self.number for part in parts):
                    yield self._replaced([cut, following], parts)
        yield from self._exchanges(chosen)

    def _exchanges(self, chosen: Sequence[Cut]) -> Iterator[Change]:
        at = {cut.segment.start: cut for cut in chosen}
        for one, other in different({start: cut.home for start, cut in at.items()}):
            first, second = at[one], at[other]
            swapped = [first._replace(home=second.home), second._replace(home=first.home)]
            yield self._replaced([first, second], swapped)

    def _replaced(self, before: Sequence[Cut], after: Sequence[Cut]) -> Change:
        return Change(tuple(self.number[cut] for cut in before), tuple(self.number[cut] for cut in after))

    def alternatives(self) -> Sequence[Sequence[tuple[int, ...]]]:
        """All paths."""
        finished: list[tuple[int, ...]] = []
        paths: list[tuple[tuple[int, ...], int]] = [((), self.blocks.start)]
        while paths:
            path, following = paths.pop()
            if following == self.blocks.stop:
                finished.append(path)
                continue
            for number in self._starting[following]:
                paths.append(((*path, number), self.cuts[number].segment.end + 1))
        return [finished]
