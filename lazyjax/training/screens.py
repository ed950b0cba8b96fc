"""What a run says before its first step and after its last: what was chosen, what came of it.

On a terminal sentences wrap at words; a pipe gets one plain line for each.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazyjax.hardware.load import is_busy
from lazyjax.planning.commands.sentences import decisions
from lazyjax.planning.plan.document import Plan
from lazyjax.runs import Run
from lazyjax.training.display import format_bytes
from lazyjax.training.status import say

_HEADING = 10


def show_facts(console: Console, facts: Mapping[str, str | Sequence[str]]) -> None:
    """Headings with one or more sentences each."""
    grid = Table.grid(padding=0)
    grid.add_column(width=_HEADING)
    grid.add_column(ratio=1)
    for heading, text in facts.items():
        for number, sentence in enumerate((text,) if isinstance(text, str) else text):
            name = "" if number else heading
            if console.is_terminal:
                grid.add_row(Text(name), Text(sentence))
            else:
                say(console, f"{name:<{_HEADING}}{sentence}")
    if console.is_terminal:
        console.print(grid)


def plan_sentences(plan: Plan) -> list[str]:
    """Who made a plan, what it decides, and what it promises."""
    makers = {"milp": "found for this run by the planner (milp)"}
    maker = makers[plan.planner] if plan.planner in makers else f"the rule of {plan.planner}"
    facts = [f"{maker}: {decisions(plan)}"]
    if plan.prediction is not None:
        bound = plan.prediction.bound_seconds
        least = f"; no plan takes less than {_seconds(bound)}" if bound else ""
        peaks = plan.prediction.peak_bytes
        memory = ", ".join(
            f"{tier} {format_bytes(peaks[tier])}" for tier in ("device", "host") if tier in peaks
        )
        facts.append(f"predicted: {_seconds(plan.prediction.period_seconds)} a step{least}; {memory}")
    return facts


def show_closing(console: Console, plan: Plan, run: Run, *, buffer_bytes: int, here: str) -> None:
    """What the plan promised beside what was measured; nothing where it promised nothing.

    Args:
        plan: in use at the end.
        run: the records.
        buffer_bytes: most bytes that the plan's schedule has on the device at once.
        here: what the device calls itself.
    """
    prediction, steps = plan.prediction, run.timed_steps
    if prediction is None or not steps or run.summary is None:
        return
    seconds = statistics.median(_own_seconds(step) for step in steps)
    deviation = seconds / prediction.period_seconds - 1
    table = Table(
        title="predicted and measured", title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0)
    )
    for heading, justify in (("", "left"), ("predicted", "right"), ("measured", "right"), ("", "left")):
        table.add_column(heading, justify=justify, no_wrap=heading != "")  # type: ignore[arg-type]
    table.add_row(
        "  a step",
        _seconds(prediction.period_seconds),
        _seconds(seconds),
        f"{deviation:+.1%} (median of {len(steps)})",
    )
    table.add_row(
        "  on the device",
        format_bytes(buffer_bytes),
        format_bytes(run.summary["peak_device_bytes"]),
        "buffers",
    )
    if "host" in prediction.peak_bytes:
        table.add_row(
            "  on the host",
            format_bytes(prediction.peak_bytes["host"]),
            format_bytes(run.summary["peak_host_bytes"]),
            "the process, with Python",
        )
    console.print(table)
    busy = busy_sentence(run)
    if busy is not None:
        say(console, busy)
    share = sum(step["padded_tokens"] for step in steps) / (
        len(steps) * plan.batch_rows * plan.sequence_length
    )
    if share < 0.99:
        say(
            console,
            f"  (the prediction is for rows of {plan.sequence_length} tokens; the steps had {share:.0%} of "
            "them, because their rows were shorter)",
        )
    if plan.device is not None and not same_device(plan.device, here):
        say(console, f"  (predicted for {plan.device}, measured on {here}: another kind of machine)")


def busy_sentence(run: Run) -> str | None:
    """What other programs took of the CPUs while steps were timed and before, where it was much."""
    summary = run.summary or {}
    if "cpus" not in summary:
        return None
    cpus, calibrated = summary["cpus"], summary["other_cpus_while_calibrated"]
    stepping = run.other_cpus
    if not (is_busy(stepping, cpus) or is_busy(calibrated, cpus)):
        return None
    shares = [] if stepping is None else [f"{stepping:.1f} during these steps"]
    shares += [] if calibrated is None else [f"{calibrated:.1f} during calibration"]
    return (
        f"  (the machine was busy: of its {cpus} CPUs other programs took {' and '.join(shares)}; on a quiet "
        "one the times would be others)"
    )


def _own_seconds(step: Mapping[str, Any]) -> float:
    """Seconds of a step without compiling, which happens once per kernel and is in no prediction."""
    return step["step_seconds"] - (step["compile_seconds"] if "compile_seconds" in step else 0.0)


def same_device(profiled: str, here: str) -> bool:
    """Whether a profile's device is of the kind that is here: names differ, model numbers do not.

    Args:
        profiled: such as `NVIDIA H200 SXM 141 GB`, or what `device_label` gave elsewhere.
        here: such as `NVIDIA H200`, or what `device_label` gives.
    """
    if profiled == here:
        return True
    numbers = [word.lower() for word in here.replace(",", " ").split() if any(c.isdigit() for c in word)]
    words = profiled.lower().replace(",", " ").split()
    return bool(numbers) and "cpus" not in here.lower() and numbers[0] in words


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds < 1000 else f"{seconds:,.0f} s"
