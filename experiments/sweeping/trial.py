"""One trial in a process of its own.

    python -m experiments.sweeping.trial CONFIG OUTCOME LOCK [--resume RUN]

Trains as `lazyjax train` does and writes how that ended. The process ends with whoever started it: its
standard input is a pipe that closes when the starter dies, however it dies. A lock on the file LOCK keeps
a second process of the same trial waiting until the first is gone.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pathlib
import sys
import threading
import time

from rich.console import Console

from experiments.sweeping.folder import Outcome, State, write_json


def end_with_starter() -> None:
    """Ends this process when standard input reaches its end."""

    def watch() -> None:
        # By its descriptor: the interpreter cannot end while a thread holds the lock of a buffered reader.
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="starter", daemon=True).start()


def run(config_path: pathlib.Path, resume: pathlib.Path | None) -> Outcome:
    """Trains one configuration; what goes wrong is an outcome, not an exception."""
    from lazyjax.config import load_config
    from lazyjax.planning.planner.service import InfeasibleError
    from lazyjax.training import setup
    from lazyjax.training.capacity import CapacityError
    from lazyjax.training.checks import StepMemoryError
    from lazyjax.training.resume import read_resume

    start = time.perf_counter()
    console = Console(width=120, force_terminal=False)
    try:
        config, point = (load_config(config_path), None) if resume is None else read_resume(resume)
        summary = setup.train(config, console, point)
    except (InfeasibleError, StepMemoryError, CapacityError) as error:
        return Outcome(State.INFEASIBLE, str(error), seconds=time.perf_counter() - start)
    except (ValueError, ArithmeticError, MemoryError, OSError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
        return Outcome(State.FAILED, message, seconds=time.perf_counter() - start)
    state = State.SUCCEEDED if summary["status"] == "finished" else State.INTERRUPTED
    return Outcome(state, summary["reason"] or "", summary, time.perf_counter() - start)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("outcome", type=pathlib.Path)
    parser.add_argument("lock", type=pathlib.Path)
    parser.add_argument("--resume", type=pathlib.Path)
    options = parser.parse_args()
    end_with_starter()
    with options.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_json(options.outcome, run(options.config, options.resume).to_json())
        # Threads of libraries must not hold up the end of a trial whose outcome is on disk.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
