"""`lazyjax runs`: what is in run folders, as a table of their main figures and a picture of their losses.

Reads files of a run folder only and imports nothing of the library, so that it starts at once and also
reads runs that were copied from another machine. `analysis` builds on the reader.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

_METRICS = "metrics.jsonl"
#: Weight of the past in the smoothed loss.
_SMOOTHING = 0.9
_PICTURES = (".png", ".pdf", ".svg")


class RunError(ValueError):
    """A folder that holds no readable run; the message names the file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The records of one run.

    Attributes:
        steps, evaluations: the lines of metrics.jsonl, by kind, in order.
        summary: summary.json; None while the run goes on, or after it was killed.
        predicted_step_seconds: what the plan in use promised; None where it promised nothing.
        scores: the lines of metrics.jsonl about answers to held-out rows.
    """

    folder: pathlib.Path
    steps: tuple[dict[str, Any], ...]
    evaluations: tuple[dict[str, Any], ...]
    summary: dict[str, Any] | None
    predicted_step_seconds: float | None = None
    scores: tuple[dict[str, Any], ...] = ()

    @property
    def status(self) -> str:
        """How the run ended."""
        return "unfinished" if self.summary is None else str(_entry(self.summary, "status"))

    @property
    def timed_steps(self) -> tuple[dict[str, Any], ...]:
        """Those that did not compile, where there are any; of older records all but the first."""
        if all("compile_seconds" in step for step in self.steps):
            return tuple(step for step in self.steps if not step["compile_seconds"]) or self.steps
        return self.steps[1:] or self.steps

    def mean_of(self, key: str) -> float | None:
        """Mean over the timed steps, weighted by their time; None where nothing was recorded."""
        known = [step for step in self.timed_steps if key in step and step[key] is not None]
        seconds = sum(step["step_seconds"] for step in known)
        return sum(step[key] * step["step_seconds"] for step in known) / seconds if seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that are not padding, over all timed steps."""
        seconds = sum(step["step_seconds"] for step in self.timed_steps)
        return sum(step["real_tokens"] for step in self.timed_steps) / seconds if seconds else None

    @property
    def other_cpus(self) -> float | None:
        """How many CPUs other programs took on average during the timed steps; None where unknown."""
        steps = [s for s in self.timed_steps if _entry(s, "other_cpu_seconds") is not None]
        seconds = sum(step["step_seconds"] for step in steps)
        return max(0.0, sum(s["other_cpu_seconds"] for s in steps) / seconds) if seconds else None

    @property
    def step_seconds(self) -> float | None:
        """Mean of the timed steps."""
        count = len(self.timed_steps)
        return sum(step["step_seconds"] for step in self.timed_steps) / count if count else None


def find_runs(folders: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """The run folders among `folders` and directly in them, in the order of their names.

    Raises:
        RunError: one of them is no run and holds none.
    """
    found: list[pathlib.Path] = []
    for folder in folders:
        if (folder / _METRICS).is_file():
            found.append(folder)
            continue
        if not folder.is_dir():
            raise RunError(f"{folder}: no such folder")
        inside = sorted(path.parent for path in folder.glob(f"*/{_METRICS}"))
        if not inside:
            raise RunError(f"{folder}: no run (no {_METRICS}) in it, nor in the folders in it")
        found += inside
    return found


def read_run(folder: pathlib.Path) -> Run:
    """Reads a run folder; a last line that was cut off by a kill is left out.

    Raises:
        RunError: no metrics.jsonl, or a damaged file.
    """
    path = folder / _METRICS
    lines = _text(path).split("\n")
    records = [_record(path, number, line) for number, line in enumerate(lines[:-1], start=1)]
    summary_path, plan_path = folder / "summary.json", folder / "plan.json"
    plan = _table(plan_path) if plan_path.is_file() else {}
    prediction = _entry(plan, "prediction")
    seconds = _entry(prediction, "period_seconds") if isinstance(prediction, dict) else None
    return Run(
        folder,
        tuple(record for record in records if record["kind"] == "train"),
        tuple(record for record in records if record["kind"] == "evaluation"),
        _table(summary_path) if summary_path.is_file() else None,
        seconds,
        tuple(record for record in records if record["kind"] == "exact_match"),
    )


#: What a reader may count on in each record.
_KEYS = {
    "train": ("step", "loss", "real_tokens", "step_seconds"),
    "evaluation": ("step", "loss"),
    "exact_match": ("step", "exact_match", "low", "high", "rows"),
}


def _record(path: pathlib.Path, number: int, line: str) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise RunError(f"{where}: {error.msg}") from error
    if not isinstance(record, dict) or "kind" not in record:
        raise RunError(f"{where}: not a record of a run")
    missing = [key for key in _KEYS[record["kind"]] if key not in record] if record["kind"] in _KEYS else []
    if missing:
        raise RunError(f"{where}: a record of kind {record['kind']} without {missing[0]}")
    # Runs of earlier releases wrote NaN, which is no JSON; here both are null.
    return {key: None if _is_nan(value) else value for key, value in record.items()}


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: not a text file") from error


def _table(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise RunError(f"{path}: {error.msg}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path}: not a JSON table")
    return value


def _entry(table: dict[str, Any], key: str) -> Any:
    return table[key] if key in table else None


#: Heading and width of each figure.
_COLUMNS = (
    ("status", 12),
    ("steps", 6),
    ("loss before", 13),
    ("after", 9),
    ("tokens/s", 9),
    ("TFLOPS", 8),
    ("s a step", 10),
    ("predicted", 11),
)


def run_table(runs: Sequence[Run]) -> str:
    """Two lines a run, 80 columns: its name with device and commit, never cut, and its figures.

    A third one has the exact match of answers to held-out rows, where there were any. Losses are those of
    held-out rows; TFLOPS are model TFLOPS (6 N tokens / s, padding counts). All figures but `predicted` were
    measured.
    """
    head = "".join(heading.ljust(width) if not at else heading.rjust(width)
                   for at, (heading, width) in enumerate(_COLUMNS))  # fmt: skip
    lines = ["runs (measured; predicted: what the plan promised a step to take)", f"  {head}".rstrip()]
    for run in runs:
        summary = run.summary or {}
        about = [str(value) for key in ("device", "commit") if (value := _entry(summary, key)) is not None]
        lines.append(run.folder.name + (f" ({', '.join(about)})" if about else ""))
        losses = [evaluation["loss"] for evaluation in run.evaluations]
        figures = [
            run.status,
            str(len(run.steps)),
            _figure(losses[0] if losses else None, "{:.4f}"),
            _figure(losses[-1] if len(losses) > 1 else None, "{:.4f}"),
            _figure(run.tokens_per_second, "{:,.0f}"),
            _figure(run.mean_of("model_tflops"), "{:.3g}"),
            _figure(run.step_seconds, "{:.4g}"),
            _figure(run.predicted_step_seconds, "{:.4g}"),
        ]
        cells = [
            figure.rjust(width) if at else figure.ljust(width)
            for at, (figure, (_, width)) in enumerate(zip(figures, _COLUMNS, strict=True))
        ]
        lines.append("  " + "".join(cells).rstrip())
        if run.scores:
            lines.append(f"  exact match {_scores(run)}")
    return "\n".join(lines)


def _scores(run: Run) -> str:
    """The first and the last exact match, each with the step after which it was taken."""
    first, last = run.scores[0], run.scores[-1]
    when = [f"{one['exact_match']:.1%} " + (f"after step {one['step']}" if one["step"] else "before")
            for one in ([first, last] if last is not first else [last])]  # fmt: skip
    return f"{', '.join(when)} ({last['low']:.1%} to {last['high']:.1%}, 95 %, of {last['rows']} rows)"


def _figure(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return "<0.001" if 0 < value < 0.001 and form.endswith("g}") else form.format(value)


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line, as everywhere."""

    def error(self, message: str) -> NoReturn:
        """Raises RunError."""
        raise RunError(f"{self.prog}: {message} ({self.prog} --help lists the options)")


def smoothed(values: Sequence[float], weight: float = _SMOOTHING) -> list[float]:
    """Exponential mean without the bias of its start."""
    result, mean, share = [], 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        share = weight * share + (1 - weight)
        result.append(mean / share)
    return result


def plot_losses(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Training loss, plain and smoothed, as lines, held-out loss as dots, over steps.

    Raises:
        RunError: the picture cannot be written there, or not in that format.
    """
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, run in enumerate(runs):
        color = f"C{index % 10}"
        finite = [step for step in run.steps if step["loss"] is not None]
        steps, losses = [step["step"] for step in finite], [step["loss"] for step in finite]
        axes.plot(steps, losses, color=color, linewidth=0.8, alpha=0.3)
        axes.plot(steps, smoothed(losses), color=color, linewidth=1.6, label=run.folder.name)
        held_out = [evaluation for evaluation in run.evaluations if evaluation["loss"] is not None]
        axes.plot([e["step"] for e in held_out], [e["loss"] for e in held_out], "o", color=color)
    axes.set_title("loss (measured): training, thin; smoothed, thick; held-out rows, dots")
    axes.set_xlabel("step")
    axes.set_ylabel("mean -log p of a target token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def check_picture(path: pathlib.Path) -> None:
    """Whether a picture can be written to `path`, before anything is computed for it.

    Raises:
        RunError: another format than PNG, PDF or SVG, or a folder that is not there.
    """
    if path.suffix.lower() not in _PICTURES:
        raise RunError(f"{path}: a picture is one of {', '.join(_PICTURES)}")
    if not path.absolute().parent.is_dir():
        raise RunError(f"{path}: there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise RunError(f"{path}: is a folder")


def runs_command(arguments: Sequence[str]) -> None:
    """Compare runs: lazyjax runs [FOLDER ...] [--plot losses.png]; by default all of ./runs."""
    parser = _Parser(allow_abbrev=False, prog="lazyjax runs", description="Compares run folders.")
    default = [pathlib.Path("runs")]
    parser.add_argument("folders", nargs="*", type=pathlib.Path, default=default,
                        help="run folders, or folders of them (default: runs)")  # fmt: skip
    parser.add_argument("--plot", type=pathlib.Path, help="write the loss curves to this picture")
    options = parser.parse_args(list(arguments))
    if options.plot is not None:
        check_picture(options.plot)
    runs = [read_run(folder) for folder in find_runs(options.folders)]
    print(run_table(runs))
    if options.plot is not None:
        plot_losses(runs, options.plot)
        print(f"losses: {options.plot}")
