"""Random planning problems for tests; drawn as in the benchmark that compares with brute force."""

import functools

import numpy as np

from experiments.benchmarks.planner_exactness import all_plans, draw_roomy
from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.planner.windows import WindowModel


@functools.cache
def random_plans(seed: int, count: int = 2) -> tuple[Problem, list[Plan]]:
    """A random problem of up to five blocks with room for anything, and random plans of it."""
    problem = draw_roomy(np.random.default_rng(seed), most_blocks=5)
    model = WindowModel(problem)
    drawn = all_plans(model, np.random.default_rng(seed + 1), most=count)
    return problem, [model.choices.decode(values, "random") for values in drawn]
