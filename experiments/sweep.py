"""Runs a sweep: many trainings from one file, continued wherever they were left.

    python -m experiments.sweep experiments/sweeps/NAME.yaml [--workers N] [--retry] [--dry-run]
    python -m experiments.sweep experiments/sweeps/NAME.yaml --slurm --workers 4 [--slurm-setting KEY=VALUE]

Each trial is an ordinary run in a process of its own, in a folder named after a digest of its
configuration. Started again, a sweep goes on: finished trials are never repeated, interrupted ones
go on from their checkpoint, failed ones are run again only with --retry. Several workers, on this
machine or on others that share the folder, may run the same sweep. Ctrl-C stops the running trials
after their step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live

from experiments.sweeping.document import Sweep, read_sweep
from experiments.sweeping.folder import State, SweepFolder
from experiments.sweeping.launch import local_workers, slurm_workers
from experiments.sweeping.table import trials_table
from experiments.sweeping.trial import end_with_starter
from experiments.sweeping.worker import TRIAL_MODULE, Worker
from lazyjax.cli import guarded, quiet_libraries

DEFAULT_PARENT = pathlib.Path("runs") / "sweeps"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=pathlib.Path, help="the sweep, see experiments/sweeps/")
    parser.add_argument("--folder", type=pathlib.Path, help="its records (runs/sweeps/NAME)")
    parser.add_argument(
        "--workers", type=int, default=1, help="trials at a time; each gets its share of the cores"
    )
    parser.add_argument("--retry", action="store_true", help="run failed trials again")
    parser.add_argument("--dry-run", action="store_true", help="list trials with predictions; train nothing")
    parser.add_argument("--slurm", action="store_true", help="workers are SLURM jobs (extra `slurm`)")
    parser.add_argument(
        "--slurm-setting",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for submitit, e.g. slurm_partition=gpu",
    )
    # Given by the launchers: be a worker that draws nothing, on these cores.
    parser.add_argument("--worker-cores", help=argparse.SUPPRESS)
    parser.add_argument("--end-with-starter", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--trial-module", default=TRIAL_MODULE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error("--workers: at least 1")
    return options


def run(arguments: Sequence[str]) -> int:
    """Runs a sweep; 0 where every trial has ended, 1 where one failed, 130 or 143 after a signal."""
    options = parse(arguments)
    sweep = read_sweep(options.file)
    folder = SweepFolder(options.folder or DEFAULT_PARENT / sweep.name)
    console = Console()
    if options.dry_run:
        from experiments.sweeping.predict import print_predictions

        print_predictions(sweep, folder, console)
        return 0
    folder.prepare(sweep)
    if options.worker_cores is not None:
        if options.end_with_starter:
            end_with_starter()
        if options.worker_cores:
            os.sched_setaffinity(0, [int(core) for core in options.worker_cores.split(",")])
        stopped = _worker(options, sweep, folder).run()
        return 0 if stopped is None else 128 + stopped
    if options.slurm:
        slurm_workers(options, folder, console)
        return 0
    return _run_here(options, sweep, folder, console)


def _worker(options: argparse.Namespace, sweep: Sweep, folder: SweepFolder) -> Worker:
    return Worker(sweep, folder, retry=options.retry, trial_module=options.trial_module)


def _run_here(options: argparse.Namespace, sweep: Sweep, folder: SweepFolder, console: Console) -> int:
    with _live_table(sweep, folder, console):
        if options.workers == 1:
            stopped = _worker(options, sweep, folder).run()
        else:
            stopped = local_workers(options, folder.path)
    states = [folder.state(trial) for trial in sweep.trials]
    if not console.is_terminal:
        console.print(trials_table(sweep, folder))
    console.print(f"records in {folder.path}; `python -m analysis.report {folder.path}` makes the report")
    if stopped is not None:
        console.print(f"{signal.Signals(stopped).name}: stopped; the same command goes on from here")
        return 128 + stopped
    return 1 if State.FAILED in states else 0


@contextlib.contextmanager
def _live_table(sweep: Sweep, folder: SweepFolder, console: Console) -> Iterator[None]:
    """Draws the table again every two seconds, where someone watches."""
    if not console.is_terminal:
        yield
        return
    done = threading.Event()
    with Live(trials_table(sweep, folder), console=console, refresh_per_second=1) as live:

        def redraw() -> None:
            while not done.wait(2.0):
                live.update(trials_table(sweep, folder))

        thread = threading.Thread(target=redraw, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            live.update(trials_table(sweep, folder))


def main() -> int:
    """Command line."""
    quiet_libraries()
    code = 0

    def command() -> None:
        nonlocal code
        code = run(sys.argv[1:])

    failed = guarded(command, debug="LAZYJAX_DEBUG" in os.environ)
    return failed or code


if __name__ == "__main__":
    sys.exit(main())
