"""What was recorded of a run until now, and where a resumed one goes on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lazyjax.training.answering import ExactMatchMetrics
from lazyjax.training.metrics import EvaluationMetrics, StepMetrics


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


@dataclasses.dataclass
class History:
    """What was recorded of a run, in order; grows while it goes on.

    Attributes:
        steps, evaluations, scores: of all processes that the run has had.
    """

    steps: list[StepMetrics] = dataclasses.field(default_factory=list)
    evaluations: list[EvaluationMetrics] = dataclasses.field(default_factory=list)
    scores: list[ExactMatchMetrics] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, start: Start | None) -> History:
        """That of a run that begins, or goes on from `start`."""
        if start is None:
            return cls()
        return cls(list(start.steps), list(start.evaluations), list(start.scores))

    @property
    def last_step(self) -> int:
        """Number of the last step; 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    @property
    def skipped_steps(self) -> int:
        """Steps that did not change the parameters."""
        return sum(step.skipped for step in self.steps)

    @property
    def skipped_in_a_row(self) -> int:
        """Of these, the last ones."""
        count = 0
        for step in reversed(self.steps):
            if not step.skipped:
                break
            count += 1
        return count

    def has_finite_loss(self) -> bool:
        """Whether some loss was finite."""
        losses = [step.loss for step in self.steps] + [one.loss for one in self.evaluations]
        return any(map(math.isfinite, losses))
