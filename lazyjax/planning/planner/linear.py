"""A mixed-integer linear program as plain data, and what is asked and answered about it.

Both sides of the solver's process border import this and nothing else of the planner, so it
imports neither a solver nor JAX.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Literal

Sense = Literal["<", ">", "="]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]
#: Of the same program: a path of questions that go on from each other's answers, those aside of it, and those
#: that are far from any other and begin anew.
Line = Literal["path", "aside", "anew"]

_numbers = itertools.count()


class LinearProgram:
    """Columns and rows of a minimisation, to be added to only.

    Attributes:
        number: differs from that of every other program of this process.
        lower, upper, integral: one entry per column.
        columns, coefficients: nonzeros of all rows, one row after another.
        ends: where in these each row ends.
        senses, rights: of each row: `terms (sense) right`.
        objective: column -> coefficient.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.lower, self.upper = array.array("d"), array.array("d")
        self.integral = array.array("b")
        self.columns, self.coefficients = array.array("i"), array.array("d")
        self.ends, self.rights = array.array("q"), array.array("d")
        self.senses: list[Sense] = []
        self.objective: dict[int, float] = {}

    def add_column(self, lower: float = 0.0, upper: float = math.inf, *, integral: bool = False) -> int:
        """A new column; its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.integral.append(integral)
        return len(self.lower) - 1

    def add_row(self, terms: Mapping[int, float], sense: Sense, right: float) -> None:
        """Requires `sum of coefficient x column (sense) right`."""
        self.columns.extend(terms.keys())
        self.coefficients.extend(terms.values())
        self.ends.append(len(self.columns))
        self.senses.append(sense)
        self.rights.append(right)


@dataclasses.dataclass(frozen=True)
class Question:
    """One solve of a program.

    Attributes:
        solver: `CBC` or `HIGHS`.
        relaxed: without integrality.
        bounds: column -> (lower, upper), for this solve only.
        start: column -> value of a known solution; may leave columns out.
        relative_gap: at which to stop.
        max_seconds: at which to stop.
        line: which earlier answer a relaxation goes on from: the last one of its line.
        large: a relaxation that takes long from nothing; from there it may be solved by interior points.
    """

    solver: str
    relaxed: bool = False
    line: Line = "path"
    large: bool = False
    bounds: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    start: Mapping[int, float] = dataclasses.field(default_factory=dict)
    relative_gap: float = 1e-4
    max_seconds: float = 30.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """Outcome of one solve.

    Attributes:
        status: `unknown` where the solver stopped without solution or proof.
        objective: of the solution.
        bound: no solution is better; minus infinity where the solver says nothing.
        values: of all columns; None without a solution.
    """

    status: Status
    objective: float
    bound: float
    values: array.array[float] | None
