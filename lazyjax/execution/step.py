"""One training step: the walk, and the decision that lies in its middle or at its end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from lazyjax.batch import Batch
from lazyjax.execution.buffers import StepBuffers
from lazyjax.execution.copy_work import CopyWork
from lazyjax.execution.device_work import DeviceWork
from lazyjax.execution.host_queues import HostQueues
from lazyjax.execution.host_update import HostUpdates, UpdateStep
from lazyjax.execution.host_work import HostWork
from lazyjax.execution.interfaces import Copies, LayerKernels
from lazyjax.execution.pending import Pending
from lazyjax.execution.recorder import Recorder
from lazyjax.execution.walk import Walk, handlers_of
from lazyjax.optim.clipping import ClipRule, global_norm
from lazyjax.planning.program.schedule import STATE_ACTIONS, Operation, Schedule
from lazyjax.storage.host import HostStore
from lazyjax.storage.nvme import Drive


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Loss, norm, counts and times of one training step.

    Attributes:
        loss: mean -log p over the batch's target tokens.
        gradient_norm: global norm before clipping.
        skipped: the loss or the norm was not finite; nothing was or will be updated.
        target_tokens, real_tokens, padded_tokens: counted, not padding, and all tokens.
        seconds: wall time of the step.
        peak_device_bytes: most bytes the executor held on one device (without XLA's scratch).
    """

    loss: float
    gradient_norm: float
    skipped: bool
    target_tokens: int
    real_tokens: int
    padded_tokens: int
    seconds: float
    peak_device_bytes: int


class Machinery(NamedTuple):
    """The parts that every step works with."""

    kernels: LayerKernels
    copies: Copies
    store: HostStore
    updates: HostUpdates
    queues: HostQueues
    recorder: Recorder
    clip: ClipRule


class Step:
    """One walk through a schedule, with the update that it ends in or leaves behind.

    Args:
        pending: the update of the step before, if it was deferred.
        carried: state of the step before on its way to NVMe.
        count: optimizer steps applied when this one is.

    Attributes:
        deferred_update: what the next step has to apply.
        left: the same as `carried`, for the step after.
    """

    def __init__(
        self,
        machinery: Machinery,
        drive: Drive | None,
        schedule: Schedule,
        batch: Batch,
        learning_rate: float,
        *,
        count: int,
        pending: UpdateStep | None,
        carried: Mapping[int, Pending],
        on_operation: Callable[[Operation], None],
    ) -> None:
        self._machinery, self._batch = machinery, batch
        self._learning_rate, self._step_count = learning_rate, count
        self._immediate = schedule.plan.update == "immediate"
        self._buffers = StepBuffers(machinery.copies.device_bytes)
        padded = batch.with_rows(schedule.plan.executed_rows)
        copy_work = CopyWork(
            machinery.copies, machinery.store, machinery.queues, self._buffers, schedule, padded
        )
        self._device_work = DeviceWork(machinery.kernels, machinery.copies, self._buffers, schedule, padded)
        self._host_work = HostWork(
            machinery.copies, machinery.updates, drive, machinery.queues, machinery.recorder, self._buffers,
            pending, deferred=not self._immediate,
        )  # fmt: skip
        self.walk = Walk(
            schedule,
            handlers_of(copy_work, self._device_work, self._host_work),
            self._buffers,
            machinery.recorder,
            carried=carried,
            issued=on_operation,
        )
        self._decided = False
        self.skipped = False
        self.loss = self.gradient_norm = math.nan
        self.deferred_update: UpdateStep | None = None
        self.left: dict[int, Pending] = {}

    def run(self) -> None:
        """Does the step and waits for everything that belongs to it."""
        # Given here and not kept by the walk: a cycle would hold arrays until the collector comes by.
        self.walk.run(self._before)
        update = None if self._decided else self._decide()
        self.left = self.walk.finish_all()
        self._buffers.clear()
        # Only now are the gradients in their slabs.
        self.deferred_update = update

    def result(self, seconds: float) -> StepResult:
        """The figures to report after `run`, which took `seconds`."""
        return StepResult(
            loss=self.loss,
            gradient_norm=self.gradient_norm,
            skipped=self.skipped,
            target_tokens=self._batch.target_tokens,
            real_tokens=self._batch.real_tokens,
            padded_tokens=self._batch.rows * self._batch.sequence_length,
            seconds=seconds,
            peak_device_bytes=self._buffers.peak_bytes,
        )

    def _before(self, operation: Operation) -> None:
        if self._immediate and not self._decided and operation.action in STATE_ACTIONS:
            self._host_work.step = self._decide()

    def _decide(self) -> UpdateStep | None:
        """Reads loss and norms (the step's one wait for the device) and fixes the update, if any."""
        self._decided = True
        work, copies = self._device_work, self._machinery.copies
        squared_norms = [work.squared_norms[layer] for layer in range(len(work.squared_norms))]
        scalars = copies.read_scalars([*work.losses, *squared_norms])
        losses, by_layer = scalars[: len(work.losses)], scalars[len(work.losses) :]
        self.loss = float(np.sum(np.asarray(losses, np.float64)))
        self.gradient_norm = global_norm(by_layer)
        if not (math.isfinite(self.loss) and math.isfinite(self.gradient_norm)):
            self.skipped = True
            return None
        scales = self._machinery.clip.scales(by_layer)
        return UpdateStep(self._learning_rate, self._step_count, scales)
