"""`lazyjax plan --plot`: a step of the plan and of the baselines on one axis of time, a map of the blocks.

A PNG (or PDF, SVG) has everything below each other; an HTML page has a picture for each, with sentences, in
one file that loads and runs nothing. Every figure in them is simulated.
"""

from __future__ import annotations

import base64
import html
import io
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lazyjax.planning.commands.plot import COLOURS, draw_lanes, memory_steps
from lazyjax.planning.commands.report import ComparisonRow
from lazyjax.planning.commands.sentences import decisions
from lazyjax.planning.plan.document import Boundary, Plan
from lazyjax.planning.planner.question import Request
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.planning.program.simulate import simulate
from lazyjax.runs import RunError
from lazyjax.specs import Tier
from lazyjax.timeline import Resource, Timeline

_DPI = 110
_LANES = {
    Resource.COMPUTE: "device computes",
    Resource.H2D: "host to device",
    Resource.D2H: "device to host",
    Resource.CPU: "host updates weights",
    Resource.NVME_READ: "NVMe reads",
    Resource.NVME_WRITE: "NVMe writes",
    Resource.INTERCONNECT: "between devices",
}
#: What the colours mean, in words for someone who sees them for the first time.
_WORDS = {
    "forward": "forward pass",
    "loss": "head and loss",
    "recompute": "computed again",
    "backward": "backward pass",
    "fetch": "weights to the device",
    "reload": "activations brought back",
    "offload": "activations put away",
    "gradient_out": "gradients to the host",
    "update": "optimizer",
    "load": "activations from NVMe",
    "spill": "activations to NVMe",
    "load_state": "optimizer state from NVMe",
    "spill_state": "optimizer state to NVMe",
    "spill_gradient": "gradients to NVMe",
    "load_parameters": "weights from NVMe",
    "gather": "weights gathered from all devices",
    "reduce_scatter": "gradients summed over devices",
}
_HOMES = {
    Boundary.DEVICE: ("on the device", "#54a24b"),
    Boundary.HOST: ("on the host", "#eeca3b"),
    Boundary.NVME: ("on NVMe", "#b279a2"),
    Boundary.RECOMPUTE: ("computed again", "#e45756"),
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .25rem; } p { margin: .25rem 0; }
.wide { overflow-x: auto; } img { background: #fff; min-width: 44rem; width: 100%; height: auto; }
"""


class Step(NamedTuple):
    """One step as it is drawn.

    Attributes:
        fixed_bytes: of device memory besides what the timeline counts.
        fits: whether no memory is exceeded.
    """

    name: str
    plan: Plan
    period_seconds: float
    timeline: Timeline
    fixed_bytes: int
    fits: bool

    @property
    def title(self) -> str:
        """Name, time of a step, throughput, and how busy the device is."""
        computing = [event for event in self.timeline.events if event.resource is Resource.COMPUTE]
        busy = sum(event.end_seconds - event.start_seconds for event in computing)
        tokens = self.plan.batch_rows * self.plan.sequence_length / self.period_seconds
        words = f"{self.name}: {self.period_seconds:.4g} s a step, {tokens:,.0f} tokens/s"
        words += f", the device computes {busy / self.period_seconds:.0%} of the time"
        return words if self.fits else f"{words}; does NOT fit in memory"


def steps_of(request: Request, lines: Sequence[ComparisonRow]) -> list[Step]:
    """The simulated step of every plan of a comparison."""
    steps = []
    for line in lines:
        costs = request.costs(line.plan.microbatch_rows)
        schedule = build_schedule(line.plan, request.sizes(line.plan.microbatch_rows))
        simulation = simulate(schedule, costs.operation_seconds, costs.contention)
        fixed = line.peak_bytes[Tier.DEVICE.value] - schedule.peak_bytes()[Tier.DEVICE]
        fits = not any(line.over(request, tier) for tier in Tier)
        steps.append(Step(line.name, line.plan, line.period_seconds, simulation.timeline, fixed, fits))
    return steps


def check_path(path: pathlib.Path, check_picture: Callable[[pathlib.Path], None]) -> None:
    """Whether something can be drawn there, before minutes go into planning.

    Raises:
        RunError: the folder is missing, or the ending is none of the known ones.
    """
    # The page goes where a picture could go.
    check_picture(path.with_suffix(".png") if path.suffix.lower() == ".html" else path)
    if path.suffix.lower() == ".html" and path.is_dir():
        raise RunError(f"{path}: is a folder")


def write_picture(
    request: Request, lines: Sequence[ComparisonRow], path: pathlib.Path, *, title: str
) -> None:
    """Draws the first of `lines`, the plan, above the others; as a page where the name ends in .html.

    Raises:
        RunError: it cannot be written.
    """
    steps = steps_of(request, lines)
    capacity = request.capacity[Tier.DEVICE]
    try:
        if path.suffix.lower() == ".html":
            path.write_text(_page(steps, capacity, title), encoding="utf-8")
            return
        heights = [1.9, *(height for step in steps for height in _heights(step))]
        figure, axes = _figure(heights)
        figure.suptitle(f"{title} (simulated)")
        draw_layer_map(axes[0], steps[0].plan)
        _draw_steps(axes[1:], steps, capacity)
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def draw_layer_map(axis: Any, plan: Plan) -> None:
    """A column a block: where its input waits, how many of its tensors are kept where, whose weights stay."""
    blocks = plan.layers[1:-1]
    homes = list(_HOMES)
    axis.pcolormesh(
        [[homes.index(layer.boundary) for layer in blocks]],
        cmap=ListedColormap([colour for _, colour in _HOMES.values()]),
        vmin=-0.5, vmax=len(homes) - 0.5, edgecolors="white", linewidth=0.5,
    )  # fmt: skip
    rows = ["the block's input waits"]
    counts = {f"tensors kept on the {tier.value}": _kept(plan, tier) for tier in (Tier.DEVICE, Tier.HOST)}
    counts["weights stay on the device"] = [int(layer.resident) for layer in blocks]
    for name, numbers in counts.items():
        if any(numbers):
            for block, number in enumerate(numbers):
                if number:
                    axis.text(block + 0.5, len(rows) + 0.5, str(number), ha="center", va="center", fontsize=7)
            rows.append(name)
    axis.set_yticks([row + 0.5 for row in range(len(rows))], rows)
    axis.set_ylim(len(rows), 0)
    axis.set_xlim(0, len(blocks))
    axis.set_xlabel("block")
    axis.set_title("What is kept of each block for the backward pass", loc="left", fontsize=10)
    used = {layer.boundary for layer in blocks}
    patches = [Patch(color=colour, label=word) for home, (word, colour) in _HOMES.items() if home in used]
    axis.legend(handles=patches, fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)


def _kept(plan: Plan, tier: Tier) -> list[int]:
    return [sum(home is tier for home in layer.saved.values()) for layer in plan.layers[1:-1]]


def _lanes(step: Step) -> list[Resource]:
    return [lane for lane in Resource if any(event.resource is lane for event in step.timeline.events)]


def _end_seconds(steps: Sequence[Step]) -> float:
    """Of the longest step; what is under way when the next one begins belongs to it, too."""
    return 1.01 * max(event.end_seconds for step in steps for event in step.timeline.events)


def _heights(step: Step) -> tuple[float, float]:
    return 0.42 * len(_lanes(step)) + 0.35, 1.1


def _figure(heights: Sequence[float]) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(12, sum(heights) + 0.45 * len(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(len(heights), 1, height_ratios=list(heights), squeeze=False)[:, 0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw_steps(axes: Sequence[Any], steps: Sequence[Step], capacity_bytes: int) -> None:
    """Lanes and device memory of each step, all on the longest one's axis."""
    end = _end_seconds(steps)
    for number, step in enumerate(steps):
        lanes_axis, memory_axis = axes[2 * number : 2 * number + 2]
        lanes = _lanes(step)
        actions = draw_lanes(lanes_axis, step.timeline, lanes)
        lanes_axis.set_yticks(range(len(lanes)), [_LANES[lane] for lane in lanes])
        lanes_axis.set_ylim(len(lanes) - 0.4, -0.6)
        lanes_axis.set_title(step.title, loc="left", fontsize=10)
        lanes_axis.set_xticklabels([])
        patches = [Patch(color=COLOURS[action], label=_WORDS[action]) for action in actions]
        lanes_axis.legend(handles=patches, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        for axis in (lanes_axis, memory_axis):
            axis.set_xlim(0, end)
        _draw_memory(memory_axis, step, capacity_bytes)
    axes[-1].set_xlabel("seconds from the start of the step")


def _draw_memory(axis: Any, step: Step, capacity_bytes: int) -> None:
    fixed = dict.fromkeys(Tier, 0) | {Tier.DEVICE: step.fixed_bytes}
    found = memory_steps(step.timeline, Tier.DEVICE, fixed)
    assert found is not None
    moments, sizes = found
    axis.step(moments, sizes, where="post", color="#4c78a8", linewidth=0.8)
    axis.fill_between(moments, sizes, step="post", color="#4c78a8", alpha=0.2)
    limit = capacity_bytes / 1e9
    if max(sizes) > 0.4 * limit:
        axis.axhline(limit, color="#e45756", linestyle=":", linewidth=1.2)
        axis.annotate(
            f"may use {limit:,.3g} GB", (1.005, limit), xycoords=("axes fraction", "data"), va="center",
            fontsize=7, color="#e45756",
        )  # fmt: skip
    axis.set_ylim(0, 1.1 * max(*sizes, limit if max(sizes) > 0.4 * limit else 0))
    axis.set_ylabel("device\nmemory, GB", fontsize=8)


def _page(steps: Sequence[Step], capacity_bytes: int, title: str) -> str:
    """The page as text."""
    plan = steps[0].plan
    figure, axes = _figure([1.9])
    draw_layer_map(axes[0], plan)
    parts = [
        f"<h1>{html.escape(title)} (simulated)</h1>",
        "<p>One step of training, from left to right. Each lane is a part of the machine that works on one "
        "thing at a time; a gap is time in which it waits. All steps have the same axis: a shorter one is "
        "faster. Below each, the memory that the step takes on the device.</p>",
        f"<p>The plan: {html.escape(decisions(plan))}.</p>",
        _embedded(figure, "a map of the blocks"),
    ]
    end = _end_seconds(steps)
    for step in steps:
        figure, axes = _figure(_heights(step))
        _draw_steps(axes, [step], capacity_bytes)
        for axis in axes:
            axis.set_xlim(0, end)
        parts.append(f"<h2>{html.escape(step.title)}</h2><p>{html.escape(decisions(step.plan))}</p>")
        parts.append(_embedded(figure, step.title))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _embedded(figure: Figure, caption: str) -> str:
    file = io.BytesIO()
    figure.savefig(file, dpi=_DPI, format="png")
    picture = base64.b64encode(file.getvalue()).decode()
    return f'<div class="wide"><img alt="{html.escape(caption)}" src="data:image/png;base64,{picture}"></div>'
