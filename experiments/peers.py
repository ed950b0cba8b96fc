"""LazyJAX beside today's best for models larger than the GPU, at their device budgets.

Command:  python -m experiments.reproduce peers
Their tokens per second are quoted, ours simulated on the profile of the same GPU, so the ratio says no
more than the profile's assumptions do. What differs stands beside each row.
"""

from __future__ import annotations

import functools
import pathlib
from typing import NamedTuple

from experiments.sheet import Sheet, paper, simulated_cell
from experiments.systems import template_of
from lazyjax.hardware.profile import load_profile
from lazyjax.planning.plan import cache
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.service import InfeasibleError, solve_cached

#: The batch of als244's benchmarks: sequences and tokens of each; taken for all rows.
ROWS, TOKENS = 16, 4096
GIB = 2**30
_BF16 = "no fp32 masters (bf16 weights and state), optimizer on the GPU"
_EIGHT_BIT = "8-bit or bf16 state without exact fp32 masters"


class Peer(NamedTuple):
    """One published figure: full fine-tuning on one GPU.

    Attributes:
        budget_gib: of device memory; None: all of it.
        differs: from what this library computes.
    """

    system: str
    profile: str
    model: str
    budget_gib: float | None
    tokens_per_second: float
    differs: str


PEERS = (
    Peer("als244/dataflow", "h100-sxm", "Llama-3.1-8B", 67.0, 12511, _BF16),
    Peer("als244/dataflow", "h100-sxm", "Llama-3.1-8B", 8.8, 10209, _BF16),
    Peer("als244/shadowspill", "rtx5090", "Llama-3.1-8B", 16.0, 3556, _BF16),
    Peer("RoundPipe", "rtx4090", "Llama-3.1-8B", None, 3142, _BF16 + "; their sequences may be shorter"),
    Peer("RoundPipe", "rtx4090", "Qwen3-32B", None, 740, _BF16 + "; their sequences may be shorter"),
    Peer("LLMQ", "rtx4090", "Qwen2.5-7B", None, 2800, _EIGHT_BIT + ", products in 8 bit"),
)
#: Device budgets of the curve, GiB.
BUDGETS_GIB = (8.8, 12.0, 16.0, 24.0, 40.0, 67.0)


@functools.cache
def tokens_per_second(profile_name: str, model: str, budget_gib: float | None) -> float | None:
    """Simulated, of the plan found; None where nothing fits."""
    profile = load_profile(profile_name)
    request = build_request(
        template_of(model),
        profile,
        batch_rows=ROWS,
        sequence_length=TOKENS,
        device_bytes=None if budget_gib is None else int(budget_gib * GIB),
        nvme_bytes=0,
    )
    try:
        plan, _ = solve_cached(request, cache.default_folder(), time_limit_seconds=20.0)
    except InfeasibleError:
        return None
    assert plan.prediction is not None
    return ROWS * TOKENS / plan.prediction.period_seconds


def peers(folder: pathlib.Path) -> Sheet:
    """The published figures, and tokens per second against device budget."""
    columns = ["system", "GPU", "model", "device GiB", "tokens/s", "LazyJAX tokens/s", "ratio"]
    columns.append("what differs")
    sheet = Sheet(f"Peers: {ROWS} rows of {TOKENS} tokens", columns)
    for peer in PEERS:
        ours = tokens_per_second(peer.profile, peer.model, peer.budget_gib)
        budget = "all" if peer.budget_gib is None else f"{peer.budget_gib:g}"
        cells = ("does not fit", "") if ours is None else (
            simulated_cell(ours, 0), f"{ours / peer.tokens_per_second:.2f}x (simulated over published)"
        )  # fmt: skip
        sheet.add(
            peer.system, peer.profile, peer.model, budget, paper(peer.tokens_per_second, 0), *cells,
            peer.differs,
        )  # fmt: skip
        print(" | ".join(sheet.rows[-1]), flush=True)
    for profile in ("h100-sxm", "rtx5090"):
        for budget_gib in BUDGETS_GIB:
            if budget_gib * GIB > load_profile(profile).device_bytes:
                continue
            ours = tokens_per_second(profile, "Llama-3.1-8B", budget_gib)
            cell = "does not fit" if ours is None else simulated_cell(ours, 0)
            sheet.add("-", profile, "Llama-3.1-8B", f"{budget_gib:g}", "-", cell, "", "")
    sheet.notes += [
        "LazyJAX computes products in bf16 with fp32 accumulation, keeps exact fp32 masters and 8-bit "
        "moments on the host and updates there. `paper` here is what the peers publish as measured.",
        "Rows without a system are the curve of tokens/s against device budget.",
    ]
    _plot(folder)
    sheet.write(folder, "peers")
    return sheet


def _plot(folder: pathlib.Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for profile in ("h100-sxm", "rtx5090"):
        points = [
            (budget, rate)
            for budget in BUDGETS_GIB
            if budget * GIB <= load_profile(profile).device_bytes
            and (rate := tokens_per_second(profile, "Llama-3.1-8B", budget)) is not None
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"LazyJAX, {profile} (simulated)")
    for peer in PEERS:
        if peer.model == "Llama-3.1-8B" and peer.budget_gib is not None:
            at = (peer.budget_gib, peer.tokens_per_second)
            axes.plot(*at, "k^", markersize=5)
            axes.annotate(f"{peer.system} (published)", at, fontsize=7)
    axes.set_xlabel("device budget, GiB")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "peers.png", dpi=130)
