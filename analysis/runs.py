"""Reads run folders: a table of their main figures, and their loss curves as a picture.

    python -m analysis.runs RUN_FOLDER [RUN_FOLDER ...] [--plot losses.png]

Needs the files of a run folder only, so it also reads runs that were copied from another machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


class RunError(ValueError):
    """A folder that holds no readable run; the message names the file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The records of one run.

    Attributes:
        steps, evaluations: the lines of metrics.jsonl, by kind, in order.
        summary: summary.json; None while the run goes on, or after it was killed.
    """

    folder: pathlib.Path
    steps: tuple[dict[str, Any], ...]
    evaluations: tuple[dict[str, Any], ...]
    summary: dict[str, Any] | None

    @property
    def status(self) -> str:
        """How the run ended."""
        return "unfinished" if self.summary is None else str(self.summary["status"])


def read_run(folder: pathlib.Path) -> Run:
    """Reads a run folder; a last line that was cut off by a kill is left out.

    Raises:
        RunError: no metrics.jsonl, or a damaged file.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise RunError(f"{path}, line {number}: {error.msg}") from error
    summary_path = folder / "summary.json"
    summary = json.loads(summary_path.read_text(encoding="utf-8")) if summary_path.is_file() else None
    return Run(
        folder,
        tuple(record for record in records if record["kind"] == "train"),
        tuple(record for record in records if record["kind"] == "evaluation"),
        summary,
    )


def run_table(runs: Sequence[Run]) -> Table:
    """One line per run: status, steps, losses, rates. Everything in it was measured."""
    table = Table(title="runs (measured)")
    columns = ("run", "status", "steps", "eval loss before", "eval loss after", "tokens/s", "model TFLOPS")
    for column in (*columns, "device MiB", "device"):
        table.add_column(column)
    for run in runs:
        # The first step compiles.
        timed = run.steps[1:] or run.steps
        seconds = sum(step["step_seconds"] for step in timed)
        losses = [evaluation["loss"] for evaluation in run.evaluations]
        table.add_row(
            run.folder.name,
            run.status,
            str(len(run.steps)),
            f"{losses[0]:.4f}" if losses else "-",
            f"{losses[-1]:.4f}" if len(losses) > 1 else "-",
            f"{sum(step['real_tokens'] for step in timed) / seconds:,.0f}" if timed else "-",
            f"{sum(step['model_tflops'] * step['step_seconds'] for step in timed) / seconds:.3g}"
            if timed
            else "-",
            f"{max(step['peak_device_bytes'] for step in run.steps) / 2**20:.1f}" if run.steps else "-",
            "-" if run.summary is None else f"{run.summary['device']}, {run.summary['commit']}",
        )
    return table


def plot_losses(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Training loss as lines, evaluation loss as dots, over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for index, run in enumerate(runs):
        color = f"C{index % 10}"
        finite = [step for step in run.steps if step["loss"] is not None]
        steps, losses = [step["step"] for step in finite], [step["loss"] for step in finite]
        axes.plot(steps, losses, color=color, linewidth=0.8, label=run.folder.name)
        axes.plot(
            [evaluation["step"] for evaluation in run.evaluations],
            [evaluation["loss"] for evaluation in run.evaluations],
            "o",
            color=color,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (line: training, dots: evaluation), measured")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compares run folders.")
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, help="write the loss curves to this picture")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(folder) for folder in options.folders]
    except RunError as error:
        parser.error(str(error))
    Console().print(run_table(runs))
    if options.plot is not None:
        plot_losses(runs, options.plot)


if __name__ == "__main__":
    main()
