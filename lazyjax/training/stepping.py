"""Step after step, with what is due between them: evaluations, checkpoints, other plans."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from lazyjax.batch import Batch
from lazyjax.distributed.processes import Processes
from lazyjax.execution.executor import NonFiniteStepsError, StepResult
from lazyjax.hardware.load import other_cpu_seconds, read_cpus
from lazyjax.training.checkpoints import Position
from lazyjax.training.examination import Examination
from lazyjax.training.metrics import CompileClock, Log, step_metrics
from lazyjax.training.replanning import Replan
from lazyjax.training.run_context import RunContext
from lazyjax.training.saving import Saver


@dataclasses.dataclass(frozen=True)
class Stepping:
    """The steps of a run; see `lazyjax.training.loop.Trainer` for the attributes."""

    context: RunContext
    examination: Examination
    batches: Iterator[Batch]
    parameter_count: int
    after_step: Callable[[int, StepResult], Replan | None]
    saver: Saver | None
    max_seconds: float
    processes: Processes

    def run(self, log: Log, clock: CompileClock) -> None:
        """All steps until the last one, or until someone wants the run to stop; then what follows on them."""
        context, last_step = self.context, self.context.history.last_step
        self.examination.look(last_step, log)
        for step in range(last_step + 1, context.schedule.steps + 1):
            context.stop.look()
            if context.stop:
                break
            self._step(step, log, clock)
            self.examination.look(step, log)
            if self.saver is not None and self._is_due(self.saver, step) and not context.stop:
                self._save(self.saver, log)
            if context.summary.seconds > self.max_seconds:
                context.stop.time_is_up()
            context.summary.keep_young()
        # From here on a signal can only lose what was trained.
        context.stop.writing("the last update is being applied")
        context.executor.flush()
        if context.history.steps:
            context.stop.writing("the model is evaluated, then saved")
            context.record(lambda: context.folder.write_timeline([context.executor.timeline()]))
            self.examination.evaluate(context.history.last_step, log)
            self._save_last(log)

    def _step(self, step: int, log: Log, clock: CompileClock) -> None:
        context, schedule = self.context, self.context.schedule
        start, compiled, cpus = time.perf_counter(), clock.seconds, read_cpus()
        learning_rate = float(schedule.learning_rates[step - 1])
        failure: NonFiniteStepsError | None = None
        try:
            result = context.executor.train_step(next(self.batches), learning_rate)
        except NonFiniteStepsError as error:
            result, failure = error.result, error
        metrics = step_metrics(
            result,
            step=step,
            epoch=step / schedule.steps_per_epoch,
            learning_rate=learning_rate,
            step_seconds=time.perf_counter() - start,
            compile_seconds=clock.seconds - compiled,
            other_cpu_seconds=other_cpu_seconds(cpus, read_cpus()),
            parameter_count=self.parameter_count,
        )
        context.history.steps.append(metrics)
        log.step(metrics)
        context.display.step(metrics)
        self.examination.check_first(metrics.loss, "the loss of the first step")
        if failure is not None:
            raise failure
        outcome = self.after_step(step, result)
        if outcome is not None:
            if outcome.swapped:
                context.record(lambda: context.folder.write_plan(outcome.plan, after_step=step))
                context.summary.use_plan(outcome.plan)
            log.replan(outcome)
            context.display.replan(outcome)

    def _is_due(self, saver: Saver, step: int) -> bool:
        """Whether a checkpoint is to be saved; where it goes by a clock, by that of the first process."""
        due: bool = self.processes.main.decide(lambda: saver.due(step))
        return due

    def _save(self, saver: Saver, log: Log) -> None:
        """Begins a checkpoint of the last step."""
        context, history = self.context, self.context.history
        context.executor.flush()
        context.record(log.sync)
        last = history.steps[-1]
        saver.begin(
            Position(
                step=last.step,
                applied_steps=last.step - history.skipped_steps,
                skipped_steps=history.skipped_steps,
                skipped_in_a_row=history.skipped_in_a_row,
                learning_rate=last.learning_rate,
                schedule_steps=context.schedule.steps,
                data=saver.data_state(),
                seed=saver.seed,
                metrics=log.position(),
                evaluation_loss=history.evaluations[-1].loss if history.evaluations else None,
            )
        )

    def _save_last(self, log: Log) -> None:
        """A run that was stopped can go on; one that is finished, if it has made checkpoints before."""
        saver, stop = self.saver, self.context.stop
        if saver is None or not saver.enabled:
            return
        saver.wait()
        if saver.last_step != self.context.history.last_step and (stop or saver.last_step is not None):
            stop.writing("a checkpoint is being written")
            self._save(saver, log)
            saver.wait()
