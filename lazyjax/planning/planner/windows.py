"""The schedule at layer granularity: one window per layer and direction, whole batch at a time.

A plan's schedule depends on its decisions in length and order; this one does not. Forward
windows 0..head-1, the loss window, then one window per layer backward; what a segment recomputes
happens in the window of its last layer. Every window has the same operations whatever is
decided, only their seconds differ, and those are affine in the decisions. Hence one set of
operations serves a solver (start times as variables) and a replay (`window_schedule`, which
`lazyjax.planning.program.simulate` runs like any schedule).

Differences to the microbatch schedule, all on purpose: transfers of a window overlap the window
before (there: the microbatches before), and a segment is recomputed in one piece.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.plan.document import Boundary
from lazyjax.planning.planner.problem import RESOURCE_OF, Affine, Choices, Problem, SegmentChoice
from lazyjax.planning.program.schedule import (
    GRADIENT_WINDOW,
    LOAD_AHEAD_ITEMS,
    OFFLOAD_WINDOW_ITEMS,
    STATE_WINDOW,
    Action,
    Operation,
    Schedule,
)
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

#: Windows after which offloaded activations must have left the device.
OFFLOAD_WINDOW = 2


@dataclasses.dataclass
class WindowOperation:
    """One operation of the layer-granularity schedule.

    Attributes:
        seconds: affine in the decisions.
        waits: operations before it in the list, each under a condition: None, or an affine
            expression that is 1 where the wait applies and 0 elsewhere.
        waits_previous: operations of the step before.
    """

    index: int
    action: Action
    layer: int
    window: int
    seconds: Affine
    waits: list[tuple[int, Affine | None]]
    waits_previous: list[int] = dataclasses.field(default_factory=list)

    @property
    def resource(self) -> Resource:
        """The queue that runs it."""
        return RESOURCE_OF[self.action]


class WindowModel:
    """The operations of a problem at layer granularity, with seconds affine in its choices."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices = Choices(problem)
        self.operations: list[WindowOperation] = []
        self._seconds = _WindowSeconds(problem, self.choices)
        self._compute: list[int] = []
        self._offload: dict[int, int] = {}
        self._gradient: dict[int, int] = {}
        self._spill: dict[int, int] = {}
        self._load: dict[int, int] = {}
        self._reload: dict[int, int] = {}
        self._fetch: dict[int, list[int]] = {}
        self._update: dict[int, int] = {}
        self._build()

    @property
    def windows(self) -> int:
        """Forward, loss and backward windows together."""
        return 2 * self.problem.head + 1

    def backward_layer(self, window: int) -> int:
        """The layer whose backward pass a window after the loss runs."""
        return 2 * self.problem.head - window

    def depth(self, window: int) -> int:
        """Prefetch depth that applies to a window's parameters."""
        settings = self.problem.settings
        return settings.prefetch if window <= self.problem.head else settings.backward_prefetch

    def slabs(self, window: int) -> tuple[int, ...]:
        """Layers whose parameters a window needs."""
        head = self.problem.head
        if window == head:
            return (head, 0) if self.problem.sizes.tied else (head,)
        if window < head:
            return (window,)
        layer = self.backward_layer(window)
        return (layer,) if layer else ()

    def durations(
        self, values: Float64[np.ndarray, "... variables"]
    ) -> Float64[np.ndarray, "... operations"]:
        """Seconds of every operation for complete assignments."""
        return np.stack([operation.seconds.value(values) for operation in self.operations], axis=-1)

    # Building

    def _append(self, action: Action, layer: int, window: int, seconds: Affine, waits: list[int]) -> int:
        index = len(self.operations)
        conditions: list[tuple[int, Affine | None]] = [(wait, None) for wait in waits]
        self.operations.append(WindowOperation(index, action, layer, window, seconds, conditions))
        return index

    def _build(self) -> None:
        deferred = self.problem.settings.update == "deferred"
        if deferred:
            self._emit_updates(0)
        last_window = self.windows - 1
        for window in range(self.windows):
            self._emit_loads(window)
            for target in (0, 1) if window == 0 else (window + 1,):
                if target <= last_window:
                    self._emit_reload(window, target)
            self._emit_fetches(window)
            self._emit_window(window)
        if not deferred:
            self._emit_updates(last_window)
        self._close_the_ring(deferred)

    def _before(self, window: int) -> list[int]:
        """The compute operation that ends the window before."""
        return [self._compute[window - 1]] if window else []

    def _emit_loads(self, window: int) -> None:
        if not self.problem.nvme_boundaries:
            return
        head = self.problem.head
        ahead = 1 + math.ceil(LOAD_AHEAD_ITEMS / self.problem.microbatches)
        for target in range(head + 1, self.windows - 1):
            layer = self.backward_layer(target)
            if target in self._load or window < max(target - ahead, layer + 1):
                continue
            load = self._append(Action.LOAD, layer, target, self._seconds.load(layer), self._before(window))
            self._load[target] = load
            waits = self.operations[load].waits
            residual_there = self._seconds.residual_on_nvme(layer)
            if residual_there.terms:
                waits.append((self._spill[layer], residual_there))
            for start in range(1, layer + 1):
                boundary_there = self._seconds.boundary_on_nvme(start, layer)
                if boundary_there.terms:
                    waits.append((self._spill[start], boundary_there))

    def _emit_reload(self, window: int, target: int) -> None:
        head = self.problem.head
        waits = self._before(window)
        layer = target
        if target > head:
            layer = self.backward_layer(target)
            waits = [*waits, self._offload[layer], *([self._offload[layer - 1]] if layer else [])]
        reload = self._append(Action.RELOAD, layer, target, self._seconds.reload(target, layer), waits)
        self._reload[target] = reload
        if target in self._load:
            conditional = self.operations[reload].waits
            conditional.append((self._load[target], self._seconds.residual_on_nvme(layer)))
            conditional.append((self._load[target], self._seconds.segment_on_nvme(layer)))

    def _emit_fetches(self, window: int) -> None:
        furthest = max(self.depth(0), self.depth(self.problem.head + 1))
        for target in range(window, min(window + furthest, self.windows)):
            if target - window >= self.depth(target) or target in self._fetch:
                continue
            self._fetch[target] = []
            for layer in self.slabs(target):
                waits = self._before(window)
                if layer in self._update:
                    waits = [*waits, self._update[layer]]
                seconds = self._seconds.fetch(target, layer, self.depth(target))
                self._fetch[target].append(self._append(Action.FETCH, layer, target, seconds, waits))

    def _emit_window(self, window: int) -> None:
        head = self.problem.head
        layer = window if window <= head else self.backward_layer(window)
        action = Action.FORWARD if window < head else Action.LOSS if window == head else Action.BACKWARD
        waits = [*self._fetch[window], self._reload[window]]
        if window - OFFLOAD_WINDOW in self._offload:
            waits.append(self._offload[window - OFFLOAD_WINDOW])
        if window - GRADIENT_WINDOW in self._gradient:
            waits.append(self._gradient[window - GRADIENT_WINDOW])
        compute = self._append(action, layer, window, self._seconds.compute(window, layer), waits)
        self._compute.append(compute)
        self._offload[window] = self._append(
            Action.OFFLOAD, layer, window, self._seconds.offload(window, layer), [compute]
        )
        if self.problem.nvme_boundaries and 1 <= window < head:
            self._spill[window] = self._append(
                Action.SPILL, layer, window, self._seconds.spill(layer), [self._offload[window]]
            )
        if window >= head:
            self._gradient[window] = self._append(
                Action.GRADIENT_OUT, layer, window, self._seconds.gradient(layer), [compute]
            )

    def _emit_updates(self, window: int) -> None:
        states = self.problem.nvme_states
        spills: list[int] = []
        for layer in range(self.problem.head + 1):
            waits = list(self._gradient.values())[-1:]
            if states:
                # Counted in all layers, so fewer copies are under way than the schedule allows.
                ahead = spills[-STATE_WINDOW : -STATE_WINDOW + 1]
                load = self._append(
                    Action.LOAD_STATE, layer, window, self._seconds.state(Action.LOAD_STATE, layer), ahead
                )
                waits = [*waits, load]
            self._update[layer] = self._append(
                Action.UPDATE, layer, window, Affine(self.problem.update_seconds(layer)), waits
            )
            if states:
                spills.append(
                    self._append(
                        Action.SPILL_STATE, layer, window, self._seconds.state(Action.SPILL_STATE, layer),
                        [self._update[layer]],
                    )
                )  # fmt: skip

    def _close_the_ring(self, deferred: bool) -> None:
        last_gradient = self._gradient[self.windows - 1]
        state_spills = [op.index for op in self.operations if op.action is Action.SPILL_STATE]
        for operation in self.operations:
            match operation.action:
                case Action.UPDATE if deferred:
                    operation.waits_previous += [self._compute[-1], last_gradient]
                case Action.FETCH if not deferred:
                    operation.waits_previous.append(self._update[self.problem.head])
                case Action.LOAD_STATE:
                    operation.waits_previous += state_spills[-1:]


class _WindowSeconds:
    """Seconds of each window's operations, affine in the decisions."""

    def __init__(self, problem: Problem, choices: Choices) -> None:
        self.problem, self.choices = problem, choices
        self.streamed = problem.settings.interlayer_home == "host"
        # Microbatches that pass from one layer to the next without a trip through the host.
        soon = problem.settings.reload_ahead + OFFLOAD_WINDOW_ITEMS
        self.staying = min(problem.microbatches, (soon + 1) // 2)

    def _moved(self, action: Action, layer: int, microbatch_bytes: int, times: int | None = None) -> float:
        count = self.problem.microbatches if times is None else times
        return self.problem.transfer_seconds(action, layer, microbatch_bytes, count)

    def _input(self, action: Action, layer: int, times: int | None = None) -> float:
        return self._moved(action, layer, self.problem.sizes.layers[layer].input_bytes, times)

    def _residuals(self, action: Action, layer: int, *tiers: Tier) -> Affine:
        return self.choices.save_sum(
            layer, lambda option: self._moved(action, layer, self.problem.saved_bytes(layer, option, *tiers))
        )

    def compute(self, window: int, layer: int) -> Affine:
        problem, head = self.problem, self.problem.head
        if window <= head:
            action = Action.FORWARD if window < head else Action.LOSS
        else:
            action = Action.BACKWARD
        own = self.choices.save_sum(layer, lambda option: problem.compute_seconds(action, layer, option))
        if action is not Action.BACKWARD or layer == 0:
            return own
        return own + self.choices.ending(
            layer,
            lambda s: sum(
                problem.compute_seconds(Action.RECOMPUTE, again) for again in range(s.start, s.end)
            ),
        )

    def fetch(self, target: int, layer: int, depth: int) -> Affine:
        problem, choices, head = self.problem, self.choices, self.problem.head

        def slab(which: int) -> float:
            return problem.transfer_seconds(Action.FETCH, which, problem.sizes.layers[which].parameter_bytes)

        if target < head:
            return Affine(slab(layer))
        if target == head:
            if layer == head:
                return Affine(slab(layer))
            # The tied table was on the device in the first window.
            return Affine() if target <= depth else slab(layer) * (1.0 - 1.0 * choices.resident(layer))
        kept = choices.covering(layer, lambda s: float(_kept(s, layer, depth, head)))
        own = self._needed(1.0 - kept, layer)
        total = slab(layer) * own
        for again in range(max(1, layer - problem.longest_segment + 1), layer):
            recomputed = choices.ending(
                layer,
                lambda s, again=again: float(s.start <= again and not _kept_from_forward(s, depth, head)),
            )
            if recomputed.terms:
                total += slab(again) * self._needed(recomputed, again)
        return total

    def _needed(self, wanted: Affine, layer: int) -> Affine:
        """`wanted`, unless the slab is resident."""
        resident = self.choices.resident(layer)
        return self.choices.derive(wanted - resident) if resident.terms else wanted

    def reload(self, target: int, layer: int) -> Affine:
        if target == 0:
            return Affine(self._moved(Action.RELOAD, 0, self.problem.sizes.batch_bytes))
        return self._reloaded_activations(target, layer)

    def _reloaded_activations(self, target: int, layer: int) -> Affine:
        problem, choices, head = self.problem, self.choices, self.problem.head
        away = problem.microbatches - self.staying
        if target <= head:
            if not self.streamed or target == head:
                return Affine()
            once = self._input(Action.RELOAD, layer, away)
            return once - choices.starting(layer, lambda s: once if s.home is Boundary.DEVICE else 0.0)
        total = Affine()
        if layer:
            total += self._residuals(Action.RELOAD, layer, Tier.HOST, Tier.NVME)
            total += choices.ending(
                layer,
                lambda s: 0.0 if s.home is Boundary.DEVICE else self._input(Action.RELOAD, s.start),
            )
        if self.streamed:
            total += self._input(Action.RELOAD, layer + 1, away) + self._waiting(Action.RELOAD, layer + 1)
            if layer:
                # Recomputed inputs pass through the host: once for the next recomputation, once
                # for their own backward pass; so does a segment's first input.
                total += choices.covering(
                    layer,
                    lambda s: (
                        sum(self._input(Action.RELOAD, i) for i in range(s.start + 1, s.end + 1))
                        if s.end == layer
                        else self._input(Action.RELOAD, layer)
                        if s.start < layer or s.home is not Boundary.DEVICE
                        else 0.0
                    ),
                )
        return total

    def offload(self, window: int, layer: int) -> Affine:
        problem, choices, head = self.problem, self.choices, self.problem.head
        away = problem.microbatches - self.staying
        if window < head:
            total = Affine()
            if layer:
                total += self._residuals(Action.OFFLOAD, layer, Tier.HOST, Tier.NVME)
            following = layer + 1
            if following < head:
                total += choices.covering(
                    following,
                    lambda s: (
                        self._input(Action.OFFLOAD, following)
                        if s.start == following and s.home is not Boundary.DEVICE
                        else self._input(Action.OFFLOAD, following, away)
                        if self.streamed and s.start < following
                        else 0.0
                    ),
                )
            return total
        if not self.streamed or layer == 0:
            return Affine()
        total = self._input(Action.OFFLOAD, layer, away) + self._waiting(Action.OFFLOAD, layer)
        if window == head:
            return total
        return total + choices.ending(
            layer, lambda s: sum(self._input(Action.OFFLOAD, i) for i in range(s.start + 1, s.end + 1))
        )

    def _waiting(self, action: Action, layer: int) -> Affine:
        """Gradients of a layer's input that wait on the host only because a recomputation comes between."""
        if layer < 2:
            return Affine()
        return self.choices.ending(
            layer - 1, lambda s: self._input(action, layer, self.staying) if s.start < s.end else 0.0
        )

    def spill(self, layer: int) -> Affine:
        return self._residuals(Action.SPILL, layer, Tier.NVME) + self.choices.starting(
            layer, lambda s: self._input(Action.SPILL, layer) if s.home is Boundary.NVME else 0.0
        )

    def load(self, layer: int) -> Affine:
        return self._residuals(Action.LOAD, layer, Tier.NVME) + self.choices.ending(
            layer, lambda s: self._input(Action.LOAD, s.start) if s.home is Boundary.NVME else 0.0
        )

    def residual_on_nvme(self, layer: int) -> Affine:
        return self.choices.save_sum(
            layer, lambda option: float(self.problem.saved_bytes(layer, option, Tier.NVME) > 0)
        )

    def boundary_on_nvme(self, start: int, end: int) -> Affine:
        return self.choices.ending(end, lambda s: float(s.start == start and s.home is Boundary.NVME))

    def segment_on_nvme(self, end: int) -> Affine:
        return self.choices.ending(end, lambda s: float(s.home is Boundary.NVME))

    def gradient(self, layer: int) -> Affine:
        gradient_bytes = self.problem.sizes.layers[layer].gradient_bytes
        return Affine(self.problem.transfer_seconds(Action.GRADIENT_OUT, layer, gradient_bytes))

    def state(self, action: Action, layer: int) -> Affine:
        state_bytes = self.problem.sizes.layers[layer].state_bytes
        return self.problem.transfer_seconds(action, layer, state_bytes) * self.choices.state_on_nvme(layer)


def _kept_from_forward(segment: SegmentChoice, depth: int, head: int) -> bool:
    """Whether the first slabs after the loss are still there from the forward pass."""
    return segment.end == head - 1 and head + 1 - segment.start <= depth


def _kept(segment: SegmentChoice, layer: int, depth: int, head: int) -> bool:
    """Whether the layer's slab is on the device when its backward pass needs it: because it was
    just recomputed with, or because the forward pass ended with it."""
    if segment.start <= layer < segment.end:
        return 2 * (segment.end - layer) <= depth
    return segment.end == layer and _kept_from_forward(segment, depth, head)


def window_schedule(
    model: WindowModel, values: Float64[np.ndarray, "variables"]
) -> tuple[Schedule, list[float]]:
    """A schedule of `Operation`s, and the seconds of each, for one complete assignment.

    Memory is not part of it (see `lazyjax.planning.planner.window_memory`).
    """
    operations = tuple(
        Operation(
            index=operation.index,
            action=operation.action,
            resource=operation.resource,
            layer=operation.layer,
            microbatch=None,
            window=operation.window,
            waits=tuple(
                sorted(
                    {
                        wait
                        for wait, condition in operation.waits
                        if condition is None or condition.value(values) > 0.5
                    }
                )
            ),
            waits_previous=tuple(sorted(set(operation.waits_previous))),
        )
        for operation in model.operations
    )
    seconds = [float(value) for value in model.durations(values)]
    return Schedule(model.choices.decode(values, "window"), model.problem.sizes, operations), seconds
