"""A sweep folder as `experiments.sweep` leaves it, with figures that a test knows."""

import json
import pathlib
from typing import Any


def write_sweep(folder: pathlib.Path, *, commits: tuple[str, ...] = ("abc",)) -> pathlib.Path:
    """Two variants of three seeds, of which `slow` is 0.5 worse in each, and one that does not fit."""
    trials: list[dict[str, Any]] = []
    for name, seed in [(name, seed) for name in ("plain", "slow", "huge") for seed in range(3)]:
        digest = f"{name}{seed}"
        entry = {"name": name, "seed": seed, "overrides": {}, "digest": digest, "folder": digest}
        trials.append({**entry, "problem": None, "compared_with": "plain"})
        write_outcome(folder, name, seed, digest, commits[seed % len(commits)])
    compare = {"baseline": "plain", "metrics": ["last_evaluation_loss"]}
    described = {"name": "tried", "file": "tried.yaml", "compare": compare, "grid": {}, "trials": trials}
    (folder / "sweep.json").write_text(json.dumps(described))
    return folder


def write_outcome(folder: pathlib.Path, name: str, seed: int, digest: str, commit: str) -> None:
    """The records of one trial."""
    outcomes = folder / "outcomes"
    outcomes.mkdir(parents=True, exist_ok=True)
    if name == "huge":
        outcome = {"state": "infeasible", "message": "no plan | fits", "summary": None, "seconds": 1.0}
        (outcomes / f"{digest}.json").write_text(json.dumps(outcome))
        return
    slow = name == "slow"
    summary = {
        "status": "finished", "device": "cpu", "commit": commit, "date": "2026-11-30",
        "last_evaluation_loss": 2.0 + seed + (0.5 if slow else 0.0) + (0.01 * seed if slow else 0.0),
        "median_step_seconds": 2.0 if slow else 1.0, "rows": 2, "sequence_length": 10,
        "tokens_per_second": 100.0, "peak_device_bytes": 2**20,
    }  # fmt: skip
    outcome = {"state": "succeeded", "message": "", "summary": summary, "seconds": 3.0}
    (outcomes / f"{digest}.json").write_text(json.dumps(outcome))
    run = folder / "trials" / digest
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps(summary))
    # Rows of `slow` are half as long as its plan was made for.
    prediction = {"period_seconds": 3.8 if slow else 1.1}
    (run / "plan.json").write_text(json.dumps({"prediction": prediction}))
    tokens = {"real_tokens": 10, "padded_tokens": 10 if slow else 20}
    steps = [
        {"kind": "train", "step": step, "loss": 5.0 / step, "step_seconds": 0.5, **tokens}
        for step in range(1, 6)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
