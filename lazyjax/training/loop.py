"""The training loop: batches in, steps through the executor, records out.

One body for every plan, optimizer and model. It knows nothing of layers, tiers or files of
weights; it decides when to evaluate, when to stop, and what is written down.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lazyjax.batch import Batch
from lazyjax.distributed.processes import Processes, alone
from lazyjax.execution.executor import NonFiniteStepsError, StepResult
from lazyjax.training.display import Display
from lazyjax.training.examination import Answers, Examination, NonFiniteModelError, no_answers
from lazyjax.training.history import History, Start
from lazyjax.training.interrupt import StoppedAtOnce, StopRequest
from lazyjax.training.metrics import CompileClock, Log, MetricsLog, NoLog
from lazyjax.training.model_file import write_model
from lazyjax.training.records import write_somewhere
from lazyjax.training.replanning import Replan
from lazyjax.training.run_context import RunContext, StepExecutor, TrainingSchedule
from lazyjax.training.run_folder import RunFolder
from lazyjax.training.saving import Saver
from lazyjax.training.stepping import Stepping
from lazyjax.training.summary import Status, Summary
from lazyjax.training.wandb_log import Mirror, no_mirror


class Trainer:
    """Runs one schedule.

    Args:
        executor: does the steps; the caller closes it.
        batches: at least as many as the schedule has steps.
        evaluation: gives the held-out batches, the same ones at every call; no batch, no evaluation.
        parameter_count: N of the model TFLOPS.
        folder: where metrics, timeline and summary are written.
        facts: entries that the summary repeats (device, model, ...); those of `plan_facts` follow
            the plan in use.
        after_step: gets every step and its result, and may answer with a plan made again.
        save_model: writes the model as it is and returns its folder; None saves none.
        answers: scores held-out rows at a stage, after a step, unless it is stopped meanwhile; gives None
            where it has no rows.
        saver: saves checkpoints; None saves none.
        start: where a resumed run goes on; None: at the beginning.
        max_seconds: of this process, after which the run is stopped as by a signal.
        find_nonfinite: names the parameters that hold values that are not finite.
        mirror: gets every record besides the files.
        processes: that train together; only the first writes records.
    """

    def __init__(
        self,
        executor: StepExecutor,
        batches: Iterator[Batch],
        evaluation: Callable[[], Iterable[Batch]],
        schedule: TrainingSchedule,
        *,
        parameter_count: int,
        folder: RunFolder,
        display: Display,
        facts: Mapping[str, Any],
        after_step: Callable[[int, StepResult], Replan | None] = lambda step, result: None,
        save_model: Callable[[], pathlib.Path] | None = None,
        answers: Answers = no_answers,
        saver: Saver | None = None,
        start: Start | None = None,
        max_seconds: float = math.inf,
        find_nonfinite: Callable[[], Sequence[object]] = tuple,
        mirror: Mirror = no_mirror,
        processes: Processes | None = None,
    ) -> None:
        self._processes, self._save_model = processes or alone(), save_model
        self._begin, self._mirror = start, mirror
        stop = StopRequest(self._processes.main.exchange if self._processes.several else None)
        history = History.of(start)
        summary = Summary(folder, history, facts, display.say)
        self._context = RunContext(executor, schedule, folder, display, stop, history, summary)
        self._examination = Examination(self._context, evaluation, answers, find_nonfinite)
        self._stepping = Stepping(
            self._context, self._examination, batches, parameter_count, after_step, saver, max_seconds,
            self._processes,
        )  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Trains, saves the model, and returns the summary that is in the run folder at the end.

        The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 ends the run after the current step: pending updates
        are applied, the model is saved and the records are complete; signals that come while they are
        written are answered and change nothing. The second one during a step ends it at once. Whatever
        is raised on the way is raised on, after what is known has been written; after non-finite steps,
        which leave the model as it was, it is saved too.
        """
        stop, say = self._context.stop, self._context.display.say
        with stop.listening(say), contextlib.closing(CompileClock()) as clock:
            return self._run(clock)

    def close(self) -> None:
        """Waits for a checkpoint that is being saved."""
        if self._stepping.saver is not None:
            self._stepping.saver.wait()

    def _run(self, clock: CompileClock) -> dict[str, Any]:
        context = self._context
        context.summary.begin()
        context.summary.keep()
        log = self._open_log()
        context.display.start()
        failure: BaseException | None = None
        try:
            with self._processes.training(self._end_with_others):
                self._stepping.run(log, clock)
        except BaseException as error:
            failure = error
            context.stop.writing("the records are being written")
            self._end_saving(error)
        # A signal after this comes too late to have ended anything.
        stopped, model = context.stop.reason, None
        context.display.stop()
        if self._save_model is not None and context.history.steps and _is_whole(failure):
            try:
                context.stop.writing("the model is being written")
                context.summary.keep("saving")
                model = write_model(self._save_model, context.stop, context.display.say)
            except BaseException as error:
                failure = failure or error
        if failure is None and stopped is None and context.history.steps:
            failure = self._examination.last_answers(log)
        log.close()
        status: Status = "finished" if stopped is None else "interrupted"
        if failure is not None:
            status, stopped = "failed", f"{type(failure).__name__}: {failure}"
        if isinstance(failure, NonFiniteStepsError | NonFiniteModelError):
            # Losses and norms are common, so all processes have met it.
            self._processes.main.told = failure
        summary = context.summary.document(status, stopped, model)
        if self._processes.leads:
            write_somewhere(context.folder.summary, summary, context.display.say)
        if failure is not None:
            raise failure
        return summary

    def _end_saving(self, failure: BaseException) -> None:
        """What is being saved is of a whole step, and worth waiting for unless someone does not wait."""
        if self._stepping.saver is None:
            return
        if isinstance(failure, StoppedAtOnce):
            self._stepping.saver.abandon()
        else:
            self._stepping.saver.wait()

    def _open_log(self) -> Log:
        if not self._processes.leads:
            return NoLog()
        return MetricsLog(
            self._context.folder.metrics,
            self._context.folder.tensorboard,
            self._context.display.say,
            position=None if self._begin is None else self._begin.metrics,
            first_step=0 if self._begin is None else self._context.history.last_step + 1,
            mirror=self._mirror,
        )

    def _end_with_others(self, reason: str) -> None:
        """Another process has ended this run; called from another thread, with the process about to end."""
        self._context.folder.write_summary(self._context.summary.document("failed", reason, None))


def _is_whole(failure: BaseException | None) -> bool:
    """Whether the parameters are those of a step: a skipped one has not touched them."""
    return failure is None or isinstance(failure, NonFiniteStepsError)
