"""Stands for a training: takes a moment, may be told to fail or to die, and writes down that it ran.

Every start is a line of `ledger` in the folder of the lock. A trial whose end is in the ledger has a finished
summary in its run folder, as a training has; some die between that and the record of their outcome.
"""

import argparse
import fcntl
import os
import pathlib
import signal
import sys
import time

import yaml

from experiments.sweeping.folder import Outcome, State, write_json
from experiments.sweeping.trial import end_with_starter


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("config", "outcome", "lock"):
        parser.add_argument(name, type=pathlib.Path)
    options = parser.parse_args()
    end_with_starter()
    stopped = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    config = yaml.safe_load(options.config.read_text())
    run = pathlib.Path(config["run"]["folder"]) / config["run"]["name"]
    rate, steps = config["optimizer"]["learning_rate"], config["training"]["steps"]
    with options.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run.mkdir(parents=True)
        note(options.lock, f"start {run.name}")
        deadline = time.monotonic() + steps / 1000
        while time.monotonic() < deadline and not stopped:
            time.sleep(0.005)
        if stopped:
            outcome = Outcome(State.INTERRUPTED, "SIGTERM")
        elif rate == 0.5:
            outcome = Outcome(State.INFEASIBLE, "no plan fits: 3 GB of host memory are missing")
        elif rate == 0.25:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            loss = rate + config["training"]["seed"]
            summary = {"status": "finished", "last_evaluation_loss": loss, "total_seconds": steps / 1000}
            outcome = Outcome(State.SUCCEEDED, summary=summary)
            write_json(run / "summary.json", summary)
            note(options.lock, f"end {run.name}")
            if rate == 0.125:
                os.kill(os.getpid(), signal.SIGKILL)
        write_json(options.outcome, outcome.to_json())
        sys.stdout.flush()
        os._exit(0)


def note(lock: pathlib.Path, line: str) -> None:
    with (lock.parent / "ledger").open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
