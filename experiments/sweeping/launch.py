"""Several workers: processes of this machine, or SLURM jobs through submitit."""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console

from experiments.sweeping.document import SweepError
from experiments.sweeping.folder import SweepFolder

_ROOT = pathlib.Path(__file__).parents[2]


def worker_command(options: argparse.Namespace, folder: pathlib.Path, cores: Sequence[int]) -> list[str]:
    """The command of one worker that draws nothing."""
    words = [sys.executable, "-m", "experiments.sweep", str(options.file.resolve())]
    words += ["--folder", str(folder.resolve()), "--worker-cores", ",".join(map(str, cores))]
    words += ["--trial-module", options.trial_module]
    return words + (["--retry"] if options.retry else [])


def local_workers(options: argparse.Namespace, folder: pathlib.Path) -> int | None:
    """Runs workers side by side, each on its own share of the cores.

    Returns:
        The number of the signal that stopped them; None where nothing was left to do.

    Raises:
        RuntimeError: a worker ended in another way.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    shares = [cores[number :: options.workers] or cores for number in range(options.workers)]
    path = os.pathsep.join(part for part in (str(_ROOT), os.environ.get("PYTHONPATH", "")) if part)
    workers = [
        subprocess.Popen(
            [*worker_command(options, folder, share), "--end-with-starter"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        for share in shares
    ]
    stopped: list[int] = []

    def stop(number: int, frame: types.FrameType | None) -> None:
        del frame
        stopped.append(number)
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        codes = [worker.wait() for worker in workers]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if not stopped and any(codes):
        raise RuntimeError(f"workers ended with exit codes {codes}; run the same command to go on")
    return stopped[0] if stopped else None


def slurm_workers(options: argparse.Namespace, folder: SweepFolder, console: Console) -> None:
    """Submits `--workers` jobs that each take trials until none is left.

    Raises:
        SweepError: submitit is not installed, or a setting is not KEY=VALUE.
    """
    try:
        import submitit
    except ImportError:
        raise SweepError("--slurm needs submitit: pip install 'lazyjax[slurm]'") from None
    settings: dict[str, Any] = {}
    for text in options.slurm_setting:
        key, equals, value = text.partition("=")
        if not equals:
            raise SweepError(f"--slurm-setting {text!r}: expected KEY=VALUE")
        # submitit checks the types of its settings.
        settings[key] = yaml.safe_load(value)
    cluster = settings.pop("cluster") if "cluster" in settings else "slurm"
    words = worker_command(options, folder.path, ())
    try:
        executor = submitit.AutoExecutor(folder=folder.logs / "slurm", cluster=cluster)
        executor.update_parameters(name=f"sweep-{folder.path.name}", **settings)
        jobs = [executor.submit(submitit.helpers.CommandFunction(words)) for _ in range(options.workers)]
    except (RuntimeError, TypeError, ValueError, NameError, OSError) as error:
        raise SweepError(f"--slurm: {error}") from error
    console.print(
        f"submitted {', '.join(str(job.job_id) for job in jobs)}; the same command without --slurm shows the "
        "table",
        highlight=False,
    )
