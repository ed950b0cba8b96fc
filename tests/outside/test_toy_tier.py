"""A tier between host and NVMe, added by changing two files of the library: everything planned follows.

The test works on a copy of the package. Executing such a plan would take a store for the tier as well; this
is about the expansion, the memory rows, the program and the checks, which must not know the tiers by name:
boundaries, residuals and optimizer state. Gradients and master weights go from host to NVMe in one move.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

#: File -> (what is there, what replaces it).
CHANGES: dict[str, list[tuple[str, str]]] = {
    "lazyjax/specs.py": [
        ('    HOST = "host"\n    NVME = "nvme"\n', '    HOST = "host"\n    FAR = "far"\n    NVME = "nvme"\n'),
        ('    CPU = "cpu"\n', '    CPU = "cpu"\n    FAR_READ = "far_read"\n    FAR_WRITE = "far_write"\n'),
    ],
    "lazyjax/planning/program/operations.py": [
        (
            '    LOAD = "load"\n',
            '    LOAD = "load"\n    SINK = "sink"\n    RAISE = "raise"\n'
            '    SINK_STATE = "sink_state"\n    RAISE_STATE = "raise_state"\n',
        ),
        (
            "    Action.UPDATE: Resource.CPU,\n",
            "    Action.UPDATE: Resource.CPU,\n"
            "    Action.SINK: Resource.FAR_WRITE,\n    Action.SINK_STATE: Resource.FAR_WRITE,\n"
            "    Action.RAISE: Resource.FAR_READ,\n    Action.RAISE_STATE: Resource.FAR_READ,\n",
        ),
        (
            "    Link(Tier.HOST, Tier.NVME, ",
            "    Link(Tier.HOST, Tier.FAR, Action.SINK, Action.RAISE,\n"
            "         Action.SINK_STATE, Action.RAISE_STATE),\n"
            "    Link(Tier.FAR, Tier.NVME, ",
        ),
    ],
}

SCRIPT = """
import collections, dataclasses, json
from experiments.benchmarks.planner_exactness import (
    best_by_force, compare_memory, draw_roomy, random_problem, used_bytes_of,
)
from experiments.benchmarks.solving import solve
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.planning.program.verify import verify
from lazyjax.specs import Part, Tier

moved = collections.Counter()
for seed in range(24):
    compared = compare_memory(seed, only_state=True)
    assert compared.rows_bytes == compared.schedule_bytes, seed
    schedule = build_schedule(compared.plan, compared.sizes)
    verify(compared.plan, compared.sizes, lambda operation: 1.0 + operation.index % 3)
    moved.update(operation.action.value for operation in schedule.operations)
equal = 0
for seed in range(40):
    problem = random_problem(seed, most_plans=12, most_blocks=3)
    problem = dataclasses.replace(
        problem, boundary_homes=tuple(Tier), residents=False,
        owned_sets=(frozenset(), frozenset([Part.STATE])),
    )
    solution = solve(problem, relative_gap=1e-9, time_limit_seconds=600.0)
    best = best_by_force(problem)
    assert abs(solution.period_seconds - best) <= 1e-6 * best or solution.period_seconds == best, seed
    if solution.plan is None:
        continue
    used = used_bytes_of(problem, solution.plan)
    assert all(used[tier] <= problem.capacity[tier] for tier in Tier)
    equal += 1
    if equal == 4:
        break
print(json.dumps({"moved": moved, "equal": equal}))
"""


def test_two_files_add_a_tier_to_all_of_planning(tmp_path: pathlib.Path) -> None:
    for package in ("lazyjax", "experiments"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    assert len(CHANGES) == 2
    for name, replacements in CHANGES.items():
        file = tmp_path / name
        text = file.read_text()
        for old, new in replacements:
            assert old in text, (name, old)
            text = text.replace(old, new)
        file.write_text(text)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["equal"] == 4
    assert all(
        found["moved"][kind] for kind in ("sink", "raise", "spill", "load", "sink_state", "raise_state")
    )
