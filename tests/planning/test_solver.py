"""A solver that dies, hangs or wants too much memory ends neither planning nor a run."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import sys

import pytest

from experiments.benchmarks.planner_exactness import random_problem
from experiments.benchmarks.solving import solve
from lazyjax.hardware.profile import load_profile
from lazyjax.planning.planner import solver
from lazyjax.planning.planner.leanest import leanest_plan, memory_shortfall
from lazyjax.planning.planner.linear import LinearProgram, Question
from lazyjax.planning.planner.milp import Program
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.search import find_plan
from lazyjax.planning.planner.solver import SolverFailure, SolverProcess, shared_process
from lazyjax.planning.program.verify import verify
from lazyjax.specs import Tier
from tests.tiny import template

#: Processes in the solver's place. They take the first question and then go wrong.
_RECEIVE = "import os, signal, sys, time; from multiprocessing.connection import Connection; "
_RECEIVE += "socket = Connection(int(sys.argv[1])); socket.recv(); "
BROKEN = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "crashed": "os.kill(os.getpid(), signal.SIGSEGV)",
    "hung": "time.sleep(600)",
    "left": "sys.exit(3)",
}
SAID = {
    "killed": "was ended by SIGKILL",
    "crashed": "was ended by SIGSEGV",
    "hung": "did not answer within",
    "left": "ended with exit code 3",
}


@pytest.fixture(params=sorted(BROKEN))
def broken(request, monkeypatch):
    """The shared process goes wrong at its first question, in one of several ways."""
    monkeypatch.setattr(solver, "COMMAND", [sys.executable, "-c", _RECEIVE + BROKEN[request.param]])
    shared = shared_process()
    if request.param == "hung":
        # No other process is waited for in vain, so only this one need not be waited for long.
        monkeypatch.setattr(solver, "_PATIENCE", 0.0)
        monkeypatch.setattr(shared, "grace_seconds", 1.0)
    shared.close()
    yield request.param
    shared.close()
    shared.failures = 0


def knapsack(columns: int = 3) -> LinearProgram:
    """Least cost of at least 2, where the first column costs 1 and the others 3."""
    program = LinearProgram()
    for column in range(columns):
        program.add_column(upper=1.0, integral=True)
        program.objective[column] = 3.0 if column else 1.0
    program.add_row(dict.fromkeys(range(columns), 1.0), ">", 1.5)
    return program


@pytest.mark.parametrize("name", solver.solvers())
def test_programs_are_solved_relaxed_bounded_and_again(name):
    process = SolverProcess()
    try:
        program = knapsack()
        relaxed = process.solve(program, Question(name, relaxed=True))
        assert relaxed.objective == pytest.approx(2.5)
        whole = process.solve(program, Question(name))
        assert (whole.status, whole.objective) == ("optimal", pytest.approx(4.0))
        assert whole.bound == pytest.approx(4.0)
        none = process.solve(program, Question(name, bounds={0: (0.0, 0.0), 1: (0.0, 0.0)}))
        assert none.status == "infeasible"
        # Bounds held for that question only, and a new process is told the program again.
        process.close()
        assert process.solve(program, Question(name)).objective == pytest.approx(4.0)
    finally:
        process.close()


def test_how_a_process_failed_is_told_and_the_next_question_has_a_new_one(broken, monkeypatch):
    with pytest.raises(SolverFailure, match=SAID[broken]):
        shared_process().solve(knapsack(), Question("CBC", max_seconds=0.1))
    monkeypatch.undo()
    assert shared_process().solve(knapsack(), Question("CBC")).objective == pytest.approx(4.0)


def test_too_much_memory_is_an_answer():
    idle = SolverProcess()
    process = None
    try:
        idle.solve(knapsack(), Question("CBC"))
        status = pathlib.Path(f"/proc/{idle.process_id}/status").read_text()
        taken_kib = int(re.search(r"VmPeak:\s+(\d+) kB", status)[1])
        process = SolverProcess(memory_bytes=taken_kib * 1024 + 32 * 2**20)
        with pytest.raises(SolverFailure, match=r"out of memory|SIGABRT|SIGSEGV|exit code"):
            process.solve(knapsack(columns=200_000), Question("CBC"))
        assert process.solve(knapsack(), Question("CBC")).objective == pytest.approx(4.0)
    finally:
        idle.close()
        if process is not None:
            process.close()


def test_after_some_failures_a_search_asks_no_more(broken):
    shared = shared_process()
    for _ in range(3):
        with pytest.raises(SolverFailure, match=SAID[broken]):
            shared.solve(knapsack(), Question("CBC", max_seconds=0.1))
    with pytest.raises(SolverFailure, match="not asked any more"):
        shared.solve(knapsack(), Question("CBC"))
    # No process was started to be waited for.
    assert shared.process_id is None
    shared.begin()
    with pytest.raises(SolverFailure, match=SAID[broken]):
        shared.solve(knapsack(), Question("CBC", max_seconds=0.1))


def test_without_a_solver_descent_finds_plans_and_bounds_still_hold(broken):
    problem = random_problem(1100, most_blocks=4, most_plans=None)
    program = Program(problem)
    assert 0 <= program.relax() < math.inf
    assert SAID[broken] in program.failures[0]
    roomy = dataclasses.replace(problem, capacity=dict.fromkeys(Tier, 10**12))
    assert memory_shortfall(roomy) == {}
    assert leanest_plan(roomy) is not None
    solution = solve(roomy)
    assert solution.plan is not None
    assert 0 < solution.bound_seconds <= solution.period_seconds
    tight = dataclasses.replace(problem, capacity=dict.fromkeys(Tier, 1))
    assert memory_shortfall(tight)[Tier.DEVICE] > 0


def test_planning_goes_on_without_a_solver(broken):

    asked = build_request(
        template("qwen2", tied=False), load_profile("rtx3090"), batch_rows=4, sequence_length=32, nvme_bytes=0
    )
    said: list[str] = []
    found = find_plan(asked, time_limit_seconds=3.0, progress=said.append)
    assert found.plan is not None
    assert found.failures
    assert SAID[broken] in said[0]
    assert said[0].endswith("going on without it")
    assert found.bound_seconds <= found.layer_period_seconds
    rows = found.plan.microbatch_rows
    verify(
        found.plan,
        asked.sizes(rows),
        asked.costs(rows).operation_seconds,
        capacity=asked.capacity,
        static_host_bytes=asked.static_host_bytes,
        working_bytes=asked.costs(rows).working_bytes,
    )
    assert found.plan.prediction.peak_bytes["device"] <= asked.capacity[Tier.DEVICE]
