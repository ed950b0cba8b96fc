"""Cases against brute force: a bound that no plan undercuts, above what the relaxation says."""

import functools
import math
import types

import numpy as np
import pytest

from experiments.benchmarks.planner_exactness import all_plans, best_by_force, random_problem
from lazyjax.planning.planner.cases import Cases, critical_conditions
from lazyjax.planning.planner.divide import condition_bounds, divide, relaxation, relaxations
from lazyjax.planning.planner.milp import Program
from lazyjax.planning.planner.solver import SolverFailure, shared_process
from lazyjax.planning.program.conditions import ALWAYS
from tests.planning.chains import SOLVERS

#: Seeds of problems with few plans whose relaxation voids waits that every plan has: about one in twenty.
SEEDS = (2164, 2307, 2309, 2311, 2462, 2687)


@functools.cache
def instance(seed):
    """A random problem small enough for brute force, and its shortest period."""
    problem = random_problem(seed, most_plans=200)
    return problem, best_by_force(problem)


def cases_of(program, **options):
    asks = [functools.partial(ask, program) for ask in (relaxation, relaxations)]
    fix = functools.partial(condition_bounds, program.linear)
    return Cases(program.model, *asks, fix, program.relax(), **options)


def ignore(bounds, values, voided):
    """Looks at nothing."""


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_plan_is_faster_than_the_bound(solver):
    raised = 0
    for seed in SEEDS:
        problem, best = instance(seed)
        program = Program(problem, solver)
        root, target = program.relax(), 1.2 * program.relax()
        cases = cases_of(program, most_conditions=math.inf)
        cases.close(lambda target=target: target, math.inf, ignore)
        bound = min(cases.bound_seconds, target)
        assert root * (1 - 1e-9) <= bound <= best * (1 + 1e-6)
        raised += bound > root * 1.001
        assert not program.failures
    # Solvers return different corners, which void different waits.
    assert raised >= len(SEEDS) // 2


@pytest.mark.parametrize("solver", SOLVERS)
def test_dividing_finds_plans_that_fit_and_bounds_them(solver):
    found = 0
    for seed in SEEDS:
        problem, best = instance(seed)
        program = Program(problem, solver)
        options = {"cutoff_seconds": best * 1.05 if math.isfinite(best) else math.inf, "deadline": math.inf}
        values, bound = divide(program, None, **options, relative_gap=0.0)
        assert bound <= best * (1 + 1e-6)
        if values is not None:
            found += 1
            assert program.fits(values)
            period = program.model.period(values)
            assert best * (1 - 1e-9) <= period < options["cutoff_seconds"]
            assert divide(program, values, **options, relative_gap=0.01)[0] is values
    # From HiGHS's corners fewer.
    assert found >= 1


def test_time_and_a_failing_solver_leave_the_relaxations_bound(monkeypatch):
    program = Program(instance(SEEDS[0])[0])
    root = program.relax()
    cases = cases_of(program)
    cases.close(lambda: math.inf, -math.inf, ignore)
    assert (cases.bound_seconds, len(cases.open)) == (root, 1)

    def solve(linear, question):
        raise SolverFailure("gone")

    monkeypatch.setattr(program, "process", types.SimpleNamespace(solve=solve))
    given = {"cutoff_seconds": 2 * root, "deadline": math.inf, "relative_gap": 0.0}
    assert divide(program, None, **given) == (None, root)
    assert program.failures == ["gone"]


def test_a_target_that_falls_closes_more():
    """Plans found on the way lower the target; what is open is then weighed against the new one."""
    problem, best = instance(SEEDS[0])
    program = Program(problem)
    targets = iter([best * 2] * 3)
    cases = cases_of(program, most_conditions=math.inf)
    cases.close(lambda: next(targets, program.relax()), math.inf, ignore)
    assert cases.bound_seconds >= program.relax() * (1 - 1e-9)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_bounds_say_what_a_condition_says(seed):
    """Every plan keeps the bounds of the conditions that hold in it, and of those that do not."""
    program = Program(instance(seed)[0])
    choices, rows = program.model.choices, program.linear
    conditions = {condition for operation in program.model.operations for _, condition in operation.waits}
    fixed = 0
    for values in choices.complete(all_plans(choices, np.random.default_rng(seed), most=10)):
        column = dict(zip(rows.variables, values, strict=True))
        for condition in conditions - {ALWAYS}:
            holds = condition.holds(values)
            for told in (True, False):
                bounds = condition_bounds(rows, condition, told)
                if bounds is None:
                    continue
                fixed += 1
                own = {c: limits for c, limits in bounds.items() if c in column}
                kept = all(low <= column[c] <= high for c, (low, high) in own.items())
                assert kept or holds is not told
                if len(own) == len(bounds):
                    assert kept is (holds is told)
    assert fixed


def test_critical_conditions_are_those_that_mostly_hold_the_weakest_first():
    found = []
    for seed in SEEDS:
        program = Program(instance(seed)[0])
        values = relaxation(program, {}, "path").values
        conditions = critical_conditions(program.model, values)
        shares = [float(condition.value(values)) for condition in conditions]
        assert shares == sorted(shares)
        assert all(0.5 <= share < 1 for share in shares)
        choices = program.model.choices
        whole = choices.rounded(values[: choices.binaries])
        assert critical_conditions(program.model, choices.complete(whole)) == []
        found += conditions
    assert found


@pytest.mark.parametrize("solver", SOLVERS)
def test_many_cases_are_asked_of_two_processes_and_say_what_one_says(solver):
    program = Program(instance(SEEDS[0])[0], solver)
    cases = [{column: (0.0, 0.0)} for column in program.linear.binaries[:6]]
    program.relax()
    other = shared_process(1)
    other.close()
    assert relaxations(program, cases, deadline=-math.inf) == [None] * len(cases)
    assert other.process_id is None
    told = relaxations(program, cases)
    assert other.process_id not in (None, program.process.process_id)
    expected = [relaxation(program, bounds).seconds for bounds in cases]
    assert [one.seconds for one in told] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_all_lines_of_questions_say_the_same(solver):
    for seed in SEEDS[:2]:
        program = Program(instance(seed)[0], solver)
        one = {program.linear.binaries[0]: (0.0, 0.0)}
        for bounds in ({}, one, {}):
            answers = [relaxation(program, bounds, line).seconds for line in ("path", "aside", "anew")]
            assert answers == pytest.approx(answers[:1] * 3, rel=1e-9)
