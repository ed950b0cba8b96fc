"""Periods and memory of many assignments of one problem at once, with arrays in place of numbers.

The same replay as `lazyjax.planning.program.simulate`, for a fixed number of steps, and the memory rows of
`lazyjax.planning.planner.window_memory`. Descent compares thousands of plans with it, and brute force all
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from lazyjax.planning.planner.window_memory import MemoryRow, usable_bytes
from lazyjax.planning.planner.windows import WindowModel
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
        rows: the problem's memory rows; their derived quantities are among the model's choices.
    """

    def __init__(self, model: WindowModel, rows: Sequence[MemoryRow]) -> None:
        self.model = model
        size, operations = model.choices.size, model.operations
        self._limits = np.array([usable_bytes(model.problem.capacity[row.tier]) for row in rows])
        self._bytes = _matrix([row.bytes.terms for row in rows], size)
        self._bytes_constant = np.array([row.bytes.constant for row in rows])
        on_device = np.array([row.tier is Tier.DEVICE for row in rows], float)
        weights = on_device / np.maximum(self._limits, 1.0) / max(1.0, on_device.sum())
        self._share, self._share_constant = self._bytes @ weights, self._bytes_constant @ weights
        self._seconds = _matrix([operation.seconds.terms for operation in operations], size)
        self._seconds_constant = np.array([operation.seconds.constant for operation in operations])
        moves = np.array([operation.resource not in _COMPUTING for operation in operations], float)
        self._moving, self._moving_constant = self._seconds @ moves, self._seconds_constant @ moves

    def excess(self, values: Completed) -> PerAssignment:
        """By what share capacities are exceeded: the worst row, and a little of all; 0 where all fit."""
        over = values @ self._bytes + self._bytes_constant - self._limits
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
        durations = np.ascontiguousarray((values @ self._seconds + self._seconds_constant).T)
        absent = self._absent_waits(values)
        if before is None:
            end = self._step(durations, absent, None)
        else:
            end = np.repeat(before[:, None], len(values), axis=1)
        for _ in range(steps - 1):
            last, end = end, self._step(durations, absent, end)
        advances = end - last
        low, high = advances.min(axis=0), advances.max(axis=0)
        return Periods(high, np.asarray(high - low <= _ACCURACY * high), end)

    def _absent_waits(self, values: Completed) -> dict[tuple[int, int], PerAssignment | None]:
        """Per conditional wait: 0 where it applies and minus infinity elsewhere; None if nowhere."""
        absent: dict[tuple[int, int], PerAssignment | None] = {}
        for operation in self.model.operations:
            for wait, condition in operation.waits:
                if condition is not None:
                    applies = condition.value(values) > 0.5
                    # Two conditions may name the same wait.
                    key = (operation.index, wait)
                    earlier = absent[key] if key in absent else None
                    if applies.any():
                        offsets = np.where(applies, 0.0, -np.inf)
                        absent[key] = offsets if earlier is None else np.maximum(earlier, offsets)
                    else:
                        absent[key] = earlier
        return absent

    def _step(
        self,
        durations: Float64[np.ndarray, "operations batch"],
        absent: dict[tuple[int, int], PerAssignment | None],
        previous: Float64[np.ndarray, "operations batch"] | None,
    ) -> Float64[np.ndarray, "operations batch"]:
        operations = self.model.operations
        free: dict[Resource, PerAssignment] = {}
        if previous is not None:
            for operation in operations:
                free[operation.resource] = previous[operation.index]
        end = np.empty_like(durations)
        for operation in operations:
            moment = end[operation.index]
            moment[:] = free[operation.resource] if operation.resource in free else 0.0
            for wait, condition in operation.waits:
                if condition is None:
                    np.maximum(moment, end[wait], out=moment)
                    continue
                offsets = absent[operation.index, wait]
                if offsets is not None:
                    np.maximum(moment, end[wait] + offsets, out=moment)
            if previous is not None:
                for wait in operation.waits_previous:
                    np.maximum(moment, previous[wait], out=moment)
            moment += durations[operation.index]
            free[operation.resource] = moment
        return end


def _matrix(columns: Sequence[dict[int, float]], size: int) -> Float64[np.ndarray, "variables columns"]:
    matrix = np.zeros((size, len(columns)))
    for column, terms in enumerate(columns):
        for variable, coefficient in terms.items():
            matrix[variable, column] = coefficient
    return matrix
