"""Is the planner's answer the best there is? Random chains against brute force.

Command:  python -m experiments.benchmarks.planner_exactness [--instances 200] [--most-plans 20000]
          python -m experiments.benchmarks.planner_exactness --replays 500
          python -m experiments.benchmarks.planner_exactness --memory 200
Each instance is a chain of at most four blocks of mixed kinds with random sizes, rates and
capacities. Every plan in its decision space is replayed to the steady state; the program's
period must equal the best. Expected: `200 of 200 equal`. With --replays, larger instances are only
replayed: objective against period, and peaks as the schedule counts them against capacities. With
--memory 200, the largest memory row of each tier is compared with the peak of the schedule of as many
random plans, 1 to 9 microbatches, boundaries, residuals and state on any tier. Expected: difference 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from experiments.benchmarks.solving import solve
from lazyjax.planning.plan.document import LayerPlan, Plan
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.memory import memory_rows
from lazyjax.planning.planner.problem import Problem, save_options
from lazyjax.planning.program.schedule import Action, LayerSizes, ModelSizes, Operation, build_schedule
from lazyjax.planning.program.simulate import simulate
from lazyjax.planning.program.verify import owned_bytes_per_tier, used_bytes
from lazyjax.specs import Part, Tier
from lazyjax.timeline import Resource


class RandomSeconds:
    """Seconds per operation of a random machine: rates per link, a table per layer and kind."""

    def __init__(self, rng: np.random.Generator, residual_names: list[tuple[str, ...]]) -> None:
        self.rate: dict[Resource, float] = {
            resource: 10 ** rng.uniform(-0.5, 0.7)
            for resource in Resource
            if resource not in (Resource.COMPUTE, Resource.CPU, Resource.INTERCONNECT)
        }
        # Drawn apart, so that the other figures stay what they were.
        apart = np.random.default_rng([int(1e6 * rate) for rate in self.rate.values()])
        self.rate[Resource.INTERCONNECT] = 10 ** apart.uniform(-0.2, 1.0)
        count = len(residual_names)
        self.forward = rng.uniform(0.2, 2.0, count)
        self.update = rng.uniform(0.05, 1.5, count) * rng.choice([0.2, 1.0, 3.0])
        self.gain = [{name: rng.uniform(0.05, 0.4) for name in names} for names in residual_names]

    def __call__(self, operation: Operation) -> float:
        """Seconds of one operation."""
        match operation.action:
            case Action.FORWARD | Action.RECOMPUTE:
                return float(self.forward[operation.layer])
            case Action.LOSS:
                return float(3 * self.forward[operation.layer])
            case Action.BACKWARD:
                gain = sum(self.gain[operation.layer][name] for name in operation.saved)
                return float(self.forward[operation.layer] * (3.0 - gain))
            case Action.UPDATE:
                return float(self.update[operation.layer])
            case _:
                return operation.bytes / 100.0 / self.rate[operation.resource]


#: Of what layers own, what may live on a drive.
_SETS: tuple[tuple[frozenset[Part], ...], ...] = (
    (frozenset(), frozenset([Part.STATE])),
    (frozenset(), frozenset([Part.STATE, Part.LO]), frozenset(Part)),
    (frozenset([Part.GRADIENT]), frozenset([Part.GRADIENT, Part.HI])),
    (frozenset(Part),),
)


@dataclasses.dataclass(frozen=True)
class Instance:
    """A random problem and what it was drawn from."""

    seed: int
    problem: Problem


def random_problem(seed: int, *, most_plans: int | None = 20_000, most_blocks: int = 4) -> Problem:
    """A random chain with at most `most_plans` plans, or any number."""
    rng = np.random.default_rng(seed)
    while True:
        problem = draw_roomy(rng, most_blocks)
        problem = dataclasses.replace(problem, capacity=_capacities(problem, rng))
        if most_plans is None or plan_count(problem) <= most_plans:
            return problem


def draw_roomy(rng: np.random.Generator, most_blocks: int, fewest_blocks: int = 1) -> Problem:
    """A random chain on a machine whose memory nothing exceeds."""
    blocks = int(rng.integers(fewest_blocks, most_blocks + 1))
    microbatches = int(rng.choice([1, 1, 2, 3, 4]))
    tied = bool(rng.random() < 0.3)
    kinds = [{name: int(rng.integers(5, 90)) for name in ("a", "b")[: rng.integers(0, 3)]} for _ in range(2)]
    kind_of = rng.integers(0, 2, blocks)
    residuals = [{}, *(kinds[kind] for kind in kind_of), {}]
    hidden = int(rng.integers(10, 60))
    slabs = {kind: int(rng.integers(20, 150)) for kind in range(2)}
    ends = int(rng.integers(20, 300))
    # Drawn apart, so that the other figures stay what they were.
    owned = np.random.default_rng(int(slabs[0]) * 1009 + ends)
    both_halves = bool(owned.random() < 0.3)
    layers = []
    for index in range(blocks + 2):
        inner = 0 < index <= blocks
        parameters = slabs[int(kind_of[index - 1])] if inner else ends
        layers.append(
            LayerSizes(
                parameter_bytes=parameters,
                accumulator_bytes=2 * parameters,
                gradient_bytes=parameters,
                input_bytes=hidden if index else 0,
                residual_bytes=residuals[index],
                state_bytes=parameters,
                half_bytes=parameters // (2 if both_halves else 1),
            )
        )
    devices = int(np.random.default_rng(ends * 977 + hidden).choice([1, 1, 2, 3]))
    sizes = ModelSizes(tuple(layers), 3, tied, both_halves, devices)
    names = [tuple(layer.residual_bytes) for layer in layers]
    nvme = bool(rng.random() < 0.4)
    nvme_states = bool(rng.random() < 0.3)
    tiers = [Tier.DEVICE, Tier.HOST, *([Tier.NVME] if nvme and rng.random() < 0.5 else [])]
    saves: list[tuple[Mapping[str, Tier], ...]] = []
    for own in names:
        sets = [subset for size in range(1, len(own) + 1) for subset in itertools.combinations(own, size)]
        saves.append(({}, *(dict.fromkeys(subset, tier) for subset in sets for tier in tiers)))
    settings = Plan(
        model="random", planner="none", batch_rows=microbatches, sequence_length=1, microbatches=microbatches,
        prefetch=int(rng.integers(1, 4)), backward_prefetch=int(rng.integers(1, 4)),
        reload_ahead=int(rng.integers(1, 3)),
        interlayer_home="host" if rng.random() < 0.25 else "device",
        update="immediate" if rng.random() < 0.3 else "deferred",
        layers=tuple(LayerPlan() for _ in layers),
    )  # fmt: skip
    return Problem(
        settings=settings,
        sizes=sizes,
        seconds=RandomSeconds(rng, names),
        saves=tuple(saves),
        capacity=dict.fromkeys(Tier, 10**9),
        longest_segment=blocks if rng.random() < 0.5 else 2,
        boundary_homes=tuple(Tier) if nvme else (Tier.DEVICE, Tier.HOST),
        state_home=Tier.NVME if nvme_states else Tier.HOST,
        owned_sets=_SETS[int(owned.integers(len(_SETS)))],
        static_host_bytes=sum(2 * layer.half_bytes + layer.gradient_bytes for layer in layers),
        by_layer=False,
        residents=bool(rng.random() < 0.6),
    )


class MemoryComparison(NamedTuple):
    """A random plan's peaks: the largest memory row of each tier, and what its own schedule counts."""

    plan: Plan
    sizes: ModelSizes
    rows_bytes: dict[Tier, int]
    schedule_bytes: dict[Tier, int]


def compare_memory(seed: int, *, only_state: bool = False) -> MemoryComparison:
    """Of one random plan, all of whose tensors may be on any tier.

    Args:
        only_state: of what layers own, only optimizer state leaves the host.
    """
    rng = np.random.default_rng(seed)
    problem = draw_roomy(rng, most_blocks=6)
    home: Literal["device", "host"] = "host" if seed // 9 % 2 else "device"
    count = 1 + seed % 9
    settings = problem.settings.model_copy(
        update={
            "microbatches": count,
            "batch_rows": count,
            "interlayer_home": home,
            "offload_window": 1 + seed % 4,
        }
    )
    names = [tuple(layer.residual_bytes) for layer in problem.sizes.layers]
    sets = [[own[:size] for size in range(1, len(own) + 1)] for own in names]
    sizes, parts = problem.sizes, set(Part) - {Part.STATE}
    masters = sum(sizes.owned_bytes(layer, part) for layer in range(len(sizes.layers)) for part in parts)
    problem = dataclasses.replace(
        problem, settings=settings, boundary_homes=tuple(Tier), state_home=Tier.NVME,
        saves=tuple(save_options(own, tuple(Tier)) for own in sets), static_host_bytes=masters,
        working_bytes=lambda action, layer, saved, head_chunk: (
            3 * layer + 5 * len(saved) + len(action.value) * count + (head_chunk or 0)
        ),
        head_chunks=(7, 40, 300)[: 1 + seed % 3],
    )  # fmt: skip
    if only_state:
        problem = dataclasses.replace(problem, owned_sets=(frozenset(), frozenset([Part.STATE])))
    choices = Choices(problem)
    rows = memory_rows(problem, choices)
    values = all_plans(choices, rng, most=1)
    plan = choices.decode(values[0], "random")
    peaks = rows.peak_bytes(choices.complete(values))
    return MemoryComparison(
        plan, problem.sizes, {tier: int(peaks[tier][0]) for tier in Tier}, used_bytes_of(problem, plan)
    )


def memory_table(first_seed: int, plans: int) -> str:
    """The largest difference over random plans, and what they used."""
    found = [compare_memory(seed) for seed in range(first_seed, first_seed + plans)]
    differences = {
        tier: max(abs(one.rows_bytes[tier] - one.schedule_bytes[tier]) for one in found) for tier in Tier
    }
    counts = sorted({one.plan.microbatches for one in found})
    homes = Counter(one.plan.interlayer_home for one in found)
    kept = Counter(
        kind
        for one in found
        for kind in {
            *(f"boundary on {layer.boundary.value}" for layer in one.plan.layers[1:-1]),
            *(f"residual on {tier.value}" for layer in one.plan.layers for tier in layer.saved.values()),
            *(f"{part.value} on nvme" for layer in one.plan.layers for part in layer.on_nvme),
        }
    )
    return (
        f"{plans} plans, {counts[0]} to {counts[-1]} microbatches, between layers on "
        + ", ".join(f"{home} {number}" for home, number in sorted(homes.items()))
        + "; plans with "
        + ", ".join(f"{kind} {number}" for kind, number in sorted(kept.items()))
        + "\nlargest difference between memory rows and the schedule's own peak: "
        + ", ".join(f"{tier.value} {difference} bytes" for tier, difference in differences.items())
    )


def _capacities(problem: Problem, rng: np.random.Generator) -> dict[Tier, int]:
    """Between what the leanest plan seems to need and what the richest does."""
    choices = Choices(problem)
    plans = [choices.decode(values, "random") for values in all_plans(choices, rng, most=40)]
    peaks = [used_bytes_of(problem, plan) for plan in plans]
    capacity = {}
    for tier in Tier:
        low, high = min(peak[tier] for peak in peaks), max(peak[tier] for peak in peaks)
        capacity[tier] = int(low + (high - low) * rng.uniform(-0.02, 1.1) ** 2)
    return capacity


def used_bytes_of(problem: Problem, plan: Plan) -> dict[Tier, int]:
    """Peaks of a plan as its own schedule counts them, with what is there all the time."""
    peak = used_bytes(build_schedule(plan, problem.sizes), problem.working_bytes)
    static = owned_bytes_per_tier(plan, problem.sizes)
    static[Tier.HOST] += problem.static_host_bytes
    return {tier: peak[tier] + static[tier] for tier in Tier}


def plan_count(problem: Problem) -> int:
    """How many plans a problem has, at most."""
    return math.prod(len(cases) for cases in _alternatives(Choices(problem)))


def _alternatives(choices: Choices) -> list[Sequence[tuple[int, ...]]]:
    return [cases for decision in choices.decisions for cases in decision.alternatives()]


def all_plans(
    choices: Choices, rng: np.random.Generator | None = None, most: int | None = None
) -> Float64[np.ndarray, "plans binaries"]:
    """Every assignment of a problem's decisions, or about `most` random ones."""
    factors = _alternatives(choices)
    if most is None:
        combinations = list(itertools.product(*factors))
    else:
        assert rng is not None
        combinations = [
            tuple(factor[int(rng.integers(len(factor)))] for factor in factors) for _ in range(most)
        ]
    plans = np.zeros((len(combinations), choices.binaries))
    for row, combination in enumerate(combinations):
        plans[row, [number for part in combination for number in part]] = 1.0
    return np.unique(choices.repaired(plans), axis=0)


def best_by_force(problem: Problem) -> float:
    """The smallest period over all plans that fit; infinite if none does.

    Shares nothing with the program: bytes and seconds are counted from the concrete schedule of every
    plan, microbatch by microbatch.
    """
    best = math.inf
    choices = Choices(problem)
    for values in all_plans(choices):
        schedule = build_schedule(choices.decode(values, "force"), problem.sizes)
        busy: dict[Resource, float] = dict.fromkeys(Resource, 0.0)
        for operation in schedule.operations:
            busy[operation.resource] += problem.seconds(operation)
        if max(busy.values()) >= best:
            continue
        used = used_bytes_of(problem, schedule.plan)
        if all(used[tier] <= problem.capacity[tier] for tier in Tier):
            best = min(best, simulate(schedule, problem.seconds).period_seconds)
    return best


def check(seed: int, most_plans: int, solver: str | None = None) -> tuple[float, float, float]:
    """(best by brute force, program's period by replay, program's objective) of one instance."""
    problem = random_problem(seed, most_plans=most_plans)
    solution = solve(problem, relative_gap=1e-9, time_limit_seconds=120.0, solver=solver)
    return best_by_force(problem), solution.period_seconds, solution.objective_seconds


def replays(first_seed: int, instances: int, solver: str | None) -> str:
    """Solves instances of up to six blocks; replays and counts the memory of every plan found."""
    worst_period = worst_memory = 0.0
    solved = 0
    for seed in range(first_seed, first_seed + instances):
        problem = random_problem(seed, most_blocks=6, most_plans=None)
        solution = solve(problem, relative_gap=1e-4, time_limit_seconds=60.0, solver=solver)
        if solution.plan is None:
            continue
        solved += 1
        difference = abs(solution.objective_seconds / solution.period_seconds - 1)
        worst_period = max(worst_period, difference)
        used = used_bytes_of(problem, solution.plan)
        for tier in Tier:
            if problem.capacity[tier]:
                worst_memory = max(worst_memory, used[tier] / problem.capacity[tier])
    return (
        f"{instances} instances, {solved} with a plan: objective and replayed period differ by at most "
        f"{worst_period:.1e}; the fullest tier is {worst_memory:.2%} full"
    )


def main() -> None:
    """Runs all instances and prints those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--most-plans", type=int, default=20_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--solver", choices=("CBC", "HIGHS"), default=None)
    parser.add_argument("--replays", type=int, metavar="INSTANCES")
    parser.add_argument("--memory", type=int, metavar="PLANS")
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory_table(arguments.first_seed, arguments.memory))
        return
    if arguments.replays:
        print(replays(arguments.first_seed, arguments.replays, arguments.solver))
        return
    equal = infeasible = 0
    begun = time.monotonic()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.instances):
        force, period, objective = check(seed, arguments.most_plans, arguments.solver)
        same = force == period or abs(force - period) <= 1e-6 * force
        same = same and (force == objective or abs(force - objective) <= 1e-6 * force)
        infeasible += force == float("inf")
        equal += same
        if not same:
            print(f"seed {seed}: brute force {force:.9g}, replay {period:.9g}, objective {objective:.9g}")
    print(
        f"{equal} of {arguments.instances} equal ({infeasible} of them: nothing fits, both agree), "
        f"{time.monotonic() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
