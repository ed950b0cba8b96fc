"""Periods and memory of many assignments of one problem at once, with arrays in place of numbers.

The same replay as `lazyjax.planning.program.simulate`, for a fixed number of steps, and the memory rows of
`lazyjax.planning.planner.memory`. Descent compares thousands of plans with it, and brute force all
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from jaxtyping import Bool, Float64

from lazyjax.planning.planner.affine import Number
from lazyjax.planning.planner.memory import MemoryRows, usable_bytes
from lazyjax.planning.planner.timing import TimeModel
from lazyjax.planning.program.conditions import ALWAYS, Condition
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

#: Relative difference of advances below which an assignment counts as settled.
_ACCURACY = 1e-10
#: Weight of all exceeded rows together beside the worst one, so that every improvement shows.
_SUM_WEIGHT = 1e-3

_COMPUTING = (Resource.COMPUTE, Resource.CPU)

#: Assignments with derived variables, as `Choices.complete` returns them.
Completed = Float64[np.ndarray, "batch variables"]
PerAssignment = Float64[np.ndarray, "batch"]


class Periods(NamedTuple):
    """Outcome of a replay of some steps.

    Attributes:
        seconds: the largest advance of any operation over the last step.
        settled: whether all operations advanced equally, so that this is the steady state.
        end: of every operation in the last step.
    """

    seconds: PerAssignment
    settled: Bool[np.ndarray, "batch"]
    end: Float64[np.ndarray, "operations batch"]


class BatchReplay:
    """Evaluates assignments of a problem's decisions.

    Args:
        rows: the problem's memory rows; their products are among the model's choices.
    """

    def __init__(self, model: TimeModel, rows: MemoryRows) -> None:
        self.model = model
        size, operations = model.choices.size, model.operations
        self._limits = np.array([usable_bytes(model.problem.capacity[tier]) for tier in rows.tiers])
        self._bytes, self._bytes_constant = rows.matrix, rows.constants
        on_device = np.array([tier is Tier.DEVICE for tier in rows.tiers], float)
        weights = on_device / np.maximum(self._limits, 1.0) / max(1.0, on_device.sum())
        self._share, self._share_constant = self._bytes @ weights, self._bytes_constant @ weights
        self._seconds = _matrix([operation.seconds.terms for operation in operations], size)
        self._seconds_constant = np.array([operation.seconds.constant for operation in operations])
        # What no plan needs has no pace of its own.
        self._everywhere = [o.index for o in operations if ALWAYS in o.exists]
        moves = np.array([operation.resource not in _COMPUTING for operation in operations], float)
        self._moving, self._moving_constant = self._seconds @ moves, self._seconds_constant @ moves

    def excess(self, values: Completed) -> PerAssignment:
        """By what share capacities are exceeded: the worst row, and a little of all; 0 where all fit."""
        over = _product(values, self._bytes) + (self._bytes_constant - self._limits)
        shares = np.maximum(over, 0.0) / np.maximum(self._limits, 1.0)
        return np.asarray(shares.max(axis=1, initial=0.0) + _SUM_WEIGHT * shares.sum(axis=1))

    def device_share(self, values: Completed) -> PerAssignment:
        """Share of the device's memory in use, mean over the memory rows."""
        return np.asarray(values @ self._share + self._share_constant)

    def moved_seconds(self, values: Completed) -> PerAssignment:
        """Busy seconds of all links and drives in a step."""
        return np.asarray(values @ self._moving + self._moving_constant)

    def periods(
        self,
        values: Completed,
        *,
        steps: int,
        before: Float64[np.ndarray, "operations"] | None = None,
    ) -> Periods:
        """Replays at least two steps.

        Args:
            before: ends of a step to go on from, for assignments close to the one it is of; by
                default queues are empty.
        """
        durations = np.ascontiguousarray((_product(values, self._seconds) + self._seconds_constant).T)
        absent = self._absent_waits(values)
        if before is None:
            end = self._step(durations, absent, None)
        else:
            end = np.repeat(before[:, None], len(values), axis=1)
        for _ in range(steps - 1):
            last, end = end, self._step(durations, absent, end)
        advances = end - last
        low, high = advances[self._everywhere].min(axis=0), advances.max(axis=0)
        return Periods(high, np.asarray(high - low <= _ACCURACY * high), end)

    def _absent_waits(self, values: Completed) -> dict[Condition, PerAssignment | None]:
        """Per condition of a wait: 0 where it applies and minus infinity elsewhere; None if nowhere."""
        absent: dict[Condition, PerAssignment | None] = {}
        for operation in self.model.operations:
            for _, condition in (*operation.binding, *operation.waits_previous):
                if condition != ALWAYS and condition not in absent:
                    applies = condition.value(values) > 0.5
                    absent[condition] = np.where(applies, 0.0, -np.inf) if applies.any() else None
        return absent

    def _step(
        self,
        durations: Float64[np.ndarray, "operations batch"],
        absent: dict[Condition, PerAssignment | None],
        previous: Float64[np.ndarray, "operations batch"] | None,
    ) -> Float64[np.ndarray, "operations batch"]:
        operations = self.model.operations
        free: dict[Resource, PerAssignment] = {}
        if previous is not None:
            for operation in operations:
                free[operation.resource] = previous[operation.index]
        end = np.empty_like(durations)

        def delay(moment: PerAssignment, waited: PerAssignment, condition: Condition) -> None:
            if condition == ALWAYS:
                np.maximum(moment, waited, out=moment)
                return
            offsets = absent[condition]
            if offsets is not None:
                np.maximum(moment, waited + offsets, out=moment)

        for operation in operations:
            moment = end[operation.index]
            moment[:] = free[operation.resource] if operation.resource in free else 0.0
            for wait, condition in operation.binding:
                delay(moment, end[wait], condition)
            if previous is not None:
                for wait, condition in operation.waits_previous:
                    delay(moment, previous[wait], condition)
            moment += durations[operation.index]
            free[operation.resource] = moment
        return end


def _product(
    values: Completed, matrix: Float64[np.ndarray, "variables columns"]
) -> Float64[np.ndarray, "batch columns"]:
    """values @ matrix, for assignments that are all close to the first."""
    differing = np.flatnonzero((values != values[0]).any(axis=0))
    if 2 * len(differing) > len(values[0]):
        return np.asarray(values @ matrix)
    changed = scipy.sparse.csr_array(values - values[0])
    return np.asarray(changed @ matrix + values[0] @ matrix)


def _matrix(columns: Sequence[dict[int, Number]], size: int) -> Float64[np.ndarray, "variables columns"]:
    matrix = np.zeros((size, len(columns)))
    for column, terms in enumerate(columns):
        for variable, coefficient in terms.items():
            matrix[variable, column] = coefficient
    return matrix
