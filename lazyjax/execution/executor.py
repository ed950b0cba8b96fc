"""Trains a model under a plan: hands a schedule, a batch and the slabs to a walk, step by step.

The executor holds no policy. It is given the schedules of its plans and walks them
(`lazyjax.execution.walk`); handlers do the work (`copy_work`, `device_work`, `host_work`). Here remains
what lasts longer than a step: the plan in use, the update that is still pending, the threads, the
drive, and how errors end its use.

Gradients stay in their host slabs until the update, which is queued when the global norm is
known; with deferred updates that is under the next step's forward pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable

import numpy as np

from lazyjax.batch import Batch
from lazyjax.execution.buffers import StepBuffers
from lazyjax.execution.forward import ForwardPass
from lazyjax.execution.host_queues import HostQueues
from lazyjax.execution.host_update import HostUpdates, UpdateStep
from lazyjax.execution.host_work import HostWork
from lazyjax.execution.interfaces import Copies, LayerKernels
from lazyjax.execution.pending import Pending
from lazyjax.execution.recorder import Recorder
from lazyjax.execution.step import Machinery, Step, StepResult
from lazyjax.optim.clipping import ClipRule
from lazyjax.planning.plan.document import Plan, PlanError, uses_nvme, validate_plan
from lazyjax.planning.program.schedule import Operation, Schedule
from lazyjax.specs import ModelSpec
from lazyjax.storage.host import HostStore
from lazyjax.storage.nvme import Drive
from lazyjax.timeline import Timeline

__all__ = ["Executor", "FailedExecutorError", "NonFiniteStepsError", "Schedules", "StepCounts", "StepResult"]

#: Steps in a row with a non-finite loss or gradient norm that end a run.
MOST_NON_FINITE_STEPS = 3

_NON_FINITE = (
    f"{MOST_NON_FINITE_STEPS} steps in a row had a non-finite loss or gradient norm (last: "
    "loss {result.loss}, norm {result.gradient_norm}); none of them changed the parameters. "
    "Lower the learning rate, or check the checkpoint and the data"
)

#: A plan and a sequence length -> its verified schedule (`lazyjax.execution.build`).
Schedules = Callable[[Plan, int], Schedule]


class NonFiniteStepsError(ArithmeticError):
    """Several steps in a row had a non-finite loss or gradient norm; parameters are untouched by them.

    Attributes:
        result: of the last of them.
    """

    def __init__(self, message: str, result: StepResult) -> None:
        super().__init__(message)
        self.result = result


class FailedExecutorError(RuntimeError):
    """An executor was used again after a step of it had failed."""


def check_plan(plan: Plan, kernels: LayerKernels, *, has_drive: bool) -> None:
    """Whether kernels and machine can run a plan.

    Raises:
        PlanError: the plan does not fit the model, the mesh or the machine; names the key.
    """
    template = kernels.template.in_chunks(plan.token_chunk)
    names = [template.kind(index).residual_names for index in range(len(template.spec.layers))]
    validate_plan(plan, template.spec, names)
    if uses_nvme(plan) and not has_drive:
        raise PlanError("layers: the plan uses NVMe; give a folder for it (plan.nvme_folder)")
    if plan.microbatch_rows % kernels.devices:
        raise PlanError(
            f"microbatches: {plan.microbatch_rows} rows each cannot be split over {kernels.devices} devices"
        )


def check_batch(batch: Batch, plan: Plan, spec: ModelSpec) -> None:
    """Whether a step can be trained on a batch.

    Raises:
        ValueError: it has other rows than the plan, no target tokens, or ids outside the vocabulary.
    """
    if batch.rows != plan.batch_rows:
        raise ValueError(f"batch has {batch.rows} rows, the plan is for {plan.batch_rows}")
    if not batch.target_tokens:
        raise ValueError("batch has no target tokens: every position is masked out of the loss")
    batch.check_vocabulary(spec.vocabulary_size)


class Unfinished:
    """What a step leaves behind for the next one, and the error that ended an executor's use.

    Attributes:
        failure: None as long as all went well.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._pending: UpdateStep | None = None
        # State on its way to NVMe, by its operation in the schedule that was walked last.
        self._carried: dict[int, Pending] = {}
        self._walked: Schedule | None = None

    def refuse_after_failure(self) -> None:
        """Raises `FailedExecutorError` if there was a failure."""
        if self.failure is not None:
            raise FailedExecutorError(f"an earlier step failed: {self.failure}") from self.failure

    def leave(self, schedule: Schedule, step: Step) -> None:
        """Keeps what `step`, a walk through `schedule`, did not finish."""
        self._pending, self._carried, self._walked = step.deferred_update, step.left, schedule

    def take(self, schedule: Schedule | None) -> tuple[UpdateStep | None, dict[int, Pending]]:
        """The update that is pending, and writes of state that a walk through `schedule` may wait for.

        Another schedule numbers its operations otherwise: then the writes are waited for here.
        """
        (pending, self._pending), (carried, self._carried) = (self._pending, None), (self._carried, {})
        if schedule is None or schedule is not self._walked:
            self.wait(carried.values())
            carried = {}
        return pending, carried

    def wait(self, tasks: Iterable[Pending]) -> None:
        """Waits for all, also after an error; the first error is raised and ends further steps."""
        errors: list[BaseException] = []
        for task in tasks:
            try:
                task.wait()
            except BaseException as error:
                errors.append(error)
        if errors:
            self.failure = errors[0]
            raise errors[0]

    def settle(self) -> None:
        """Waits for writes of state; an error is raised where the next step waits for them."""
        for task in list(self._carried.values()):
            with contextlib.suppress(Exception):
                task.wait()


@dataclasses.dataclass
class StepCounts:
    """Steps of a run, including those of other processes that it goes on from.

    Attributes:
        applied: steps that changed the parameters.
        skipped: steps that did not, because loss or gradient norm was not finite.
        skipped_in_a_row: of these, since the last applied one.
    """

    applied: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    @property
    def next_step(self) -> int:
        """Number of the next step, from 1."""
        return self.applied + self.skipped + 1

    def add(self, result: StepResult) -> None:
        """Counts a step that was walked.

        Raises:
            NonFiniteStepsError: the third non-finite step in a row.
        """
        self.applied += not result.skipped
        self.skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if self.skipped_in_a_row >= MOST_NON_FINITE_STEPS:
            raise NonFiniteStepsError(_NON_FINITE.format(result=result), result)


class Executor:
    """Trains one model under one plan.

    Not thread-safe; `close()` it when done. After an error of the device, the drive or a thread it
    refuses further steps: gradients of that step are incomplete and are never applied; updates of
    the step before were completed as far as they could be.

    Args:
        schedules: gives the schedules that are walked.
        open_drive: opens the NVMe drive when the first plan needs it; None where there is none.
        queues, recorder: the host threads and the record of events, if not new ones.
        step: optimizer steps that were applied before.

    Attributes:
        counts: of steps; to be set where slabs and optimizer state are another process's.
    """

    def __init__(
        self,
        kernels: LayerKernels,
        copies: Copies,
        schedules: Schedules,
        plan: Plan,
        store: HostStore,
        updates: HostUpdates,
        *,
        clip: ClipRule,
        open_drive: Callable[[], Drive] | None = None,
        queues: HostQueues | None = None,
        recorder: Recorder | None = None,
        step: int = 0,
    ) -> None:
        self.kernels, self.store, self.updates = kernels, store, updates
        self.template = kernels.template
        self._schedules, self._open_drive = schedules, open_drive
        self._drive: Drive | None = None
        self._machinery = Machinery(
            kernels, copies, store, updates, queues or HostQueues(), recorder or Recorder(), clip
        )
        self._forward = ForwardPass(kernels, store, copies)
        self._unfinished = Unfinished()
        self.counts = StepCounts(applied=step)
        self.on_operation: Callable[[Operation], None] = lambda operation: None
        try:
            self.set_plan(plan)
        except BaseException:
            self.close()
            raise

    def set_plan(self, plan: Plan) -> None:
        """Uses another plan from the next step on.

        Raises:
            PlanError: the plan does not fit the model, the mesh or the machine.
            NvmeError: the drive failed.
            In either case the plan before stays in use, and the optimizer state where it was.
        """
        check_plan(plan, self.kernels, has_drive=self._open_drive is not None)
        schedule = self._schedules(plan, plan.sequence_length)
        self.flush()
        if uses_nvme(plan) and self._drive is None and self._open_drive is not None:
            self._drive = self._open_drive()
        self.updates.place([layer.on_nvme for layer in plan.layers], self._drive)
        self.plan, self.schedule = plan, schedule

    def train_step(self, batch: Batch, learning_rate: float) -> StepResult:
        """One step: loss and gradients of `batch`, then the update (or its deferral).

        Raises:
            ValueError: see `check_batch`; nothing ran.
            NonFiniteStepsError: the third non-finite step in a row.
            FailedExecutorError: an earlier step failed.
        """
        self._unfinished.refuse_after_failure()
        self.store.settle()
        check_batch(batch, self.plan, self.template.spec)
        start = time.perf_counter()
        schedule = self._schedules(self.plan, batch.sequence_length)
        pending, carried = self._unfinished.take(schedule)
        self._machinery.recorder.begin_step(self.counts.next_step)
        step = Step(
            self._machinery, self._drive, schedule, batch, learning_rate,
            count=self.counts.applied + 1, pending=pending, carried=carried, on_operation=self.on_operation,
        )  # fmt: skip
        try:
            step.run()
        except BaseException as error:
            self._unfinished.failure = error
            step.walk.settle()
            raise
        self._unfinished.leave(schedule, step)
        result = step.result(time.perf_counter() - start)
        self.counts.add(result)
        return result

    def flush(self) -> None:
        """Applies the update that is still pending, if any, and waits for it and its state's writes."""
        pending, carried = self._unfinished.take(None)
        assert not carried
        if pending is not None:
            m = self._machinery
            buffers = StepBuffers(m.copies.device_bytes)
            work = HostWork(
                m.copies, m.updates, self._drive, m.queues, m.recorder, buffers, pending,
                deferred=self.plan.update == "deferred",
            )  # fmt: skip
            self._unfinished.wait(work.update_all(self.schedule))

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """Sum of -log p over the batch's target tokens by their weights, and the sum of these.

        Flushes pending updates.

        Raises:
            ValueError: ids outside the vocabulary; nothing ran.
        """
        batch.check_vocabulary(self.template.spec.vocabulary_size)
        self.flush()
        return self._forward.loss_sum(batch, self.plan), batch.target_weight

    def logits(self, batch: Batch) -> np.ndarray:
        """fp32 logits [B, T, V] of a short batch; flushes pending updates.

        Raises:
            ValueError: ids outside the vocabulary; nothing ran.
        """
        batch.check_vocabulary(self.template.spec.vocabulary_size)
        self.flush()
        return self._forward.logits(batch, self.plan)

    def timeline(self) -> Timeline:
        """Events and memory of the last step (of the one running, from another thread)."""
        self._unfinished.settle()
        return self._machinery.recorder.timeline()

    def close(self) -> None:
        """Applies what is pending, unless a step failed, stops all threads and removes the drive's files.

        All of it is done whatever fails; an error is raised at the end.
        """
        with contextlib.ExitStack() as stack:
            if self._drive is not None:
                stack.callback(self._drive.close)
            stack.callback(self._machinery.recorder.close)
            stack.callback(self._machinery.queues.close)
            if self._unfinished.failure is None:
                stack.callback(self.flush)
