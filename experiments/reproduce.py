"""The paper's tables beside simulations on the same profile.

Commands:  python -m experiments.reproduce table1|table3|table5|table6|figure4 [--out FOLDER]
Every cell says whether it is `paper` or `simulated`. One constant is calibrated per model and GPU:
the executed matmul rate, such that MegaTrain's simulated TFLOPS equal its published row. Capacities
and link rates are the profile's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

from experiments import published
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.commands.report import model_tflops
from lazyjax.planning.costs.described import MixtureOfExperts, described_costs, lazytrain_host_bytes
from lazyjax.planning.costs.layers import SaveSet
from lazyjax.planning.costs.seconds import Costs, static_host_bytes
from lazyjax.planning.plan import cache
from lazyjax.planning.plan.baselines import lazytrain, megatrain
from lazyjax.planning.plan.document import Boundary, Plan
from lazyjax.planning.planner.feasibility import largest_batch
from lazyjax.planning.planner.question import CostModel, Request
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.search import find_plan
from lazyjax.planning.planner.service import InfeasibleError, solve_cached, verify_for
from lazyjax.planning.program.critical import exposed_seconds
from lazyjax.planning.program.schedule import Action, Operation, build_schedule
from lazyjax.planning.program.simulate import simulate
from lazyjax.planning.program.verify import used_bytes
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

#: Gap to which our plans are searched.
_GAP = 0.005
#: Bytes that a serial update touches per parameter: DeepSpeed-style AdamW on bf16 parameters with
#: fp32 moments (2+2 parameter, 2 gradient, 8+8 moments), the copy of the new weights (2+2), and
#: clipping, which reads every gradient for its norm, then reads and writes it to scale it (2, 2+2).
_MEGATRAIN_BYTES = 22 + 4 + 6
#: Hybrid 8-bit keeps the moments of 2 % of the parameters in a quarter of the bytes. It also moves
#: clipping, which saves next to nothing by the paper's own ablation (table 5: 0.3 % in all).
_LAZYTRAIN_BYTES = _MEGATRAIN_BYTES - 0.02 * 16 * 3 / 4
#: Bytes per parameter of the plain bf16 update, for which the profile states a rate.
_PROFILE_BYTES = 22
RESULTS = pathlib.Path(__file__).parent / "results"


class AutogradCosts:
    """Costs as an executor has them that differentiates each layer with autograd.

    A layer's backward pass runs its whole forward pass again (nothing is left out as unused), and
    the update passes over memory as often as `update_bytes` per parameter says.
    """

    def __init__(self, costs: CostModel, names: Sequence[tuple[str, ...]], update_bytes: float) -> None:
        self.costs, self.names, self.update_bytes = costs, names, update_bytes

    def operation_seconds(self, operation: Operation) -> float:
        """Seconds of one operation."""
        seconds = self.costs.operation_seconds
        match operation.action:
            case Action.BACKWARD if self.names[operation.layer]:
                everything = tuple(sorted(self.names[operation.layer]))
                pure = dataclasses.replace(operation, saved=everything)
                again = dataclasses.replace(operation, action=Action.RECOMPUTE, saved=())
                return seconds(pure) + seconds(again)
            case Action.UPDATE:
                return seconds(operation) * self.update_bytes / _PROFILE_BYTES
            case _:
                return seconds(operation)

    def save_sets(self, kind: str) -> Sequence[SaveSet]:
        """As the costs it wraps."""
        return self.costs.save_sets(kind)

    def working_bytes(self, action: Action, layer: int, saved: tuple[str, ...]) -> int:
        """As the costs it wraps."""
        return self.costs.working_bytes(action, layer, saved)

    def operation_flops(self, operation: Operation) -> int:
        """Matrix FLOPs of one operation, with the forward pass that autograd runs again."""
        flops = self.costs.operation_flops
        if operation.action is Action.BACKWARD and self.names[operation.layer]:
            everything = tuple(sorted(self.names[operation.layer]))
            pure = dataclasses.replace(operation, saved=everything)
            return flops(pure) + flops(dataclasses.replace(operation, action=Action.RECOMPUTE, saved=()))
        return flops(operation)


class Simulated:
    """Simulations of one model on one machine with one executed rate."""

    def __init__(self, model: str, profile: HardwareProfile) -> None:
        self.template: ModelTemplate = build_template(architecture(model))
        self.profile = profile
        self.names = [
            self.template.kind(index).residual_names for index in range(len(self.template.spec.layers))
        ]

    def request(self, rows: int, optimizer: str = "hybrid8bit") -> Request:
        """The planning question for `rows` rows; no activations on NVMe."""
        return build_request(
            self.template,
            self.profile,
            rows=rows,
            sequence_length=published.SEQUENCE_LENGTH,
            optimizer=optimizer,
            nvme_bytes=0,
        )

    def rule(
        self, baseline: Callable[..., Plan], rows: int, update_bytes: float
    ) -> tuple[Plan, float, dict[Tier, int]]:
        """Plan, period and peaks of a published system: its rules, the whole batch at once."""
        plan = baseline(self.template.spec, self.names, rows=rows, sequence_length=published.SEQUENCE_LENGTH)
        request = self.request(rows, "bf16_adamw")
        costs = AutogradCosts(request.costs(rows), self.names, update_bytes)
        schedule = build_schedule(plan, request.sizes(rows))
        period = simulate(schedule, costs.operation_seconds).period_seconds
        return plan, period, used_bytes(schedule)

    def megatrain(self, rows: int) -> tuple[Plan, float, dict[Tier, int]]:
        """MegaTrain: interval of four, update at the end."""
        return self.rule(megatrain, rows, _MEGATRAIN_BYTES)

    def lazytrain(self, rows: int) -> tuple[Plan, float, dict[Tier, int]]:
        """LazyTrain: the published plan, update at the end."""
        return self.rule(lazytrain, rows, _LAZYTRAIN_BYTES)

    def tflops(self, plan: Plan, period_seconds: float) -> float:
        """Model TFLOPS in the paper's convention."""
        return model_tflops(self.template.spec.parameter_count, plan, period_seconds)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A machine, and where no executed rate reaches the published row, what the GPU's peak would give."""

    machine: Simulated
    at_peak_tflops: float | None


@functools.cache
def calibrate(model: str, profile_name: str) -> Calibration:
    """The machine whose executed rate makes MegaTrain's simulation equal its published row.

    Where the profile's links and host are too slow for that row at any rate up to the GPU's peak,
    the profile's own rate stays.
    """
    row = next(r for r in published.TABLE_3 if (r.model, r.profile) == (model, profile_name))
    profile = load_profile(profile_name)

    def at(rate: float) -> Simulated:
        return Simulated(model, profile.model_copy(update={"matmul_flops_per_second": rate}))

    def reached(rate: float) -> float:
        machine = at(rate)
        plan, period, _ = machine.megatrain(row.megatrain.rows)
        return machine.tflops(plan, period)

    low, high = 1e12, published.PEAK_TFLOPS[row.gpu] * 1e12
    if reached(high) < row.megatrain.tflops:
        return Calibration(at(profile.matmul_flops_per_second), reached(high))
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if reached(middle) < row.megatrain.tflops else (low, middle)
    return Calibration(at(high), None)


def calibrated(model: str, profile_name: str) -> Simulated:
    """The machine of `calibrate`."""
    return calibrate(model, profile_name).machine


def planned(model: str, profile_name: str, rows: int) -> Plan | None:
    """Our plan on the calibrated machine, solved once; None where nothing fits."""
    request = calibrated(model, profile_name).request(rows)
    try:
        folder = cache.default_folder()
        return solve_cached(request, folder, time_limit_seconds=90.0, relative_gap=_GAP)[0]
    except InfeasibleError:
        return None


class Sheet:
    """Rows of labelled cells, printed and written as Markdown and CSV."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title, self.columns = title, tuple(columns)
        self.rows: list[tuple[str, ...]] = []
        self.notes: list[str] = []

    def add(self, *cells: str) -> None:
        """One row; every figure in it carries its own label."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def markdown(self) -> str:
        """The sheet with its notes."""
        lines = [
            f"# {self.title}",
            "",
            "| " + " | ".join(self.columns) + " |",
            "|---" * len(self.columns) + "|",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes)])

    def write(self, folder: pathlib.Path, name: str) -> None:
        """NAME.md and NAME.csv in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(self.markdown())
        quoted = [",".join(f'"{cell}"' for cell in row) for row in (self.columns, *self.rows)]
        (folder / f"{name}.csv").write_text("\n".join(quoted) + "\n")


def paper(value: float | None, digits: int = 2) -> str:
    """A cell with a published figure."""
    return "-" if value is None else f"{value:.{digits}f} (paper)"


def simulated_cell(value: float, digits: int = 2) -> str:
    """A cell with a simulated figure."""
    return f"{value:.{digits}f} (simulated)"


def table3(folder: pathlib.Path, models: Sequence[str] = ()) -> Sheet:
    """Throughput of the three systems on every model and GPU."""
    columns = (
        "GPU",
        "model",
        "system",
        "rows",
        "TFLOPS",
        "TFLOPS",
        "deviation",
        "tokens/s",
        "device GB",
        "host GB",
    )
    sheet = Sheet("Table 3: throughput", columns)
    for row in published.TABLE_3:
        if models and row.model not in models:
            continue
        calibration = calibrate(row.model, row.profile)
        machine = calibration.machine
        rate = machine.profile.matmul_flops_per_second / 1e12
        mega_plan, mega_period, _ = machine.megatrain(row.megatrain.rows)
        lazy_plan, lazy_period, _ = machine.lazytrain(row.lazytrain.rows)
        for name, figures, plan, period in (
            ("MegaTrain", row.megatrain, mega_plan, mega_period),
            ("LazyTrain", row.lazytrain, lazy_plan, lazy_period),
        ):
            tflops = machine.tflops(plan, period)
            reachable = calibration.at_peak_tflops is None
            fitted = name == "MegaTrain" and reachable
            deviation = "calibrated" if fitted else f"{tflops / figures.tflops - 1:+.1%}"
            sheet.add(
                row.gpu, row.model, name, str(figures.rows), paper(figures.tflops), simulated_cell(tflops),
                deviation, simulated_cell(plan.rows * published.SEQUENCE_LENGTH / period, 0),
                paper(figures.device_gb), paper(figures.host_gb),
            )  # fmt: skip
        published_ratio = row.lazytrain.tflops / row.megatrain.tflops
        ratio = machine.tflops(lazy_plan, lazy_period) / machine.tflops(mega_plan, mega_period)
        rows = [row.lazytrain.rows]
        if row.gpu != "H800":
            largest = largest_batch(machine.request(1), below=129)
            rows += [count for count in (32,) if row.lazytrain.rows < count <= largest]
            sheet.notes.append(
                f"{row.gpu} {row.model}: largest batch up to 128 that fits: {largest} (simulated)."
            )
        for count in rows:
            ours = planned(row.model, row.profile, count)
            if ours is None or ours.prediction is None:
                sheet.add(row.gpu, row.model, "LazyJAX", str(count), "-", "does not fit", "", "", "", "")
                continue
            prediction = ours.prediction
            tflops = machine.tflops(ours, prediction.period_seconds)
            sheet.add(
                row.gpu, row.model, "LazyJAX", str(count), "-", simulated_cell(tflops),
                f"{tflops / machine.tflops(lazy_plan, lazy_period):.2f}x LazyTrain (simulated)",
                simulated_cell(count * published.SEQUENCE_LENGTH / prediction.period_seconds, 0),
                simulated_cell(prediction.peak_bytes["device"] / 1e9, 1),
                simulated_cell(prediction.peak_bytes["host"] / 1e9, 1),
            )  # fmt: skip
        origin = "calibrated on MegaTrain's row"
        if calibration.at_peak_tflops is not None:
            origin = (
                "the profile's: its links and host limit MegaTrain to "
                f"{calibration.at_peak_tflops:.1f} model TFLOPS at any rate up to the GPU's peak"
            )
        sheet.notes.append(
            f"{row.gpu} {row.model}: executed rate {rate:.1f} TFLOPS ({origin}); "
            f"LazyTrain / MegaTrain {published_ratio:.3f} (paper), {ratio:.3f} (simulated), "
            f"{ratio / published_ratio - 1:+.1%}."
        )
        print(sheet.notes[-1], flush=True)
    sheet.write(folder, "table3")
    return sheet


def table5(folder: pathlib.Path) -> Sheet:
    """Ablation on the 27B H800 row, theirs and ours."""
    model, profile, rows = "Qwen3.6-27B", "h800-paper", 72
    machine = calibrated(model, profile)
    sheet = Sheet("Table 5: ablation, 27B, H800, 72 rows", ("system", "TFLOPS", "TFLOPS", "step s"))
    theirs = {
        "MegaTrain": machine.megatrain(rows),
        "LazyTrain": machine.lazytrain(rows),
        "LazyTrain without MILP": machine.rule(megatrain, rows, _LAZYTRAIN_BYTES),
        "LazyTrain without Hybrid-8bit": machine.rule(lazytrain, rows, _MEGATRAIN_BYTES),
    }
    for name, (plan, period, _) in theirs.items():
        tflops = simulated_cell(machine.tflops(plan, period))
        sheet.add(name, paper(published.TABLE_5[name][0]), tflops, simulated_cell(period))
    base = planned(model, profile, rows)
    assert base is not None
    request = machine.request(rows)
    bare = tuple(layer.model_copy(update={"saved": {}}) for layer in base.layers)
    ours: Mapping[str, Plan] = {
        "LazyJAX": base,
        "LazyJAX, update at the end of the step": base.model_copy(update={"update": "immediate"}),
        "LazyJAX, nothing kept inside layers": base.model_copy(update={"layers": bare}),
        "LazyJAX, nothing fetched ahead": base.model_copy(update={"prefetch": 1, "backward_prefetch": 1}),
    }
    for name, plan in ours.items():
        costs = request.costs(plan.microbatch_rows)
        schedule = build_schedule(plan, request.sizes(plan.microbatch_rows))
        period = simulate(schedule, costs.operation_seconds).period_seconds
        sheet.add(name, "-", simulated_cell(machine.tflops(plan, period)), simulated_cell(period))
    sheet.write(folder, "table5")
    return sheet


def table1(folder: pathlib.Path) -> Sheet:
    """The published placement beside ours under the same activation budgets."""
    machine = calibrated("Qwen3.6-27B", "h800-paper")
    free = machine.request(72)
    state = sum(layer.state_bytes for layer in free.sizes(1).layers)
    gib = 2**30
    host = free.static_host_bytes + state + int(published.TABLE_1_CAPACITY_GIB["host"] * gib)
    request = build_request(
        machine.template, machine.profile, rows=72, sequence_length=published.SEQUENCE_LENGTH,
        device_bytes=int(published.TABLE_1_CAPACITY_GIB["device"] * gib), host_bytes=host, nvme_bytes=0,
    )  # fmt: skip
    found = find_plan(request, time_limit_seconds=90.0, relative_gap=_GAP)
    sheet = Sheet(
        "Table 1: where the 65 boundaries live (27B, H800, 72 rows)", ("home", "LazyTrain", "LazyJAX")
    )
    ours = dict.fromkeys(published.TABLE_1_COUNTS, 0)
    if found.plan is not None:
        for layer in found.plan.layers[1:]:
            ours[layer.boundary.value] += 1
        sheet.notes.append(
            "LazyJAX keeps tensors inside "
            f"{sum(1 for layer in found.plan.layers if layer.saved)} layers (simulated); period at layer "
            f"granularity {found.layer_period_seconds:.2f} s, bound {found.bound_seconds:.2f} s."
        )
    for home, count in published.TABLE_1_COUNTS.items():
        sheet.add(home, f"{count} (paper)", f"{ours[home]} (simulated)")
    sheet.add("recompute, layers", _indices(lazytrain_recomputed(machine)), _indices(recomputed(found.plan)))
    sheet.notes.append("Budgets: 70 GiB device, 15 GiB of host activations; 8-bit state and masters besides.")
    sheet.write(folder, "table1")
    return sheet


def recomputed(plan: Plan | None) -> list[int]:
    """Boundaries that a plan drops, numbered as in the paper (0: input of the first block)."""
    if plan is None:
        return []
    return [i - 1 for i, layer in enumerate(plan.layers) if layer.boundary is Boundary.RECOMPUTE]


def lazytrain_recomputed(machine: Simulated) -> list[int]:
    """The same of the published plan."""
    return recomputed(machine.lazytrain(72)[0])


def _indices(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) or "none"


def figure4(folder: pathlib.Path, models: Sequence[str] = ()) -> Sheet:
    """Throughput of all rows of table 3 as bars, paper and simulated side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sheet = Sheet("Figure 4: model TFLOPS", ("GPU", "model", "series", "TFLOPS"))
    rows = [row for row in published.TABLE_3 if not models or row.model in models]
    series: dict[str, list[float]] = {
        name: []
        for name in (
            "MegaTrain (paper)", "LazyTrain (paper)", "MegaTrain (simulated)", "LazyTrain (simulated)",
            "LazyJAX (simulated)",
        )
    }  # fmt: skip
    for row in rows:
        machine = calibrated(row.model, row.profile)
        mega, lazy = machine.megatrain(row.megatrain.rows), machine.lazytrain(row.lazytrain.rows)
        plan = planned(row.model, row.profile, row.lazytrain.rows)
        ours = 0.0
        if plan is not None and plan.prediction is not None:
            ours = machine.tflops(plan, plan.prediction.period_seconds)
        values = (
            row.megatrain.tflops,
            row.lazytrain.tflops,
            machine.tflops(*mega[:2]),
            machine.tflops(*lazy[:2]),
            ours,
        )
        for name, value in zip(series, values, strict=True):
            series[name].append(value)
            sheet.add(row.gpu, row.model, name, f"{value:.2f}")
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(series)
    for position, (name, values_) in enumerate(series.items()):
        hatch = "//" if name.endswith("(paper)") else ""
        axes.bar([i + position * width for i in range(len(rows))], values_, width, label=name, hatch=hatch)
    axes.set_xticks(
        [i + 0.4 for i in range(len(rows))], [f"{row.gpu}\n{row.model}" for row in rows], fontsize=8
    )
    axes.set_ylabel("model TFLOPS")
    axes.legend(fontsize=8, frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "figure4.png", dpi=130)
    sheet.write(folder, "figure4")
    return sheet


def table6(folder: pathlib.Path) -> Sheet:
    """GPT-OSS-120B, planned but not run: host memory, feasibility, exposed traffic."""
    profile = load_profile("h800-paper")
    model = MixtureOfExperts()
    optimizer = make_host_optimizer("hybrid8bit", threads=1, path="pure")

    @functools.cache
    def costs(microbatch_rows: int) -> Costs:
        return described_costs(
            model,
            profile,
            rows=microbatch_rows,
            sequence_length=published.SEQUENCE_LENGTH,
            optimizer=optimizer,
        )

    spec = costs(1).spec
    state = sum(layer.state_bytes for layer in costs(1).sizes.layers)
    static = static_host_bytes(spec)

    def request(host_bytes: int) -> Request:
        return Request(
            spec=spec,
            rows=published.TABLE_6_ROWS,
            sequence_length=published.SEQUENCE_LENGTH,
            sizes=lambda rows: costs(rows).sizes,
            costs=costs,
            capacity={Tier.DEVICE: profile.device_bytes, Tier.HOST: host_bytes, Tier.NVME: 0},
            static_host_bytes=static,
        )

    gib = 2**30
    sheet = Sheet("Table 6: GPT-OSS-120B (36 layers, plan only), H800", ("figure", "LazyTrain", "LazyJAX"))
    for name, share in (("host GiB, 2 % 8-bit", 0.02), ("host GiB, all 8-bit", 1.0)):
        theirs = lazytrain_host_bytes(spec.parameter_count, share) / gib
        ours = simulated_cell((static + state) / gib) if share == 1.0 else "-"
        sheet.add(name, f"{paper(published.TABLE_6[name])}, {simulated_cell(theirs)}", ours)
    small = find_plan(request(int(360e9)), time_limit_seconds=30.0, relative_gap=_GAP)
    short = small.shortfall_bytes[Tier.HOST] if Tier.HOST in small.shortfall_bytes else 0
    verdict = f"infeasible, {short / 1e9:.1f} GB short (simulated)" if small.plan is None else "feasible"
    sheet.add("360 GB of host memory", "infeasible (paper)", verdict)
    roomy = request(2 * 2**40)
    found = find_plan(roomy, time_limit_seconds=60.0, relative_gap=_GAP)
    plan = found.plan
    assert plan is not None
    verification = verify_for(roomy, plan)
    schedule = build_schedule(plan, roomy.sizes(plan.microbatch_rows))
    exposed = exposed_seconds(schedule, verification.simulation)
    links = exposed[Resource.H2D] + exposed[Resource.D2H]
    on_device = sum(layer.boundary is Boundary.DEVICE for layer in plan.layers[1:])
    sheet.add("2 TiB, 32 rows: gap", "optimal (paper)", f"{found.gap:.2%} (simulated)")
    sheet.add("boundaries on the device", "37 of 37 (paper)", f"{on_device} of 37 (simulated)")
    sheet.add(
        "parameter and gradient traffic exposed, s",
        paper(published.TABLE_6["exposed traffic s"]),
        simulated_cell(links),
    )
    busy = verification.bounds_seconds
    sheet.add("step s", "-", simulated_cell(verification.period_seconds))
    sheet.notes.append(
        f"Busy in a step: H2D {busy[Resource.H2D]:.1f} s, D2H {busy[Resource.D2H]:.1f} s, compute "
        f"{busy[Resource.COMPUTE]:.1f} s, CPU {busy[Resource.CPU]:.1f} s (simulated): "
        "the links bound this model."
    )
    sheet.write(folder, "table6")
    return sheet


TABLES: Mapping[str, Callable[[pathlib.Path], Sheet]] = {
    "table1": table1,
    "table3": table3,
    "table5": table5,
    "table6": table6,
    "figure4": figure4,
}


def main() -> None:
    """Makes one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    begun = time.monotonic()
    print(TABLES[arguments.table](arguments.out).markdown())
    print(f"{time.monotonic() - begun:.0f} s; written to {arguments.out}")


if __name__ == "__main__":
    main()
