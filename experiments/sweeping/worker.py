"""Runs the trials of a sweep, one after another, until nothing is left for this worker.

Any number of workers, on any hosts that share the folder, may run the same sweep: each claims a trial
before it touches it. What a worker leaves behind when it is killed is taken up by the next one.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
import types
from collections.abc import Callable

from experiments.sweeping.attempt import command, environment, finished_summary, wait_for_orphan
from experiments.sweeping.claims import RENEW_SECONDS, Claim, claim
from experiments.sweeping.document import Sweep, Trial
from experiments.sweeping.folder import ENDED, Outcome, State, SweepFolder

#: Module that trains one trial (see there for its arguments).
TRIAL_MODULE = "experiments.sweeping.trial"


class Worker:
    """Takes trials until none is left; stops after SIGINT or SIGTERM, passing it on to its trial.

    Args:
        retry: runs trials that failed once more.
        changed: called whenever a trial has begun or ended.
        trial_module: what a trial's process runs.
    """

    def __init__(
        self,
        sweep: Sweep,
        folder: SweepFolder,
        *,
        retry: bool = False,
        changed: Callable[[], None] = lambda: None,
        trial_module: str = TRIAL_MODULE,
    ) -> None:
        self._sweep, self._folder, self._retry = sweep, folder, retry
        self._changed, self._trial_module = changed, trial_module
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped_by: int | None = None
        self._retried: set[str] = set()

    def run(self) -> int | None:
        """Runs trials; the number of the signal that ended it, or None when nothing was left."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in previous:
            signal.signal(number, self._stop)
        try:
            while self._stopped_by is None:
                taken = self._take()
                if taken is not None:
                    self._run_trial(*taken)
                    self._changed()
                elif self._others_run():
                    # One of theirs may still be left to us, if its worker dies.
                    time.sleep(1.0)
                    self._changed()
                else:
                    break
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._stopped_by

    def _stop(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        self._stopped_by = number
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _wanted(self, trial: Trial) -> bool:
        outcome = self._folder.outcome(trial)
        if outcome is None or outcome.state not in ENDED:
            return True
        again = self._retry and outcome.state is State.FAILED and trial.problem is None
        return again and trial.digest not in self._retried

    def _take(self) -> tuple[Trial, Claim] | None:
        for trial in self._sweep.trials:
            if not self._wanted(trial):
                continue
            taken = claim(self._folder.claims, trial.digest)
            if taken is None:
                continue
            # It may have ended between the look and the claim.
            if self._wanted(trial):
                return trial, taken
            taken.release()
        return None

    def _others_run(self) -> bool:
        return any(self._folder.state(trial) is State.RUNNING for trial in self._sweep.trials)

    def _run_trial(self, trial: Trial, taken: Claim) -> None:
        self._retried.add(trial.digest)
        start = time.perf_counter()
        wait_for_orphan(self._folder, trial)
        summary = finished_summary(self._folder.run_folder(trial))
        if summary is not None:
            # Whoever ran it was killed between its last step and the record of it.
            self._folder.record(trial, Outcome(State.SUCCEEDED, "", summary, summary["total_seconds"]))
            taken.release()
            return
        with taken.renewed(RENEW_SECONDS):
            self._changed()
            outcome = self._outcome_of_process(trial, taken)
        if not taken.is_held():
            return  # another worker thought this one dead and has the trial now
        if outcome.state is State.INTERRUPTED and self._stopped_by is None:
            message = f"the run ended by itself: {outcome.message or 'interrupted'}"
            outcome = Outcome(State.FAILED, message, outcome.summary)
        self._folder.record(trial, dataclasses.replace(outcome, seconds=time.perf_counter() - start))
        taken.release()

    def _outcome_of_process(self, trial: Trial, taken: Claim) -> Outcome:
        """Starts the trial's process, waits for it, and reads what it left."""
        result = self._folder.logs / f"{trial.digest}.{taken.generation}.json"
        log = self._folder.logs / f"{trial.folder_name}.log"
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                command(self._folder, trial, result, self._trial_module),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(self._folder),
                start_new_session=True,
            )
            if self._stopped_by is not None:
                self._child.send_signal(self._stopped_by)
            code = self._child.wait()
            assert self._child.stdin is not None
            self._child.stdin.close()
        try:
            values = json.loads(result.read_text())
        except (OSError, ValueError):
            if self._stopped_by is not None:
                return Outcome(State.INTERRUPTED, signal.Signals(self._stopped_by).name)
            words = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Outcome(State.FAILED, f"its process ended with {words}; {log} has what it printed")
        result.unlink()
        return Outcome(**{**values, "state": State(values["state"])})
