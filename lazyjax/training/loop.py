"""The training loop: batches in, steps through the executor, records out.

One body for every plan, optimizer and model. It knows nothing of layers, tiers or files of
weights; it decides when to evaluate, when to stop, and what is written down.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from lazyjax.batch import Batch
from lazyjax.execution.executor import StepResult
from lazyjax.planning.plan.document import Plan
from lazyjax.timeline import Timeline
from lazyjax.training.display import Display
from lazyjax.training.interrupt import StopRequest
from lazyjax.training.metrics import EvaluationMetrics, MetricsLog, StepMetrics, step_metrics
from lazyjax.training.replanning import Replan
from lazyjax.training.run_folder import RunFolder

Status = Literal["finished", "interrupted", "failed"]


@runtime_checkable
class StepExecutor(Protocol):
    """What the loop needs of `lazyjax.execution.executor.Executor`."""

    def train_step(self, batch: Batch, learning_rate: float) -> StepResult:
        """One step; raises NonFiniteStepsError after three non-finite ones in a row."""
        ...

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Summed loss and number of target tokens."""
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
    ) -> None:
        self._executor, self._batches, self._evaluation = executor, batches, evaluation
        self._schedule, self._parameter_count = schedule, parameter_count
        self._folder, self._display, self._facts = folder, display, dict(facts)
        self._after_step = after_step
        self._stop = StopRequest()
        self._steps: list[StepMetrics] = []
        self._evaluations: list[EvaluationMetrics] = []

    def run(self) -> dict[str, Any]:
        """Trains, and returns the summary that was written to the run folder.

        The first SIGINT or SIGTERM ends the run after the current step: pending updates are
        applied and the records are complete. Whatever is raised on the way (a non-finite run, a
        full disk) is raised on, after what is known has been written.
        """
        start = time.perf_counter()
        log = MetricsLog(self._folder.metrics, self._folder.tensorboard)
        self._display.start()
        status: Status = "failed"
        reason = None
        try:
            with self._stop.listening(self._display.say):
                self._train(log)
            status = "interrupted" if self._stop else "finished"
            reason = self._stop.signal_name
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._display.stop()
            log.close()
            summary = self._summary(status, reason, time.perf_counter() - start)
            self._folder.write_summary(summary)
        return summary

    def _train(self, log: MetricsLog) -> None:
        self._evaluate(0, log)
        for step in range(1, self._schedule.steps + 1):
            if self._stop:
                break
            self._step(step, log)
            every = self._schedule.evaluate_every
            if every and step % every == 0 and step < self._schedule.steps:
                self._evaluate(step, log)
        self._executor.flush()
        if self._steps:
            self._folder.write_timeline([self._executor.timeline()])
            self._evaluate(self._steps[-1].step, log)

    def _step(self, step: int, log: MetricsLog) -> None:
        start = time.perf_counter()
        learning_rate = float(self._schedule.learning_rates[step - 1])
        result = self._executor.train_step(next(self._batches), learning_rate)
        metrics = step_metrics(
            result,
            step=step,
            epoch=step / self._schedule.steps_per_epoch,
            learning_rate=learning_rate,
            step_seconds=time.perf_counter() - start,
            parameter_count=self._parameter_count,
        )
        self._steps.append(metrics)
        log.step(metrics)
        self._display.step(metrics)
        outcome = self._after_step(step, result)
        if outcome is not None:
            if outcome.swapped:
                self._folder.write_plan(outcome.plan, after_step=step)
                self._facts |= plan_facts(outcome.plan)
            log.replan(outcome)
            self._display.replan(outcome)

    def _evaluate(self, step: int, log: MetricsLog) -> None:
        """Evaluates, unless someone waits for the run to stop: a part of the rows means nothing."""
        start = time.perf_counter()
        loss_sum, target_tokens = 0.0, 0
        for batch in self._evaluation():
            if self._stop:
                return
            batch_loss, batch_tokens = self._executor.evaluate(batch)
            loss_sum += batch_loss
            target_tokens += batch_tokens
        if not target_tokens or self._stop:
            return
        seconds = time.perf_counter() - start
        metrics = EvaluationMetrics(step, loss_sum / target_tokens, target_tokens, seconds)
        self._evaluations.append(metrics)
        log.evaluation(metrics)
        self._display.evaluation(metrics)

    def _summary(self, status: Status, reason: str | None, seconds: float) -> dict[str, Any]:
        return {
            "status": status,
            "reason": reason,
            "label": "measured",
            **self._facts,
            **summarize(self._steps, self._evaluations),
            "total_seconds": seconds,
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def plan_facts(plan: Plan) -> dict[str, str]:
    """What a summary says of the plan in use: who made it, and its fingerprint."""
    return {"planner": plan.planner, "plan": plan.fingerprint()}


def summarize(steps: Sequence[StepMetrics], evaluations: Sequence[EvaluationMetrics]) -> dict[str, Any]:
    """Main figures of a run; rates leave out the first step, which compiles, where there are more."""
    timed = steps[1:] or steps
    seconds = sum(step.step_seconds for step in timed)
    finite = [step.loss for step in steps if math.isfinite(step.loss)]
    return {
        "steps": len(steps),
        "skipped_steps": sum(step.skipped for step in steps),
        "first_loss": finite[0] if finite else None,
        "last_loss": finite[-1] if finite else None,
        "first_evaluation_loss": evaluations[0].loss if evaluations else None,
        "last_evaluation_loss": evaluations[-1].loss if evaluations else None,
        "mean_step_seconds": seconds / len(timed) if timed else None,
        "tokens_per_second": sum(step.real_tokens for step in timed) / seconds if timed else None,
        "model_tflops": (
            sum(step.model_tflops * step.step_seconds for step in timed) / seconds if timed else None
        ),
        "peak_device_bytes": max((step.peak_device_bytes for step in steps), default=0),
    }
