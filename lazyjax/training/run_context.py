"""What the parts of a training run share: the executor, the schedule, and where records and words go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from lazyjax.batch import Batch
from lazyjax.execution.executor import StepResult
from lazyjax.timeline import Timeline
from lazyjax.training.display import Display
from lazyjax.training.history import History
from lazyjax.training.interrupt import StopRequest
from lazyjax.training.run_folder import RunFolder
from lazyjax.training.summary import Summary


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

    def evaluation_is_due(self, step: int) -> bool:
        """Whether there is an evaluation after `step`, which is not the last."""
        every = self.evaluate_every
        return bool(every) and step % every == 0 and step < self.steps


@dataclasses.dataclass(frozen=True)
class RunContext:
    """A run as it goes on.

    Attributes:
        stop: whether someone wants it to end.
        history: what was recorded until now.
    """

    executor: StepExecutor
    schedule: TrainingSchedule
    folder: RunFolder
    display: Display
    stop: StopRequest
    history: History
    summary: Summary

    def record(self, write: Callable[[], object]) -> None:
        """Writes a record of the run folder; one that cannot be written ends nothing."""
        try:
            write()
        except OSError as error:
            self.display.say(f"WARNING: {error.filename or self.folder.path}: {error.strerror}")
