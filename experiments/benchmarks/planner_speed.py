"""How long the planner takes for 27B, and how sure it then is.

Command:  python -m experiments.benchmarks.planner_speed [--solver HIGHS|CBC] [--repeats 3] [--save]
64 blocks, embedding and head, all decisions open; H800 and RTX 3090, each with the profile's host
memory and with little, where optimizer state has to live on NVMe. Each case is a new process that
traces the model, searches over microbatches, prefetch and interlayer home, and verifies the plan. Times are
from the start of the search; importing JAX and building the model comes on top and is told too.
Target: at most 10 s on 2 cores to a gap of at most 1 %. Expected: gaps of at most 1 %, in 7 to 26 s with
HiGHS and 13 to 44 s with CBC.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

from experiments.benchmarks.provenance import ROOT, provenance
from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning.planner.milp import solvers
from lazyjax.planning.planner.question import Request
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.search import find_plan
from lazyjax.planning.planner.service import verify_for
from lazyjax.specs import Tier

RESULT = pathlib.Path(__file__).parent / "results" / "planner_speed.md"
SOURCES = ("lazyjax/planning", "lazyjax/models", "experiments/benchmarks/planner_speed.py")


class Case(NamedTuple):
    """Profile, batch, and host memory in GB (None: the profile's)."""

    profile: str
    rows: int
    host_gb: float | None


CASES = (
    Case("h800-paper", 72, None),
    Case("h800-paper", 72, 231.0),
    Case("rtx3090", 32, None),
    Case("rtx3090", 32, 222.0),
)


def request_of(case: Case) -> Request:
    """The planning question of one case."""
    return build_request(
        build_template(architecture("Qwen3.6-27B")),
        load_profile(case.profile),
        batch_rows=case.rows,
        sequence_length=1024,
        host_bytes=None if case.host_gb is None else int(case.host_gb * 1e9),
    )


def measure(case: Case, solver: str, time_limit_seconds: float) -> dict[str, Any]:
    """One search, in this process."""
    imported = time.monotonic()
    request = request_of(case)
    begun = time.monotonic()
    found = find_plan(request, time_limit_seconds=time_limit_seconds, solver=solver)
    seconds = time.monotonic() - begun
    if found.plan is None:
        return {"seconds": seconds, "period": float("inf"), "gap": float("inf")}
    verified = verify_for(request, found.plan)
    return {
        "building_seconds": begun - imported,
        "seconds": seconds,
        "period": found.layer_period_seconds,
        "gap": found.gap,
        "microbatches": found.plan.microbatches,
        "settings": len(found.attempts),
        "microbatch_difference": verified.period_seconds / found.layer_period_seconds - 1,
        "host_gb": request.capacity[Tier.HOST] / 1e9,
    }


def repeated(case: Case, solver: str, repeats: int, time_limit_seconds: float) -> list[dict[str, Any]]:
    """Measures in new processes, so that nothing is known beforehand."""
    arguments = ["--case", str(CASES.index(case)), "--solver", solver, "--limit", str(time_limit_seconds)]
    command = [sys.executable, "-m", "experiments.benchmarks.planner_speed", *arguments]
    results = []
    for _ in range(repeats):
        printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        results.append(json.loads(printed.splitlines()[-1]))
    return results


def row(case: Case, solver: str, results: list[dict[str, Any]]) -> str:
    """A line of the table: medians, and the slowest and least certain repeat."""
    seconds, gaps = [r["seconds"] for r in results], [r["gap"] for r in results]
    first = results[0]
    return (
        f"| {case.profile}, {case.rows} rows, {first['host_gb']:.0f} GB host | {solver} "
        f"| {statistics.median(seconds):.1f} | {max(seconds):.1f} | {first['period']:.3f} "
        f"| {max(gaps):.2%} | {first['microbatches']} of {first['settings']} settings "
        f"| {first['microbatch_difference']:+.2%} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--solver", choices=("CBC", "HIGHS"), action="append")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one search")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(CASES[arguments.case], arguments.solver[0], arguments.limit)))
        return
    lines = [
        "# Time and certainty of the planner, Qwen3.6-27B, 64 blocks, all decisions",
        "",
        provenance(*SOURCES),
        "",
        f"Repeats: {arguments.repeats}. Seconds of the whole search in a new process (median, slowest), "
        "the largest proven gap, and how the period microbatch by microbatch differs from it.",
        "",
        "| case | solver | s | slowest s | period s | gap | microbatches | by microbatch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for case in CASES:
        for solver in arguments.solver or solvers():
            lines.append(row(case, solver, repeated(case, solver, arguments.repeats, arguments.limit)))
            print(lines[-1], flush=True)
    if arguments.save:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
