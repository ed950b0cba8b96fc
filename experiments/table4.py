"""Exact match across systems (LazyTrain's table 4), with SmolLM2-135M-Instruct and the shipped problems.

    python -m experiments.reproduce table4 [--measure]

Columns of the paper (its own models) beside measured ones: the plans of the sweep `table4`, all in this
executor, against training in memory (float32 AdamW, one jit) on the same batches. Scores of all seeds are
pooled; differences from training in memory have Newcombe's interval of two independent shares.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from analysis.sweeps import SweepRecords
from experiments import published
from experiments.measured import SWEEPS, provenance_of
from experiments.sheet import Sheet
from lazyjax.evaluation.exact_match import wilson_interval

IN_MEMORY = "in memory, float32 AdamW"


class Score(NamedTuple):
    """Right answers among rows, over all seeds."""

    correct: int
    rows: int
    seeds: int

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.correct / self.rows

    def text(self) -> str:
        """Share and interval in per cent."""
        low, high = wilson_interval(self.correct, self.rows)
        return f"{self.share:.1%} ({low:.1%} to {high:.1%}; {self.seeds} seeds) (measured)"


def difference(score: Score, other: Score) -> tuple[float, float, float]:
    """`score` minus `other`, with the 95 % interval of Newcombe (1998, method 10)."""
    low, high = wilson_interval(score.correct, score.rows)
    other_low, other_high = wilson_interval(other.correct, other.rows)
    centre = score.share - other.share
    below = math.hypot(score.share - low, other_high - other.share)
    above = math.hypot(high - score.share, other.share - other_low)
    return centre, centre - below, centre + above


def scores_of(records: SweepRecords) -> dict[str, Score]:
    """Variant -> its score over the trials that have one."""
    found = {}
    for variant in records.variants:
        summaries: list[Mapping[str, Any]] = [
            trial.run.summary
            for trial in variant.trials
            if trial.state == "succeeded" and trial.run is not None and trial.run.summary is not None
        ]
        rows = [summary["last_exact_match_rows"] for summary in summaries]
        right = [
            round(summary["last_exact_match"] * count) for summary, count in zip(summaries, rows, strict=True)
        ]
        if rows:
            found[variant.name] = Score(sum(right), sum(rows), len(rows))
    return found


def in_memory_score(folder: pathlib.Path) -> Score | None:
    """What was trained in memory so far; None where nothing was."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("in-memory-seed*.json"))]
    if not found:
        return None
    return Score(sum(one["correct"] for one in found), sum(one["rows"] for one in found), len(found))


def measure_in_memory(folder: pathlib.Path, console: Console, seeds: Sequence[int] = ()) -> None:
    """Trains and scores the sweep's seeds in memory, or some of them; those that are there are left."""
    from experiments.smollm2 import in_memory_run
    from experiments.sweeping.document import read_sweep
    from experiments.sweeping.folder import write_json
    from lazyjax.config import digest
    from lazyjax.training.setup import source_commit

    sweep = read_sweep(SWEEPS / "table4.yaml")
    folder.mkdir(parents=True, exist_ok=True)
    for trial in sweep.trials:
        config, path = trial.config, folder / f"in-memory-seed{trial.seed}.json"
        if config is None or path.exists() or trial.name != trial.compared_with:
            continue
        if seeds and trial.seed not in seeds:
            continue
        rows = config.training.exact_match_rows_after
        assert rows
        answers = path.with_suffix(".answers.jsonl")
        losses, score = in_memory_run(config, rows, answers, f"in memory, seed {trial.seed}", console)
        assert score is not None
        facts = {"correct": score.correct, "rows": score.rows, "losses": losses}
        write_json(path, {**facts, "commit": source_commit(), "config": digest(config)[:12]})


def table4(folder: pathlib.Path, records: SweepRecords | None, sweep_folder: pathlib.Path) -> Sheet:
    """The sheet; measured rows are those that there are."""
    sheet = Sheet("Table 4: exact match", ("model", "system", "exact match", "difference from in memory"))
    for model, shares in published.TABLE_4.items():
        for system, share in shares.items():
            sheet.add(model, system, f"{share:.2f} % (paper)", "-")
    model = "SmolLM2-135M-Instruct"
    base = in_memory_score(sweep_folder)
    if base is not None:
        sheet.add(model, IN_MEMORY, base.text(), "-")
    scores = {} if records is None else scores_of(records)
    for name, score in scores.items():
        sheet.add(model, name, score.text(), "-" if base is None else _difference_text(score, base))
    if not scores:
        sheet.notes.append("No measured cells: run `python -m experiments.reproduce table4 --measure`.")
    elif records is not None:
        sheet.notes.append(provenance_of(records))
        sheet.notes.append(_same_losses(records))
    sheet.write(folder, "table4")
    return sheet


def _difference_text(score: Score, base: Score) -> str:
    centre, low, high = difference(score, base)
    overlap = "contains 0" if low <= 0 <= high else "does not contain 0"
    return f"{100 * centre:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}, {overlap}) (measured)"


def _same_losses(records: SweepRecords) -> str:
    """Which variants had the same losses, bit for bit, in every seed that they share."""
    by_losses: dict[tuple[tuple[int, tuple[float, ...]], ...], list[str]] = {}
    for variant in records.variants:
        known: Sequence[tuple[int, tuple[float, ...]]] = [
            (trial.seed, tuple(step["loss"] for step in trial.run.steps))
            for trial in variant.trials
            if trial.state == "succeeded" and trial.run is not None
        ]
        if known:
            by_losses.setdefault(tuple(known), []).append(variant.name)
    groups = [" = ".join(names) for names in by_losses.values() if len(names) > 1]
    return "Losses of all steps equal bit for bit: " + ("; ".join(groups) or "no two variants") + "."
