"""The file `summary.json` of a run, kept true while it goes on, and the figures in it."""

from __future__ import annotations

import math
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lazyjax.planning.plan.document import Plan
from lazyjax.training.answering import ExactMatchMetrics
from lazyjax.training.history import History
from lazyjax.training.metrics import EvaluationMetrics, StepMetrics
from lazyjax.training.run_folder import RunFolder

#: The first two of a run that goes on; `process` in the summary then says which one it is.
Status = Literal["running", "saving", "finished", "interrupted", "failed"]
#: summary.json is at most about this much older than the run that goes on.
_SUMMARY_SECONDS = 30.0


class Summary:
    """What a run has come to.

    Args:
        facts: entries that it repeats (device, model, ...); those of `plan_facts` follow the plan in use.
    """

    def __init__(
        self, folder: RunFolder, history: History, facts: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self._folder, self._history, self._facts, self._say = folder, history, dict(facts), say
        self._start = self._written = time.perf_counter()
        self._fails = False

    def begin(self) -> None:
        """Starts the clock of the run's seconds."""
        self._start = time.perf_counter()

    def use_plan(self, plan: Plan) -> None:
        """Says of another plan that it is in use."""
        self._facts |= plan_facts(plan)

    @property
    def seconds(self) -> float:
        """Since the run of this process began."""
        return time.perf_counter() - self._start

    def keep(self, status: Status = "running") -> None:
        """Writes the file; says once where that fails."""
        self._written = time.perf_counter()
        try:
            self._folder.write_summary(self.document(status, None, None))
            self._fails = False
        except OSError as error:
            if not self._fails:
                self._say(f"WARNING: {self._folder.summary} cannot be written ({error.strerror})")
            self._fails = True

    def keep_young(self) -> None:
        """Writes the file where it has become old."""
        if time.perf_counter() - self._written > _SUMMARY_SECONDS:
            self.keep()

    def document(self, status: Status, reason: str | None, model: pathlib.Path | None) -> dict[str, Any]:
        """The entries.

        Args:
            reason: why a run ended that is not finished.
            model: the folder that was written.
        """
        return {
            "status": status,
            "reason": reason,
            "process": None if status in ("finished", "interrupted", "failed") else os.getpid(),
            "model_folder": None if model is None else model.name,
            "label": "measured",
            **self._facts,
            **summarize(self._history.steps, self._history.evaluations),
            **summarize_scores(self._history.scores),
            "total_seconds": self.seconds,
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


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
