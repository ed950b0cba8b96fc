"""The folder of one run: everything needed to repeat and to judge it.

config.yaml     the resolved configuration; `lazyjax train config.yaml` repeats the run
plan.json       the plan in use at the end
plan-until-step-N.json  the one before it, where a run planned again after step N and changed over
metrics.jsonl   one JSON object per step and per evaluation
tensorboard/    the same numbers for TensorBoard
timeline.json   the last step's operations, for ui.perfetto.dev; of other processes timeline-process-N.json
summary.json    how far the run is or how it ended, on which device, and its main figures
model/          the trained model as a Hugging Face folder
checkpoints/    what `lazyjax train --resume` goes on from (`lazyjax.training.checkpoints`)

Of a run that was resumed after step N there may also be config-until-step-N.yaml, plan-until-step-N.json and
model-until-step-N/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lazyjax.config import Config, dump_config, with_absolute_paths
from lazyjax.planning.plan.document import Plan
from lazyjax.timeline import Timeline, write_perfetto
from lazyjax.training.records import replace_file


class RunFolderError(ValueError):
    """A run folder that cannot be made or already holds a run."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths and writers of one run's records.

    Attributes:
        process: of several processes, the one that holds this; only process 0 writes, but for timelines.
    """

    path: pathlib.Path
    process: int = 0

    @property
    def metrics(self) -> pathlib.Path:
        """The metrics log."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> pathlib.Path:
        """Folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def model(self) -> pathlib.Path:
        """Folder of the trained model."""
        return self.path / "model"

    @property
    def checkpoints(self) -> pathlib.Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def write_config(self, config: Config, *, after_step: int = 0) -> None:
        """Writes config.yaml, with absolute paths; one that it replaces is kept, if it differs.

        Where processes find each other, and which of them this is, is not part of it.
        """
        if self.process:
            return
        anywhere = {"coordinator": None, "processes": None, "process": None}
        config = config.model_copy(update={"distributed": config.distributed.model_copy(update=anywhere)})
        # A record repeats the run from every working directory.
        text = dump_config(with_absolute_paths(config))
        current = self.path / "config.yaml"
        if after_step:
            if current.read_text() == text:
                return
            current.rename(self.path / f"config-until-step-{after_step}.yaml")
        replace_file(current, text)

    def write_plan(self, plan: Plan, *, after_step: int = 0) -> None:
        """Writes plan.json; the plan that it replaces after `after_step` steps is kept beside it."""
        if self.process:
            return
        current = self.path / "plan.json"
        new = self.path / ".plan.json.new"
        plan.save(new)
        if after_step and current.exists() and current.read_bytes() != new.read_bytes():
            current.rename(self.path / f"plan-until-step-{after_step}.json")
        new.rename(current)

    def make_way_for_model(self, after_step: int) -> None:
        """Keeps the model that an interrupted run has written, when the resumed one writes its own."""
        if self.model.exists() and not self.process:
            self.model.rename(self.path / f"model-until-step-{after_step}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out while one writes.

        Raises:
            RunFolderError: another one is writing.
        """
        if self.process:
            yield
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFolderError(f"{self.path}: another process is writing this run") from None
            yield
        finally:
            os.close(descriptor)

    def discard(self) -> None:
        """Takes back a folder of a run that has not begun: what was written before it, and nothing else."""
        if self.process:
            return
        for name in ("config.yaml", "plan.json"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / "wandb", ignore_errors=True)
        with contextlib.suppress(OSError):  # something else is in it
            self.path.rmdir()

    def write_timeline(self, timelines: Sequence[Timeline]) -> None:
        """Writes timeline.json, or that of this process."""
        name = f"timeline-process-{self.process}.json" if self.process else "timeline.json"
        write_perfetto(timelines, self.path / name)

    @property
    def summary(self) -> pathlib.Path:
        """The summary."""
        return self.path / "summary.json"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces summary.json. OSError: it stays as it was."""
        if not self.process:
            replace_file(self.summary, json.dumps(summary, indent=2) + "\n")


def create_run_folder(config: Config, model_name: str) -> RunFolder:
    """Makes the run's folder and writes the resolved configuration into it.

    Raises:
        RunFolderError: the folder holds something already, or cannot be made.
    """
    name = config.run.name
    if name is None:
        moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{moment}-{re.sub(r'[^A-Za-z0-9_.+-]+', '-', model_name)}"
    path = config.run.folder / name
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise RunFolderError(f"{path} is not empty; choose another run.name or move the folder away")
        resolved = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        folder = RunFolder(path)
        folder.write_config(resolved)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written ({error.strerror})") from error
    return folder
