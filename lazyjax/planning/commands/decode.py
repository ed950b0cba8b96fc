"""The command `lazyjax plan --generate`: how a model is decoded on a machine, and how long that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lazyjax.config.arguments import Parser
from lazyjax.config.keys import ConfigError
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.huggingface.find import read_architecture
from lazyjax.models.registry import build_template
from lazyjax.planning.costs.decode import DecodeCosts, decode_costs
from lazyjax.planning.plan.decode import DecodePlan
from lazyjax.planning.planner.decode import batch_sizes, most_resident, plan_decoding

#: The evaluation of LazyTrain (arXiv 2608.11919): the held-out 30 % of MetaMathQA's 395,000 rows.
PAPER_ROWS = 118_501
#: Of a parameter: both halves of its master, as for training.
_HOST_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """What is answered: so many rows, of so many tokens of prompt and answer on average."""

    rows: int
    prompt_tokens: int
    answer_tokens: int


def decode_plan_command(arguments: Sequence[str]) -> None:
    """Plan decoding: lazyjax plan --generate --model NAME --hardware PROFILE [--rows N]."""
    options = _parser().parse_args(list(arguments))
    if options.prompt_tokens + options.answer_tokens > options.tokens:
        raise ConfigError(
            f"--tokens {options.tokens}: less than an average row has "
            f"({options.prompt_tokens} + {options.answer_tokens} tokens)"
        )
    profile = load_profile(options.hardware)
    template = build_template(read_architecture(options.model))
    costs = decode_costs(template, profile, tokens=options.tokens, compute_dtype=options.dtype)
    device_bytes = profile.device_bytes if options.device_gb is None else int(options.device_gb * 1e9)
    workload = Workload(options.rows, options.prompt_tokens, options.answer_tokens)
    most = min(options.most_batch, options.rows)
    if options.batch is not None and options.batch % profile.devices:
        raise ConfigError(f"--batch {options.batch}: cannot be split over {profile.devices} devices")
    plan = plan_decoding(costs, device_bytes=device_bytes, most_rows=most, batch_rows=options.batch)
    console = Console()
    for line in first_lines(costs, plan, profile, workload, device_bytes):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)
    console.print(comparison(costs, plan, workload, device_bytes, most))


def row_seconds(costs: DecodeCosts, plan: DecodePlan, workload: Workload) -> float:
    """Seconds per answered row: its share of the steps, and its prompt."""
    step_seconds = costs.predict(plan).step_seconds
    prompts = costs.prompt_seconds(workload.prompt_tokens, plan.batch_rows) / plan.batch_rows
    return workload.answer_tokens * step_seconds / plan.batch_rows + prompts


def first_lines(
    costs: DecodeCosts, plan: DecodePlan, profile: HardwareProfile, workload: Workload, device_bytes: int
) -> list[str]:
    """Whether it fits, what was chosen, and how long the rows take; every figure is simulated."""
    sizes = costs.sizes
    spec, prediction, used = sizes.template.spec, costs.predict(plan), len(sizes.uses)
    where = "whole" if len(plan.resident) == used else f"with {len(plan.resident)} of {used} layers resident"
    hours = workload.rows * row_seconds(costs, plan, workload) / 3600
    state_bytes = plan.batch_rows // profile.devices * sizes.row_state_bytes
    return [
        f"{spec.name} fits {profile.name} {where}: {prediction.device_bytes / 1e9:.1f} of "
        f"{device_bytes / 1e9:.1f} GB of device memory, {state_bytes / 1e9:.1f} of them states of "
        f"{plan.batch_rows} rows ({sizes.row_state_bytes / 1e6:.0f} MB each at {plan.tokens} tokens); "
        f"{_HOST_BYTES * spec.parameter_count / 1e9:.1f} GB of host memory.",
        f"{plan.batch_rows / prediction.step_seconds:,.0f} tokens/s: a step of "
        f"{prediction.step_seconds * 1e3:.1f} ms gives {plan.batch_rows} tokens (simulated).",
        f"{workload.rows:,} rows of {workload.prompt_tokens} prompt and {workload.answer_tokens} answer "
        f"tokens (assumed averages) take {hours:.2f} hours (simulated).",
    ]


def comparison(
    costs: DecodeCosts, chosen: DecodePlan, workload: Workload, device_bytes: int, most_rows: int
) -> Table:
    """The choice beside smaller and larger batches and beside streaming everything."""
    table = Table(title="simulated", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("", "rows", "resident\nlayers", "step\nms", "tokens\n/s", "device\nGB", "hours"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)

    def add(name: str, plan: DecodePlan) -> None:
        prediction = costs.predict(plan)
        hours = workload.rows * row_seconds(costs, plan, workload) / 3600
        table.add_row(
            name,
            str(plan.batch_rows),
            f"{len(plan.resident)}/{len(costs.sizes.uses)}",
            f"{prediction.step_seconds * 1e3:.1f}",
            f"{plan.batch_rows / prediction.step_seconds:,.0f}",
            f"{prediction.device_bytes / 1e9:.1f}",
            f"{hours:,.1f}",
        )

    add("chosen", chosen)
    streamed = [
        DecodePlan(batch_rows, costs.sizes.tokens)
        for batch_rows in batch_sizes(most_rows, costs.profile.devices)
        if costs.sizes.device_bytes(DecodePlan(batch_rows, costs.sizes.tokens)) <= device_bytes
    ]
    if chosen.resident and streamed:
        add("all streamed, same rows", DecodePlan(chosen.batch_rows, chosen.tokens))
        add("all streamed, most rows", streamed[-1])
    for batch_rows in (chosen.batch_rows // 4, chosen.batch_rows // 2, chosen.batch_rows * 2):
        if batch_rows < 1 or batch_rows % costs.profile.devices:
            continue
        other = most_resident(costs.sizes, batch_rows, device_bytes)
        if other is not None:
            add(f"{batch_rows} rows", other)
    return table


def _parser() -> Parser:
    parser = Parser(prog="lazyjax plan --generate", description="Plan decoding instead of training.")
    positive = _whole(1)
    parser.add_argument("--generate", action="store_true", required=True, help="plan decoding")
    parser.add_argument("--model", required=True, help="packaged architecture, model folder or config.json")
    parser.add_argument("--hardware", required=True, help="preset or file made by `lazyjax profile`")
    parser.add_argument(
        "--rows",
        type=positive,
        default=PAPER_ROWS,
        help=f"rows to answer (default {PAPER_ROWS}, the paper's)",
    )
    parser.add_argument("--prompt-tokens", type=positive, default=150, help="of an average row (default 150)")
    parser.add_argument("--answer-tokens", type=positive, default=200, help="of an average row (default 200)")
    parser.add_argument("--tokens", type=positive, default=1024, help="most tokens of a row (default 1024)")
    parser.add_argument("--batch", type=positive, help="fix the rows that are decoded together")
    parser.add_argument("--most-batch", type=positive, default=1024, help="try up to so many (default 1024)")
    parser.add_argument("--device-gb", type=_amount, help="device memory to use, GB (1e9 bytes)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of parameters")
    return parser


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    parse.__name__ = f"whole number from {least} on"
    return parse


def _amount(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


_amount.__name__ = "positive number"
