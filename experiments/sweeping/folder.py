"""The folder of a sweep, and what is known of its trials.

sweep.json          the sweep as it was expanded: trials, overrides, seeds, what is compared
trials/NAME-seedS-DIGEST/   run folders, as `lazyjax train` writes them
outcomes/DIGEST.json        how a trial ended (written once it has ended, replaced by a retry)
claims/             who runs what (see `experiments.sweeping.claims`)
logs/               what the trials printed
compiled/HOST/      kernels, compiled once for all trials
abandoned/          run folders of attempts that could not be continued
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.sweeping.claims import is_claimed
from experiments.sweeping.document import Sweep, SweepError, Trial


class State(enum.Enum):
    """Where a trial is."""

    PLANNED = "planned"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


#: States in which a trial is not run again (`FAILED` is, when asked to).
ENDED = (State.SUCCEEDED, State.INFEASIBLE, State.FAILED)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        message: the planner's words for an infeasible trial, the error of a failed one.
        summary: the run's summary.json; None where the run never got that far.
        seconds: from the start of the trial's process to its end.
    """

    state: State
    message: str = ""
    summary: Mapping[str, Any] | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return {**dataclasses.asdict(self), "state": self.state.value}


class SweepFolder:
    """Paths, states and outcomes of one sweep."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.trials = path / "trials"
        self.outcomes = path / "outcomes"
        self.claims = path / "claims"
        self.logs = path / "logs"
        self.abandoned = path / "abandoned"
        self.compiled = path / "compiled"

    def prepare(self, sweep: Sweep) -> None:
        """Makes the folders and writes sweep.json.

        Raises:
            SweepError: the folder belongs to another sweep, or cannot be written.
        """
        record = self.path / "sweep.json"
        described = describe(sweep)
        try:
            for folder in (self.trials, self.outcomes, self.claims, self.logs, self.abandoned):
                folder.mkdir(parents=True, exist_ok=True)
            if record.exists():
                there = json.loads(record.read_text())["name"]
                if there != sweep.name:
                    raise SweepError(f"{self.path}: holds the sweep {there!r}; name another --folder")
            write_json(record, described)
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, SweepError):
                raise
            raise SweepError(f"{self.path}: cannot be used ({error})") from error

    def run_folder(self, trial: Trial) -> pathlib.Path:
        """Where the trial's records are."""
        return self.trials / trial.folder_name

    def outcome(self, trial: Trial) -> Outcome | None:
        """How the trial ended; None where it has not ended yet."""
        if trial.problem is not None:
            return Outcome(State.FAILED, trial.problem)
        try:
            values = json.loads((self.outcomes / f"{trial.digest}.json").read_text())
        except FileNotFoundError:
            return None
        return Outcome(**{**values, "state": State(values["state"])})

    def record(self, trial: Trial, outcome: Outcome) -> None:
        """Writes how the trial ended, at once and whole."""
        write_json(self.outcomes / f"{trial.digest}.json", outcome.to_json())

    def state(self, trial: Trial) -> State:
        """Where the trial is now."""
        if trial.problem is None and is_claimed(self.claims, trial.digest):
            return State.RUNNING
        outcome = self.outcome(trial)
        if outcome is not None:
            return outcome.state
        return State.INTERRUPTED if self.run_folder(trial).exists() else State.PLANNED


def describe(sweep: Sweep) -> dict[str, Any]:
    """A sweep as data, for whoever reads its folder."""
    path, here = sweep.path.resolve(), pathlib.Path.cwd()
    return {
        "name": sweep.name,
        "file": str(path.relative_to(here) if path.is_relative_to(here) else path),
        "compare": sweep.document.compare.model_dump(),
        "grid": sweep.document.grid,
        "trials": [
            {
                "name": trial.name,
                "seed": trial.seed,
                "overrides": dict(trial.overrides),
                "digest": trial.digest,
                "folder": trial.folder_name,
                "problem": trial.problem,
                "compared_with": trial.compared_with,
            }
            for trial in sweep.trials
        ],
    }


def write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Writes a file so that a reader finds the old content or the new one, and nothing between."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=1, sort_keys=True, default=str, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
