"""What the planner expects of the full run: Qwen3.6-27B in the setup of the paper, on its H800.

Everything it prints is `simulated`, except the two figures of the paper beside it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from rich.console import Console

from experiments.published import TABLE_5
from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning.commands.report import baseline_rows, comparison, comparison_row, model_tflops
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
    profile = load_profile(MACHINE)
    request = build_request(
        build_template(architecture(MODEL)),
        profile,
        batch_rows=ROWS,
        sequence_length=SEQUENCE_LENGTH,
        nvme_bytes=0,
    )
    with console.status(f"planning {MODEL}, {ROWS} x {SEQUENCE_LENGTH} tokens, on {MACHINE} ..."):
        plan, _ = solve_cached(request, folder or default_folder(), time_limit_seconds=time_limit_seconds)
        verification = verify_for(request, plan)
        baselines = baseline_rows(request)
    peaks = {tier.value: size for tier, size in verification.peak_bytes.items()}
    own = comparison_row(request, "lazyjax", plan, verification.period_seconds, peaks)
    console.print(
        f"1. {MODEL}, {ROWS} x {SEQUENCE_LENGTH} tokens on the profile {MACHINE} ({profile.device}), not on "
        "this machine:",
        highlight=False,
    )
    console.print(comparison([own, *baselines], request))
    simulated = {
        row.name: model_tflops(request.spec.parameter_count, row.plan, row.period_seconds)
        for row in baselines
    }
    console.print(difference_sentence(simulated) + "\n", highlight=False)


def difference_sentence(simulated: Mapping[str, float]) -> str:
    """What the paper measured of its two systems, and how far the simulation is from it.

    Args:
        simulated: model TFLOPS by the name of a baseline.
    """
    parts = []
    for system in ("MegaTrain", "LazyTrain"):
        paper, ours = TABLE_5[system][0], simulated[system.lower()]
        parts.append(f"{system} {paper:.1f} (simulated here {ours:.1f}, {ours / paper - 1:+.0%})")
    return (
        f"The paper measured on its own H800, in model TFLOPS: {', '.join(parts)}. A simulation runs their "
        "rules in this executor at this profile's rates: it compares plans with each other, and no simulated "
        "figure is a measurement."
    )
