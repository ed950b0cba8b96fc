"""Periods and memory of many assignments of one problem at once, with arrays in place of numbers.

The same replay as `lazyjax.planning.program.simulate`, for a fixed number of steps, and the memory rows of
`lazyjax.planning.planner.memory`. Descent compares thousands of plans with it, and brute force all
of them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from jaxtyping import Bool, Float64, Int

from lazyjax.planning.planner.affine import Number
from lazyjax.planning.planner.memory import MemoryRows, usable_bytes
from lazyjax.planning.planner.timing import TimeModel, Wait
from lazyjax.planning.program.conditions import ALWAYS, Condition
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

#: Relative difference of advances below which an assignment counts as settled.
_ACCURACY = 1e-10
#: Weight of all exceeded rows together beside the worst one, so that every improvement shows.
_SUM_WEIGHT = 1e-3

#: Assignments that differ in less than one part in so many are multiplied by their differences.
_SPARSE = 8

_COMPUTING = (Resource.COMPUTE, Resource.CPU)

#: Assignments with derived variables, as `Choices.complete` returns them.
Completed = Float64[np.ndarray, "batch variables"]
PerAssignment = Float64[np.ndarray, "batch"]


class Assignments:
    """Many assignments, fast to multiply where most of them differ from the first in a few decisions."""

    def __init__(self, values: Completed) -> None:
        self.values = values
        self._base = values[0] if len(values) else np.zeros(values.shape[1])
        rows, columns = np.nonzero(values != self._base)
        self._changed: scipy.sparse.csr_array | None = None
        if _SPARSE * len(rows) <= values.size:
            ends = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(values)))])
            differences = values[rows, columns] - self._base[columns]
            self._changed = scipy.sparse.csr_array((differences, columns, ends), shape=values.shape)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Int[np.ndarray, "some"]) -> Assignments:
        some = copy.copy(self)
        some.values = self.values[rows]
        some._changed = None if self._changed is None else self._changed[rows]
        return some

    def affine(
        self, matrix: Float64[np.ndarray, "variables columns"], constants: Float64[np.ndarray, "columns"]
    ) -> Float64[np.ndarray, "batch columns"]:
        """assignments @ matrix + constants."""
        if self._changed is None:
            return np.asarray(self.values @ matrix + constants)
        result = np.asarray(self._changed @ matrix)
        result += self._base @ matrix + constants
        return result


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


#: Per condition of a wait: 0 where it applies and minus infinity elsewhere; None if it applies nowhere.
Absent = dict[Condition, PerAssignment | None]


class _Replayed(NamedTuple):
    """An operation of a replay, with the waits that apply to some of the assignments."""

    number: int
    resource: Resource
    waits: list[tuple[int, PerAssignment | None]]
    waits_previous: list[tuple[int, PerAssignment | None]]


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
        waits = [wait for o in operations for wait in (*o.binding, *o.waits_previous)]
        conditional = dict.fromkeys(condition for _, condition in waits if condition != ALWAYS)
        self._number = {condition: number for number, condition in enumerate(conditional)}
        self._conditions = _matrix([condition.terms() for condition in conditional], size)
        self._conditions_constant = np.array([float(condition.constant) for condition in conditional])
        # What no plan needs has no pace of its own.
        self._everywhere = [o.index for o in operations if ALWAYS in o.exists]
        moves = np.array([operation.resource not in _COMPUTING for operation in operations], float)
        self._moving, self._moving_constant = self._seconds @ moves, self._seconds_constant @ moves

    def excess(self, values: Completed | Assignments) -> PerAssignment:
        """By what share capacities are exceeded: the worst row, and a little of all; 0 where all fit."""
        over = _assignments(values).affine(self._bytes, self._bytes_constant - self._limits)
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
        values: Completed | Assignments,
        *,
        steps: int,
        before: Float64[np.ndarray, "operations"] | None = None,
    ) -> Periods:
        """Replays at least two steps.

        Args:
            before: ends of a step to go on from, for assignments close to the one it is of; by
                default queues are empty.
        """
        assignments = _assignments(values)
        durations = np.ascontiguousarray(assignments.affine(self._seconds, self._seconds_constant).T)
        absent = self._absent_waits(assignments)
        replayed = [
            _Replayed(o.index, o.resource, _held(o.binding, absent), _held(o.waits_previous, absent))
            for o in self.model.operations
        ]
        if before is None:
            end = self._step(durations, replayed, None)
        else:
            end = np.repeat(before[:, None], len(values), axis=1)
        for _ in range(steps - 1):
            last, end = end, self._step(durations, replayed, end)
        advances = end - last
        low, high = advances[self._everywhere].min(axis=0), advances.max(axis=0)
        return Periods(high, np.asarray(high - low <= _ACCURACY * high), end)

    def _absent_waits(self, assignments: Assignments) -> Absent:
        """By condition, for these assignments."""
        applies = assignments.affine(self._conditions, self._conditions_constant).T > 0.5
        offsets = np.where(applies, 0.0, -np.inf)
        anywhere = applies.any(axis=1)
        return {c: offsets[number] if anywhere[number] else None for c, number in self._number.items()}

    @staticmethod
    def _step(
        durations: Float64[np.ndarray, "operations batch"],
        steps: Sequence[_Replayed],
        previous: Float64[np.ndarray, "operations batch"] | None,
    ) -> Float64[np.ndarray, "operations batch"]:
        free: dict[Resource, PerAssignment] = {}
        if previous is not None:
            for index, resource, _, _ in steps:
                free[resource] = previous[index]
        end, nothing = np.empty_like(durations), np.zeros(durations.shape[1])
        for index, resource, waits, waits_previous in steps:
            moment = end[index]
            begin = free.get(resource, nothing)
            for wait, offsets in waits:
                waited = end[wait]
                begin = np.maximum(begin, waited if offsets is None else waited + offsets, out=moment)
            if previous is not None:
                for wait, offsets in waits_previous:
                    waited = previous[wait]
                    begin = np.maximum(begin, waited if offsets is None else waited + offsets, out=moment)
            free[resource] = np.add(begin, durations[index], out=moment)
        return end


def _assignments(values: Completed | Assignments) -> Assignments:
    return values if isinstance(values, Assignments) else Assignments(values)


def _held(waits: Sequence[Wait], absent: Absent) -> list[tuple[int, PerAssignment | None]]:
    """Waits that apply to some assignment, with what takes them out of the others; None where to all."""
    held: list[tuple[int, PerAssignment | None]] = []
    for wait, condition in waits:
        if condition == ALWAYS:
            held.append((wait, None))
        elif (offsets := absent[condition]) is not None:
            held.append((wait, offsets))
    return held


def _matrix(columns: Sequence[dict[int, Number]], size: int) -> Float64[np.ndarray, "variables columns"]:
    matrix = np.zeros((size, len(columns)))
    for column, terms in enumerate(columns):
        for variable, coefficient in terms.items():
            matrix[variable, column] = coefficient
    return matrix
