"""A plan in readable form: figures beside the baselines, a map of the layers, reasons for one layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lazyjax.planning.critical import exposed_seconds
from lazyjax.planning.plan import Boundary, LayerPlan, Plan, PlanError, validate_plan
from lazyjax.planning.schedule import build_schedule
from lazyjax.planning.search import Found, Request, predict
from lazyjax.planning.verify import Verification
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

_HOME_STYLES = {
    "device": "bold green",
    "host": "yellow",
    "nvme": "magenta",
    "recompute": "red",
}
_HOME_LETTERS = {"device": "D", "host": "H", "nvme": "N", "recompute": "r"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One plan as a row of the comparison."""

    name: str
    plan: Plan
    period_seconds: float
    peak_bytes: Mapping[str, int]

    def over(self, request: Request, tier: Tier) -> bool:
        """Whether the plan needs more than there is."""
        return self.peak_bytes[tier.value] > request.capacity[tier]


def model_tflops(parameter_count: int, plan: Plan, period_seconds: float) -> float:
    """6 N tokens / s, the convention of MegaTrain and LazyTrain; padding counts, recompute does not."""
    return 6 * parameter_count * plan.rows * plan.sequence_length / period_seconds / 1e12


def comparison(lines: Sequence[Line], request: Request) -> Table:
    """Plans side by side; every figure is simulated. TFLOPS are 6 N tokens / s."""
    table = Table(title="simulated", title_justify="left", header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("plan", no_wrap=True)
    tiers = [tier for tier in Tier if request.capacity[tier]]
    headings = ["M", "period s", "TFLOPS", "tokens/s", *(f"{tier.value} GB" for tier in tiers)]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for line in lines:
        tokens = line.plan.rows * line.plan.sequence_length
        memory = [
            Text(f"{line.peak_bytes[tier.value] / 1e9:.1f}", style="red" if line.over(request, tier) else "")
            for tier in tiers
        ]
        table.add_row(
            line.name,
            str(line.plan.microbatches),
            f"{line.period_seconds:.2f}",
            f"{model_tflops(request.spec.parameter_count, line.plan, line.period_seconds):.1f}",
            f"{tokens / line.period_seconds:.0f}",
            *memory,
            Text("does not fit", style="red") if any(line.over(request, tier) for tier in Tier) else "",
        )
    limits = (f"{request.capacity[tier] / 1e9:.1f}" for tier in tiers)
    table.add_section()
    table.add_row(Text("may use", style="dim"), "", "", "", "", *limits, "")
    return table


def layer_map(plan: Plan, per_line: int = 32) -> Text:
    """Two letters per layer: where its input waits, and where its residuals are kept."""
    text = Text()
    homes = ", ".join(f"{letter} {home}" for home, letter in _HOME_LETTERS.items())
    text.append(
        f"Layers: input then residuals ({homes}, . nothing saved, * parameters stay, ' state on NVMe)\n"
    )
    for start in range(0, len(plan.layers), per_line):
        text.append(f"{start:>4}  ")
        for layer in plan.layers[start : start + per_line]:
            text.append(_HOME_LETTERS[layer.boundary.value], style=_HOME_STYLES[layer.boundary.value])
            tiers = sorted({tier.value for tier in layer.saved.values()})
            if not tiers:
                text.append(".", style="dim")
            for tier in tiers:
                text.append(_HOME_LETTERS[tier].lower() + str(len(layer.saved)), style=_HOME_STYLES[tier])
            text.append(("*" if layer.resident else "") + ("'" if layer.state == "nvme" else "") + " ")
        text.append("\n")
    return text


def saved_sets(plan: Plan, kinds: Sequence[str]) -> Table:
    """How many layers of each kind keep which tensors where."""
    table = Table(title="kept inside the layers", title_justify="left", header_style="bold")
    table.add_column("kind")
    table.add_column("layers", justify="right")
    table.add_column("input")
    table.add_column("saved")
    counts: dict[tuple[str, str, str], int] = {}
    for kind, layer in list(zip(kinds, plan.layers, strict=True))[1:-1]:
        saved = ", ".join(f"{name} ({tier.value})" for name, tier in layer.saved.items()) or "nothing"
        key = (kind, layer.boundary.value, saved)
        counts[key] = counts[key] + 1 if key in counts else 1
    for (kind, home, saved), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
        table.add_row(kind, str(count), Text(home, style=_HOME_STYLES[home]), saved)
    return table


def bounds_table(request: Request, plan: Plan, verification: Verification) -> Table:
    """What every resource must do in a step, and how long compute waits for it."""
    schedule = build_schedule(plan, request.sizes(plan.microbatch_rows))
    exposed = exposed_seconds(schedule, verification.simulation)
    table = Table(title="one step", title_justify="left", header_style="bold")
    table.add_column("resource")
    table.add_column("busy s (lower bound)", justify="right")
    table.add_column("of the period", justify="right")
    table.add_column("exposed s", justify="right")
    for resource, busy in verification.bounds_seconds.items():
        if busy:
            table.add_row(
                resource.value,
                f"{busy:.3f}",
                f"{busy / verification.period_seconds:.1%}",
                "" if resource is Resource.COMPUTE else f"{exposed[resource]:.3f}",
            )
    return table


def plan_report(
    request: Request, plan: Plan, found: Found | None, verification: Verification, baselines: Sequence[Line]
) -> RenderableType:
    """All of it: settings, comparison, layer map, resources, bound."""
    peaks = {tier.value: size for tier, size in verification.peak_bytes.items()}
    own = Line(plan.planner, plan, verification.period_seconds, peaks)
    settings = Text.assemble(
        (f"{plan.model}", "bold"),
        f": {plan.rows} rows x {plan.sequence_length} tokens in {plan.microbatches} microbatches of "
        f"{plan.microbatch_rows}; parameter slabs {plan.prefetch} forward, "
        f"{plan.backward_prefetch} backward; "
        f"reload {plan.reload_ahead} ahead; handoff {plan.handoff}; update {plan.update}",
    )
    parts: list[RenderableType] = [settings, comparison([own, *baselines], request), layer_map(plan)]
    parts.append(saved_sets(plan, [layer.kind for layer in request.spec.layers]))
    parts.append(bounds_table(request, plan, verification))
    prediction = plan.prediction
    if prediction is not None and prediction.bound_seconds is not None and prediction.gap is not None:
        solved = f", solved in {prediction.solve_seconds:.1f} s" if prediction.solve_seconds else ""
        layer_level = ""
        if found is not None:
            difference = verification.period_seconds / found.layer_period_seconds - 1
            layer_level = (
                f" ({found.layer_period_seconds:.3f} s at that level; "
                f"microbatch by microbatch {difference:+.2%})"
            )
        parts.append(
            Text(
                f"No plan of these decisions takes less than {prediction.bound_seconds:.3f} s at layer "
                f"granularity: gap {prediction.gap:.2%}{layer_level}{solved}"
            )
        )
    return Group(*parts)


def explain(request: Request, plan: Plan, layer: int) -> RenderableType:
    """Every other decision for one layer: what it would do to the period and the peaks.

    Raises:
        PlanError: no such layer.
    """
    if not 0 < layer < len(plan.layers) - 1:
        raise PlanError(f"--explain {layer}: the model's blocks are layers 1 to {len(plan.layers) - 2}")
    decided = plan.layers[layer]
    base = predict(request, plan)
    table = Table(
        title=f"layer {layer} ({request.spec.layers[layer].name}): {_describe(decided)}",
        title_justify="left",
        header_style="bold",
    )
    table.add_column("instead")
    table.add_column("period", justify="right")
    for tier in Tier:
        table.add_column(f"{tier.value} GB", justify="right")
    table.add_column("")
    for alternative in _alternatives(request, plan, layer):
        layers = (*plan.layers[:layer], alternative, *plan.layers[layer + 1 :])
        changed = plan.model_copy(update={"layers": layers, "prediction": None})
        try:
            names = [list(request.sizes(1).layers[i].residual_bytes) for i in range(len(plan.layers))]
            validate_plan(changed, request.spec, names)
        except PlanError:
            continue
        prediction = predict(request, changed)
        over = [tier.value for tier in Tier if prediction.peak_bytes[tier.value] > request.capacity[tier]]
        table.add_row(
            _describe(alternative),
            f"{prediction.period_seconds / base.period_seconds - 1:+.3%}",
            *(
                f"{(prediction.peak_bytes[tier.value] - base.peak_bytes[tier.value]) / 1e9:+.2f}"
                for tier in Tier
            ),
            Text(f"does not fit: {', '.join(over)}" if over else "", style="red"),
        )
    return table


def _alternatives(request: Request, plan: Plan, layer: int) -> list[LayerPlan]:
    decided = plan.layers[layer]
    homes = [Boundary.DEVICE, Boundary.HOST, Boundary.RECOMPUTE]
    if request.capacity[Tier.NVME]:
        homes.append(Boundary.NVME)
    found = [decided.model_copy(update={"boundary": home}) for home in homes]
    costs = request.costs(plan.microbatch_rows)
    for candidate in costs.save_sets(request.spec.layers[layer].kind):
        for tier in (Tier.DEVICE, Tier.HOST) if candidate.names else (Tier.DEVICE,):
            found.append(decided.model_copy(update={"saved": dict.fromkeys(candidate.names, tier)}))
    found.append(decided.model_copy(update={"resident": not decided.resident}))
    return [alternative for alternative in found if alternative != decided]


def _describe(layer: LayerPlan) -> str:
    saved = "nothing"
    if layer.saved:
        tiers = ", ".join(sorted({tier.value for tier in layer.saved.values()}))
        saved = f"{', '.join(layer.saved)} on {tiers}"
    resident = ", parameters stay" if layer.resident else ""
    return f"input {layer.boundary.value}, saves {saved}{resident}"
