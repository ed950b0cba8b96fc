"""`lazyjax train --resume RUN`: the configuration that goes on, and the checkpoint it goes on from.

A run is resumed as it was begun. What may change is how long it is, when it looks and saves, and the plan:
the arithmetic is the same under every one. A finished run's folder is never written to; with another
run.name its last checkpoint begins a new run.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lazyjax.config import Config, load_config
from lazyjax.data.loader import Loader
from lazyjax.distributed.channel import Channel
from lazyjax.execution.executor import Executor, StepCounts
from lazyjax.execution.host_update import HostUpdates
from lazyjax.planning.plan.document import Plan, read_plan
from lazyjax.storage.host import HostStore
from lazyjax.training.checkpoints import (
    Checkpoint,
    DamagedCheckpointError,
    Identity,
    Position,
    ResumeError,
    list_checkpoints,
    open_checkpoint,
)
from lazyjax.training.history import Start
from lazyjax.training.metrics import evaluations_of, read_records, scores_of, steps_of
from lazyjax.training.places import place_of
from lazyjax.training.run_folder import RunFolder

#: What may differ from the run that is resumed: whole groups, and keys of others.
CHANGEABLE_GROUPS = frozenset({"plan", "checkpoints", "distributed"})
CHANGEABLE_KEYS: Mapping[str, frozenset[str]] = {
    "training": frozenset({"steps", "epochs", "evaluate_every", "log_every", "max_hours"}),
    "optimizer": frozenset({"threads"}),
    "data": frozenset({"cache_folder"}),
    "run": frozenset({"save_model", "name", "folder", "wandb"}),
}
#: Either length replaces the other.
_LENGTHS = {"--training.steps": "--training.epochs", "--training.epochs": "--training.steps"}


@dataclasses.dataclass(frozen=True)
class Resume:
    """Where a run goes on.

    Attributes:
        source: folder of the run whose checkpoints are read.
        folder: of the run that is written; `source` unless that one is finished.
        checkpoints: those that could be opened, newest first; at least one.
        skipped: why newer or other ones could not.
        plan: the one to run; None where the configuration asks for another.
    """

    source: pathlib.Path
    folder: RunFolder
    checkpoints: tuple[Checkpoint, ...]
    skipped: tuple[str, ...]
    plan: Plan | None

    @property
    def position(self) -> Position:
        """Of the newest checkpoint that could be opened."""
        return self.checkpoints[0].position

    @property
    def attention(self) -> str:
        """The form of attention that ran."""
        return self.checkpoints[0].attention

    def check_identity(self, mine: Identity) -> None:
        """ResumeError, naming what differs, if another model or optimizer is to be trained."""
        self.checkpoints[0].check_identity(mine)

    def check_length(self, steps: int) -> None:
        """ResumeError where nothing is left to do."""
        if self.position.step >= steps:
            raise ResumeError(
                f"{self.source}: has {self.position.step} of {steps} steps; ask for more with training.steps "
                "or training.epochs"
            )

    def without_past(self, config: Config) -> Config:
        """Without what the configuration asks for after steps that lie behind."""
        after = config.plan.replan_after_steps
        if after is None or after > self.position.step:
            return config
        return config.model_copy(update={"plan": config.plan.model_copy(update={"replan_after_steps": None})})

    def start(
        self,
        store: HostStore,
        executor: Executor,
        loader: Loader,
        say: Callable[[str], None],
        channel: Channel | None = None,
    ) -> Start:
        """Puts slabs, optimizer state, counts and data in place; gives what was recorded until then.

        Args:
            channel: of the processes that do so together.
        """
        checkpoint = self.restore(store, executor.updates, say, channel)
        position = checkpoint.position
        loader.restore(position.data)
        executor.counts = StepCounts(
            applied=position.applied_steps,
            skipped=position.skipped_steps,
            skipped_in_a_row=position.skipped_in_a_row,
        )
        source = RunFolder(self.source).metrics
        records = read_records(source, position.metrics)
        if self.folder.path != self.source and (channel is None or channel.leads):
            with source.open("rb") as file:
                self.folder.metrics.write_bytes(file.read(position.metrics["bytes"]))
        return Start(steps_of(records), evaluations_of(records), scores_of(records), position.metrics)

    def plan_for(self, devices: int) -> Plan | None:
        """`plan`, unless it was made for another number of devices."""
        made_for = self.checkpoints[0].devices
        return self.plan if made_for in (None, devices) else None

    def restore(
        self,
        store: HostStore,
        updates: HostUpdates,
        say: Callable[[str], None],
        channel: Channel | None = None,
    ) -> Checkpoint:
        """Fills slabs and optimizer state, layer by layer, from the newest checkpoint that is whole.

        Several processes take the newest that is whole for all of them.

        Raises:
            ResumeError: none is; the message names what is wrong with each.
        """
        reasons = list(self.skipped)
        for checkpoint in self.checkpoints:
            damage = _restore_all(checkpoint, store, updates)
            found = [damage] if channel is None else channel.exchange(damage)
            if any(found):
                # The next one overwrites all of it.
                reasons += [reason for reason in dict.fromkeys(found) if reason is not None]
                continue
            for reason in reasons:
                say(f"skipped: {reason}")
            say(f"resumed after step {checkpoint.position.step} from {checkpoint.path}")
            return checkpoint
        raise _none(self.source, reasons)


def _restore_all(checkpoint: Checkpoint, store: HostStore, updates: HostUpdates) -> str | None:
    """What is wrong with a checkpoint; None where all that is held here was restored."""
    try:
        for layer in range(len(store.layouts)):
            place = place_of(store, updates, layer)
            with updates.writing(layer) as (slabs, state):
                checkpoint.restore_layer(layer, slabs, state, place)
    except DamagedCheckpointError as error:
        return str(error)
    return None


def read_resume(run: pathlib.Path, overrides: Sequence[str] = ()) -> tuple[Config, Resume]:
    """The configuration of a run, with what the command line changes, and where it goes on.

    Raises:
        ResumeError: no run, a finished one without another name, no checkpoint, or a key that a resumed
            run cannot change. ConfigError: as `load_config`.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise ResumeError(f"{run}: no run to resume (no config.yaml)")
    begun = load_config(path)
    config = load_config(path, [*overrides, *_other_lengths(overrides)])
    _check_changes(begun, config)
    found, skipped = _open_all(list_checkpoints(RunFolder(run).checkpoints))
    if not found:
        raise _none(run, skipped)
    finished = _status(run) == "finished"
    if finished and config.run.name in (None, begun.run.name):
        raise ResumeError(
            f"{run} holds a finished run and is never written to; set run.name to another name to go on "
            "from its last checkpoint, with more training.steps or training.epochs"
        )
    folder = run
    if config.run.name != begun.run.name or config.run.folder != begun.run.folder:
        if config.run.name is None:
            raise ResumeError("run.name: a run that goes on elsewhere needs a name")
        folder = config.run.folder / config.run.name
    plan = read_plan(found[0].plan, f"{found[0].path}: plan") if config.plan == begun.plan else None
    return config, Resume(run, RunFolder(folder), tuple(found), tuple(skipped), plan)


def _open_all(paths: Iterable[pathlib.Path]) -> tuple[list[Checkpoint], list[str]]:
    found, skipped = [], []
    for path in paths:
        try:
            found.append(open_checkpoint(path))
        except DamagedCheckpointError as error:
            skipped.append(str(error))
    return found, skipped


def _none(run: pathlib.Path, reasons: Sequence[str]) -> ResumeError:
    if not reasons:
        return ResumeError(
            f"{run}: no checkpoint (set checkpoints.every_steps or every_minutes to have some)"
        )
    return ResumeError("\n  ".join([f"{run}: no checkpoint is whole", *reasons]))


def _status(run: pathlib.Path) -> str | None:
    try:
        summary: Mapping[str, Any] = json.loads((run / "summary.json").read_text())
        return str(summary["status"])
    except (OSError, ValueError, KeyError):
        return None


def _other_lengths(overrides: Sequence[str]) -> list[str]:
    given = {word.partition("=")[0].replace("_", "-") for word in overrides}
    return [
        word
        for one, other in _LENGTHS.items()
        if one in given and other not in given
        for word in (other, "null")
    ]


def _check_changes(begun: Config, config: Config) -> None:
    for group in type(begun).model_fields:
        before, now = getattr(begun, group), getattr(config, group)
        changeable_keys = CHANGEABLE_KEYS[group] if group in CHANGEABLE_KEYS else frozenset()
        for key in type(before).model_fields:
            changeable = group in CHANGEABLE_GROUPS or key in changeable_keys
            one, other = getattr(before, key), getattr(now, key)
            if one != other and not changeable:
                raise ResumeError(
                    f"{group}.{key}: the run was begun with {one}, {other} is asked for; "
                    "a run is resumed as it was begun"
                )
