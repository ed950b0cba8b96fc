"""The paper's tables beside simulations on the same machine.

Commands:  python -m experiments.reproduce NAME [--measure] [--out FOLDER], where NAME is fit, table1,
table3, table4, table5, table6, figure4, timeline, sensitivity, peers or scaling.
Every cell says whether it is `paper`, `simulated` or `measured`. Measured ones come from sweeps of this
machine (`experiments.measured`): those in --sweeps, which --measure runs first. A machine has one set of
constants, that of its profile (`fit` says where they come from); `lazyjax plan` gives the same figures for
the same machine, model and batch.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from analysis.sweeps import SweepError
from experiments import published, sweep
from experiments.fit import fit_table
from experiments.measured import add_measured, records_of, sweep_name
from experiments.ours import planned, replayed, request_for
from experiments.peers import peers
from experiments.scaling import scaling
from experiments.sensitivity import sensitivity
from experiments.sheet import Sheet, paper, simulated_cell
from experiments.systems import LAZYTRAIN, MEGATRAIN, Outcome, simulated, template_of
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.commands.picture import write_picture
from lazyjax.planning.commands.report import baseline_rows, comparison_row, model_tflops
from lazyjax.planning.costs.described import MixtureOfExperts, described_costs, lazytrain_host_bytes
from lazyjax.planning.costs.seconds import Costs, static_host_bytes
from lazyjax.planning.plan.baselines import megatrain
from lazyjax.planning.plan.document import Boundary, Plan
from lazyjax.planning.planner.question import Request
from lazyjax.planning.planner.search import find_plan
from lazyjax.planning.planner.service import verify_for
from lazyjax.planning.program.critical import exposed_seconds
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.specs import ModelSpec, Tier
from lazyjax.timeline import Resource

#: Gap to which tables 1 and 6, which ask their own questions, are searched.
_GAP = 0.005
RESULTS = pathlib.Path(__file__).parent / "results"


def _machine_plan(row: published.Row) -> tuple[HardwareProfile, Outcome, Outcome]:
    """The machine of a row of table 3, and both published systems on it."""
    profile = load_profile(row.profile)
    mega = simulated(MEGATRAIN, row.model, profile, row.megatrain.rows)
    return profile, mega, simulated(LAZYTRAIN, row.model, profile, row.lazytrain.rows)


def _tflops(plan: Plan, period_seconds: float, model: str) -> float:
    """Model TFLOPS with the true parameter count."""
    return model_tflops(template_of(model).spec.parameter_count, plan, period_seconds)


def table3(folder: pathlib.Path, models: Sequence[str] = ()) -> Sheet:
    """Throughput of the three systems on every model and GPU."""
    columns = ["GPU", "model", "system", "rows", "tokens/s", "tokens/s", "deviation", "against LazyTrain"]
    columns += ["model TFLOPS", "device GB", "host GB"]
    sheet = Sheet("Table 3: throughput", columns)
    for row in published.TABLE_3:
        if models and row.model not in models:
            continue
        profile, mega, lazy = _machine_plan(row)
        systems = (("MegaTrain", row.megatrain, mega), ("LazyTrain", row.lazytrain, lazy))
        for name, figures, outcome in systems:
            assert figures.tokens_per_second is not None
            deviation = outcome.tokens_per_second / figures.tokens_per_second - 1
            tflops = _tflops(outcome.plan, outcome.simulation.period_seconds, row.model)
            sheet.add(
                row.gpu, row.model, name, str(figures.rows), paper(figures.tokens_per_second, 0),
                simulated_cell(outcome.tokens_per_second, 0), f"{deviation:+.1%}", "",
                f"{paper(figures.tflops)}, {simulated_cell(tflops)}", paper(figures.device_gb),
                paper(figures.host_gb),
            )  # fmt: skip
        rows = [row.lazytrain.rows, *([32] if row.gpu != "H800" else [])]
        for count in rows:
            sheet.add(*_our_row(row, profile, count, lazy))
        print("\n".join(" | ".join(cells) for cells in sheet.rows[-2 - len(rows) :]), flush=True)
    sheet.notes += [
        "tokens/s count padding, as published. Deviation: simulated over paper. Against LazyTrain: simulated "
        "tokens/s over LazyTrain's published row, and in brackets over its simulation on the same constants; "
        "with other rows than LazyTrain's, what more memory or microbatches allow is part of the ratio.",
        "model TFLOPS are 6 N tokens/s with N as the model has it, embedding table included, which "
        "multiplies nothing: they may exceed the executed ones. The paper's rows for 3B, 7B and 14B divide "
        "by 3.00, 7.00 and 14.00 G parameters, so tokens/s are compared.",
        "Constants of the machines and how sure they are: fit.md. What LazyJAX's figures depend on: "
        "sensitivity.md.",
    ]
    sheet.write(folder, "table3")
    return sheet


def _our_row(row: published.Row, profile: HardwareProfile, count: int, lazy: Outcome) -> tuple[str, ...]:
    ours = planned(row.model, profile, count)
    if ours is None:
        return (row.gpu, row.model, "LazyJAX", str(count), "-", "does not fit", *[""] * 5)
    rate, prediction = ours.tokens_per_second, ours.prediction
    assert row.lazytrain.tokens_per_second is not None
    over_paper, over_simulated = rate / row.lazytrain.tokens_per_second, rate / lazy.tokens_per_second
    ratios = f"{over_paper:.2f}x paper ({over_simulated:.2f}x simulated)"
    return (
        row.gpu, row.model, "LazyJAX", str(count), "-", simulated_cell(rate, 0), "", ratios,
        simulated_cell(_tflops(ours.plan, prediction.period_seconds, row.model)),
        simulated_cell(prediction.peak_bytes["device"] / 1e9, 1),
        simulated_cell(prediction.peak_bytes["host"] / 1e9, 1),
    )  # fmt: skip


def table5(folder: pathlib.Path) -> Sheet:
    """Ablation on the 27B H800 row, theirs and ours, and the path from theirs to ours."""
    model, profile, rows = "Qwen3.6-27B", load_profile("h800-paper"), 72
    columns = ("system", "tokens/s", "tokens/s", "step s")
    sheet = Sheet("Table 5: ablation, 27B, H800, 72 rows", columns)
    # Without the MILP the interval of four remains, but nothing is recomputed in vain.
    interval = MEGATRAIN._replace(rules=_interval_of_four, update_bytes=LAZYTRAIN.update_bytes)
    theirs = {
        "MegaTrain": MEGATRAIN,
        "LazyTrain": LAZYTRAIN,
        "LazyTrain without MILP": interval,
        "LazyTrain without Hybrid-8bit": LAZYTRAIN._replace(update_bytes=MEGATRAIN.update_bytes),
    }
    for name, system in theirs.items():
        outcome = simulated(system, model, profile, rows)
        figures = published.TABLE_5[name]
        sheet.add(
            name, paper(figures[3], 0), simulated_cell(outcome.tokens_per_second, 0),
            simulated_cell(outcome.simulation.period_seconds),
        )  # fmt: skip
    base = planned(model, profile, rows)
    assert base is not None
    request = request_for(model, profile, rows)
    bare = tuple(layer.model_copy(update={"saved": {}}) for layer in base.plan.layers)
    plan = base.plan
    lazy = simulated(LAZYTRAIN, model, profile, rows).plan
    path: Mapping[str, Plan] = {
        "LazyTrain's plan in this executor: XLA's kernels, no second forward, our host update": lazy,
        "the same, update deferred under the next forward": lazy.model_copy(update={"update": "deferred"}),
        "LazyJAX: the plan": plan,
        "LazyJAX, update at the end of the step": plan.model_copy(update={"update": "immediate"}),
        "LazyJAX, nothing kept inside layers": plan.model_copy(update={"layers": bare}),
        "LazyJAX, nothing fetched ahead": plan.model_copy(update={"prefetch": 1, "backward_prefetch": 1}),
    }
    for name, changed in path.items():
        ours = replayed(request, changed)
        seconds = simulated_cell(ours.prediction.period_seconds)
        sheet.add(name, "-", simulated_cell(ours.tokens_per_second, 0), seconds)
    sheet.notes.append(
        "LazyTrain without MILP is read as MegaTrain's interval of four with only what is needed recomputed; "
        "the paper does not say. Peaks of plans changed by hand are not held to the capacities."
    )
    sheet.write(folder, "table5")
    return sheet


def _interval_of_four(spec: ModelSpec, residual_names: Sequence[Sequence[str]], **batch: Any) -> Plan:
    return megatrain(spec, residual_names, **batch, recompute="needed")


def table1(folder: pathlib.Path) -> Sheet:
    """The published placement beside ours under the same activation budgets."""
    model, profile = "Qwen3.6-27B", load_profile("h800-paper")
    free = request_for(model, profile, 72)
    state = sum(layer.state_bytes for layer in free.sizes(1).layers)
    gib = 2**30
    host = free.static_host_bytes + state + int(published.TABLE_1_CAPACITY_GIB["host"] * gib)
    device = int(published.TABLE_1_CAPACITY_GIB["device"] * gib)
    request = request_for(model, profile, 72, device_bytes=device, host_bytes=host)
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
    theirs = simulated(LAZYTRAIN, model, profile, 72).plan
    sheet.add("recompute, layers", _indices(recomputed(theirs)), _indices(recomputed(found.plan)))
    sheet.notes.append("Budgets: 70 GiB device, 15 GiB of host activations; 8-bit state and masters besides.")
    sheet.write(folder, "table1")
    return sheet


def recomputed(plan: Plan | None) -> list[int]:
    """Boundaries that a plan drops, numbered as in the paper (0: input of the first block)."""
    if plan is None:
        return []
    return [i - 1 for i, layer in enumerate(plan.layers) if layer.boundary is Boundary.RECOMPUTE]


def _indices(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) or "none"


def figure4(folder: pathlib.Path, models: Sequence[str] = ()) -> Sheet:
    """Tokens per second of all rows of table 3 as bars over LazyTrain's published row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sheet = Sheet("Figure 4: tokens/s", ("GPU", "model", "series", "tokens/s"))
    rows = [row for row in published.TABLE_3 if not models or row.model in models]
    series: dict[str, list[float]] = {}
    for row in rows:
        profile, mega, lazy = _machine_plan(row)
        ours = planned(row.model, profile, row.lazytrain.rows)
        assert row.megatrain.tokens_per_second is not None
        assert row.lazytrain.tokens_per_second is not None
        values = {
            "MegaTrain (paper)": row.megatrain.tokens_per_second,
            "LazyTrain (paper)": row.lazytrain.tokens_per_second,
            "MegaTrain (simulated)": mega.tokens_per_second,
            "LazyTrain (simulated)": lazy.tokens_per_second,
            "LazyJAX (simulated)": 0.0 if ours is None else ours.tokens_per_second,
        }
        for name, value in values.items():
            series.setdefault(name, []).append(value / row.lazytrain.tokens_per_second)
            sheet.add(row.gpu, row.model, name, f"{value:.0f}")
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(series)
    for position, (name, ratios) in enumerate(series.items()):
        hatch = "//" if name.endswith("(paper)") else ""
        axes.bar([i + position * width for i in range(len(rows))], ratios, width, label=name, hatch=hatch)
    axes.set_xticks(
        [i + 0.4 for i in range(len(rows))], [f"{row.gpu}\n{row.model}" for row in rows], fontsize=8
    )
    axes.set_ylabel("tokens/s over LazyTrain (paper)")
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
            microbatch_rows=microbatch_rows,
            sequence_length=published.SEQUENCE_LENGTH,
            optimizer=optimizer,
        )

    spec = costs(1).spec
    state = sum(layer.state_bytes for layer in costs(1).sizes.layers)
    static = static_host_bytes(spec)

    def request(host_bytes: int) -> Request:
        return Request(
            spec=spec,
            batch_rows=published.TABLE_6_ROWS,
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


def timeline(folder: pathlib.Path) -> Sheet:
    """One step of 27B on the H800 under LazyJAX's plan and each baseline, drawn on one axis (simulated)."""
    model, profile, rows = "Qwen3.6-27B", load_profile("h800-paper"), 72
    request = request_for(model, profile, rows)
    ours = planned(model, profile, rows)
    assert ours is not None
    own = comparison_row(
        request, "LazyJAX", ours.plan, ours.prediction.period_seconds, ours.prediction.peak_bytes
    )
    lines = [own, *baseline_rows(request)]
    folder.mkdir(parents=True, exist_ok=True)
    write_picture(
        request, lines, folder / "timeline.png", title=f"{model}, {profile.name}, {rows} x 1024 tokens"
    )
    sheet = Sheet("One step of 27B on the H800 (timeline.png)", ("plan", "step s", "device GB"))
    for line in lines:
        sheet.add(
            line.name, simulated_cell(line.period_seconds), simulated_cell(line.peak_bytes["device"] / 1e9, 1)
        )
    sheet.write(folder, "timeline")
    return sheet


def _table4(options: argparse.Namespace) -> Sheet:
    """Table 4 has no simulated cells: a plan changes the time of a step, not what is learned."""
    from experiments import table4

    if options.measure:
        from experiments.convert_smollm2 import convert

        convert(pathlib.Path("runs/models/smollm2-135m-instruct"))
        table4.measure_in_memory(options.sweeps / "table4", Console(), options.in_memory_seeds)
    measure = options.measure and not options.in_memory_seeds
    records = records_of("table4", options.sweeps, measure=measure, mixed=options.mixed)
    return table4.table4(options.out, records, options.sweeps / "table4")


TABLES: Mapping[str, Callable[[pathlib.Path], Sheet]] = {
    "fit": fit_table,
    "sensitivity": sensitivity,
    "peers": peers,
    "scaling": scaling,
    "table1": table1,
    "table3": table3,
    "table5": table5,
    "table6": table6,
    "figure4": figure4,
    "timeline": timeline,
}
#: Those with measured cells beside the others.
_WITH_MEASURED = ("table1", "table3", "table5", "table6")


def make(arguments: Sequence[str] | None = None) -> Sheet:
    """Makes one table, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", choices=sorted([*TABLES, "table4"]))
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--measure", action="store_true", help="run the table's sweep on this machine first")
    parser.add_argument(
        "--sweeps", type=pathlib.Path, default=sweep.DEFAULT_PARENT, help="the sweeps' folder"
    )
    parser.add_argument(
        "--in-memory-seeds", type=int, nargs="+", default=[], metavar="SEED",
        help="table4 --measure: only train these in memory, without the sweep"
    )  # fmt: skip
    parser.add_argument("--mixed", action="store_true", help="allow measured cells of different commits")
    options = parser.parse_args(arguments)
    if options.table == "table4":
        return _table4(options)
    sheet = TABLES[options.table](options.out)
    if options.table in _WITH_MEASURED:
        measure = options.measure and options.table != "table6"
        try:
            records = records_of(sweep_name(), options.sweeps, measure=measure, mixed=options.mixed)
        except SweepError as error:
            parser.error(str(error))
        add_measured(sheet, options.table, records)
        sheet.write(options.out, options.table)
    return sheet


def main() -> None:
    """Command line."""
    begun = time.monotonic()
    print(make().markdown())
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
