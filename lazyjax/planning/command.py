"""The command `lazyjax plan`: solve, verify, show, save."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from lazyjax.hardware.profile import load_profile
from lazyjax.huggingface.checkpoint import read_json_table
from lazyjax.models.architecture import Architecture
from lazyjax.models.registry import architecture, build_template, parse_hf_config
from lazyjax.optim.make import OPTIMIZERS
from lazyjax.planning import cache
from lazyjax.planning.baselines import BASELINES, PUBLISHED, without_nvme
from lazyjax.planning.feasibility import largest_batch, nearest_changes
from lazyjax.planning.plan import Plan, PlanError, load_plan, validate_plan
from lazyjax.planning.plot import plot_timeline
from lazyjax.planning.question import Request, microbatch_counts
from lazyjax.planning.report import Line, explain, line_of, plan_report
from lazyjax.planning.request import build_request, request_key
from lazyjax.planning.search import RELATIVE_GAP, Found, find_plan, fits, predict
from lazyjax.planning.verify import Verification, VerificationError, verify
from lazyjax.specs import Tier
from lazyjax.timeline import write_perfetto

#: The host optimizer with the smallest state.
SMALLEST_OPTIMIZER = "hybrid8bit"
#: Most microbatches with which a baseline is tried.
_MOST_TRIED = 16


class InfeasibleError(ValueError):
    """No plan fits; the message names the tier, the shortfall and the nearest change."""


def plan_command(arguments: Sequence[str]) -> None:
    """Plan a training step: lazyjax plan --model NAME --hardware PROFILE --batch ROWS --seq TOKENS."""
    options = _parser().parse_args(list(arguments))
    console = Console()
    if options.batch is None and options.max_batch is None:
        raise PlanError("--batch: say how many rows a batch has, or find out with --max-batch ROWS")
    template = build_template(read_architecture(options.model))
    last = len(template.spec.layers) - 1
    if options.explain is not None and not 0 <= options.explain <= last:
        raise PlanError(f"--explain {options.explain}: the model has layers 0 to {last}")
    profile = load_profile(options.hardware)

    def ask(rows: int, *, nvme: bool = options.nvme, optimizer: str = options.optimizer) -> Request:
        request = build_request(
            template,
            profile,
            rows=rows,
            sequence_length=options.seq,
            optimizer=optimizer,
            device_bytes=_bytes(options.device_gb),
            host_bytes=_bytes(options.host_gb),
            nvme_bytes=None if nvme else 0,
        )
        fixed = {key: getattr(options, key) for key in ("microbatches", "handoff", "update")}
        return dataclasses.replace(request, **fixed)

    rows = options.batch
    if options.max_batch is not None:
        unit = profile.devices * (options.microbatches or 1)
        rows = largest_batch(ask(unit), below=options.max_batch + 1)
        if not rows:
            why = f"ask for --batch {unit} to see why"
            raise InfeasibleError(f"no batch up to {options.max_batch} fits; {why}")
        console.print(f"largest batch that fits, up to {options.max_batch}: [bold]{rows}[/bold] rows")
    request = ask(rows)
    offers: dict[str, Request] = {}
    if profile.nvme_bytes and not options.nvme:
        offers["--nvme (the profile has a drive)"] = ask(rows, nvme=True)
    if options.optimizer != SMALLEST_OPTIMIZER:
        offers[f"--optimizer {SMALLEST_OPTIMIZER}"] = ask(rows, optimizer=SMALLEST_OPTIMIZER)
    found = None
    if options.plan is not None:
        plan = load_plan(options.plan)
        _check_batch(plan, request, str(options.plan))
        validate_plan(plan, template.spec, _residual_names(request))
    else:
        folder = None if options.no_cache else cache.default_folder()
        plan, found = solve_cached(
            request,
            folder,
            time_limit_seconds=options.time_limit,
            relative_gap=options.gap / 100,
            console=console,
            offers=offers,
        )
        if found is None:
            console.print("[dim]solved before: from the cache[/dim]", highlight=False)
    verification = verify_for(request, plan)
    if options.out is not None:
        plan.save(options.out)
    if options.png is not None:
        title = f"{plan.model}, {options.hardware}, {plan.rows} x {plan.sequence_length} (simulated)"
        static = {tier: verification.peak_bytes[tier] - verification.live_bytes[tier] for tier in Tier}
        timeline = verification.simulation.timeline
        plot_timeline(timeline, options.png, title=title, capacity=request.capacity, fixed=static)
    if options.trace is not None:
        write_perfetto([verification.simulation.timeline], options.trace)
    console.print(plan_report(request, plan, verification, baseline_lines(request)))
    if options.explain is not None:
        console.print(explain(request, plan, options.explain))
    written = options.out
    if written is None and options.plan is None and not options.no_cache:
        written = cache.path_of(cache.default_folder(), request_key(request))
    if written is not None and written.exists():
        console.print(f"plan: {written}", soft_wrap=True, highlight=False)


def read_architecture(name: str) -> Architecture:
    """A packaged architecture by name, or that of a Hugging Face folder or config.json.

    Raises:
        ArchitectureError: no such name, or a file that describes no supported model.
    """
    path = pathlib.Path(name)
    if path.is_dir():
        return parse_hf_config(read_json_table(path / "config.json"), name=path.resolve().name)
    if name.endswith(".json"):
        return parse_hf_config(read_json_table(path), name=path.stem)
    return architecture(name)


def solve_cached(
    request: Request,
    folder: pathlib.Path | None,
    *,
    time_limit_seconds: float,
    relative_gap: float = RELATIVE_GAP,
    console: Console | None = None,
    offers: Mapping[str, Request] | None = None,
) -> tuple[Plan, Found | None]:
    """A plan from the cache, or solved and put there.

    A cached plan that was not proven close to the best is solved again where there is more time.

    Args:
        relative_gap: between period and proven bound at which the search ends.
        offers: what else could be asked, for the message where nothing fits.

    Raises:
        InfeasibleError: nothing fits.
    """
    key = request_key(request)
    known = None if folder is None else cache.find(folder, key)
    if known is not None and not _usable(request, known):
        known = None
    if known is not None and known.prediction is not None:
        spent, gap = known.prediction.solve_seconds, known.prediction.gap
        sure = gap is not None and gap <= relative_gap
        if sure or (spent is not None and time_limit_seconds <= 1.5 * spent):
            return known, None

    def show(line: str) -> None:
        if console is not None:
            console.print(f"[dim]{line}[/dim]", highlight=False)

    starts = list(baseline_plans(request).values())
    found = find_plan(
        request,
        time_limit_seconds=time_limit_seconds,
        relative_gap=relative_gap,
        warm_starts=starts if known is None else [known, *starts],
        progress=show,
    )
    if found.plan is None:
        raise InfeasibleError(infeasible_message(request, found, offers or {}))
    if folder is not None:
        cache.store(folder, key, found.plan)
    return found.plan, found


def _usable(request: Request, plan: Plan) -> bool:
    """Whether a cached plan is what was stored; files get damaged."""
    prediction = plan.prediction
    if prediction is None or prediction.gap is None or not 0 <= prediction.gap <= 1:
        return False
    try:
        validate_plan(plan, request.spec, _residual_names(request))
        _check_batch(plan, request, "cache")
        verify_for(request, plan)
    except (PlanError, VerificationError):
        return False
    return True


def _residual_names(request: Request) -> list[list[str]]:
    return [list(layer.residual_bytes) for layer in request.sizes(request.devices).layers]


def _check_batch(plan: Plan, request: Request, name: str) -> None:
    for key in ("rows", "sequence_length"):
        if getattr(plan, key) != getattr(request, key):
            raise PlanError(
                f"{name}: {key} is {getattr(plan, key)}, but {getattr(request, key)} is asked for"
            )


def infeasible_message(request: Request, found: Found, offers: Mapping[str, Request]) -> str:
    """Which tier, how many bytes, what to change."""
    missing = " and ".join(
        f"{tier.value} memory is short of {size} bytes "
        f"({size / 1e9:.2f} GB; it has {request.capacity[tier] / 1e9:.1f})"
        for tier, size in found.shortfall_bytes.items()
    )
    if not missing:
        return f"no plan was found for {request.rows} rows, though some may fit; give it more time"
    helpful = nearest_changes(request, found.shortfall_bytes, offers)
    return f"no plan fits {request.rows} rows: {missing}; it fits with {', or '.join(helpful)}"


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
    names = _residual_names(request)
    batch = {"rows": request.rows, "sequence_length": request.sequence_length}
    plans = {name: baseline(request.spec, names, **batch) for name, baseline in BASELINES.items()}
    if not request.capacity[Tier.NVME]:
        plans = {name: without_nvme(plan) for name, plan in plans.items()}
    return plans


def baseline_lines(request: Request) -> list[Line]:
    """What every baseline takes in the same executor on the same machine.

    Those that are no published rule get the fewest microbatches with which they fit.
    """
    lines = []
    counts = [count for count in microbatch_counts(request.rows, request.devices) if count <= _MOST_TRIED]
    for name, plan in baseline_plans(request).items():
        prediction = predict(request, plan)
        for count in counts if name not in PUBLISHED else ():
            if fits(request, prediction):
                break
            finer = plan.model_copy(update={"microbatches": count})
            finer_prediction = predict(request, finer)
            if fits(request, finer_prediction):
                plan, prediction = finer, finer_prediction
        lines.append(line_of(request, name, plan, prediction.period_seconds, prediction.peak_bytes))
    return lines


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _number(least: int, kind: type[int] | type[float]) -> Callable[[str], float | int]:
    def parse(text: str) -> float | int:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not (math.isfinite(value) and value >= least):
            word = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {word} from {least:g} on, it is {text!r}")
        return value

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lazyjax plan", description="Plan a training step.")
    positive, amount = _number(1, int), _number(0, float)
    parser.add_argument("--model", required=True, help="packaged architecture, model folder or config.json")
    parser.add_argument("--hardware", required=True, help="preset or file made by `lazyjax profile`")
    parser.add_argument("--batch", type=positive, help="rows of a batch")
    parser.add_argument("--seq", type=positive, default=1024, help="tokens of a row")
    parser.add_argument("--optimizer", default=SMALLEST_OPTIMIZER, choices=OPTIMIZERS, help="host optimizer")
    parser.add_argument(
        "--max-batch", type=positive, metavar="ROWS", help="find the largest batch up to ROWS and plan it"
    )
    parser.add_argument("--microbatches", type=positive, help="fix the number of microbatches")
    parser.add_argument("--handoff", choices=("device", "host"), help="fix where activations wait")
    parser.add_argument("--update", choices=("deferred", "immediate"), help="when the optimizer runs")
    parser.add_argument("--device-gb", type=amount, help="device memory to use, GB (1e9 bytes)")
    parser.add_argument("--host-gb", type=amount, help="host memory to use, GB")
    parser.add_argument("--nvme", action="store_true", help="use the profile's NVMe for boundaries and state")
    parser.add_argument("--plan", type=pathlib.Path, help="show this plan instead of solving")
    parser.add_argument("--explain", type=int, metavar="LAYER", help="why this layer is treated so")
    parser.add_argument("--time-limit", type=amount, default=20.0, help="seconds for the search")
    percent = 100 * RELATIVE_GAP
    parser.add_argument("--gap", type=amount, default=percent, help="percent from the best possible plan")
    parser.add_argument("--no-cache", action="store_true", help="solve even if the plan is known")
    parser.add_argument("--out", type=pathlib.Path, help="write the plan as JSON here")
    parser.add_argument("--png", type=pathlib.Path, help="write the simulated step as a picture")
    parser.add_argument("--trace", type=pathlib.Path, help="write the simulated step for Perfetto")
    return parser
