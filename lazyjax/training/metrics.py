"""What is recorded of every step and evaluation, and where it is written.

Throughput follows two conventions, which are never mixed: `tokens_per_second` counts tokens that
are not padding; `model_tflops` is 6 N x padded tokens / second (MegaTrain, LazyTrain: padding
counts, attention and recompute do not).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from tensorboardX import SummaryWriter

from lazyjax.execution.executor import StepResult
from lazyjax.training.replanning import Replan


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step; `step_seconds` is the loop's wall time, with data and logging."""

    step: int
    epoch: float
    loss: float
    gradient_norm: float
    learning_rate: float
    skipped: bool
    target_tokens: int
    real_tokens: int
    padded_tokens: int
    step_seconds: float
    tokens_per_second: float
    model_tflops: float
    peak_device_bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationMetrics:
    """The mean loss over target tokens of held-out rows, after `step` steps."""

    step: int
    loss: float
    target_tokens: int
    seconds: float


def step_metrics(
    result: StepResult,
    *,
    step: int,
    epoch: float,
    learning_rate: float,
    step_seconds: float,
    parameter_count: int,
) -> StepMetrics:
    """Adds to an executor's result what only the loop knows."""
    return StepMetrics(
        step=step,
        epoch=epoch,
        loss=result.loss,
        gradient_norm=result.gradient_norm,
        learning_rate=learning_rate,
        skipped=result.skipped,
        target_tokens=result.target_tokens,
        real_tokens=result.real_tokens,
        padded_tokens=result.padded_tokens,
        step_seconds=step_seconds,
        tokens_per_second=result.real_tokens / step_seconds,
        model_tflops=model_tflops(parameter_count, result.padded_tokens, step_seconds),
        peak_device_bytes=result.peak_device_bytes,
        host_bytes=resident_host_bytes(),
    )


def model_tflops(parameter_count: int, padded_tokens: int, seconds: float) -> float:
    """6 N tokens / second in 1e12 (LazyTrain, arXiv 2608.11919: padding counts as tokens)."""
    return 6 * parameter_count * padded_tokens / seconds / 1e12


def resident_host_bytes() -> int:
    """Memory of this process that is in RAM (Linux; 0 where /proc is missing)."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class MetricsLog:
    """Writes every record to metrics.jsonl, at once, and to TensorBoard."""

    def __init__(self, path: pathlib.Path, tensorboard: pathlib.Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(tensorboard), flush_secs=30)

    def step(self, metrics: StepMetrics) -> None:
        """Records one step."""
        self._write("train", metrics)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Records one evaluation."""
        self._write("evaluation", metrics)

    def replan(self, outcome: Replan) -> None:
        """Records that the plan was solved again, and whether the new one runs from now on."""
        record = {
            "kind": "replan",
            "step": outcome.step,
            "running_seconds": outcome.running_seconds,
            "candidate_seconds": outcome.candidate_seconds,
            "plan": outcome.plan.fingerprint(),
            "swapped": outcome.swapped,
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes both files."""
        self._file.close()
        self._tensorboard.close()

    def _write(self, kind: str, metrics: StepMetrics | EvaluationMetrics) -> None:
        values = dataclasses.asdict(metrics)
        record = {"kind": kind} | {key: _json(value) for key, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        # A killed process must leave every finished step on disk.
        self._file.flush()
        for key, value in values.items():
            if key != "step":
                self._tensorboard.add_scalar(f"{kind}/{key}", float(value), metrics.step)


def _json(value: Any) -> Any:
    """JSON has no NaN or infinity: null stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
