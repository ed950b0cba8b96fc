"""A step as a picture: one lane per resource over time, memory per tier below."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from lazyjax.specs import Tier
from lazyjax.timeline import Resource, Timeline

#: Of an operation, by its action.
COLOURS = {
    "forward": "#4c78a8",
    "loss": "#1f3b5c",
    "recompute": "#e45756",
    "backward": "#72b7b2",
    "fetch": "#f58518",
    "reload": "#ffbf79",
    "offload": "#b279a2",
    "gradient_out": "#7a4a6e",
    "update": "#54a24b",
    "load": "#9d755d",
    "spill": "#d8b5a5",
    "load_state": "#bab0ac",
    "spill_state": "#79706e",
    "spill_gradient": "#59504e",
    "load_parameters": "#c9a66b",
    "gather": "#d67195",
    "reduce_scatter": "#9e3d61",
}


def plot_timeline(
    timeline: Timeline,
    path: pathlib.Path,
    *,
    title: str,
    capacity: Mapping[Tier, int] | None = None,
    fixed: Mapping[Tier, int] | None = None,
) -> None:
    """Writes a picture of one step's operations and of the bytes on each tier, over the whole step.

    Args:
        capacity: drawn as a limit where a tier has one.
        fixed: bytes besides what the timeline counts (training state, working sets), added to it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = [lane for lane in Resource if any(event.resource is lane for event in timeline.events)]
    tiers = [tier for tier in Tier if memory_steps(timeline, tier, fixed) is not None]
    heights = [0.55 * len(lanes) + 0.9, *(1.6 for _ in tiers)]
    figure = Figure(figsize=(14, 1.2 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(tiers), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    _draw_lanes(axes[0], timeline, lanes)
    axes[0].set_title(title)
    for axis, tier in zip(axes[1:], tiers, strict=True):
        limit = None if capacity is None or not capacity[tier] else capacity[tier]
        steps = memory_steps(timeline, tier, fixed)
        assert steps is not None
        _draw_memory(axis, tier, *steps, limit)
    axes[-1].set_xlabel("seconds from the start of the step")
    figure.savefig(path, dpi=130)


def memory_steps(
    timeline: Timeline, tier: Tier, fixed: Mapping[Tier, int] | None
) -> tuple[list[float], list[float]] | None:
    """Moments and GB of a tier from the start of the step to its end; None where it holds nothing.

    What a timeline counts is there only while something lives; before and after it, `fixed` is all.
    """
    besides = 0 if fixed is None else fixed[tier]
    samples = [sample for sample in timeline.memory if sample.tier == tier.value]
    if not samples and not besides:
        return None
    end = max((event.end_seconds for event in timeline.events), default=0.0)
    moments = [0.0, *(sample.seconds for sample in samples)]
    sizes = [besides / 1e9, *((sample.bytes + besides) / 1e9 for sample in samples)]
    return [*moments, max(end, moments[-1])], [*sizes, sizes[-1]]


def _draw_lanes(axis: Any, timeline: Timeline, lanes: Sequence[Resource]) -> None:
    actions = draw_lanes(axis, timeline, lanes)
    axis.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    axis.set_ylim(len(lanes) - 0.4, -1.3)
    axis.legend(
        actions.values(), actions.keys(), ncols=len(actions), fontsize=7, loc="upper left", frameon=False
    )


def draw_lanes(axis: Any, timeline: Timeline, lanes: Sequence[Resource]) -> dict[str, Any]:
    """Bars of every operation, a lane below the other; what was drawn for each action."""
    actions: dict[str, Any] = {}
    for row, lane in enumerate(lanes):
        for action in dict.fromkeys(event.action for event in timeline.events if event.resource is lane):
            spans = [
                (event.start_seconds, event.end_seconds - event.start_seconds)
                for event in timeline.events
                if event.resource is lane and event.action == action
            ]
            actions[action] = axis.broken_barh(
                spans, (row - 0.4, 0.8), facecolors=COLOURS[action], edgecolor="white", linewidth=0.15
            )
    return actions


def _draw_memory(
    axis: Any, tier: Tier, moments: Sequence[float], sizes: Sequence[float], limit_bytes: int | None
) -> None:
    axis.step(moments, sizes, where="post", color="#4c78a8")
    axis.fill_between(moments, sizes, step="post", color="#4c78a8", alpha=0.2)
    highest = max(sizes)
    if limit_bytes is not None:
        limit = limit_bytes / 1e9
        axis.axhline(limit, color="#e45756", linestyle=":", linewidth=1.2)
        axis.annotate(
            f"limit {limit:,.1f} GB", (0.99, limit), xycoords=("axes fraction", "data"), ha="right", va="top",
            fontsize=8, color="#e45756",
        )  # fmt: skip
        highest = max(highest, limit)
    axis.set_ylim(0, 1.08 * highest)
    axis.set_ylabel(f"{tier.value}, GB")
