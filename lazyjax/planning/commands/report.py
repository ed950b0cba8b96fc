"""A plan in readable form: figures beside the baselines, a map of the layers, reasons for one layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lazyjax.planning.commands.sentences import PART_WORDS, bound_sentence, decisions, digits, verdict
from lazyjax.planning.plan.baselines import PUBLISHED
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan, PlanError, validate_plan
from lazyjax.planning.planner.question import Request, microbatch_counts
from lazyjax.planning.planner.search import fits, predict
from lazyjax.planning.planner.service import baseline_plans
from lazyjax.planning.program.critical import critical_path, exposed_seconds
from lazyjax.planning.program.schedule import COMPUTE_ACTIONS, build_schedule
from lazyjax.planning.program.simulate import simulate
from lazyjax.planning.program.verify import Verification
from lazyjax.specs import Part, Tier
from lazyjax.timeline import Resource

#: Most microbatches with which a baseline is tried.
_MOST_TRIED = 16
_HOME_STYLES = {
    "device": "bold green",
    "host": "yellow",
    "nvme": "magenta",
    "recompute": "red",
}
_HOME_LETTERS = {"device": "D", "host": "H", "nvme": "N", "recompute": "r"}


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One plan as a row of the comparison."""

    name: str
    plan: Plan
    period_seconds: float
    peak_bytes: Mapping[str, int]
    executed_flops: int

    def over(self, request: Request, tier: Tier) -> bool:
        """Whether the plan needs more than there is."""
        return self.peak_bytes[tier.value] > request.capacity[tier]


#: Share of a memory from which on it is said to bind.
_NEARLY_FULL = 0.97


def comparison_row(
    request: Request, name: str, plan: Plan, period_seconds: float, peak_bytes: Mapping[str, int]
) -> ComparisonRow:
    """A row of the comparison, with the matrix FLOPs that the plan's schedule executes."""
    schedule = build_schedule(plan, request.sizes(plan.microbatch_rows))
    flops = request.costs(plan.microbatch_rows).operation_flops
    executed = sum(
        flops(operation) for operation in schedule.operations if operation.action in COMPUTE_ACTIONS
    )
    return ComparisonRow(name, plan, period_seconds, peak_bytes, executed)


def baseline_rows(request: Request) -> list[ComparisonRow]:
    """What every baseline takes in the same executor on the same machine.

    Those that are no published rule get the fewest microbatches with which they fit.
    """
    lines = []
    counts = [
        count for count in microbatch_counts(request.batch_rows, request.devices) if count <= _MOST_TRIED
    ]
    for name, plan in baseline_plans(request).items():
        prediction = predict(request, plan)
        for count in counts if name not in PUBLISHED else ():
            if fits(request, prediction):
                break
            finer = plan.model_copy(update={"microbatches": count})
            finer_prediction = predict(request, finer)
            if fits(request, finer_prediction):
                plan, prediction = finer, finer_prediction
        lines.append(comparison_row(request, name, plan, prediction.period_seconds, prediction.peak_bytes))
    return lines


def model_tflops(parameter_count: int, plan: Plan, period_seconds: float) -> float:
    """6 N tokens / s, the convention of MegaTrain and LazyTrain; padding counts, recompute does not."""
    return 6 * parameter_count * plan.batch_rows * plan.sequence_length / period_seconds / 1e12


def comparison(lines: Sequence[ComparisonRow], request: Request) -> Table:
    """Plans side by side; every figure is simulated.

    Model TFLOPS are 6 N tokens / s; executed TFLOPS count every matrix product, with attention and
    what is recomputed.
    """
    table = Table(title="simulated", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("plan", no_wrap=True)
    tiers = [tier for tier in Tier if request.capacity[tier]]
    headings = ["M", "period\ns", "model\nTFLOPS", "executed\nTFLOPS", "tokens\n/s"]
    headings += [f"{tier.value}\nGB" for tier in tiers]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        tokens = line.plan.batch_rows * line.plan.sequence_length
        memory = [
            Text(
                digits(request.in_one_place(tier, line.peak_bytes[tier.value]) / 1e9),
                style="red" if line.over(request, tier) else "",
            )
            for tier in tiers
        ]
        over = any(line.over(request, tier) for tier in Tier)
        table.add_row(
            Text.assemble(line.name, ("\n  does not fit", "red") if over else ""),
            str(line.plan.microbatches),
            digits(line.period_seconds),
            digits(model_tflops(request.spec.parameter_count, line.plan, line.period_seconds)),
            digits(line.executed_flops / line.period_seconds / 1e12),
            f"{tokens / line.period_seconds:,.0f}",
            *memory,
        )
    limits = (digits(request.in_one_place(tier, request.capacity[tier]) / 1e9) for tier in tiers)
    table.add_section()
    table.add_row(Text("may use", style="dim"), "", "", "", "", "", *limits)
    table.caption_justify = "left"
    if any(
        model_tflops(request.spec.parameter_count, line.plan, line.period_seconds) * 1e12
        > line.executed_flops / line.period_seconds
        for line in lines
    ):
        table.caption = (
            "Model TFLOPS are 6 N tokens/s; N counts the embedding table,\n"
            "which multiplies nothing: they may exceed the executed ones."
        )
    return table


def layer_map(plan: Plan, per_line: int = 8) -> Text:
    """Each layer: where its input waits, and how many of its tensors are kept where."""
    text = Text()
    text.append(
        "Layers: where the input waits (D device, H host, N NVMe, r computed again),\n"
        "then how many tensors inside are kept where (. none, d3 three on the device),\n"
        "* parameters stay on the device, ' optimizer state on NVMe\n"
    )
    if any(layer.on_nvme - {Part.STATE} for layer in plan.layers):
        text.append('(" with more of what the layer owns)\n')
    for start in range(0, len(plan.layers), per_line):
        text.append(f"{start:>4}  ")
        for layer in plan.layers[start : start + per_line]:
            text.append(_HOME_LETTERS[layer.boundary.value], style=_HOME_STYLES[layer.boundary.value])
            cell = _kept_where(layer)
            text.append(cell, style="dim" if cell == "." else "")
            marks = ("*" if layer.resident else "") + _owned_mark(layer)
            text.append(marks + " " * max(1, 7 - len(cell) - len(marks)))
        text.append("\n")
    return text


def _kept_where(layer: LayerPlan) -> str:
    tiers = sorted({tier.value for tier in layer.saved.values()})
    counts = {tier: sum(home.value == tier for home in layer.saved.values()) for tier in tiers}
    return "".join(f"{_HOME_LETTERS[tier].lower()}{count}" for tier, count in counts.items()) or "."


def saved_sets(plan: Plan, kinds: Sequence[str]) -> Table:
    """How many layers of each kind keep which tensors where."""
    table = Table(title="kept inside the layers", title_justify="left", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("kind", no_wrap=True)
    table.add_column("layers", justify="right")
    table.add_column("input", no_wrap=True)
    table.add_column("saved")
    counts: dict[tuple[str, str, str], int] = {}
    for kind, layer in list(zip(kinds, plan.layers, strict=True))[1:-1]:
        saved = _saved(layer)
        key = (kind, layer.boundary.value, saved)
        counts[key] = counts[key] + 1 if key in counts else 1
    for (kind, home, saved), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
        table.add_row(kind, str(count), Text(home, style=_HOME_STYLES[home]), saved)
    return table


def bounds_table(request: Request, plan: Plan, verification: Verification) -> Table:
    """What every resource must do in a step, how long compute waits for it, and its critical part."""
    schedule = build_schedule(plan, request.sizes(plan.microbatch_rows))
    exposed = exposed_seconds(schedule, verification.simulation)
    critical = dict.fromkeys(Resource, 0.0)
    for stretch in critical_path(schedule, verification.simulation):
        critical[stretch.event.resource] += stretch.event.end_seconds - stretch.event.start_seconds
    table = Table(title="one step", title_justify="left", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    for heading in ("resource", "busy s\n(lower bound)", "of the\nperiod", "exposed s", "critical\npath s"):
        table.add_column(heading, justify="left" if heading == "resource" else "right", no_wrap=True)
    for resource, busy in verification.bounds_seconds.items():
        if busy:
            table.add_row(
                resource.value,
                digits(busy),
                f"{busy / verification.period_seconds:.1%}",
                "" if resource is Resource.COMPUTE else digits(exposed[resource]),
                digits(critical[resource]),
            )
    return table


def plan_report(
    request: Request,
    plan: Plan,
    verification: Verification,
    baselines: Sequence[ComparisonRow],
    *,
    hardware: str,
    epoch_rows: int | None = None,
) -> RenderableType:
    """All of it: verdict, decisions, comparison, layer map, resources, bound.

    Args:
        hardware: what the machine is called.
        epoch_rows: rows of the data, for the hours of an epoch.
    """
    peaks = {tier.value: size for tier, size in verification.peak_bytes.items()}
    own = comparison_row(request, plan.planner, plan, verification.period_seconds, peaks)
    opening = verdict(request, plan, verification, hardware=hardware, epoch_rows=epoch_rows)
    parts: list[RenderableType] = [
        Text(opening, style="bold"),
        Text(f"The plan: {decisions(plan)}; residuals are brought back {plan.reload_ahead} ahead."),
        comparison([own, *baselines], request),
        layer_map(plan),
        saved_sets(plan, [layer.kind for layer in request.spec.layers]),
        bounds_table(request, plan, verification),
    ]
    sentence = bound_sentence(plan)
    return Group(*parts, Text(sentence)) if sentence else Group(*parts)


def explain(request: Request, plan: Plan, layer: int) -> RenderableType:
    """Every other decision for one layer: what it would do to the period and the peaks.

    Raises:
        PlanError: no such layer.
    """
    if not 0 <= layer < len(plan.layers):
        raise PlanError(f"--explain {layer}: the model has layers 0 to {len(plan.layers) - 1}")
    decided = plan.layers[layer]
    base = predict(request, plan)
    table = Table(
        title=f"layer {layer} ({request.spec.layers[layer].name}): {_describe(decided)}",
        title_justify="left",
        header_style="bold",
        caption=_binding(request, plan),
        caption_justify="left",
    )
    table.add_column("instead")
    table.add_column("period", justify="right")
    tiers = [tier for tier in Tier if request.capacity[tier]]
    for tier in tiers:
        table.add_column(f"{tier.value}\nGB", justify="right")
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
        change = {tier: prediction.peak_bytes[tier.value] - base.peak_bytes[tier.value] for tier in tiers}
        over = [tier.value for tier in Tier if prediction.peak_bytes[tier.value] > request.capacity[tier]]
        table.add_row(
            _difference(decided, alternative),
            f"{prediction.period_seconds / base.period_seconds - 1:+.3%}",
            *(f"{request.in_one_place(tier, change[tier]) / 1e9:+.2f}" for tier in tiers),
            Text(f"{', '.join(over)} too small" if over else "", style="red"),
        )
    return table


def _binding(request: Request, plan: Plan) -> str:
    """Which resource and which memory leave no room."""
    costs = request.costs(plan.microbatch_rows)
    schedule = build_schedule(plan, request.sizes(plan.microbatch_rows))
    simulation = simulate(schedule, costs.operation_seconds, costs.contention)
    busiest = max(simulation.busy_seconds, key=lambda resource: simulation.busy_seconds[resource])
    share = simulation.busy_seconds[busiest] / simulation.period_seconds
    peaks = predict(request, plan).peak_bytes
    full = [
        f"{tier.value} memory ({peaks[tier.value] / request.capacity[tier]:.0%} used)"
        for tier in Tier
        if request.capacity[tier] and peaks[tier.value] > _NEARLY_FULL * request.capacity[tier]
    ]
    memory = f"; {' and '.join(full)} is nearly full" if full else "; no memory is nearly full"
    return f"The step is bound by {busiest.value}, busy {share:.0%} of the period{memory}."


def _alternatives(request: Request, plan: Plan, layer: int) -> list[LayerPlan]:
    decided = plan.layers[layer]
    inner = 0 < layer < len(plan.layers) - 1
    homes = [Boundary.DEVICE, Boundary.HOST, Boundary.RECOMPUTE]
    if request.capacity[Tier.NVME]:
        homes.append(Boundary.NVME)
    found = [decided.model_copy(update={"boundary": home}) for home in homes if inner]
    costs = request.costs(plan.microbatch_rows)
    for candidate in costs.save_sets(request.spec.layers[layer].kind) if inner else ():
        for tier in (Tier.DEVICE, Tier.HOST) if candidate.names else (Tier.DEVICE,):
            found.append(decided.model_copy(update={"saved": dict.fromkeys(candidate.names, tier)}))
    if inner or (layer == 0 and request.spec.tied):
        found.append(decided.model_copy(update={"resident": not decided.resident}))
    if request.capacity[Tier.NVME]:
        for parts in (frozenset[Part](), frozenset([Part.STATE]), frozenset(Part)):
            found.append(decided.with_on_nvme(parts))
    return [alternative for alternative in found if alternative != decided]


def _describe(layer: LayerPlan) -> str:
    resident = "; parameters stay" if layer.resident else ""
    below = f"; on NVMe: {_owned(layer)}" if layer.on_nvme else ""
    return f"input {layer.boundary.value}; saves {_saved(layer)}{resident}{below}"


def _owned(layer: LayerPlan) -> str:
    return ", ".join(words for part, words in PART_WORDS.items() if part in layer.on_nvme) or "nothing"


def _owned_mark(layer: LayerPlan) -> str:
    if not layer.on_nvme:
        return ""
    return "'" if layer.on_nvme == {Part.STATE} else '"'


def _saved(layer: LayerPlan) -> str:
    """Which tensors are kept where, tier by tier."""
    names: dict[str, list[str]] = {}
    for name, tier in layer.saved.items():
        names.setdefault(tier.value, []).append(name)
    return "; ".join(f"on {tier}: {', '.join(kept)}" for tier, kept in sorted(names.items())) or "nothing"


def _difference(decided: LayerPlan, alternative: LayerPlan) -> str:
    """What `alternative` does otherwise."""
    parts = []
    if alternative.boundary != decided.boundary:
        parts.append(f"input {alternative.boundary.value}")
    if alternative.saved != decided.saved:
        parts.append(f"save {_saved(alternative)}")
    if alternative.resident != decided.resident:
        parts.append("parameters stay" if alternative.resident else "parameters are fetched")
    if alternative.on_nvme != decided.on_nvme:
        parts.append(f"on NVMe: {_owned(alternative)}")
    return "; ".join(parts)
