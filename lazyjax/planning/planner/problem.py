"""The planning problem: what may be decided, and every decision as a 0/1 variable.

A `Problem` is one choice of the global settings (microbatches, prefetch, interlayer_home, update) with
all that the layer decisions are weighed by: bytes, seconds, capacities. Its `Choices` number the
decisions; durations and memory (see `lazyjax.planning.planner.windows`) are affine in them. This module
knows no solver and no model family.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan, PlanError
from lazyjax.planning.program.operations import (
    RESOURCE_OF,
    Action,
    ModelSizes,
    Operation,
    WorkingBytes,
    no_working_bytes,
)
from lazyjax.planning.program.simulate import OperationSeconds
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

#: Homes a boundary can have, in the order in which they are numbered.
HOMES = (Boundary.DEVICE, Boundary.HOST, Boundary.NVME)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Layer decisions to take under fixed global settings.

    Attributes:
        settings: a plan whose global fields hold; its layers are ignored.
        sizes: bytes of one microbatch.
        seconds: of one operation of the schedule.
        saves: per layer the ways to keep residuals (name -> tier); the first keeps none.
        capacity: bytes that may be used per tier.
        static_host_bytes: what the host holds all the time: masters, gradients, buffers; without
            optimizer state, which counts where the plan puts it.
        working_bytes: see `WorkingBytes`.
        longest_segment: most layers that share one kept boundary.
        nvme_boundaries, nvme_states, residents: whether these decisions are open.
        kinds: name per layer; layers of one name have the same save options and compute seconds. By
            default no two layers have.
    """

    settings: Plan
    sizes: ModelSizes
    seconds: OperationSeconds
    saves: tuple[tuple[Mapping[str, Tier], ...], ...]
    capacity: Mapping[Tier, int]
    static_host_bytes: int = 0
    working_bytes: WorkingBytes = no_working_bytes
    longest_segment: int = 4
    nvme_boundaries: bool = False
    nvme_states: bool = False
    residents: bool = True
    kinds: tuple[str, ...] | None = None

    @functools.cached_property
    def _first_alike(self) -> tuple[int, ...]:
        """Per layer the first one of its kind, whose compute times are worked out for all of them."""
        if self.kinds is None:
            return tuple(range(len(self.sizes.layers)))
        return tuple(self.kinds.index(kind) for kind in self.kinds)

    @functools.cached_property
    def _known(self) -> dict[tuple[Action, int, int], float]:
        return {}

    @property
    def head(self) -> int:
        """Number of the last layer."""
        return len(self.sizes.layers) - 1

    @property
    def microbatches(self) -> int:
        """M."""
        return self.settings.microbatches

    def saved_bytes(self, layer: int, option: int, *tiers: Tier) -> int:
        """Bytes that one microbatch keeps on `tiers` under a save option."""
        residual_bytes = self.sizes.layers[layer].residual_bytes
        kept = self.saves[layer][option].items()
        return sum(residual_bytes[name] for name, tier in kept if tier in tiers)

    def compute_seconds(self, action: Action, layer: int, option: int = 0) -> float:
        """Seconds for all microbatches of one window, the last of which emits the gradient."""
        layer = self._first_alike[layer]
        key = action, layer, option
        if key not in self._known:
            self._known[key] = self._window_seconds(action, layer, option)
        return self._known[key]

    def _window_seconds(self, action: Action, layer: int, option: int) -> float:
        count = self.microbatches
        saved = tuple(sorted(self.saves[layer][option]))
        tied_table = layer == 0 and action is Action.BACKWARD and self.sizes.tied

        def one(position: int) -> float:
            return self.seconds(
                Operation(
                    0, action, Resource.COMPUTE, layer, position, 0, saved=saved,
                    accumulates=position > 0 or tied_table, last=position == count - 1,
                )
            )  # fmt: skip

        if count <= 2:
            return sum(one(position) for position in range(count))
        return one(0) + (count - 2) * one(1) + one(count - 1)

    def transfer_seconds(self, action: Action, layer: int, moved: int, times: int = 1) -> float:
        """Seconds for `times` transfers of `moved` bytes; nothing moved takes no time."""
        if not moved or not times:
            return 0.0
        return times * self.seconds(Operation(0, action, RESOURCE_OF[action], layer, None, 0, bytes=moved))

    def update_seconds(self, layer: int) -> float:
        """Seconds of one layer's host update."""
        return self.seconds(Operation(0, Action.UPDATE, Resource.CPU, layer, None, 0))


Number = float | int


class Affine:
    """constant + sum of coefficient * variable, by variable number."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: Number = 0.0, terms: Mapping[int, Number] | None = None) -> None:
        self.constant = float(constant)
        self.terms: dict[int, Number] = dict(terms) if terms else {}

    def __add__(self, other: Affine | Number) -> Affine:
        total = Affine(self.constant, self.terms)
        if isinstance(other, Affine):
            total.constant += other.constant
            for variable, coefficient in other.terms.items():
                total.terms[variable] = (
                    total.terms[variable] + coefficient if variable in total.terms else coefficient
                )
        else:
            total.constant += other
        return total

    __radd__ = __add__

    def __sub__(self, other: Affine | Number) -> Affine:
        return self + other * -1.0

    def __rsub__(self, other: Number) -> Affine:
        return self * -1.0 + other

    def __mul__(self, factor: Number) -> Affine:
        return Affine(
            self.constant * factor, {v: c * factor for v, c in self.terms.items()} if factor else {}
        )

    __rmul__ = __mul__

    def value(self, values: Float64[np.ndarray, "... variables"]) -> Float64[np.ndarray, "..."]:
        """Evaluates for one assignment, or for many along the leading axes."""
        total = np.full(values.shape[:-1], self.constant)
        for variable, coefficient in self.terms.items():
            total += coefficient * values[..., variable]
        return total


class SegmentChoice(NamedTuple):
    """Layers start..end run backward from the boundary of `start`, kept at `home`."""

    start: int
    end: int
    home: Boundary


@dataclasses.dataclass(frozen=True, slots=True)
class SaveChoice:
    """Layer keeps its residuals as in `Problem.saves[layer][option]`."""

    layer: int
    option: int


@dataclasses.dataclass(frozen=True, slots=True)
class ResidentChoice:
    """The layer's parameters stay on the device."""

    layer: int


@dataclasses.dataclass(frozen=True, slots=True)
class StateChoice:
    """The layer's optimizer state lives on NVMe."""

    layer: int


class Choices:
    """Numbers the decisions of a problem, and the continuous quantities that follow from them.

    A derived quantity is the largest of 0 and some affine expressions of earlier variables; a
    solver may leave it a lower-bounded variable because more of it never helps.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        head = problem.head
        self.blocks = range(1, head)
        self.homes = HOMES if problem.nvme_boundaries else HOMES[:2]
        self.segments = [
            SegmentChoice(start, end, home)
            for start in self.blocks
            for end in range(start, min(start + problem.longest_segment, head))
            for home in self.homes
        ]
        self.saves = [
            SaveChoice(layer, option)
            for layer in self.blocks
            for option in range(len(problem.saves[layer]))
            if len(problem.saves[layer]) > 1
        ]
        resident_layers = ([0] if problem.sizes.tied else []) + list(self.blocks)
        self.residents = [ResidentChoice(layer) for layer in resident_layers if problem.residents]
        self.states = [StateChoice(layer) for layer in range(head + 1) if problem.nvme_states]
        decisions: list[SegmentChoice | SaveChoice | ResidentChoice | StateChoice] = [
            *self.segments, *self.saves, *self.residents, *self.states,
        ]  # fmt: skip
        self.number = {choice: number for number, choice in enumerate(decisions)}
        self._starting: dict[int, list[SegmentChoice]] = defaultdict(list)
        self._ending: dict[int, list[SegmentChoice]] = defaultdict(list)
        self._covering: dict[int, list[SegmentChoice]] = defaultdict(list)
        for segment in self.segments:
            self._starting[segment.start].append(segment)
            self._ending[segment.end].append(segment)
            for layer in range(segment.start, segment.end + 1):
                self._covering[layer].append(segment)
        self._saves_of: dict[int, list[SaveChoice]] = defaultdict(list)
        for save in self.saves:
            self._saves_of[save.layer].append(save)
        self.binaries = len(decisions)
        self.derived: list[tuple[Affine, ...]] = []

    @property
    def size(self) -> int:
        """Number of variables, derived ones included."""
        return self.binaries + len(self.derived)

    def derive(self, *expressions: Affine) -> Affine:
        """A new derived variable max(0, *expressions)."""
        if not expressions:
            return Affine()
        self.derived.append(expressions)
        return Affine(0.0, {self.size - 1: 1.0})

    def segments_from(self, layer: int) -> Sequence[SegmentChoice]:
        """The segments that may start at `layer`."""
        return self._starting[layer]

    def saves_of(self, layer: int) -> Sequence[SaveChoice]:
        """The save choices of `layer`; none where there is nothing to decide."""
        return self._saves_of[layer]

    def starting(self, layer: int, weight: Callable[[SegmentChoice], float]) -> Affine:
        """`weight` of the chosen segment that starts at `layer`; 0 where none does."""
        return self._weighed(self._starting[layer], weight)

    def ending(self, layer: int, weight: Callable[[SegmentChoice], float]) -> Affine:
        """`weight` of the chosen segment that ends at `layer`; 0 where none does."""
        return self._weighed(self._ending[layer], weight)

    def covering(self, layer: int, weight: Callable[[SegmentChoice], float]) -> Affine:
        """`weight` of the chosen segment that `layer` belongs to; 0 for embedding and head."""
        return self._weighed(self._covering[layer], weight)

    def _weighed(self, among: Iterable[SegmentChoice], weight: Callable[[SegmentChoice], float]) -> Affine:
        weights = {self.number[choice]: weight(choice) for choice in among}
        return Affine(0.0, {number: value for number, value in weights.items() if value})

    def save_sum(self, layer: int, weight: Callable[[int], float]) -> Affine:
        """`weight` of the chosen save option of `layer`."""
        options = range(len(self.problem.saves[layer]))
        if len(options) == 1:
            return Affine(weight(0))
        weights = {self.number[SaveChoice(layer, option)]: weight(option) for option in options}
        return Affine(0.0, {number: value for number, value in weights.items() if value})

    def resident(self, layer: int) -> Affine:
        """1 where the layer's parameters are resident."""
        choice = ResidentChoice(layer)
        return Affine(0.0, {self.number[choice]: 1.0}) if choice in self.number else Affine()

    def state_on_nvme(self, layer: int) -> Affine:
        """1 where the layer's optimizer state lives on NVMe."""
        choice = StateChoice(layer)
        return Affine(0.0, {self.number[choice]: 1.0}) if choice in self.number else Affine()

    def equalities(self) -> list[tuple[Affine, float]]:
        """One path of segments through the blocks; one save option per layer."""
        rows = []
        if self.blocks:
            rows.append((self.starting(1, lambda s: 1.0), 1.0))
        for block in self.blocks[1:]:
            rows.append((self.starting(block, lambda s: 1.0) - self.ending(block - 1, lambda s: 1.0), 0.0))
        for layer in self.blocks:
            if len(self.problem.saves[layer]) > 1:
                rows.append((self.save_sum(layer, lambda option: 1.0), 1.0))
        return rows

    def complete(self, binaries: Float64[np.ndarray, "... binaries"]) -> Float64[np.ndarray, "... variables"]:
        """Adds the derived variables."""
        values = np.concatenate([binaries, np.zeros((*binaries.shape[:-1], len(self.derived)))], axis=-1)
        for position, expressions in enumerate(self.derived):
            for expression in expressions:
                np.maximum(
                    values[..., self.binaries + position],
                    expression.value(values),
                    out=values[..., self.binaries + position],
                )
        return values

    def encode(self, plan: Plan) -> Float64[np.ndarray, "binaries"]:
        """The decisions of `plan`.

        Raises:
            PlanError: it decides something that is not open in this problem.
        """
        chosen: list[SegmentChoice | SaveChoice | ResidentChoice | StateChoice] = []
        end = self.problem.head - 1
        for layer in reversed(self.blocks):
            if plan.layers[layer].boundary is not Boundary.RECOMPUTE:
                chosen.append(SegmentChoice(layer, end, plan.layers[layer].boundary))
                end = layer - 1
        for layer, decided in enumerate(plan.layers):
            options = [dict(option) for option in self.problem.saves[layer]]
            if dict(decided.saved) not in options:
                raise PlanError(f"layers.{layer}.saved: not among the options: {dict(decided.saved)}")
            if len(options) > 1 and layer in self.blocks:
                chosen.append(SaveChoice(layer, options.index(dict(decided.saved))))
            if decided.resident and layer in [choice.layer for choice in self.residents]:
                chosen.append(ResidentChoice(layer))
            if decided.state == "nvme":
                chosen.append(StateChoice(layer))
        missing = [choice for choice in chosen if choice not in self.number]
        if missing:
            raise PlanError(f"not open in this problem: {missing[0]}")
        values = np.zeros(self.binaries)
        values[[self.number[choice] for choice in chosen]] = 1.0
        return values

    def decode(self, values: Float64[np.ndarray, "binaries_or_more"], planner: str) -> Plan:
        """The plan of an assignment."""
        problem = self.problem

        def on(choice: SegmentChoice | SaveChoice | ResidentChoice | StateChoice) -> bool:
            return bool(values[self.number[choice]] > 0.5)

        homes = {choice.start: choice.home for choice in self.segments if on(choice)}
        saved = {
            choice.layer: problem.saves[choice.layer][choice.option] for choice in self.saves if on(choice)
        }
        resident = {choice.layer for choice in self.residents if on(choice)}
        states = {choice.layer for choice in self.states if on(choice)}
        layers = []
        for layer in range(problem.head + 1):
            boundary = Boundary.DEVICE
            if layer in self.blocks:
                boundary = homes[layer] if layer in homes else Boundary.RECOMPUTE
            layers.append(
                LayerPlan(
                    boundary=boundary,
                    saved=dict(saved[layer]) if layer in saved else dict(problem.saves[layer][0]),
                    resident=layer in resident,
                    state="nvme" if layer in states else "host",
                )
            )
        update = {"layers": tuple(layers), "planner": planner, "prediction": None}
        return problem.settings.model_copy(update=update)


def save_options(name_sets: Sequence[Iterable[str]], tiers: Sequence[Tier]) -> tuple[Mapping[str, Tier], ...]:
    """Every set of names on every tier, the empty set once and first."""
    sets = [tuple(names) for names in name_sets]
    return ({}, *(dict.fromkeys(names, tier) for names in sets if names for tier in tiers))
