"""The training loop: batches in, steps through the executor, records out.

One body for every plan, optimizer and model. It knows nothing of layers, tiers or files of
weights; it decides when to evaluate, when to stop, and what is written down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from lazyjax.batch import Batch
from lazyjax.distributed.processes import Processes, alone
from lazyjax.execution.executor import NonFiniteStepsError, StepResult
from lazyjax.hardware.load import other_cpu_seconds, read_cpus
from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.planning.plan.document import Plan
from lazyjax.timeline import Timeline
from lazyjax.training.answering import ExactMatchMetrics, Stage
from lazyjax.training.checkpoints import Position
from lazyjax.training.display import Display
from lazyjax.training.interrupt import StoppedAtOnce, StopRequest
from lazyjax.training.metrics import (
    CompileClock,
    EvaluationMetrics,
    Log,
    MetricsLog,
    NoLog,
    StepMetrics,
    step_metrics,
)
from lazyjax.training.records import write_somewhere
from lazyjax.training.replanning import Replan
from lazyjax.training.run_folder import RunFolder
from lazyjax.training.saving import Saver
from lazyjax.training.wandb_log import Mirror, no_mirror

#: The first two of a run that goes on; `process` in the summary then says which one it is.
Status = Literal["running", "saving", "finished", "interrupted", "failed"]
#: summary.json is at most about this much older than the run that goes on.
_SUMMARY_SECONDS = 30.0
#: Waits between attempts to write the model where there is no room: an hour in all.
_ROOM_SECONDS = (10.0, 20.0, 30.0, *[60.0] * 59)


#: (stage, step, stopped) -> the score; see `lazyjax.training.answering.ExactMatchEvaluation.run`.
Answers = Callable[[Stage, int, Callable[[], bool]], ExactMatchMetrics | None]


def no_answers(stage: Stage, step: int, stopped: Callable[[], bool]) -> ExactMatchMetrics | None:
    """Where no rows are to be answered."""
    del stage, step, stopped
    return None


#: Tensors that a message names one by one.
_TENSORS_NAMED = 10


class NonFiniteModelError(ArithmeticError):
    """The first loss of a run is not finite; no model is written."""


@runtime_checkable
class StepExecutor(Protocol):
    """What the loop needs of `lazyjax.execution.executor.Executor`."""

    def train_step(self, batch: Batch, learning_rate: float) -> StepResult:
        """One step; raises NonFiniteStepsError after three non-finite ones in a row."""
        ...

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """Summed loss and its denominator."""
        ...

    def flush(self) -> None:
        """Applies pending updates."""
        ...

    def timeline(self) -> Timeline:
        """Events of the last step."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """What a run does.

    Attributes:
        learning_rates: of every step; their number is the number of steps.
        evaluate_every: steps between evaluations; 0 evaluates before and after training only.
        steps_per_epoch: for the count of epochs in the records.
    """

    learning_rates: Float32[np.ndarray, " steps"]
    evaluate_every: int
    steps_per_epoch: int

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.learning_rates)


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Where a resumed run goes on.

    Attributes:
        steps, evaluations, scores: what was recorded until then.
        metrics: position of the metrics log.
    """

    steps: tuple[StepMetrics, ...]
    evaluations: tuple[EvaluationMetrics, ...]
    scores: tuple[ExactMatchMetrics, ...]
    metrics: Mapping[str, Any]

    @property
    def last_step(self) -> int:
        """The step after which it goes on."""
        return self.steps[-1].step


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
        self._processes = processes or alone()
        self._executor, self._batches, self._evaluation = executor, batches, evaluation
        self._schedule, self._parameter_count = schedule, parameter_count
        self._folder, self._display, self._facts = folder, display, dict(facts)
        self._after_step, self._save_model, self._answers = after_step, save_model, answers
        self._saver, self._begin, self._max_seconds = saver, start, max_seconds
        self._find_nonfinite, self._mirror = find_nonfinite, mirror
        self._stop = StopRequest(self._processes.main.exchange if self._processes.several else None)
        self._steps: list[StepMetrics] = [] if start is None else list(start.steps)
        self._evaluations: list[EvaluationMetrics] = [] if start is None else list(start.evaluations)
        self._scores: list[ExactMatchMetrics] = [] if start is None else list(start.scores)
        self._start = self._summarized = time.perf_counter()
        self._summary_fails = False

    def run(self) -> dict[str, Any]:
        """Trains, saves the model, and returns the summary that is in the run folder at the end.

        The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 ends the run after the current step: pending updates
        are applied, the model is saved and the records are complete; signals that come while they are
        written are answered and change nothing. The second one during a step ends it at once. Whatever
        is raised on the way is raised on, after what is known has been written; after non-finite steps,
        which leave the model as it was, it is saved too.
        """
        with self._stop.listening(self._display.say), contextlib.closing(CompileClock()) as clock:
            return self._run(clock)

    def close(self) -> None:
        """Waits for a checkpoint that is being saved."""
        if self._saver is not None:
            self._saver.wait()

    def _run(self, clock: CompileClock) -> dict[str, Any]:
        self._start = time.perf_counter()
        self._keep_summary("running")
        log = self._open_log()
        self._display.start()
        failure: BaseException | None = None
        try:
            with self._processes.training(self._end_with_others):
                self._train(log, clock)
        except BaseException as error:
            failure = error
            self._stop.writing("the records are being written")
            self._end_saving(error)
        # A signal after this comes too late to have ended anything.
        stopped, model = self._stop.reason, None
        self._display.stop()
        if self._save_model is not None and self._steps and _is_whole(failure):
            try:
                model = self._write_model(self._save_model)
            except BaseException as error:
                failure = failure or error
        if failure is None and stopped is None and self._steps:
            failure = self._last_answers(log)
        log.close()
        status: Status = "finished" if stopped is None else "interrupted"
        if failure is not None:
            status, stopped = "failed", f"{type(failure).__name__}: {failure}"
        if isinstance(failure, NonFiniteStepsError | NonFiniteModelError):
            # Losses and norms are common, so all processes have met it.
            self._processes.main.told = failure
        summary = self._summary(status, stopped, model)
        if self._processes.leads:
            write_somewhere(self._folder.summary, summary, self._display.say)
        if failure is not None:
            raise failure
        return summary

    def _open_log(self) -> Log:
        if not self._processes.leads:
            return NoLog()
        return MetricsLog(
            self._folder.metrics,
            self._folder.tensorboard,
            self._display.say,
            position=None if self._begin is None else self._begin.metrics,
            first_step=0 if self._begin is None else self._last_step + 1,
            mirror=self._mirror,
        )

    def _end_with_others(self, reason: str) -> None:
        """Another process has ended this run; called from another thread, with the process about to end."""
        self._folder.write_summary(self._summary("failed", reason, None))

    @property
    def _last_step(self) -> int:
        return self._steps[-1].step if self._steps else 0

    def _train(self, log: Log, clock: CompileClock) -> None:
        first = self._last_step + 1
        self._look(self._last_step, log)
        for step in range(first, self._schedule.steps + 1):
            self._stop.look()
            if self._stop:
                break
            self._step(step, log, clock)
            self._look(step, log)
            if self._saver is not None and self._is_due(self._saver, step) and not self._stop:
                self._save(self._saver, log)
            if time.perf_counter() - self._start > self._max_seconds:
                self._stop.time_is_up()
            if time.perf_counter() - self._summarized > _SUMMARY_SECONDS:
                self._keep_summary("running")
        # From here on a signal can only lose what was trained.
        self._stop.writing("the last update is being applied")
        self._executor.flush()
        if self._steps:
            self._stop.writing("the model is evaluated, then saved")
            self._record(lambda: self._folder.write_timeline([self._executor.timeline()]))
            self._evaluate(self._last_step, log)
            self._save_last(log)

    def _is_due(self, saver: Saver, step: int) -> bool:
        """Whether a checkpoint is to be saved; where it goes by a clock, by that of the first process."""
        due: bool = self._processes.main.decide(lambda: saver.due(step))
        return due

    def _evaluation_is_due(self, step: int) -> bool:
        every = self._schedule.evaluate_every
        return bool(every) and step % every == 0 and step < self._schedule.steps

    def _look(self, step: int, log: Log) -> None:
        """Evaluates and scores where that is due and, in a run that was resumed, not recorded already."""
        if step and not self._evaluation_is_due(step):
            return
        if all(evaluation.step != step for evaluation in self._evaluations):
            self._evaluate(step, log)
        if all(score.step != step for score in self._scores):
            self._answer("during" if step else "before", step, log)

    def _save(self, saver: Saver, log: Log) -> None:
        """Begins a checkpoint of the last step."""
        self._executor.flush()
        self._record(log.sync)
        last = self._steps[-1]
        skipped_in_a_row = 0
        for step in reversed(self._steps):
            if not step.skipped:
                break
            skipped_in_a_row += 1
        skipped = sum(step.skipped for step in self._steps)
        position = Position(
            step=last.step,
            applied_steps=last.step - skipped,
            skipped_steps=skipped,
            skipped_in_a_row=skipped_in_a_row,
            learning_rate=last.learning_rate,
            schedule_steps=self._schedule.steps,
            data=saver.data_state(),
            seed=saver.seed,
            metrics=log.position(),
            evaluation_loss=self._evaluations[-1].loss if self._evaluations else None,
        )
        saver.begin(position)

    def _save_last(self, log: Log) -> None:
        """A run that was stopped can go on; one that is finished, if it has made checkpoints before."""
        saver = self._saver
        if saver is None or not saver.enabled:
            return
        saver.wait()
        if saver.last_step != self._last_step and (self._stop or saver.last_step is not None):
            self._stop.writing("a checkpoint is being written")
            self._save(saver, log)
            saver.wait()

    def _end_saving(self, failure: BaseException) -> None:
        """What is being saved is of a whole step, and worth waiting for unless someone does not wait."""
        if self._saver is None:
            return
        if isinstance(failure, StoppedAtOnce):
            self._saver.abandon()
        else:
            self._saver.wait()

    def _step(self, step: int, log: Log, clock: CompileClock) -> None:
        start, compiled, cpus = time.perf_counter(), clock.seconds, read_cpus()
        learning_rate = float(self._schedule.learning_rates[step - 1])
        failure: NonFiniteStepsError | None = None
        try:
            result = self._executor.train_step(next(self._batches), learning_rate)
        except NonFiniteStepsError as error:
            result, failure = error.result, error
        metrics = step_metrics(
            result,
            step=step,
            epoch=step / self._schedule.steps_per_epoch,
            learning_rate=learning_rate,
            step_seconds=time.perf_counter() - start,
            compile_seconds=clock.seconds - compiled,
            other_cpu_seconds=other_cpu_seconds(cpus, read_cpus()),
            parameter_count=self._parameter_count,
        )
        self._steps.append(metrics)
        log.step(metrics)
        self._display.step(metrics)
        self._check_first(metrics.loss, "the loss of the first step")
        if failure is not None:
            raise failure
        outcome = self._after_step(step, result)
        if outcome is not None:
            if outcome.swapped:
                self._record(lambda: self._folder.write_plan(outcome.plan, after_step=step))
                self._facts |= plan_facts(outcome.plan)
            log.replan(outcome)
            self._display.replan(outcome)

    def _evaluate(self, step: int, log: Log) -> None:
        """Evaluates, unless someone waits for the run to stop: a part of the rows means nothing."""
        start = time.perf_counter()
        loss_sum, weight, target_tokens = 0.0, 0.0, 0
        for batch in self._evaluation():
            self._stop.look()
            if self._stop:
                return
            batch_loss, batch_weight = self._executor.evaluate(batch)
            loss_sum += batch_loss
            weight += batch_weight
            target_tokens += batch.target_tokens
        if not target_tokens or self._stop:
            return
        seconds = time.perf_counter() - start
        metrics = EvaluationMetrics(step, loss_sum / weight, target_tokens, seconds)
        self._evaluations.append(metrics)
        log.evaluation(metrics)
        self._display.evaluation(metrics)
        self._check_first(metrics.loss, "the loss of the first evaluation")
        self._keep_summary("running")

    def _answer(self, stage: Stage, step: int, log: Log) -> None:
        """Scores answers to held-out rows, unless someone waits for the run to stop."""
        metrics = self._answers(stage, step, lambda: bool(self._stop))
        if metrics is not None:
            self._scores.append(metrics)
            log.exact_match(metrics)
            self._display.exact_match(metrics)
            self._keep_summary("running")

    def _last_answers(self, log: Log) -> Exception | None:
        """Scores the trained model; that may take hours, so it is saved by now and a signal ends them."""
        self._stop.writing(None)
        try:
            self._answer("after", self._steps[-1].step, log)
        except KeyboardInterrupt:
            pass
        except Exception as error:
            return error
        self._stop.writing("the records are being written")
        return None

    def _check_first(self, loss: float, name: str) -> None:
        """A run that begins with a loss that is not finite can only end with a model that is worth nothing.

        Later ones are the executor's business: it skips such steps, and the parameters stay as they were.
        """
        known = [step.loss for step in self._steps] + [one.loss for one in self._evaluations]
        if any(map(math.isfinite, (loss, *known))):
            return
        tensors = [str(tensor) for tensor in self._find_nonfinite()]
        why = "All parameters are finite, so something overflows on the way (model.compute_dtype float32?)"
        if tensors:
            more = f", and {len(tensors) - _TENSORS_NAMED} more" if len(tensors) > _TENSORS_NAMED else ""
            why = f"Not finite are values of {', '.join(tensors[:_TENSORS_NAMED])}{more}"
        raise NonFiniteModelError(f"{name} is {loss}: nothing can be learned. {why}")

    def _write_model(self, save_model: Callable[[], pathlib.Path]) -> pathlib.Path:
        """Writes the model; where the disk has no room, waits for some rather than lose what was trained."""
        self._stop.writing("the model is being written")
        self._keep_summary("saving")
        for wait_seconds in (*_ROOM_SECONDS, None):
            try:
                path = save_model()
            except (OSError, CheckpointError) as error:
                if wait_seconds is None:
                    raise
                self._display.say(
                    f"WARNING: the model cannot be written ({error}); it is tried again in "
                    f"{wait_seconds:g} s, a signal gives it up"
                )
                self._stop.writing("there is no room for the model: given up")
                if self._stop.wait(wait_seconds):
                    raise
                self._stop.writing("the model is being written")
            else:
                self._display.say(f"model written to {path}")
                return path
        raise AssertionError("the last try returns or raises")

    def _record(self, write: Callable[[], object]) -> None:
        """Writes a record of the run folder; one that cannot be written ends nothing."""
        try:
            write()
        except OSError as error:
            self._display.say(f"WARNING: {error.filename or self._folder.path}: {error.strerror}")

    def _keep_summary(self, status: Status) -> None:
        """Keeps summary.json true while the run goes on; says once where that fails."""
        self._summarized = time.perf_counter()
        try:
            self._folder.write_summary(self._summary(status, None, None))
            self._summary_fails = False
        except OSError as error:
            if not self._summary_fails:
                self._display.say(f"WARNING: {self._folder.summary} cannot be written ({error.strerror})")
            self._summary_fails = True

    def _summary(self, status: Status, reason: str | None, model: pathlib.Path | None) -> dict[str, Any]:
        return {
            "status": status,
            "reason": reason,
            "process": None if status in ("finished", "interrupted", "failed") else os.getpid(),
            "model_folder": None if model is None else model.name,
            "label": "measured",
            **self._facts,
            **summarize(self._steps, self._evaluations),
            **summarize_scores(self._scores),
            "total_seconds": time.perf_counter() - self._start,
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def _is_whole(failure: BaseException | None) -> bool:
    """Whether the parameters are those of a step: a skipped one has not touched them."""
    return failure is None or isinstance(failure, NonFiniteStepsError)


def plan_facts(plan: Plan) -> dict[str, str]:
    """What a summary says of the plan in use: who made it, and its fingerprint."""
    return {"planner": plan.planner, "plan": plan.fingerprint()}


def summarize_scores(scores: Sequence[ExactMatchMetrics]) -> dict[str, Any]:
    """The first and the last exact match of a run; nothing where none was asked for."""
    if not scores:
        return {}
    first, last = scores[0], scores[-1]
    return {
        "first_exact_match": first.exact_match,
        "last_exact_match": last.exact_match,
        "last_exact_match_interval": [last.low, last.high],
        "last_exact_match_rows": last.rows,
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def summarize(steps: Sequence[StepMetrics], evaluations: Sequence[EvaluationMetrics]) -> dict[str, Any]:
    """Main figures of a run; rates leave out steps that compiled, where there are others."""
    timed = [step for step in steps if not step.compile_seconds] or steps
    seconds = sum(step.step_seconds for step in timed)
    finite = [step.loss for step in steps if math.isfinite(step.loss)]
    return {
        "steps": len(steps),
        "skipped_steps": sum(step.skipped for step in steps),
        "first_loss": finite[0] if finite else None,
        "last_loss": finite[-1] if finite else None,
        "first_evaluation_loss": _finite(evaluations[0].loss) if evaluations else None,
        "last_evaluation_loss": _finite(evaluations[-1].loss) if evaluations else None,
        "timed_steps": len(timed),
        "mean_step_seconds": seconds / len(timed) if timed else None,
        "median_step_seconds": statistics.median(step.step_seconds for step in timed) if timed else None,
        "compile_seconds": sum(step.compile_seconds for step in steps),
        "tokens_per_second": sum(step.real_tokens for step in timed) / seconds if timed else None,
        "model_tflops": (
            sum(step.model_tflops * step.step_seconds for step in timed) / seconds if timed else None
        ),
        "peak_device_bytes": max((step.peak_device_bytes for step in steps), default=0),
    }
