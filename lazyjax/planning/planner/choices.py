"""All decisions of a problem together: numbered, read, written, and as the space of an expansion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.plan.document import LayerPlan, Plan, PlanError
from lazyjax.planning.planner.decisions.decision import Binaries, Change, Decision, ManyBinaries, Row
from lazyjax.planning.planner.decisions.flags import Residency
from lazyjax.planning.planner.decisions.head import HeadChunks
from lazyjax.planning.planner.decisions.owned import OwnedHomes
from lazyjax.planning.planner.decisions.residuals import Residuals
from lazyjax.planning.planner.decisions.segments import Segments
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.program.conditions import ALWAYS, NEVER, Condition
from lazyjax.planning.program.windows import Segment
from lazyjax.specs import Part, Tier


class Choices:
    """The variables of a problem, decision by decision."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.settings = problem, problem.settings
        self.binaries = 0
        self.decisions: list[Decision] = []
        self.cuts = Segments(problem, 0)
        self._take(self.cuts)
        self.residuals = Residuals(problem, self.binaries, self.cuts)
        self._take(self.residuals)
        self.residency = Residency(problem, self.binaries, self.cuts)
        self._take(self.residency)
        self.state_home = OwnedHomes(problem, self.binaries, self.cuts)
        self._take(self.state_home)
        self.logits = HeadChunks(problem, self.binaries)
        self._take(self.logits)
        for make in problem.further_decisions:
            self._take(make(problem, self.binaries, self.cuts))
        self.segments: Sequence[Segment] = self.cuts.segments
        self._certain = {group for decision in self.decisions for group in decision.groups()}
        #: Products of two conditions; their variables come after the decisions'.
        self.products: list[tuple[Condition, Condition]] = []

    def _take(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self.binaries += decision.count

    @property
    def size(self) -> int:
        """Number of variables, products included."""
        return self.binaries + len(self.products)

    # As the space of an expansion

    def chosen(self, segments: Collection[Segment], homes: Collection[Tier] | None = None) -> Condition:
        """One of the segments is run, its first input on one of `homes`."""
        return self.reduced(self.cuts.chosen(segments, homes))

    def homes(self, segment: Segment) -> Sequence[Tier]:
        """The same for all."""
        del segment
        return self.cuts.homes

    def streamed(self, segment: Segment, layer: int) -> Condition:
        """The segment is run, the slab of its `layer` fetched; only slabs of single layers stay."""
        chosen = self.cuts.chosen([segment])
        return chosen.unless(self.resident(layer)) if segment.single else chosen

    def resident(self, layer: int) -> Condition:
        """The layer's slab stays."""
        return self.residency.resident(layer)

    def saved_sets(self, layer: int) -> Sequence[tuple[tuple[str, ...], Condition]]:
        """Names that may be kept together."""
        return self.residuals.saved_sets(layer)

    def saved(self, layer: int, name: str, tier: Tier) -> Condition:
        """The residual is kept on `tier`."""
        return self.residuals.saved(layer, name, tier)

    def head_chunks(self) -> Sequence[tuple[int, Condition]]:
        """Tokens whose logits may exist at once."""
        return self.logits.chosen()

    def owned(self, layer: int, part: Part, tier: Tier) -> Condition:
        """A part of what the layer owns lives on `tier`."""
        return self.state_home.owned(layer, part, tier)

    def reduced(self, condition: Condition) -> Condition:
        """`ALWAYS` where all members of a group are named."""
        whole = condition.constant == 0 and not condition.minus and condition.plus in self._certain
        return ALWAYS if whole else condition

    def product(self, one: Condition, other: Condition) -> Condition:
        """Both; a variable of its own, which the decisions determine."""
        if NEVER in (one, other):
            return NEVER
        if ALWAYS in (one, other):
            return other if one == ALWAYS else one
        if (one, other) not in self.products:
            self.products.append((one, other))
        return Condition(0, frozenset([self.binaries + self.products.index((one, other))]))

    # As variables

    def rows(self) -> list[Row]:
        """What every assignment fulfils."""
        return [row for decision in self.decisions for row in decision.rows()]

    def complete(self, binaries: Float64[np.ndarray, "... binaries"]) -> Float64[np.ndarray, "... variables"]:
        """Adds the products."""
        if not self.products:
            return binaries
        values = [np.minimum(one.value(binaries), other.value(binaries)) for one, other in self.products]
        return np.concatenate([binaries, np.stack(values, axis=-1)], axis=-1)

    def encode(self, plan: Plan) -> Binaries:
        """The decisions of `plan`.

        Raises:
            PlanError: it decides something that is not open in this problem.
        """
        values = np.zeros(self.binaries)
        values[[number for decision in self.decisions for number in decision.encode(plan)]] = 1.0
        repaired = self.repaired(values[None])[0]
        if not np.array_equal(repaired, values):
            raise PlanError("not open in this problem: a layer of a longer segment keeps something")
        return values

    def plainest(self) -> Binaries:
        """Every boundary kept on the device, nothing inside the layers, the fewest logits."""
        layers = tuple(LayerPlan(saved=dict(options[0])) for options in self.problem.saves)
        fields = {"layers": layers, "head_chunk": self.problem.head_chunks[0]}
        return self.encode(self.settings.model_copy(update=fields))

    def decode(self, values: Float64[np.ndarray, "binaries_or_more"], planner: str) -> Plan:
        """The plan of an assignment."""
        layers: list[dict[str, Any]] = [{} for _ in range(self.problem.head + 1)]
        for decision in self.decisions:
            decision.decode(values, layers)
        update = {
            "layers": tuple(LayerPlan(**fields) for fields in layers),
            "head_chunk": self.logits.decided(values),
            "planner": planner,
            "prediction": None,
        }
        return self.settings.model_copy(update=update)

    def rounded(self, relaxed: Binaries) -> Binaries:
        """The nearest assignment in running sums; it may exceed memory by about a layer's share."""
        values = np.zeros(self.binaries)
        values[[number for decision in self.decisions for number in decision.round(relaxed)]] = 1.0
        return self.repaired(values[None])[0]

    def repaired(self, values: ManyBinaries) -> ManyBinaries:
        """Assignments that keep all rows, from some whose single decisions do."""
        values = values.copy()
        for decision in self.decisions:
            decision.repair(values)
        return values

    def changes(self, values: Binaries) -> list[Change]:
        """All single changes, and exchanges between layers that decide differently."""
        return [change for decision in self.decisions for change in decision.changes(values)]
