"""Figures of a sweep; each writes a PNG, or says that there is nothing to draw."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from analysis.sweeps import MEASURED_SECONDS, SIMULATED_SECONDS, SweepRecords, curves, readable
from lazyjax.runs import Run, smoothed

Axis = Literal["step", "tokens", "seconds"]
_LABELS = {
    "step": "step",
    "tokens": "tokens that are not padding",
    "seconds": "seconds of training, without compiling",
}


def loss_figure(records: SweepRecords, axis: Axis, file: io.BytesIO) -> bool:
    """Smoothed training loss of every trial, one colour a variant."""
    figure, axes = _axes(len(records.variants))
    drawn = False
    for number, variant in enumerate(records.variants):
        for seed_number, (x, y) in enumerate(curves(variant, lambda run: _losses(run, axis))):
            label = variant.name if seed_number == 0 else None
            axes.plot(x, y, color=_colour(number), linewidth=1.2, alpha=0.8, label=label)
            drawn = True
    axes.set_xlabel(_LABELS[axis])
    axes.set_ylabel("training loss, smoothed (measured)")
    return drawn and _save(figure, file, axes)


def metric_figure(records: SweepRecords, metric: str, file: io.BytesIO) -> bool:
    """Mean and standard error of a metric by variant."""
    means = [(variant.name, variant.mean(metric)) for variant in records.variants]
    known = [(name, value) for name, value in means if value is not None]
    if not known:
        return False
    figure, axes = _axes(height=0.3 * len(known) + 1.2)
    label, unit = readable(metric)
    names = [name for name, _ in known]
    values = [value.mean / unit for _, value in known]
    errors = [value.standard_error / unit if value.count > 1 else 0.0 for _, value in known]
    axes.barh(range(len(known)), values, xerr=errors, height=0.6)
    axes.set_yticks(range(len(known)), names)
    axes.invert_yaxis()
    # Of the whole figure: beside long names the axes are narrower than their label.
    figure.supxlabel(f"{label} (measured)", fontsize="medium")
    return _save(figure, file)


def evaluation_figure(records: SweepRecords, file: io.BytesIO) -> bool:
    """Loss of held-out rows of every trial, one colour a variant; nothing where each looked twice at most."""
    figure, axes = _axes(len(records.variants))
    drawn = False
    for number, variant in enumerate(records.variants):
        for seed_number, (x, y) in enumerate(curves(variant, _evaluations)):
            if len(x) > 2:
                label = variant.name if seed_number == 0 else None
                axes.plot(x, y, "o-", color=_colour(number), linewidth=1.2, markersize=3, label=label)
                drawn = True
    axes.set_xlabel(_LABELS["step"])
    axes.set_ylabel("loss of held-out rows (measured)")
    return drawn and _save(figure, file, axes)


def memory_figure(records: SweepRecords, file: io.BytesIO) -> bool:
    """Tokens per second against peak device memory: measured as dots, simulated as crosses."""
    figure, axes = _axes(len(records.variants))
    drawn = False
    for number, variant in enumerate(records.variants):
        speed, memory = variant.mean("tokens_per_second"), variant.mean("peak_device_bytes")
        if speed is None or memory is None:
            continue
        mib, color = memory.mean / 2**20, _colour(number)
        axes.plot([mib], [speed.mean], "o", color=color, label=variant.name)
        simulated, measured = variant.mean(SIMULATED_SECONDS), variant.mean(MEASURED_SECONDS)
        if simulated is not None and measured is not None:
            axes.plot([mib], [speed.mean * measured.mean / simulated.mean], "x", color=color)
        drawn = True
    axes.set_xlabel("peak device memory, MiB (measured)")
    axes.set_ylabel("tokens/s (dots measured, crosses simulated)")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    return drawn and _save(figure, file, axes)


def prediction_figure(records: SweepRecords, file: io.BytesIO) -> bool:
    """Simulated against measured seconds of a step."""
    rows = records.step_seconds()
    if not rows:
        return False
    figure, axes = _axes(len(records.variants))
    for number, (name, simulated, measured) in enumerate(rows):
        axes.plot([measured], [simulated], "o", color=_colour(number), label=name)
    most = max(max(row[1:]) for row in rows) * 1.05
    axes.plot([0, most], [0, most], color="0.6", linewidth=0.8)
    axes.set_xlabel("seconds of a step (measured)")
    axes.set_ylabel("seconds of a step (simulated)")
    return _save(figure, file, axes)


def _losses(run: Run, axis: Axis) -> tuple[Sequence[float], Sequence[float]]:
    x, y, tokens, seconds = [], [], 0.0, 0.0
    for step in run.steps:
        tokens += step["real_tokens"]
        # Compiling happens once, and in the first of several trials only where they share what is compiled.
        seconds += step["step_seconds"] - (step["compile_seconds"] if "compile_seconds" in step else 0.0)
        if step["loss"] is not None:
            x.append({"step": step["step"], "tokens": tokens, "seconds": seconds}[axis])
            y.append(step["loss"])
    return x, smoothed(y)


def _evaluations(run: Run) -> tuple[Sequence[float], Sequence[float]]:
    known = [one for one in run.evaluations if one["loss"] is not None]
    return [one["step"] for one in known], [one["loss"] for one in known]


def _colour(number: int) -> Any:
    """Twenty that can be told apart."""
    return colormaps["tab20"](2 * number % 20 + (number // 10) % 2)


#: Variants that fit into a legend beside the curves; more go below the axes.
_LEGEND_INSIDE = 6


def _axes(variants: int = 0, *, height: float = 3.8) -> tuple[Figure, Any]:
    """A figure with room for the legend of so many variants."""
    below = 0.2 * math.ceil(variants / 2) if variants > _LEGEND_INSIDE else 0.0
    # Narrow, so that words can be read on a telephone, too.
    figure = Figure(figsize=(5.6, height + below), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, file: io.BytesIO, axes: Any = None) -> bool:
    if axes is not None:
        count = len(axes.get_legend_handles_labels()[1])
        if count > _LEGEND_INSIDE:
            figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=2)
        else:
            axes.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=150, format="png")
    return True
