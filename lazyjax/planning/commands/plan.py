"""The command `lazyjax plan`: solve, verify, show, save."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Sequence

from rich.console import Console

from lazyjax.config import DEFAULT_OPTIMIZER
from lazyjax.config.arguments import Parser
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.huggingface.find import read_architecture
from lazyjax.models.attention import FUSED
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import OPTIMIZERS
from lazyjax.planning.commands.plot import plot_timeline
from lazyjax.planning.commands.report import (
    ComparisonRow,
    baseline_rows,
    comparison_row,
    explain,
    plan_report,
)
from lazyjax.planning.costs.packing import Packing, uniform_packing
from lazyjax.planning.costs.seconds import Costs, TemplateWork
from lazyjax.planning.plan import cache
from lazyjax.planning.plan.document import Plan, PlanError, check_made_for, load_plan, validate_plan
from lazyjax.planning.planner.batches import (
    CLOSE_TO_BEST,
    PlannedBatch,
    batches_up_to,
    plan_batches,
    recommended,
)
from lazyjax.planning.planner.question import Request
from lazyjax.planning.planner.request import build_request, request_key
from lazyjax.planning.planner.search import RELATIVE_GAP
from lazyjax.planning.planner.service import (
    InfeasibleError,
    check_batch,
    residual_names,
    solve_cached,
    verify_for,
)
from lazyjax.planning.program.verify import Verification
from lazyjax.runs import check_picture
from lazyjax.specs import Tier
from lazyjax.timeline import write_perfetto


def plan_command(arguments: Sequence[str]) -> None:
    """Plan a training step: lazyjax plan --model NAME --hardware PROFILE --batch ROWS --seq TOKENS."""
    options = _parser().parse_args(list(arguments))
    console = Console()
    _check_options(options)
    ask = _asking(options)
    if options.max_batch is None:
        batch_rows = options.batch
    else:
        unit = ask.profile.devices * (options.microbatches or 1)
        # Where none fits, the smallest one says what is missing.
        batch_rows = _recommended_rows(ask, batches_up_to(options.max_batch, unit), options, console) or unit
    asked = ask(batch_rows)
    plan = _solved(options, asked, ask, console) if options.plan is None else _loaded(options.plan, asked)
    request = asked.at(plan)
    verification = verify_for(request, plan)
    baselines = baseline_rows(request)
    _write_outputs(options, request, plan, verification, baselines)
    hardware = f"{options.hardware} ({ask.profile.device}){_spread_in_words(ask.profile)}"
    rows_seen = options.epoch_rows
    report = plan_report(request, plan, verification, baselines, hardware=hardware, epoch_rows=rows_seen)
    console.print(report, highlight=False)
    if options.packed_segment_tokens is not None:
        console.print(_packed_in_words(options.packed_segment_tokens, request, plan), highlight=False)
    if options.explain is not None:
        console.print(explain(request, plan, options.explain))
    written = options.out
    if written is None and options.plan is None and not options.no_cache:
        written = cache.path_of(cache.default_folder(), request_key(asked))
    if written is not None and written.exists():
        console.print(f"plan: {written}", soft_wrap=True, highlight=False)


def _spread_in_words(profile: HardwareProfile) -> str:
    """Nothing for one device."""
    if profile.devices == 1:
        return ""
    hosts = "one host" if profile.hosts == 1 else f"{profile.hosts} hosts"
    return f", {profile.devices} devices in {hosts},"


def _packed_in_words(segment_tokens: int, request: Request, plan: Plan) -> str:
    """How much of attention is left of rows that are packed."""
    costs = request.costs(plan.microbatch_rows)
    assert isinstance(costs, Costs)
    assert isinstance(costs.source, TemplateWork)
    visits = costs.source.shape.visits
    pairs = "all pairs" if visits is None else f"{visits.visited:,} of {visits.turns:,} pairs"
    return f"Rows are packed with segments of {segment_tokens:,} tokens: attention visits {pairs} of blocks."


def _check_options(options: argparse.Namespace) -> None:
    """What can be said before a model is read.

    Raises:
        PlanError: naming the option.
    """
    if options.batch is None and options.max_batch is None:
        raise PlanError("--batch: say how many rows a batch has, or find out with --max-batch ROWS")
    if options.batch is not None and options.max_batch is not None:
        raise PlanError("--batch plans that many rows, --max-batch looks for their number: give one of them")
    if options.packed_segment_tokens is not None and options.attention in FUSED:
        raise PlanError(
            f"--attention {options.attention} sees one segment a row, which --packed-segment-tokens denies: "
            "packed rows take blockwise attention"
        )
    _check_outputs(options)


@dataclasses.dataclass(frozen=True)
class _Asking:
    """The command line's question, for any batch."""

    options: argparse.Namespace
    template: ModelTemplate
    profile: HardwareProfile

    def __call__(self, batch_rows: int, *, nvme: bool | None = None, optimizer: str | None = None) -> Request:
        """The question for `batch_rows`; with another choice of NVMe or optimizer where one is given."""
        options = self.options
        request = build_request(
            self.template,
            self.profile,
            batch_rows=batch_rows,
            sequence_length=options.seq,
            optimizer=options.optimizer if optimizer is None else optimizer,
            compute_dtype=options.dtype,
            gradient_dtype=options.gradient_dtype,
            device_bytes=_bytes(options.device_gb),
            host_bytes=_bytes(options.host_gb),
            nvme_bytes=None if (options.nvme if nvme is None else nvme) else 0,
            packing=_packing(options, batch_rows),
        )
        fixed = {key: getattr(options, key) for key in ("microbatches", "interlayer_home", "update")}
        if options.head_chunk is not None:
            fixed["head_chunks"] = (options.head_chunk,)
        return dataclasses.replace(request, **fixed)

    def offers(self, batch_rows: int) -> dict[str, Request]:
        """The question with what the command line leaves out, by what would have to be added."""
        offers: dict[str, Request] = {}
        if self.profile.nvme_bytes and not self.options.nvme:
            offers["--nvme (the profile has a drive)"] = self(batch_rows, nvme=True)
        if self.options.optimizer != DEFAULT_OPTIMIZER:
            offers[f"--optimizer {DEFAULT_OPTIMIZER}"] = self(batch_rows, optimizer=DEFAULT_OPTIMIZER)
        return offers


def _packing(options: argparse.Namespace, batch_rows: int) -> Packing | None:
    """What `--packed-segment-tokens` says of the rows."""
    if options.packed_segment_tokens is None:
        return None
    return uniform_packing(options.packed_segment_tokens, batch_rows, options.seq)


def _asking(options: argparse.Namespace) -> _Asking:
    """Reads the model and the profile.

    Raises:
        PlanError: `--explain` names a layer that the model does not have.
    """
    whole = build_template(read_architecture(options.model), options.attention)
    last = len(whole.spec.layers) - 1
    if options.explain is not None and not 0 <= options.explain <= last:
        raise PlanError(f"--explain {options.explain}: the model has layers 0 to {last}")
    profile = load_profile(options.hardware)
    if options.devices is not None or options.hosts is not None:
        devices = options.devices or profile.devices
        profile = profile.spread(devices, options.hosts or 1, source="--devices and --hosts")
    return _Asking(options, whole.in_chunks(options.token_chunk), profile)


def _loaded(path: pathlib.Path, request: Request) -> Plan:
    """The plan of a file.

    Raises:
        PlanError: it cannot be read, or was made for something else.
    """
    plan = load_plan(path)
    check_batch(plan, request, str(path))
    undecided = {"device"} if request.chunked is None else {"device", "token_chunk"}
    asked = {key: value for key, value in request.made_for.items() if key not in undecided}
    check_made_for(plan, asked, str(path))
    validate_plan(plan, request.spec, residual_names(request.at(plan)))
    return plan


def _solved(options: argparse.Namespace, request: Request, ask: _Asking, console: Console) -> Plan:
    """The planner's plan, or the one it found before."""
    plan, found = solve_cached(
        request,
        None if options.no_cache else cache.default_folder(),
        time_limit_seconds=options.time_limit,
        relative_gap=options.gap / 100,
        console=console,
        offers=ask.offers(request.batch_rows),
    )
    if found is None:
        console.print("[dim]solved before: from the cache[/dim]", highlight=False)
    return plan


def _write_outputs(
    options: argparse.Namespace,
    request: Request,
    plan: Plan,
    verification: Verification,
    baselines: Sequence[ComparisonRow],
) -> None:
    """The plan, its pictures and its trace, as far as they were asked for."""
    if options.out is not None:
        plan.save(options.out)
    if options.png is not None:
        title = f"{plan.model}, {options.hardware}, {plan.batch_rows} x {plan.sequence_length} (simulated)"
        static = {tier: verification.peak_bytes[tier] - verification.live_bytes[tier] for tier in Tier}
        timeline = verification.simulation.timeline
        plot_timeline(timeline, options.png, title=title, capacity=request.capacity, fixed=static)
    if options.plot is not None:
        # Here, because matplotlib takes most of a second of a question that wants no picture.
        from lazyjax.planning.commands.picture import write_picture

        title = f"{plan.model}, {options.hardware}, {plan.batch_rows} x {plan.sequence_length} tokens"
        peaks = {tier.value: size for tier, size in verification.peak_bytes.items()}
        own = comparison_row(request, "LazyJAX", plan, verification.period_seconds, peaks)
        write_picture(request, [own, *baselines], options.plot, title=title)
    if options.trace is not None:
        write_perfetto([verification.simulation.timeline], options.trace)


def _check_outputs(options: argparse.Namespace) -> None:
    """Whether everything can be written that is to be written, before minutes go into solving."""
    if options.png is not None:
        check_picture(options.png)
    if options.plot is not None:
        from lazyjax.planning.commands.picture import check_path

        check_path(options.plot, check_picture)
    for path in (options.out, options.trace):
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            raise PlanError(f"{path}: there is no folder {folder}")
        if path.is_dir():
            raise PlanError(f"{path}: is a folder")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise PlanError(f"{path}: cannot be written there")


#: Seconds for planning each batch that `--max-batch` looks at.
_SECONDS_PER_BATCH = 6.0


def _recommended_rows(
    ask: Callable[[int], Request],
    batches: Sequence[int],
    options: argparse.Namespace,
    console: Console,
) -> int:
    """Prints throughput against batch; the smallest batch within 1 % of the best, 0 where none fits."""
    folder = None if options.no_cache else cache.default_folder()

    def solve(batch_rows: int) -> Plan | None:
        try:
            limit = min(_SECONDS_PER_BATCH, options.time_limit)
            return solve_cached(ask(batch_rows), folder, time_limit_seconds=limit)[0]
        except InfeasibleError:
            return None

    def show(batch: PlannedBatch) -> None:
        console.print(
            f"{batch.batch_rows:>7} rows {batch.tokens_per_second:>10,.0f} tokens/s", highlight=False
        )

    console.print("Throughput against batch (simulated):", highlight=False)
    planned = plan_batches(batches, solve, show)
    if not planned:
        return 0
    best, chosen = max(batch.tokens_per_second for batch in planned), recommended(planned)
    console.print(
        f"Recommended: {chosen.batch_rows} rows, the smallest batch of these within {CLOSE_TO_BEST:.0%} of "
        f"the best ({best:,.0f} tokens/s).",
        highlight=False,
    )
    return chosen.batch_rows


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def number(least: int, kind: type[int] | type[float]) -> Callable[[str], float | int]:
    """A parser of numbers from `least` on, for argparse."""

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
    parser = Parser(prog="lazyjax plan", description="Plan a training step.")
    positive, amount = number(1, int), number(0, float)
    parser.add_argument("--model", required=True, help="packaged architecture, model folder or config.json")
    parser.add_argument("--hardware", required=True, help="preset or file made by `lazyjax profile`")
    parser.add_argument("--batch", type=positive, help="rows of a batch")
    parser.add_argument(
        "--devices", type=positive, help="devices that share every batch, all hosts together (default: 1)"
    )
    parser.add_argument(
        "--hosts", type=positive, help="hosts that the devices are in, as many in each (default: 1)"
    )
    parser.add_argument("--seq", type=positive, default=1024, help="tokens of a row")
    on_host = f"on the host: {', '.join(OPTIMIZERS)}"
    parser.add_argument(
        "--optimizer", default=DEFAULT_OPTIMIZER, choices=OPTIMIZERS, metavar="NAME", help=on_host
    )
    dtypes = ("bfloat16", "float32")
    parser.add_argument("--dtype", default="bfloat16", choices=dtypes, help="of the layers' mathematics")
    parser.add_argument(
        "--gradient-dtype", default="bfloat16", choices=dtypes, help="of gradients to the host"
    )
    parser.add_argument("--epoch-rows", type=positive, metavar="ROWS", help="tell the hours of so many rows")
    parser.add_argument(
        "--max-batch",
        type=positive,
        metavar="ROWS",
        help="plan batches up to ROWS and take the smallest within 1 %% of the best throughput",
    )
    parser.add_argument(
        "--attention",
        choices=("blockwise", *FUSED),
        default="blockwise",
        help="the form whose costs are planned with; a fused kernel moves far less (default: blockwise)",
    )
    parser.add_argument(
        "--packed-segment-tokens",
        type=positive,
        metavar="TOKENS",
        help="rows are packed with segments of about so many tokens (default: each row is one)",
    )
    _add_fixed(parser)
    parser.add_argument("--device-gb", type=amount, help="device memory to use, GB (1e9 bytes)")
    parser.add_argument("--host-gb", type=amount, help="host memory to use, GB")
    parser.add_argument("--nvme", action="store_true", help="use the profile's NVMe for boundaries and state")
    parser.add_argument("--plan", type=pathlib.Path, help="show this plan instead of solving")
    parser.add_argument("--explain", type=int, metavar="LAYER", help="why this layer is treated so")
    parser.add_argument("--time-limit", type=amount, default=20.0, help="seconds for the search")
    percent = 100 * RELATIVE_GAP
    parser.add_argument("--gap", type=amount, default=percent, help="percent from the best possible plan")
    parser.add_argument("--no-cache", action="store_true", help="solve even if the plan is known")
    _add_outputs(parser)
    return parser


def _add_fixed(parser: argparse.ArgumentParser) -> None:
    """Decisions that are taken from the planner."""
    positive = number(1, int)
    parser.add_argument("--microbatches", type=positive, help="fix the number of microbatches")
    parser.add_argument(
        "--token-chunk", type=positive, metavar="TOKENS", help="let blocks compute so many tokens at a time"
    )
    parser.add_argument(
        "--head-chunk", type=positive, metavar="TOKENS", help="let logits of so many tokens exist at a time"
    )
    parser.add_argument("--interlayer-home", choices=("device", "host"), help="fix where activations wait")
    parser.add_argument("--update", choices=("deferred", "immediate"), help="when the optimizer runs")


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=pathlib.Path, help="write the plan as JSON here")
    parser.add_argument("--png", type=pathlib.Path, help="write the simulated step as a picture")
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE.png|.html", help="draw the step beside the baselines'"
    )
    parser.add_argument("--trace", type=pathlib.Path, help="write the simulated step for Perfetto")
