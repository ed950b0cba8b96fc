"""One attempt at a trial: its process, where it goes on, and what an earlier attempt has left."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import re
import shutil
import socket
import sys
from typing import Any

from experiments.sweeping.document import Trial
from experiments.sweeping.folder import SweepFolder

#: Lets the interpreter find this package, wherever it is started.
_ROOT = pathlib.Path(__file__).parents[2]


def command(folder: SweepFolder, trial: Trial, result: pathlib.Path, module: str) -> list[str]:
    """What the trial's process runs; writes the configuration that it names.

    A run that cannot go on is moved away.

    Args:
        result: where the process writes its outcome.
        module: that trains one trial (see `experiments.sweeping.trial`).
    """
    from lazyjax.config import dump_config

    assert trial.config is not None
    run = folder.run_folder(trial)
    resume: list[str] = []
    if run.exists():
        if can_resume(run):
            resume = ["--resume", str(run)]
        else:
            _abandon(folder, run)
    place = trial.config.run.model_copy(update={"folder": folder.trials, "name": run.name})
    config = folder.logs / f"{trial.digest}.yaml"
    config.write_text(dump_config(trial.config.model_copy(update={"run": place})))
    files = [str(path) for path in (config, result, _lock(folder, trial))]
    return [sys.executable, "-m", module, *files, *resume]


def environment(folder: SweepFolder) -> dict[str, str]:
    """Of a trial's process: it finds this package, and what other trials compiled on this host."""
    known = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    compiled = folder.compiled / re.sub(r"[^\w.-]", "-", socket.gethostname())
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled.absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {**cache, **os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *known])}


def wait_for_orphan(folder: SweepFolder, trial: Trial) -> None:
    """A process whose worker was killed ends by itself; until then the run folder is its own."""
    with _lock(folder, trial).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def can_resume(run: pathlib.Path) -> bool:
    """Whether a run folder holds a checkpoint to go on from."""
    from lazyjax.training.resume import ResumeError, read_resume

    try:
        read_resume(run)
    except ResumeError:
        return False
    return True


def finished_summary(run: pathlib.Path) -> dict[str, Any] | None:
    """The summary of a run that came to its end; None of every other one."""
    try:
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
        return summary if summary["status"] == "finished" else None
    except (OSError, ValueError, KeyError):
        return None


def _lock(folder: SweepFolder, trial: Trial) -> pathlib.Path:
    """Held by the trial's process as long as it lives."""
    return folder.claims / f"{trial.digest}.lock"


def _abandon(folder: SweepFolder, run: pathlib.Path) -> None:
    """Moves away a run that cannot go on; nothing of it is deleted."""
    number = 1
    while (folder.abandoned / f"{run.name}.{number}").exists():
        number += 1
    shutil.move(run, folder.abandoned / f"{run.name}.{number}")
