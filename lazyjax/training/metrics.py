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
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from lazyjax.execution.executor import StepResult
from lazyjax.training.answering import ExactMatchMetrics
from lazyjax.training.records import AppendedFile, Say
from lazyjax.training.replanning import Replan
from lazyjax.training.wandb_log import Mirror, no_mirror


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step; `step_seconds` is the loop's wall time, with data and logging.

    `compile_seconds` of it went into compiling, on the first step and at every new sequence length.
    `other_cpu_seconds` is the CPU time that other processes took meanwhile (None where it is unknown).
    """

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
    compile_seconds: float
    tokens_per_second: float
    model_tflops: float
    peak_device_bytes: int
    host_bytes: int
    # Runs of earlier releases did not record it.
    other_cpu_seconds: float | None = None


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
    compile_seconds: float,
    other_cpu_seconds: float | None,
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
        compile_seconds=compile_seconds,
        tokens_per_second=result.real_tokens / step_seconds,
        model_tflops=model_tflops(parameter_count, result.padded_tokens, step_seconds),
        peak_device_bytes=result.peak_device_bytes,
        host_bytes=resident_host_bytes(),
        other_cpu_seconds=other_cpu_seconds,
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


class CompileClock:
    """Seconds that this process has spent lowering and compiling, on whichever thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._record)

    def _record(self, event: str, duration_secs: float, **keywords: str | int) -> None:
        if event in _COMPILE_EVENTS:
            self.seconds += duration_secs


#: Of `jax.monitoring`. Tracing is left out: its events nest.
_COMPILE_EVENTS = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


@runtime_checkable
class Log(Protocol):
    """Where the loop puts its records; see `MetricsLog`."""

    def step(self, metrics: StepMetrics) -> None:
        """Records one step."""
        ...

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Records one evaluation."""
        ...

    def exact_match(self, metrics: ExactMatchMetrics) -> None:
        """Records one score."""
        ...

    def replan(self, outcome: Replan) -> None:
        """Records that the plan was solved again."""
        ...

    def position(self) -> dict[str, Any]:
        """What has been recorded so far."""
        ...

    def sync(self) -> None:
        """Hands the records to the drive."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class NoLog:
    """The log of a process whose records another one writes."""

    def step(self, metrics: StepMetrics) -> None:
        """Nothing."""

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Nothing."""

    def exact_match(self, metrics: ExactMatchMetrics) -> None:
        """Nothing."""

    def replan(self, outcome: Replan) -> None:
        """Nothing."""

    def position(self) -> dict[str, Any]:
        """The beginning."""
        return {"bytes": 0, "waiting": []}

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class MetricsLog:
    """Writes every record to metrics.jsonl, at once, and to TensorBoard.

    Neither blocks nor raises: what cannot be written waits (`AppendedFile`).

    Args:
        position: of a run that is resumed, what `position()` gave.
        first_step: TensorBoard hides what an earlier process recorded from this step on.
        mirror: gets every record besides.
    """

    def __init__(
        self,
        path: pathlib.Path,
        tensorboard: pathlib.Path,
        say: Say,
        *,
        position: Mapping[str, Any] | None = None,
        first_step: int = 0,
        mirror: Mirror = no_mirror,
    ) -> None:
        self._mirror = mirror
        self._file = AppendedFile(path, say, position=0 if position is None else position["bytes"])
        for line in () if position is None else position["waiting"]:
            self._file.add(line.encode())
        # One file per process: TensorBoard reads all of a folder, in the order of their names.
        moment = time.time()
        name = f"events.out.tfevents.{moment:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._events = AppendedFile(tensorboard / name, say)
        self._event(Event(wall_time=moment, file_version="brain.Event:2"))
        if first_step:
            start = SessionLog(status=SessionLog.START)
            self._event(Event(wall_time=moment, step=first_step, session_log=start))

    def step(self, metrics: StepMetrics) -> None:
        """Records one step."""
        self._metrics("train", metrics)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Records one evaluation."""
        self._metrics("evaluation", metrics)

    def exact_match(self, metrics: ExactMatchMetrics) -> None:
        """Records one score."""
        self._metrics("exact_match", metrics)

    def replan(self, outcome: Replan) -> None:
        """Records that the plan was solved again, and whether the new one runs from now on."""
        self._line(
            {
                "kind": "replan",
                "step": outcome.step,
                "running_seconds": outcome.running_seconds,
                "candidate_seconds": outcome.candidate_seconds,
                "plan": outcome.plan.fingerprint(),
                "swapped": outcome.swapped,
            }
        )

    def position(self) -> dict[str, Any]:
        """What has been recorded so far, as plain JSON values; a log made with it goes on from here."""
        return {
            "bytes": self._file.position,
            "waiting": [entry.decode() for entry in self._file.waiting],
        }

    def sync(self) -> None:
        """Hands the records to the drive. OSError: that failed."""
        self._file.sync()

    def close(self) -> None:
        """Writes what is left and closes both files."""
        self._file.close()
        self._events.close()

    def _metrics(self, kind: str, metrics: StepMetrics | EvaluationMetrics | ExactMatchMetrics) -> None:
        values = dataclasses.asdict(metrics)
        self._line({"kind": kind} | {key: _json(value) for key, value in values.items()})
        self._mirror(kind, metrics.step, values)
        entries = [
            Summary.Value(tag=f"{kind}/{key}", simple_value=float(value))
            for key, value in values.items()
            if key != "step" and value is not None
        ]
        self._event(Event(wall_time=time.time(), step=metrics.step, summary=Summary(value=entries)))

    def _line(self, record: Mapping[str, Any]) -> None:
        # Written at once: a killed process must leave every finished step on disk.
        self._file.add(json.dumps(record).encode() + b"\n")

    def _event(self, event: Event) -> None:
        """As a TFRecord: length and content, each followed by its masked CRC-32C, little-endian."""
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        checks = (struct.pack("<I", masked_crc32c(part)) for part in (length, content))
        self._events.add(b"".join((length, next(checks), content, next(checks))))


def read_records(path: pathlib.Path, position: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl up to a saved position.

    Raises:
        ValueError: the file is shorter than it was, or damaged; the message names it.
    """
    with path.open("rb") as file:
        content = file.read(position["bytes"])
    if len(content) < position["bytes"]:
        raise ValueError(
            f"{path}: {len(content)} bytes, but the checkpoint was saved after {position['bytes']}: "
            "steps are missing from it"
        )
    lines = content.splitlines() + [line.encode() for line in position["waiting"]]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from error


def steps_of(records: Iterable[Mapping[str, Any]]) -> tuple[StepMetrics, ...]:
    """The steps among records that were read back."""
    return tuple(StepMetrics(**_values(record)) for record in records if record["kind"] == "train")


def evaluations_of(records: Iterable[Mapping[str, Any]]) -> tuple[EvaluationMetrics, ...]:
    """The evaluations among records that were read back."""
    return tuple(EvaluationMetrics(**_values(record)) for record in records if record["kind"] == "evaluation")


def scores_of(records: Iterable[Mapping[str, Any]]) -> tuple[ExactMatchMetrics, ...]:
    """The scores of answers among records that were read back."""
    scored = (record for record in records if record["kind"] == "exact_match")
    return tuple(ExactMatchMetrics(**_values(record)) for record in scored)


def _values(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: math.nan if value is None else value for key, value in record.items() if key != "kind"}


def _json(value: Any) -> Any:
    """JSON has no NaN or infinity: null stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
