"""Measured cells of the paper's tables, from sweeps: on this machine, and at a size that it can run.

`python -m experiments.reproduce TABLE --measure` runs the sweep first, or goes on with it; without
--measure the cells are filled from what is already there. Where JAX sees a GPU the sweep is `systems`
(the paper's sizes that fit, MegaTrain's and LazyTrain's rules in our executor beside LazyJAX's plan),
else `ablation`, on a model of 7.5 M parameters. Tokens per second of different models are not
comparable; their ratios to LazyTrain's plan stand beside each other.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping

import jax

from analysis.sweeps import MEASURED_SECONDS, SIMULATED_SECONDS, SweepRecords, read_sweep
from experiments import sweep
from experiments.sheet import Sheet, measured_cell, simulated_cell

SWEEPS = pathlib.Path(__file__).parent / "sweeps"
#: Row of a table -> variant of the sweep.
_TABLE_5 = {
    "MegaTrain": "MegaTrain's rule",
    "LazyTrain": "LazyTrain's published plan",
    "LazyTrain's plan in this executor: XLA's kernels, no second forward, our host update": (
        "LazyTrain's published plan"
    ),
    "LazyJAX: the plan": "LazyJAX",
    "LazyJAX, update at the end of the step": "immediate update",
    "LazyJAX, nothing kept inside layers": "no residuals by name",
    "LazyJAX, nothing fetched ahead": "nothing fetched ahead",
}
_SYSTEMS = {"MegaTrain": "MegaTrain's rule", "LazyTrain": "LazyTrain's published plan", "LazyJAX": "LazyJAX"}
_REFERENCE = "LazyTrain's published plan"


def sweep_name() -> str:
    """The sweep that this machine can run."""
    return "ablation" if jax.default_backend() == "cpu" else "systems"


def records_of(
    name: str, parent: pathlib.Path, *, measure: bool = False, mixed: bool = False
) -> SweepRecords | None:
    """The records of a sweep of the repository; None where it was never begun.

    Args:
        parent: folder of the sweeps' folders.
        measure: runs it, or what is left of it.
        mixed: allows runs of different commits.

    Raises:
        ValueError: (analysis.sweeps.SweepError) damaged records, or runs of different commits.
    """
    folder = parent / name
    if measure:
        sweep.run([str(SWEEPS / f"{name}.yaml"), "--folder", str(folder)])
    return read_sweep(folder, mixed=mixed) if (folder / "sweep.json").exists() else None


def provenance_of(records: SweepRecords) -> str:
    """Device, date, commit and digests of the runs behind measured cells, in one sentence."""
    summaries = [trial.run.summary for trial in records.trials if trial.run is not None and trial.run.summary]
    facts = {
        key: sorted({str(summary[key]) for summary in summaries if key in summary})
        for key in ("device", "date", "commit")
    }
    words = ", ".join(f"{key} {' and '.join(values)}" for key, values in facts.items() if values)
    digests = ", ".join(
        f"{trial.name} {trial.digest[:10]}" for trial in records.trials if trial.run is not None
    )
    return (
        f"Measured cells: `python -m experiments.sweep experiments/sweeps/{records.name}.yaml`, {words}. "
        f"Configurations: {digests}."
    )


def add_measured(sheet: Sheet, table: str, records: SweepRecords | None) -> None:
    """Fills the measured column of a table, and adds this machine's own rows where it has some."""
    if table == "table6":
        sheet.notes.append("No measured cell: the paper, too, only solves this model's plan.")
        return
    if records is None:
        sheet.notes.append(
            f"No measured cells: run `python -m experiments.reproduce {table} --measure` "
            f"(the sweep {sweep_name()})."
        )
        return
    {"table1": _homes, "table3": _throughput, "table5": _ablation}[table](sheet, records)
    sheet.notes.append(provenance_of(records))


def _ablation(sheet: Sheet, records: SweepRecords) -> None:
    """Table 5: tokens/s here, and all three kinds of figures over LazyTrain's."""
    here = _rates(records)
    reference = next(row for row in sheet.rows if row[0] == "LazyTrain")
    sheet.columns = (
        *sheet.columns,
        "tokens/s, small model here",
        "over LazyTrain: paper, simulated, measured",
    )
    for number, row in enumerate(sheet.rows):
        variant = _TABLE_5[row[0]] if row[0] in _TABLE_5 else None
        rate = here[variant] if variant in here else None
        ratios = [
            f"{_number(cell) / _number(base):.2f} ({label})"
            for cell, base, label in ((row[1], reference[1], "paper"), (row[2], reference[2], "simulated"))
            if cell != "-"
        ]
        if rate is not None and _REFERENCE in here:
            ratios.append(f"{rate / here[_REFERENCE]:.2f} (measured)")
        sheet.rows[number] = (*row, "-" if rate is None else measured_cell(rate, 0), ", ".join(ratios))
    used = {_TABLE_5[row[0]] for row in sheet.rows if row[0] in _TABLE_5}
    blank = ["-"] * (len(sheet.columns) - 3)
    for variant, rate in here.items():
        if variant not in used:
            ratio = f"{rate / here[_REFERENCE]:.2f} (measured)" if _REFERENCE in here else "-"
            sheet.add(f"here only: {variant}", *blank, measured_cell(rate, 0), ratio)


def _throughput(sheet: Sheet, records: SweepRecords) -> None:
    """Table 3: this machine's own rows, with predictions of the run's plan beside what was measured."""
    place = sheet.columns.index("deviation")
    sheet.columns = (*sheet.columns[:place], "tokens/s here", *sheet.columns[place:])
    sheet.rows[:] = [(*row[:place], "-", *row[place:]) for row in sheet.rows]
    rates = _rates(records)
    for system, name in _SYSTEMS.items():
        if name not in rates or _REFERENCE not in rates:
            continue
        variant = records.variant(name)
        figures = {
            key: variant.mean(key)
            for key in (
                "tokens_per_second", MEASURED_SECONDS, SIMULATED_SECONDS, "model_tflops", "peak_device_bytes",
                "peak_host_bytes", "rows",
            )
        }  # fmt: skip
        known = {key: value.mean for key, value in figures.items() if value is not None}
        if not {MEASURED_SECONDS, SIMULATED_SECONDS} <= known.keys():
            continue
        ratio = known[MEASURED_SECONDS] / known[SIMULATED_SECONDS]
        run = next(trial.run for trial in variant.trials if trial.run is not None)
        assert run.summary is not None
        sheet.add(
            "this machine", str(run.summary["model"]), system, f"{known['rows']:.0f}", "-",
            simulated_cell(known["tokens_per_second"] * ratio, 0),
            measured_cell(known["tokens_per_second"], 0),
            f"{ratio - 1:+.1%}", f"{known['tokens_per_second'] / rates[_REFERENCE]:.2f}x measured",
            measured_cell(known["model_tflops"], 4), measured_cell(known["peak_device_bytes"] / 1e9, 3),
            measured_cell(known["peak_host_bytes"] / 1e9, 2),
        )  # fmt: skip


def _homes(sheet: Sheet, records: SweepRecords) -> None:
    """Table 1: where the boundaries of the executed plans lived."""
    homes = {name: _boundaries(records, name) for name in (_REFERENCE, "LazyJAX")}
    sheet.columns = (*sheet.columns, "LazyTrain's plan, executed here", "LazyJAX, executed here")
    for number, row in enumerate(sheet.rows):
        cells = [
            "-" if found is None or row[0] not in found else f"{found[row[0]]} (measured)"
            for found in homes.values()
        ]
        sheet.rows[number] = (*row, *cells)


def _boundaries(records: SweepRecords, variant: str) -> Mapping[str, int] | None:
    trials = [trial for trial in records.trials if trial.name == variant]
    run = next((trial.run for trial in trials if trial.run is not None), None)
    if run is None:
        return None
    layers = json.loads((run.folder / "plan.json").read_text())["layers"][1:]
    counts = dict.fromkeys(("device", "host", "nvme", "recompute"), 0)
    for layer in layers:
        counts[layer["boundary"]] += 1
    return counts


def _rates(records: SweepRecords) -> dict[str, float]:
    found = {variant.name: variant.mean("tokens_per_second") for variant in records.variants}
    return {name: value.mean for name, value in found.items() if value is not None}


def _number(cell: str) -> float:
    found = re.match(r"[\d.]+", cell)
    assert found is not None, cell
    return float(found[0])
