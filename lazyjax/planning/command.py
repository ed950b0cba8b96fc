"""The command `lazyjax plan`: solve, verify, show, save."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

from rich.console import Console

from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning import cache
from lazyjax.planning.baselines import BASELINES, without_nvme
from lazyjax.planning.plan import Plan, load_plan, validate_plan
from lazyjax.planning.plot import plot_timeline
from lazyjax.planning.report import Line, explain, line_of, plan_report
from lazyjax.planning.request import build_request, request_key
from lazyjax.planning.search import (
    Found,
    Request,
    find_plan,
    largest_batch,
    nearest_change,
    predict,
)
from lazyjax.planning.verify import Verification, verify
from lazyjax.specs import Tier
from lazyjax.timeline import write_perfetto


class InfeasibleError(ValueError):
    """No plan fits; the message names the tier, the shortfall and the nearest change."""


def plan_command(arguments: Sequence[str]) -> None:
    """Plan a training step: lazyjax plan --model NAME --hardware PROFILE --batch ROWS --seq TOKENS."""
    options = _parser().parse_args(list(arguments))
    console = Console()
    template = build_template(architecture(options.model))
    profile = load_profile(options.hardware)
    request = build_request(
        template,
        profile,
        rows=options.batch,
        sequence_length=options.seq,
        optimizer=options.optimizer,
        device_bytes=_bytes(options.device_gb),
        host_bytes=_bytes(options.host_gb),
        nvme_bytes=None if options.nvme else 0,
    )
    request = dataclasses.replace(request, microbatches=options.microbatches, handoff=options.handoff)
    if options.max_batch:
        rows = largest_batch(request, below=options.max_batch + 1)
        console.print(f"largest batch that fits, up to {options.max_batch}: [bold]{rows}[/bold] rows")
        if not rows:
            return
        request = dataclasses.replace(request, rows=rows, microbatches=None)
    found = None
    if options.plan is not None:
        plan = load_plan(options.plan)
        names = [template.kind(index).residual_names for index in range(len(template.spec.layers))]
        validate_plan(plan, template.spec, names)
    else:
        plan, found = solve_cached(
            request,
            None if options.no_cache else cache.default_folder(),
            time_limit_seconds=options.time_limit,
            console=console,
        )
    verification = verify_for(request, plan)
    console.print(plan_report(request, plan, found, verification, baseline_lines(request)))
    if options.explain is not None:
        console.print(explain(request, plan, options.explain))
    if options.out is not None:
        plan.save(options.out)
        console.print(f"plan written to {options.out}")
    if options.png is not None:
        title = f"{plan.model}, {options.hardware}, {plan.rows} x {plan.sequence_length} (simulated)"
        plot_timeline(verification.simulation.timeline, options.png, title=title, capacity=request.capacity)
    if options.trace is not None:
        write_perfetto([verification.simulation.timeline], options.trace)


def solve_cached(
    request: Request,
    folder: pathlib.Path | None,
    *,
    time_limit_seconds: float,
    console: Console | None = None,
) -> tuple[Plan, Found | None]:
    """A plan from the cache, or solved and put there.

    Raises:
        InfeasibleError: nothing fits.
    """
    key = request_key(request)
    if folder is not None:
        plan = cache.find(folder, key)
        if plan is not None:
            return plan, None

    def show(line: str) -> None:
        if console is not None:
            console.print(f"[dim]{line}[/dim]", highlight=False)

    found = find_plan(
        request,
        time_limit_seconds=time_limit_seconds,
        warm_starts=list(baseline_plans(request).values()),
        progress=show,
    )
    if found.plan is None:
        raise InfeasibleError(infeasible_message(request, found))
    if folder is not None:
        cache.store(folder, key, found.plan)
    return found.plan, found


def infeasible_message(request: Request, found: Found) -> str:
    """Which tier, how many bytes, what to change."""
    missing = " and ".join(
        f"{tier.value} memory is short of {size} bytes "
        f"({size / 1e9:.2f} GB; it has {request.capacity[tier] / 1e9:.1f})"
        for tier, size in found.shortfall_bytes.items()
    )
    change = nearest_change(request, found.shortfall_bytes)
    return f"no plan fits {request.rows} rows: {missing or 'no time'}; {change}"


def verify_for(request: Request, plan: Plan) -> Verification:
    """`verify` with what the request knows."""
    rows = plan.microbatch_rows
    costs = request.costs(rows)
    return verify(
        plan,
        request.sizes(rows),
        costs.operation_seconds,
        capacity=request.capacity,
        static_host_bytes=request.static_host_bytes,
        working_bytes=costs.working_bytes,
    )


def baseline_plans(request: Request) -> dict[str, Plan]:
    """Every baseline for the request's batch, whole batch at once."""
    names = [list(layer.residual_bytes) for layer in request.sizes(max(1, request.devices)).layers]
    batch = {"rows": request.rows, "sequence_length": request.sequence_length}
    plans = {name: baseline(request.spec, names, **batch) for name, baseline in BASELINES.items()}
    if not request.capacity[Tier.NVME]:
        plans = {name: without_nvme(plan) for name, plan in plans.items()}
    return plans


def baseline_lines(request: Request) -> list[Line]:
    """What every baseline takes in the same executor on the same machine."""
    lines = []
    for name, plan in baseline_plans(request).items():
        prediction = predict(request, plan)
        lines.append(line_of(request, name, plan, prediction.period_seconds, prediction.peak_bytes))
    return lines


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lazyjax plan", description="Plan a training step.")
    parser.add_argument("--model", required=True, help="name of a packaged architecture")
    parser.add_argument("--hardware", required=True, help="preset or file made by `lazyjax profile`")
    parser.add_argument("--batch", type=int, required=True, help="rows of a batch")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--optimizer", default="hybrid8bit", help="host optimizer")
    parser.add_argument(
        "--max-batch", type=int, metavar="ROWS", help="find the largest batch up to ROWS first"
    )
    parser.add_argument("--microbatches", type=int, help="fix the number of microbatches")
    parser.add_argument("--handoff", choices=("device", "host"), help="fix where activations wait")
    parser.add_argument("--device-gb", type=float, help="device memory to use, GB (1e9 bytes)")
    parser.add_argument("--host-gb", type=float, help="host memory to use, GB")
    parser.add_argument("--nvme", action="store_true", help="use the profile's NVMe for boundaries and state")
    parser.add_argument("--plan", type=pathlib.Path, help="show this plan instead of solving")
    parser.add_argument("--explain", type=int, metavar="LAYER", help="why this layer is treated so")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for the search")
    parser.add_argument("--no-cache", action="store_true", help="solve even if the plan is known")
    parser.add_argument("--out", type=pathlib.Path, help="write the plan as JSON")
    parser.add_argument("--png", type=pathlib.Path, help="write the simulated step as a picture")
    parser.add_argument("--trace", type=pathlib.Path, help="write the simulated step for Perfetto")
    return parser
