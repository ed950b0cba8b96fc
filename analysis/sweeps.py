"""Reads the folder of a sweep: its trials, how they ended, and their figures by variant and seed.

Needs the files of the folder only (see `experiments/sweeping/folder.py` for what they are).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analysis.statistics import Mean, Paired, kendall_tau, mean, paired
from lazyjax.runs import Run, RunError, read_run

#: What a step took, an entry of summary.json.
MEASURED_SECONDS = "median_step_seconds"
#: What it was simulated to take; not an entry, see `Trial.simulated_step_seconds`.
SIMULATED_SECONDS = "simulated_step_seconds"


#: Entries of summary.json that say where figures come from.
_FACTS = ("device", "date", "commit", "plan", "config")


class SweepError(ValueError):
    """A folder that holds no readable sweep, or runs that must not stand in one table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One trial: `state` as in the sweep's table, `run` its records where it has any."""

    name: str
    seed: int
    digest: str
    state: str
    message: str
    run: Run | None

    def figure(self, name: str) -> float | None:
        """An entry of summary.json as a number, or `SIMULATED_SECONDS`; None where the trial has none."""
        if name == SIMULATED_SECONDS:
            return self.simulated_step_seconds
        summary = None if self.run is None else self.run.summary
        if self.state != "succeeded" or summary is None or name not in summary or summary[name] is None:
            return None
        return float(summary[name])

    @property
    def simulated_step_seconds(self) -> float | None:
        """What the plan's prediction says of a step with as many tokens as the timed ones had.

        A plan is made for full rows. Bucketed rows are shorter; a step then takes the share of its time
        that it has of the tokens, padding counted (compute, which bounds such steps, goes with them).
        None where the plan predicts nothing.
        """
        run = self.run
        if self.state != "succeeded" or run is None or run.summary is None:
            return None
        if run.predicted_step_seconds is None:
            return None
        full = run.summary["rows"] * run.summary["sequence_length"]
        tokens = statistics.median(step["padded_tokens"] for step in run.timed_steps)
        return run.predicted_step_seconds * min(1.0, tokens / full)


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """All seeds of one variant, and the name of the one that it is held against."""

    name: str
    trials: tuple[Trial, ...]
    compared_with: str

    def by_seed(self, figure: str) -> dict[int, float]:
        """Seed -> an entry of summary.json, for the trials that have it."""
        pairs = ((trial.seed, trial.figure(figure)) for trial in self.trials)
        return {seed: value for seed, value in pairs if value is not None}

    def mean(self, figure: str) -> Mean | None:
        """Mean over the seeds; None where no trial has the figure."""
        values = list(self.by_seed(figure).values())
        return mean(values) if values else None


@dataclasses.dataclass(frozen=True, slots=True)
class SweepRecords:
    """A sweep folder."""

    folder: pathlib.Path
    name: str
    file: str
    metrics: tuple[str, ...]
    variants: tuple[Variant, ...]

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials, in the order of the file."""
        return tuple(trial for variant in self.variants for trial in variant.trials)

    def variant(self, name: str) -> Variant:
        """A variant by its name."""
        return next(variant for variant in self.variants if variant.name == name)

    def difference(self, variant: Variant, figure: str) -> Paired | None:
        """Of a variant from the one that it is held against, seed by seed; None for that one."""
        if variant.compared_with == variant.name:
            return None
        return paired(variant.by_seed(figure), self.variant(variant.compared_with).by_seed(figure))

    def step_seconds(self) -> list[tuple[str, float, float]]:
        """Variant, simulated and measured seconds of a step, where both are known."""
        rows = []
        for variant in self.variants:
            simulated, measured = variant.mean(SIMULATED_SECONDS), variant.mean(MEASURED_SECONDS)
            if simulated is not None and measured is not None:
                rows.append((variant.name, simulated.mean, measured.mean))
        return rows

    def order_agreement(self) -> float:
        """Kendall's tau of the variants' order by simulated and by measured step time."""
        rows = self.step_seconds()
        return kendall_tau([row[1] for row in rows], [row[2] for row in rows])


def read_sweep(folder: pathlib.Path, *, mixed: bool = False) -> SweepRecords:
    """Reads a sweep folder.

    Args:
        mixed: allows runs of different commits in one table.

    Raises:
        SweepError: no sweep there, a damaged file, or runs of different commits.
    """
    path = folder / "sweep.json"
    described = _json(path)
    variants: dict[str, list[Trial]] = {}
    for entry in described["trials"]:
        variants.setdefault(entry["name"], []).append(_trial(folder, entry))
    # The first sweeps had one baseline for all and said so once.
    compared_with = {
        entry["name"]: (
            entry["compared_with"] if "compared_with" in entry else described["compare"]["baseline"]
        )
        for entry in described["trials"]
    }
    records = SweepRecords(
        folder,
        described["name"],
        described["file"],
        tuple(described["compare"]["metrics"]),
        tuple(Variant(name, tuple(trials), compared_with[name]) for name, trials in variants.items()),
    )
    if not mixed:
        check_one_commit([trial.run for trial in records.trials if trial.run is not None])
    return records


def check_one_commit(runs: Sequence[Run]) -> None:
    """Figures of different sources are not comparable.

    Raises:
        SweepError: naming the commits and a run of each.
    """
    commits = {str(run.summary["commit"]): run.folder.name for run in runs if run.summary is not None}
    if len(commits) > 1:
        words = ", ".join(f"{commit} ({name})" for commit, name in sorted(commits.items()))
        raise SweepError(f"runs of different commits: {words}; --mixed puts them into one table all the same")


#: What entries of summary.json are called for a reader, and what they are divided by.
_READABLE: Mapping[str, tuple[str, float]] = {
    "median_step_seconds": ("step, s", 1),
    "tokens_per_second": ("tokens/s", 1),
    "last_evaluation_loss": ("held-out loss", 1),
    "last_loss": ("last loss", 1),
    "last_exact_match": ("exact match, %", 0.01),
    "peak_device_bytes": ("peak device memory, MiB", 2**20),
    "peak_host_bytes": ("peak host memory, MiB", 2**20),
    "total_seconds": ("whole run, s", 1),
}


def readable(metric: str) -> tuple[str, float]:
    """The name of a metric for a reader, and the unit that its values are divided by."""
    return _READABLE[metric] if metric in _READABLE else (metric, 1)


def markdown_table(records: SweepRecords) -> str:
    """One row per variant: mean and standard error of each metric, and the difference from the baseline."""
    header = ["variant", "seeds"]
    simulated = bool(records.step_seconds())
    if simulated:
        header += ["step, s (measured)", "step, s (simulated)"]
    for metric in records.metrics:
        name = readable(metric)[0]
        if not (simulated and metric == MEASURED_SECONDS):  # it is there already
            header.append(f"{name} (measured)")
        header.append(f"{name}: difference{_from(records)}, 95 %")
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for variant in records.variants:
        succeeded = [trial for trial in variant.trials if trial.state == "succeeded"]
        cells = [variant.name, f"{len(succeeded)} of {len(variant.trials)}"]
        if not succeeded:
            first = variant.trials[0]
            words = first.message.replace("|", "\\|").splitlines()
            cells.append(": ".join([first.state, *words[:1]]))
            cells += [""] * (len(header) - len(cells))
            lines.append("| " + " | ".join(cells) + " |")
            continue
        if simulated:
            cells += [mean_text(variant.mean(name)) for name in (MEASURED_SECONDS, SIMULATED_SECONDS)]
        for metric in records.metrics:
            unit = readable(metric)[1]
            difference = records.difference(variant, metric)
            if not (simulated and metric == MEASURED_SECONDS):
                cells.append(mean_text(variant.mean(metric), unit))
            cells.append(paired_text(difference, unit))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _from(records: SweepRecords) -> str:
    """What differences are from, where it is one variant for all."""
    names = {variant.compared_with for variant in records.variants}
    return f" from {names.pop()}" if len(names) == 1 else ""


def loss_sentences(records: SweepRecords) -> list[str]:
    """Differences of losses in per cent of the baseline's, and whether a loss 1 % worse is excluded."""
    lines = []
    for metric in (metric for metric in records.metrics if metric.endswith("loss")):
        for variant in records.variants:
            difference = records.difference(variant, metric)
            base = records.variant(variant.compared_with).mean(metric)
            if difference is None or difference.count < 2 or base is None:
                continue
            mean, low, high = (
                100 * value / base.mean for value in (difference.mean, difference.low, difference.high)
            )
            verdict = "excludes" if high < 1 else "does not exclude"
            lines.append(
                f"{readable(metric)[0]} of {variant.name} against {variant.compared_with}, "
                f"{difference.count} pairs: {mean:+.2f} % ({low:+.2f} to {high:+.2f} %, 95 %), "
                f"which {verdict} a loss 1 % worse."
            )
    return lines


def mean_text(value: Mean | None, unit: float = 1) -> str:
    """Mean and standard error in `unit`, four digits."""
    if value is None:
        return "-"
    if value.count == 1:
        return f"{value.mean / unit:.4g}"
    return f"{value.mean / unit:.4g} ± {value.standard_error / unit:.2g}"


def paired_text(value: Paired | None, unit: float = 1) -> str:
    """A difference and its interval in `unit`."""
    if value is None:
        return "-"
    if value.count == 1:
        return f"{value.mean / unit:+.3g} (one pair)"
    return f"{value.mean / unit:+.3g} [{value.low / unit:+.3g}, {value.high / unit:+.3g}]"


def csv_lines(records: SweepRecords) -> list[list[str]]:
    """One line per trial, with every number of its summary, and where they come from."""
    figures = sorted(
        {
            key
            for trial in records.trials
            if trial.run is not None and trial.run.summary is not None
            for key, value in trial.run.summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
    )
    figures.append(SIMULATED_SECONDS)
    lines = [["variant", "seed", "state", "digest", *_FACTS, *figures]]
    for trial in records.trials:
        values = [trial.figure(name) for name in figures]
        cells = ["" if value is None else repr(value) for value in values]
        summary = {} if trial.run is None or trial.run.summary is None else trial.run.summary
        facts = [str(summary[key]) if key in summary else "" for key in _FACTS]
        lines.append([trial.name, str(trial.seed), trial.state, trial.digest, *facts, *cells])
    return lines


def curves(
    variant: Variant, across: Callable[[Run], tuple[Sequence[float], Sequence[float]]]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """x and y of every seed's curve."""
    return [across(trial.run) for trial in variant.trials if trial.run is not None and trial.run.steps]


def _trial(folder: pathlib.Path, entry: dict[str, Any]) -> Trial:
    state, message = "planned", ""
    outcome = folder / "outcomes" / f"{entry['digest']}.json"
    if entry["problem"] is not None:
        state, message = "failed", entry["problem"]
    elif outcome.exists():
        values = _json(outcome)
        state, message = values["state"], values["message"]
    path = folder / "trials" / entry["folder"]
    run = None
    if (path / "metrics.jsonl").exists():
        try:
            run = read_run(path)
        except RunError as error:
            raise SweepError(str(error)) from error
    return Trial(entry["name"], entry["seed"], entry["digest"], state, message, run)


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SweepError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise SweepError(f"{path}: not JSON ({error})") from error
    return values
