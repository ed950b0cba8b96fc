"""`lazyjax train --reproduce RUN`: the same run once more, and whether every loss is bit for bit the same.

Configuration, plan and form of attention are those of the run, so nothing is measured or solved again: a plan
that a calibration has led to is run, not found. What may differ is the place of the records.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from lazyjax.config import Config, load_config
from lazyjax.runs import Run, read_run
from lazyjax.training import setup
from lazyjax.training.interrupt import exit_status
from lazyjax.training.status import say

#: What the comparison covers, by kind of record.
_COMPARED = {"train": ("loss", "gradient_norm"), "evaluation": ("loss",)}
#: Facts of a summary that may explain a difference.
_SURROUNDINGS = ("device", "commit", "jax", "attention", "devices")


class ReproduceError(ValueError):
    """A run that cannot be repeated; the message says why."""


def reproduce(run: pathlib.Path, overrides: Sequence[str], console: Console) -> int:
    """Repeats a run and compares.

    Args:
        overrides: keys of the group `run` only.

    Returns:
        0 where all is the same, 1 where a loss differs; what a stopped run returns where it was stopped.

    Raises:
        ReproduceError: no finished run, or an override that changes what is computed.
    """
    first, config = read_run(run), pinned(run, overrides)
    summary = setup.train(config, console)
    if summary["status"] != "finished":
        return exit_status(summary["reason"])
    assert config.run.name is not None
    again = read_run(config.run.folder / config.run.name)
    difference = first_difference(first, again)
    if difference is None:
        say(console, f"reproduced: {len(first.steps)} steps, every loss bit for bit the same as in {run}")
        return 0
    say(console, f"NOT reproduced: {difference}")
    for line in changed_surroundings(first.summary or {}, again.summary or {}):
        say(console, f"  {line}")
    return 1


def pinned(run: pathlib.Path, overrides: Sequence[str]) -> Config:
    """The configuration that repeats a run: its own, under its plan and its form of attention."""
    others = [word for word in overrides if word.startswith("--") and not word.startswith("--run.")]
    if others:
        raise ReproduceError(
            f"{others[0]}: a run is repeated as it was; only --run.name and --run.folder change"
        )
    summary = read_run(run).summary
    if summary is None or summary["status"] != "finished":
        raise ReproduceError(f"{run}: not a finished run, so there is nothing to compare all of it with")
    begun = load_config(run / "config.yaml")
    config = load_config(run / "config.yaml", list(overrides))
    name = config.run.name
    if name is None or (name, config.run.folder) == (begun.run.name, begun.run.folder):
        name = f"{run.resolve().name}-again"
    # The planner's limits belong to the search, which is not repeated.
    searched = {"device_bytes": None, "host_bytes": None, "replan_after_steps": None, "keep_residuals": True}
    plan = config.plan.model_copy(
        update={**searched, "hardware": "auto", "file": (run / "plan.json").resolve()}
    )
    return config.model_copy(
        update={
            "plan": plan,
            "model": config.model.model_copy(update={"attention": summary["attention"]}),
            "run": config.run.model_copy(update={"name": name, "save_model": False, "wandb": None}),
        }
    )


def first_difference(first: Run, again: Run) -> str | None:
    """The first recorded value that differs, in words; None where all are the same."""
    for kind, ours, theirs in (
        ("train", first.steps, again.steps),
        ("evaluation", first.evaluations, again.evaluations),
    ):
        for one, other in zip(ours, theirs, strict=False):
            for key in _COMPARED[kind]:
                if one[key] != other[key]:
                    what = "" if kind == "train" else "evaluation "
                    return f"after step {one['step']} the {what}{key} was {one[key]!r}, now {other[key]!r}"
        if len(ours) != len(theirs):
            return f"{len(ours)} records of kind {kind}, now {len(theirs)}"
    return None


def changed_surroundings(first: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """Facts that differ between two summaries and may be why."""
    return [
        f"{key}: was {first[key]}, now {again[key]}"
        for key in _SURROUNDINGS
        if key in first and key in again and first[key] != again[key]
    ]
