"""Random planning problems for tests; drawn as in the benchmark that compares with brute force."""

import functools

import numpy as np

from experiments.benchmarks.planner_exactness import all_plans, draw_roomy
from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.problem import Problem

#: Both are installed; where HiGHS cannot be loaded, the planner goes on with CBC.
SOLVERS = ["CBC", "HIGHS"]


@functools.cache
def random_plans(seed: int, count: int = 2) -> tuple[Problem, list[Plan]]:
    """A random problem of up to five blocks with room for anything, and random plans of it."""
    problem = draw_roomy(np.random.default_rng(seed), most_blocks=5)
    choices = Choices(problem)
    drawn = all_plans(choices, np.random.default_rng(seed + 1), most=count)
    return problem, [choices.decode(values, "random") for values in drawn]
