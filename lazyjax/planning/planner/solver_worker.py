"""The process in which mixed-integer programs are solved; started by `lazyjax.planning.planner.solver`.

Solvers are native code: they crash, hang and take memory. Here they may, because nothing else is
in this process. Requests arrive and answers leave as pickles over an inherited socket, whose
number is the only argument besides the memory limit. The process ends with its parent.

The only module that imports `mip`.
"""

from __future__ import annotations

import array
import importlib.util
import logging
import math
import os
import pathlib
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from lazyjax.planning.planner.linear import Answer, Line, LinearProgram, Question

_HIGHS_LIBRARY = "PMIP_HIGHS_LIBRARY"
#: HiGHS keeps one pool of threads per process and refuses another number later.
_THREADS = 2
_PARENT_POLL_SECONDS = 2.0
#: Objectives are periods in units of about a thousandth; beyond this a bound is not one.
_NO_BOUND = 1e30


class Request(NamedTuple):
    """A question about the program `number`.

    Attributes:
        program: None where this process has it already.
        forget: numbers of programs that nobody will ask about again.
    """

    number: int
    program: LinearProgram | None
    question: Question
    forget: tuple[int, ...]


def highs_library() -> str | None:
    """A HiGHS shared library that Python-MIP can load, if one is installed."""
    if _HIGHS_LIBRARY in os.environ:
        return os.environ[_HIGHS_LIBRARY]
    spec = importlib.util.find_spec("highsbox")
    if spec is None or spec.origin is None:
        return None
    found = sorted(pathlib.Path(spec.origin).parent.rglob("libhighs.*"))
    return str(found[0]) if found else None


def _import_mip() -> Any:
    """Python-MIP, told where HiGHS is before it looks for it on import."""
    library = highs_library()
    if library is not None:
        os.environ[_HIGHS_LIBRARY] = library
    logging.getLogger("mip").setLevel(logging.CRITICAL)
    import mip

    return mip


class _Model:
    """A program in the solver's own form."""

    def __init__(self, mip: Any, program: LinearProgram, solver: str) -> None:
        self.mip = mip
        # CBC's interior points take longer than its simplex.
        self.interior, self.answered = solver == "HIGHS", False
        self.model = mip.Model(solver_name=solver)
        self.model.verbose = 0
        self.model.threads = _THREADS
        self.bounds = list(zip(program.lower, program.upper, strict=True))
        self.columns = [
            self.model.add_var(
                lb=lower,
                ub=min(upper, mip.INF),
                var_type=mip.BINARY
                if integral and upper == 1
                else mip.INTEGER
                if integral
                else mip.CONTINUOUS,
            )
            for (lower, upper), integral in zip(self.bounds, program.integral, strict=True)
        ]
        begin = 0
        for end, sense, right in zip(program.ends, program.senses, program.rights, strict=True):
            terms = dict(
                zip(
                    (self.columns[column] for column in program.columns[begin:end]),
                    program.coefficients[begin:end],
                    strict=True,
                )
            )
            # A row is built whole, which is much faster than by operators.
            self.model.add_constr(mip.LinExpr(expr=terms, const=-right, sense=sense))
            begin = end
        objective = {self.columns[column]: value for column, value in program.objective.items()}
        self.model.objective = mip.minimize(mip.LinExpr(expr=objective))

    def solve(self, question: Question) -> Answer:
        model, statuses = self.model, self.mip.OptimizationStatus
        for column, (lower, upper) in question.bounds.items():
            self.columns[column].lb, self.columns[column].ub = lower, min(upper, self.mip.INF)
        model.max_mip_gap = question.relative_gap
        if question.start:
            model.start = [(self.columns[column], value) for column, value in question.start.items()]
        from_nothing = question.line == "anew" or not self.answered
        interior = self.interior and question.relaxed and question.large and from_nothing
        model.lp_method = self.mip.LP_Method.BARRIER if interior else self.mip.LP_Method.AUTO
        self.answered = True
        if question.relaxed:
            status = model.optimize(relax=True)
        else:
            status = model.optimize(max_seconds=question.max_seconds)
        # Solvers forget their results when a column changes, so all of them are read first.
        infeasible = status in (statuses.INFEASIBLE, statuses.INT_INFEASIBLE)
        # Objectives here are never negative: what is said to be unbounded is infeasible.
        answer = Answer("infeasible", math.inf, math.inf, None)
        if not infeasible and status is not statuses.UNBOUNDED:
            answer = self._answer(status, question.relaxed)
        for column in question.bounds:
            lower, upper = self.bounds[column]
            self.columns[column].lb, self.columns[column].ub = lower, min(upper, self.mip.INF)
        return answer

    def _answer(self, status: Any, relaxed: bool) -> Answer:
        model, statuses = self.model, self.mip.OptimizationStatus
        optimal = status is statuses.OPTIMAL
        if relaxed and not optimal:
            return Answer("unknown", math.inf, -math.inf, None)
        bound = _bound(model.objective_bound)
        if not model.num_solutions and not relaxed:
            return Answer("unknown", math.inf, bound, None)
        values = array.array("d", (column.x for column in self.columns))
        objective = float(model.objective_value)
        return Answer(
            "optimal" if optimal else "feasible", objective, objective if relaxed else bound, values
        )


def _bound(said: float | None) -> float:
    """A proven bound; what a solver says that was stopped before it had one (the largest number) is none."""
    return -math.inf if said is None or abs(said) >= _NO_BOUND else float(said)


def serve(connection: Connection) -> None:
    """Answers until the other end closes; an answer is an `Answer` or the text of a failure."""
    mip = _import_mip()
    models: dict[tuple[int, str, Line], _Model] = {}
    programs: dict[int, LinearProgram] = {}
    while True:
        try:
            request: Request = connection.recv()
        except (EOFError, OSError):
            return
        for number in request.forget:
            programs.pop(number, None)
            for key in [key for key in models if key[0] == number]:
                del models[key]
        if request.program is not None:
            programs[request.number] = request.program
        try:
            key = (request.number, request.question.solver, request.question.line)
            if key not in models:
                models[key] = _Model(mip, programs[request.number], request.question.solver)
            answer: Answer | str = models[key].solve(request.question)
        except MemoryError:
            answer = "out of memory"
        except Exception as error:
            # Whatever a solver's interface raises is told; the planner goes on without it.
            answer = f"{type(error).__name__}: {error}"
        connection.send(answer)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Serves the socket `arguments[0]` within `arguments[1]` bytes of memory (0: no limit)."""
    descriptor, limit_bytes = map(int, arguments)
    # An interrupt is the parent's to handle: a run finishes its step before it stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Solvers print on their own; nothing of that belongs on the user's terminal.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(Connection(descriptor))


if __name__ == "__main__":
    main(sys.argv[1:])
