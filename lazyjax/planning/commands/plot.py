"""A step as a picture: one lane per resource over time, memory per tier below."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from lazyjax.specs import Tier
from lazyjax.timeline import Resource, Timeline

_COLOURS = {
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
}


def plot_timeline(
    timeline: Timeline,
    path: pathlib.Path,
    *,
    title: str,
    capacity: Mapping[Tier, int] | None = None,
    fixed: Mapping[Tier, int] | None = None,
) -> None:
    """Writes a PNG of one step's operations and of the bytes live on each tier.

    Args:
        capacity: drawn dotted, where it is within sight.
        fixed: bytes besides what the timeline counts (training state, working sets), added to it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = [lane for lane in Resource if any(event.resource is lane for event in timeline.events)]
    figure = Figure(figsize=(14, 1.6 + 0.5 * len(lanes) + 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[0.55 * len(lanes) + 0.3, 2.4])
    kinds: dict[str, Any] = {}
    for row, lane in enumerate(lanes):
        for kind in dict.fromkeys(event.action for event in timeline.events if event.resource is lane):
            spans = [
                (event.start_seconds, event.end_seconds - event.start_seconds)
                for event in timeline.events
                if event.resource is lane and event.action == kind
            ]
            bars = top.broken_barh(
                spans, (row - 0.4, 0.8), facecolors=_COLOURS[kind], edgecolor="white", linewidth=0.15
            )
            kinds[kind] = bars
    top.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    top.invert_yaxis()
    top.set_title(title)
    top.legend(kinds.values(), kinds.keys(), ncols=len(kinds), fontsize=7, loc="upper left", frameon=False)
    top.set_ylim(len(lanes) - 0.4, -1.3)
    for tier in Tier:
        samples = [sample for sample in timeline.memory if sample.tier == tier.value]
        if samples:
            moments = [sample.seconds for sample in samples]
            besides = 0 if fixed is None else fixed[tier]
            sizes = [(sample.bytes + besides) / 1e9 for sample in samples]
            line = bottom.step(moments, sizes, where="post", label=tier.value)
            if capacity is not None and (tier is Tier.DEVICE or capacity[tier] <= 1.5e9 * max(sizes)):
                colour = line[0].get_color()
                bottom.axhline(capacity[tier] / 1e9, color=colour, linestyle=":", linewidth=1)
    bottom.set_xlabel("seconds from the start of the step")
    bottom.set_ylabel("GB" if fixed is not None else "live GB (activations, slabs)")
    bottom.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
