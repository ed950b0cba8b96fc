"""How long the planner takes for 27B, and how sure it then is.

Command:  python -m experiments.benchmarks.planner_speed [--solver HIGHS|CBC] [--search]
64 blocks, embedding and head, all decisions open; H800 and RTX 3090, each with the profile's host
memory and with little. Times one program per case (settings fixed; costs already known), and with
--search the whole search over microbatches, prefetch and handoff. Target: at most 10 s on 2 cores to
a gap of at most 1 %.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning.milp import solve, solvers
from lazyjax.planning.request import build_request
from lazyjax.planning.search import Request, find_plan, problem_of, settings_of


class Case(NamedTuple):
    """Profile, batch, microbatches, and host memory in GB (None: the profile's)."""

    profile: str
    rows: int
    microbatches: int
    host_gb: float | None


CASES = (
    Case("h800-paper", 72, 9, None),
    Case("h800-paper", 72, 9, 231.0),
    Case("rtx3090", 32, 4, None),
    Case("rtx3090", 32, 4, 222.0),
)


def request_of(case: Case, *, nvme: bool = True) -> Request:
    """The planning question of one case."""
    return build_request(
        build_template(architecture("Qwen3.6-27B")),
        load_profile(case.profile),
        rows=case.rows,
        sequence_length=1024,
        host_bytes=None if case.host_gb is None else int(case.host_gb * 1e9),
        nvme_bytes=None if nvme else 0,
    )


def main() -> None:
    """Prints one line per case and solver."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--solver", choices=("CBC", "HIGHS"), action="append")
    parser.add_argument("--limit", type=float, default=9.5, help="seconds per program")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--no-nvme", action="store_true", help="close the NVMe decisions")
    arguments = parser.parse_args()
    for case in CASES:
        request = request_of(case, nvme=not arguments.no_nvme)
        host = f"{request.capacity['host'] / 1e9:.0f} GB host"  # type: ignore[index]
        settings = next(
            plan
            for plan in settings_of(request)
            if (plan.microbatches, plan.prefetch, plan.handoff) == (case.microbatches, 2, "device")
        )
        problem = problem_of(request, settings)
        begun = time.monotonic()
        solve(problem, time_limit_seconds=0.1)  # costs are traced here, once
        print(f"{case.profile}, {case.rows} rows, {host}: costs {time.monotonic() - begun:.1f} s", flush=True)
        for solver in arguments.solver or solvers():
            begun = time.monotonic()
            solution = solve(problem, time_limit_seconds=arguments.limit, relative_gap=0.005, solver=solver)
            print(
                f"  {solver}: {time.monotonic() - begun:.1f} s, period {solution.period_seconds:.3f} s, "
                f"bound {solution.bound_seconds:.3f} s, gap {solution.gap:.2%}",
                flush=True,
            )
        if arguments.search:
            begun = time.monotonic()
            found = find_plan(request, time_limit_seconds=60.0)
            prediction = found.plan.prediction if found.plan is not None else None
            assert prediction is not None
            micro = prediction.period_seconds / found.layer_period_seconds - 1
            print(
                f"  search: {time.monotonic() - begun:.1f} s, period {found.layer_period_seconds:.3f} s, "
                f"gap {found.gap:.2%}, microbatch by microbatch {micro:+.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
