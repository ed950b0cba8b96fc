"""Random planning problems for tests; drawn as in the benchmark that compares with brute force."""

import functools

import numpy as np
import pytest

from experiments.benchmarks.planner_exactness import all_plans, draw_roomy
from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.milp import solvers
from lazyjax.planning.planner.problem import Problem

#: HiGHS is optional (the extra `highs`); CBC comes with Python-MIP.
_NEEDS_HIGHS = pytest.mark.skipif("HIGHS" not in solvers(), reason="the extra `highs` is not installed")
SOLVERS = ["CBC", pytest.param("HIGHS", marks=_NEEDS_HIGHS)]


@functools.cache
def random_plans(seed: int, count: int = 2) -> tuple[Problem, list[Plan]]:
    """A random problem of up to five blocks with room for anything, and random plans of it."""
    problem = draw_roomy(np.random.default_rng(seed), most_blocks=5)
    choices = Choices(problem)
    drawn = all_plans(choices, np.random.default_rng(seed + 1), most=count)
    return problem, [choices.decode(values, "random") for values in drawn]
