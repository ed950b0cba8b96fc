"""Bytes per tier as affine rows over the decisions: never less than the schedule's own count.

`Schedule.peak_bytes` counts a plan's memory operation by operation and has the last word; the
rows here bound it from above window by window, so that a solver can keep within capacities.
In each window what is live is affine in the number of microbatches done, so the first and the
last one suffice. Working sets, which a schedule does not count, are included.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.plan.document import Boundary
from lazyjax.planning.planner.problem import Affine, SegmentChoice
from lazyjax.planning.planner.windows import WindowModel
from lazyjax.planning.program.schedule import (
    LOAD_AHEAD_ITEMS,
    OFFLOAD_WINDOW_ITEMS,
    SPILL_WINDOW,
    STATE_WINDOW,
    Action,
)
from lazyjax.specs import Tier

#: Inputs of one microbatch on the device at once, besides the reload window, where activations
#: wait on the host between layers: one being written, and those whose copies are under way.
_STREAMED_INPUTS = 7
#: Twice the feasibility tolerance of the solvers.
SOLVER_TOLERANCE = 2e-7


class MemoryRow(NamedTuple):
    """Bytes live on a tier at one moment."""

    tier: Tier
    label: str
    bytes: Affine


def usable_bytes(capacity: int) -> float:
    """What rows may fill: solvers exceed a row by their tolerance, no plan may exceed memory by a byte."""
    return capacity - max(0.0, SOLVER_TOLERANCE * capacity - 0.5)


def memory_rows(model: WindowModel) -> list[MemoryRow]:
    """All rows of a problem; adds derived variables to `model.choices`."""
    memory = _Memory(model)
    rows = [MemoryRow(Tier.DEVICE, label, total) for label, total in memory.device()]
    rows.append(MemoryRow(Tier.HOST, "host", memory.host()))
    rows.append(MemoryRow(Tier.NVME, "nvme", memory.nvme()))
    return rows


def peak_bytes(
    rows: list[MemoryRow], values: Float64[np.ndarray, "... variables"]
) -> dict[Tier, Float64[np.ndarray, "..."]]:
    """The largest row of each tier for complete assignments."""
    return {
        tier: np.asarray(np.max([row.bytes.value(values) for row in rows if row.tier is tier], axis=0))
        for tier in Tier
    }


class _Memory:
    def __init__(self, model: WindowModel) -> None:
        self.model, self.choices, self.problem = model, model.choices, model.problem
        self.head, self.count = model.problem.head, model.problem.microbatches
        self.layers = model.problem.sizes.layers
        self.streamed = model.problem.settings.interlayer_home == "host"
        self.ahead = model.problem.settings.reload_ahead
        self.tied = model.problem.sizes.tied
        self.largest_input = max(layer.input_bytes for layer in self.layers)
        # A buffer that backward wants again within so many items does not leave at all.
        self.soon = self.ahead + OFFLOAD_WINDOW_ITEMS
        self.turning = self.head - self.soon // (2 * self.count)

    def _saved(self, layer: int, *tiers: Tier) -> Affine:
        """Residuals of one microbatch on `tiers`."""
        return self.choices.save_sum(
            layer, lambda option: float(self.problem.saved_bytes(layer, option, *tiers))
        )

    def _kept_input(self, layer: int) -> Affine:
        if layer == self.head:
            return Affine(float(self.count * self.layers[layer].input_bytes))
        size = float(self.count * self.layers[layer].input_bytes)
        return self.choices.starting(layer, lambda s: size if s.home is Boundary.DEVICE else 0.0)

    def _leaving(self, layer: int) -> Affine:
        """Residuals of one microbatch on their way out; none for embedding and head."""
        return self._saved(layer, Tier.HOST, Tier.NVME) if 0 < layer < self.head else Affine()

    def _left_behind(self, window: int, items: int) -> Affine:
        """What the last `items` microbatches before a forward or loss window have not got rid of."""
        total = Affine()
        while items > 0 and window > 0:
            window -= 1
            total += min(items, self.count) * self._leaving(window)
            items -= self.count
        return total

    def _lag(self, window: int) -> int:
        """Microbatches whose residuals are still on the device though they leave."""
        return self.soon + 1 if window >= self.turning else OFFLOAD_WINDOW_ITEMS + 1

    def _turning_inputs(self, window: int) -> float:
        """Inputs that stay because the backward pass wants them at once, or are not yet copied."""
        staying = range(max(1, self.turning), min(window, self.head)) if window >= self.turning else range(0)
        inputs = sum(self.count * self.layers[layer].input_bytes for layer in staying)
        return float(inputs + (self.largest_input if self.count == 1 else 0))

    def _coming(self, layer: int) -> Affine:
        """What one microbatch brings back for the backward window of `layer`."""
        if layer <= 0:
            return Affine(2.0 * self.largest_input if self.streamed else 0.0)
        if self.streamed:
            return self._leaving(layer) + 2.0 * self.largest_input
        return self._leaving(layer) + self.choices.ending(
            layer,
            lambda s: 0.0 if s.home is Boundary.DEVICE else float(self.layers[s.start].input_bytes),
        )

    def _coming_after(self, window: int, items: int) -> Affine:
        """Bytes brought back for the next `items` microbatches after a window's last one."""
        total = Affine()
        while items > 0 and window + 1 < self.model.windows:
            window += 1
            if window > self.head:
                total += min(items, self.count) * self._coming(self.model.backward_layer(window))
            elif self.streamed:
                total += float(min(items, self.count) * self.largest_input)
            items -= self.count
        return total

    def _working(self, action: Action, layer: int) -> Affine:
        saves = self.problem.saves[layer]
        return self.choices.save_sum(
            layer,
            lambda option: float(self.problem.working_bytes(action, layer, tuple(sorted(saves[option])))),
        )

    def _slabs(self, window: int) -> float:
        """Parameters on the device in a window, without residents of other windows."""
        slab = [layer.parameter_bytes for layer in self.layers]
        total = 0.0
        forward: set[int] = set()
        backward = 0
        for later in range(
            window,
            min(window + max(self.model.depth(0), self.model.depth(self.head + 1)), self.model.windows),
        ):
            if later - window >= self.model.depth(later) or not self.model.slabs(later):
                continue
            if later <= self.head:
                forward |= set(self.model.slabs(later))
            else:
                backward += 1
        total += sum(slab[layer] for layer in forward)
        # Which blocks these are depends on the segments: the largest ones bound them.
        lowest = self.model.backward_layer(window) if window > self.head else self.head - 1
        return total + sum(sorted(slab[1 : lowest + 1], reverse=True)[:backward])

    def device(self) -> list[tuple[str, Affine]]:
        choices, layers, count, head = self.choices, self.layers, self.count, self.head
        batch = float(self.problem.sizes.batch_bytes * count)
        rows: list[tuple[str, Affine]] = []
        # What layers 0..l keep for the backward pass.
        kept: list[Affine] = [Affine()]
        for layer in range(1, head):
            own = self._kept_input(layer) + count * self._saved(layer, Tier.DEVICE)
            own += float(layers[layer].parameter_bytes) * choices.resident(layer)
            below = kept[-1] + own
            kept.append(choices.derive(below) if below.terms else below)
        table = float(layers[0].parameter_bytes) * choices.resident(0)
        for window in range(head):
            base = Affine(batch + self._slabs(window)) + self._working(Action.FORWARD, window)
            if window:
                base += table
            rows += [(f"forward {window}", base + row) for row in self._forward(window, kept)]
        rows += [("loss", Affine(batch + self._slabs(head)) + row) for row in self._loss(kept)]
        for layer in range(head - 1, -1, -1):
            window = 2 * head - layer
            base = Affine(batch + self._slabs(window))
            if self.tied:
                base += float(layers[0].accumulator_bytes)
            rows += [(f"backward {layer}", base + row) for row in self._backward(layer, window, kept)]
        return rows

    def _forward(self, layer: int, kept: list[Affine]) -> list[Affine]:
        layers, count = self.layers, self.count
        below = kept[layer - 1] if layer else Affine()
        own_saved = self._saved(layer, Tier.DEVICE) if layer else Affine()
        own_input = self._kept_input(layer) if layer else Affine()
        lag = self._lag(layer)
        below += self._turning_inputs(layer)
        in_first = self._leaving(layer) + self._left_behind(layer, lag - 1)
        in_last = min(count, lag) * self._leaving(layer) + self._left_behind(layer, lag - count)
        beyond = self._coming_after(layer, self.ahead)
        if self.streamed:
            streamed = float((self.ahead + 1 + _STREAMED_INPUTS) * self.largest_input)
            every = below + own_input + streamed + count * own_saved + self._kept_input(layer + 1)
            return [every + in_first, every + in_last + beyond]
        size, after = layers[layer].input_bytes, layers[layer + 1].input_bytes
        first = below + float(count * size + after) + own_saved + in_first
        before = below + float(count * size) + self._left_behind(layer, lag)
        # The last microbatch: what the layer keeps of its input, and all of its output.
        kept_share = own_input * ((count - 1) / count)
        last = below + kept_share + float(size + count * after) + count * own_saved + in_last + beyond
        return [first, before, last]

    def _accumulating(self, layer: int) -> tuple[float, float]:
        """Gradient buffers of a layer at its first and at its last microbatch."""
        gradient, accumulator = self.layers[layer].gradient_bytes, self.layers[layer].accumulator_bytes
        if self.count == 1:
            return float(gradient), float(gradient)
        return float(accumulator), float(accumulator + gradient)

    def _loss(self, kept: list[Affine]) -> list[Affine]:
        size, count = self.layers[self.head].input_bytes, self.count
        first, last = self._accumulating(self.head)
        if self.tied:
            first, last = (total + self.layers[0].accumulator_bytes for total in (first, last))
            # The table may stay from the first window on.
        working = self._working(Action.LOSS, self.head)
        if self.streamed:
            fixed = float(count * size + (self.ahead + 1 + _STREAMED_INPUTS) * size)
        else:
            fixed = float((count + 1) * size)
        below = kept[-1] + self._turning_inputs(self.head)
        lag = self._lag(self.head)
        early = self._left_behind(self.head, lag) + self._coming_after(
            self.head, max(0, self.ahead - count + 1)
        )
        late = self._left_behind(self.head, lag - count + 1) + self._coming_after(self.head, self.ahead)
        return [
            below + fixed + working + first + early,
            below + fixed + working + last + late,
            below + float(count * size) + early,
        ]

    def _segment_inputs(self, layer: int) -> Affine:
        """Inputs of all microbatches on the device because layers up to `layer` are recomputed."""

        def live(s: SegmentChoice) -> float:
            if self.streamed or s.start == s.end:
                return 0.0
            inputs = sum(self.layers[i].input_bytes for i in range(s.start + 1, layer + 1))
            if s.home is not Boundary.DEVICE:
                inputs += self.layers[s.start].input_bytes
            return float(self.count * inputs)

        return self.choices.covering(layer, live)

    def _backward(self, layer: int, window: int, kept: list[Affine]) -> list[Affine]:
        layers, count = self.layers, self.count
        above, size = layers[layer + 1].input_bytes, layers[layer].input_bytes
        first, last = self._accumulating(layer)
        if self.tied and layer == 0:
            # Its accumulator is there since the loss.
            first, last = (float(layers[0].gradient_bytes),) * 2
        previous = float(layers[layer + 1].gradient_bytes)
        older = float(layers[layer + 2].gradient_bytes) if layer + 2 <= self.head else 0.0
        working = self._working(Action.BACKWARD, layer)
        if layer:
            recompute = max(
                self.problem.working_bytes(Action.RECOMPUTE, again, ())
                for again in range(max(1, layer - self.problem.longest_segment + 1), layer + 1)
            )
            if recompute > working.constant and self.problem.longest_segment > 1:
                working = self.choices.derive(
                    working,
                    self.choices.ending(layer, lambda s: float(recompute if s.start < s.end else 0)),
                )
        inputs = self._segment_inputs(layer)
        all_kept = kept[layer] + inputs
        coming = min(count, self.ahead + 1) * self._coming(layer)
        beyond = self._coming_after(window, max(0, self.ahead + 1 - count))
        if self.streamed:
            gradients_first = gradients_last = gradients_before = float(_STREAMED_INPUTS * self.largest_input)
        else:
            gradients_first = float(count * above + size)
            gradients_last = float(above + count * size)
            gradients_before = float(count * above)
        rows = [all_kept + coming + beyond + gradients_first + first + previous + working]
        if count > 1:
            share = Affine()
            if layer:
                share = self._kept_input(layer) + count * self._saved(layer, Tier.DEVICE)
            own_gone = -1.0 * share * ((count - 1) / count)
            final = all_kept + own_gone + self._coming(layer) + self._coming_after(window, self.ahead)
            rows.append(final + gradients_last + last + previous + working)
        # Before the first microbatch starts, the gradient of two windows ago may still be there.
        if older > first:
            rows.append(all_kept + coming + beyond + gradients_before + previous + older)
        return rows

    def host(self) -> Affine:
        choices, count = self.choices, self.count
        total = Affine(float(self.problem.static_host_bytes))
        states = []
        for layer, sizes in enumerate(self.layers):
            on_nvme = choices.state_on_nvme(layer)
            total += float(sizes.state_bytes) * (1.0 - 1.0 * on_nvme)
            if on_nvme.terms:
                states.append(float(STATE_WINDOW * sizes.state_bytes) * on_nvme)
            if 0 < layer < self.head:
                total += count * self._saved(layer, Tier.HOST)
                size = float(count * sizes.input_bytes)
                total += choices.starting(
                    layer, lambda s, size=size: size if s.home is Boundary.HOST else 0.0
                )
        if states:
            total += choices.derive(*states)
        if self.streamed:
            total += self._streamed_host()
        passing = self._passing()
        if passing:
            total += choices.derive(*passing)
        return total

    def _streamed_host(self) -> Affine:
        """Activations between two layers, their gradients, and recomputed inputs of one segment."""
        fixed = 2.0 * (self.count + self.ahead + 2) * self.largest_input
        if self.problem.longest_segment == 1:
            return Affine(fixed)
        segments = [
            self.choices.ending(end, lambda s: float(self.count * self.largest_input * (s.end - s.start)))
            for end in self.choices.blocks
        ]
        return fixed + self.choices.derive(*(expression for expression in segments if expression.terms))

    def _passing(self) -> list[Affine]:
        """Host copies of what lives on NVMe, on the way there or back."""
        if not self.problem.nvme_boundaries:
            return []
        expressions = []

        def there(layer: int) -> Affine:
            size = float(self.layers[layer].input_bytes)
            return self.choices.starting(layer, lambda s: size if s.home is Boundary.NVME else 0.0)

        for layer in self.choices.blocks:
            here = there(layer)
            following = there(layer + 1) if layer + 1 < self.head else Affine()
            item = here + self._saved(layer, Tier.NVME)
            if not item.terms:
                continue
            expressions.append((self.count + 1) * (here + following) + (SPILL_WINDOW + 2) * item)
            lingering = SPILL_WINDOW + 1
            loads = self.ahead + LOAD_AHEAD_ITEMS + 2 + lingering
            coming = self._saved(layer, Tier.NVME) + self.choices.ending(
                layer,
                lambda s: float(self.layers[s.start].input_bytes) if s.home is Boundary.NVME else 0.0,
            )
            expressions.append(loads * coming)
        return expressions

    def nvme(self) -> Affine:
        total = Affine()
        for layer, sizes in enumerate(self.layers):
            total += float(sizes.state_bytes) * self.choices.state_on_nvme(layer)
            if 0 < layer < self.head:
                total += self.count * self._saved(layer, Tier.NVME)
                size = float(self.count * sizes.input_bytes)
                total += self.choices.starting(
                    layer, lambda s, size=size: size if s.home is Boundary.NVME else 0.0
                )
        return total
