"""What the planner expects of the full run: Qwen3.6-27B in the setup of the paper, on its H800.

Everything it prints is `simulated`, except the two figures of the paper beside it.
"""

from __future__ import annotations

import pathlib

from rich.console import Console

from experiments.published import TABLE_5
from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning.commands.report import baseline_rows, comparison, comparison_row
from lazyjax.planning.plan.cache import default_folder
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.service import solve_cached, verify_for

MODEL, MACHINE = "Qwen3.6-27B", "h800-paper"
ROWS, SEQUENCE_LENGTH = 72, 1024


def print_prediction(
    console: Console, *, time_limit_seconds: float = 20.0, folder: pathlib.Path | None = None
) -> None:
    """Plans the full run and prints the plan beside the baselines, all simulated.

    Args:
        time_limit_seconds: of the search.
        folder: where solved plans are kept; by default the user's cache folder.
    """
    request = build_request(
        build_template(architecture(MODEL)),
        load_profile(MACHINE),
        rows=ROWS,
        sequence_length=SEQUENCE_LENGTH,
        nvme_bytes=0,
    )
    with console.status(f"planning {MODEL}, {ROWS} x {SEQUENCE_LENGTH} tokens, on {MACHINE} ..."):
        plan, _ = solve_cached(request, folder or default_folder(), time_limit_seconds=time_limit_seconds)
        verification = verify_for(request, plan)
        baselines = baseline_rows(request)
    peaks = {tier.value: size for tier, size in verification.peak_bytes.items()}
    own = comparison_row(request, "lazyjax", plan, verification.period_seconds, peaks)
    console.print(f"{MODEL}, {ROWS} x {SEQUENCE_LENGTH} tokens, {MACHINE}:", highlight=False)
    console.print(comparison([own, *baselines], request))
    paper = ", ".join(f"{name} {TABLE_5[name][0]}" for name in ("MegaTrain", "LazyTrain"))
    console.print(f"paper: {paper} TFLOPS on this machine\n", highlight=False)
