"""The rows of a planning problem as a linear program: decisions, memory, start times.

Times are in small parts of a rough period and bytes in units of the smallest memory, so that the solver's
tolerances mean the same for every model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from lazyjax.planning.planner.affine import Affine
from lazyjax.planning.planner.decisions.decision import Binaries
from lazyjax.planning.planner.linear import Answer, LinearProgram, Sense
from lazyjax.planning.planner.memory import MemoryRows, usable_bytes
from lazyjax.planning.planner.timing import TimeModel
from lazyjax.planning.program.conditions import ALWAYS, Condition
from lazyjax.specs import Tier
from lazyjax.timeline import Resource


class ProgramRows:
    """Builds the program of one problem; memory and time are added where they are asked for.

    Attributes:
        program: what was built.
        binaries: columns of the decisions.
        byte_units: bytes to a unit of each tier's rows.
        time_unit: seconds to a unit of time.
        period: column of the period.
        exclusive: sets of variables of which one at most is on, each with the columns that are then 0.
    """

    def __init__(self, model: TimeModel, memory: MemoryRows) -> None:
        self.model, self.memory, self.problem = model, memory, model.problem
        self.program = LinearProgram()
        self.byte_units = _byte_units(memory, model.problem.capacity)
        self.time_unit = math.nan
        self._decide()
        self.binaries = self.variables[: model.choices.binaries]

    def binaries_of(self, answer: Answer) -> Binaries:
        """The decisions of an answer that has values."""
        assert answer.values is not None
        return np.array([answer.values[column] for column in self.binaries])

    def _decide(self) -> None:
        choices = self.model.choices
        self.variables = [self.program.add_column(upper=1.0, integral=True) for _ in range(choices.binaries)]
        self.exclusive = {group: list[int]() for decision in choices.decisions for group in decision.groups()}
        for row in choices.rows():
            terms = self._terms(row.terms)
            if row.sense == "<" and row.right == 1.0 and set(row.terms.terms.values()) == {1.0}:
                none = self.program.add_column(upper=1.0)
                self.exclusive[frozenset(row.terms.terms)] = [none]
                self._add({**terms, none: 1.0}, row.terms.constant - row.right, "=")
            else:
                self._add(terms, row.terms.constant - row.right, row.sense)
        for pair in choices.products:
            variable = self.program.add_column(upper=1.0)
            self.variables.append(variable)
            both = Affine(1.0)
            for condition in pair:
                terms = self._terms(Affine.of(condition, -1.0))
                self._add({**terms, variable: 1.0}, -float(condition.constant), "<")
                both.add(condition, -1.0)
            self._add({**self._terms(both), variable: 1.0}, both.constant, ">")

    def _terms(self, affine: Affine, factor: float = 1.0) -> dict[int, float]:
        """Columns of `factor` times an affine expression, without its constant."""
        return {
            self.variables[v]: coefficient * factor for v, coefficient in affine.terms.items() if coefficient
        }

    def _add(self, terms: Mapping[int, float], constant: float, sense: Sense) -> None:
        """Adds the row `terms + constant (sense) 0`."""
        self.program.add_row(terms, sense, -constant)

    def limit_memory(self, slack: Mapping[Tier, int] | None = None) -> None:
        """Adds live bytes moment by moment, where some assignment exceeds the capacity.

        Args:
            slack: columns of what may be missing; with them all moments are added.
        """
        matrix, constants = self.memory.matrix, self.memory.constants
        highest = constants + np.maximum(matrix, 0.0).sum(axis=0)
        before: tuple[Tier, int, int] | None = None
        for row, tier in enumerate(self.memory.tiers):
            if slack is None and highest[row] <= self.problem.capacity[tier]:
                continue
            unit = self.byte_units[tier]
            limit = usable_bytes(self.problem.capacity[tier]) / unit
            live = self.program.add_column(upper=math.inf if slack is not None else max(0.0, limit))
            change, constant = matrix[:, row], constants[row]
            terms = {live: 1.0}
            if before is not None and before[0] is tier:
                change, constant = change - matrix[:, before[1]], constant - constants[before[1]]
                terms[before[2]] = -1.0
            variables = np.flatnonzero(change)
            terms |= {self.variables[v]: -float(change[v]) / unit for v in variables}
            self._add(terms, -float(constant) / unit, "=")
            if slack is not None:
                self._add({live: 1.0, slack[tier]: -1.0}, -limit, "<")
            before = tier, row, live

    def time(self, time_units: float) -> None:
        """Adds start times, the period and the objective.

        Args:
            time_units: units of time in a rough period.
        """
        model = self.model
        rough = sum(max(0.0, operation.seconds.constant) for operation in model.operations)
        rough += sum(max((0.0, *operation.seconds.terms.values())) for operation in model.operations)
        self.time_unit = max(rough, 1e-12) / time_units
        self.period = self.program.add_column()
        self.start = [self.program.add_column() for _ in model.operations]
        self.seconds = [self._seconds(operation.seconds) for operation in model.operations]
        # No plan worth having takes longer than everything after everything.
        self.horizon = 2 * rough / self.time_unit
        last: dict[Resource, int] = {}
        first: dict[Resource, int] = {}
        for operation in model.operations:
            index, resource = operation.index, operation.resource
            if resource in last:
                self._after(index, last[resource], ALWAYS)
            else:
                first[resource] = index
            last[resource] = index
            for wait, condition in operation.binding:
                self._after(index, wait, condition)
            for wait, condition in operation.waits_previous:
                self._after(index, wait, condition, previous=True)
        for resource, index in first.items():
            self._after(index, last[resource], ALWAYS, previous=True)
            own = [self.seconds[o.index] for o in model.operations if o.resource is resource]
            busy = {column: -1.0 for column in own if isinstance(column, int)}
            fixed = sum((seconds for seconds in own if isinstance(seconds, float)), 0.0)
            self._add({**busy, self.period: 1.0}, -fixed, ">")
        self.program.objective = {self.period: 1.0}

    def _seconds(self, seconds: Affine) -> int | float:
        """A column for what an operation takes, in units of time; a number where that is certain."""
        if not seconds.terms:
            return seconds.constant / self.time_unit
        column = self.program.add_column()
        terms = {**self._terms(seconds, -1.0 / self.time_unit), column: 1.0}
        self._add(terms, -seconds.constant / self.time_unit, "=")
        return column

    def _after(self, later: int, earlier: int, condition: Condition, *, previous: bool = False) -> None:
        duration = Affine() if condition == ALWAYS else self.horizon * (1.0 - Affine.of(condition))
        terms = self._terms(duration)
        seconds = self.seconds[earlier]
        if isinstance(seconds, float):
            duration.constant -= seconds
        else:
            terms[seconds] = -1.0
        if later != earlier:
            terms[self.start[later]], terms[self.start[earlier]] = 1.0, -1.0
        if previous:
            terms[self.period] = 1.0
        self._add(terms, duration.constant, ">")


def _byte_units(memory: MemoryRows, capacity: Mapping[Tier, int]) -> dict[Tier, float]:
    """The smallest memory; of a tier that has none, the most that may be asked of it, where that is less.

    In larger units all that is asked of it would be within the solvers' tolerance.
    """
    smallest = float(min([size for size in capacity.values() if size], default=1))
    most = memory.constants + np.maximum(memory.matrix, 0.0).sum(axis=0)
    units = dict.fromkeys(Tier, smallest)
    for tier in Tier:
        if not capacity[tier]:
            asked = [size for size, own in zip(most, memory.tiers, strict=True) if own is tier]
            units[tier] = min(smallest, max(1.0, *asked)) if asked else smallest
    return units
