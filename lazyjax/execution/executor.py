"""Walks a schedule and does the work.

The executor holds no policy: it issues the operations of the schedule one by one, keeps the
buffers that the schedule says exist, and drops those it says are free. What it adds is
asynchrony: device work is only dispatched, host work runs on threads, and the walk blocks in
just four places: on a layer's own update before its fetch, on transfers that the schedule waits
for, one window behind the device (so that it cannot run ahead of the memory), and once at the
end of the step for the loss and the norms.

Gradients stay in their host slabs until the update, which is submitted when the global norm is
known; with deferred updates that is under the next step's forward pass.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from lazyjax.batch import Batch
from lazyjax.execution.forward import ForwardPass
from lazyjax.execution.host_update import HostUpdates, UpdateStep
from lazyjax.execution.kernels import DeviceBatch, DeviceSlab, GradientSlab, Kernels
from lazyjax.execution.recorder import Recorder
from lazyjax.execution.transfers import Transfers, copy_into_slab, device_bytes
from lazyjax.optim.base import HostOptimizer
from lazyjax.optim.clipping import ClipRule, global_norm
from lazyjax.planning.costs.sizes import model_sizes
from lazyjax.planning.plan.document import Plan, PlanError, validate_plan
from lazyjax.planning.program.schedule import (
    Action,
    Buffer,
    BufferRole,
    Operation,
    Place,
    Schedule,
    build_schedule,
)
from lazyjax.specs import Tier
from lazyjax.storage.host import HostStore
from lazyjax.storage.nvme import NvmeStore
from lazyjax.timeline import Resource, Timeline

#: Steps in a row with a non-finite loss or gradient norm that end a run.
MOST_NON_FINITE_STEPS = 3


class NonFiniteStepsError(ArithmeticError):
    """Several steps in a row had a non-finite loss or gradient norm; parameters are untouched by them.

    Attributes:
        result: of the last of them.
    """

    def __init__(self, message: str, result: StepResult) -> None:
        super().__init__(message)
        self.result = result


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step reports.

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


class Executor:
    """Trains one model under one plan.

    Not thread-safe; `close()` it when done. After an exception from the device or a thread the
    executor must not be used further: slabs of layers that were not updated are unchanged.
    """

    def __init__(
        self,
        kernels: Kernels,
        plan: Plan,
        store: HostStore,
        updates: HostUpdates,
        *,
        clip: ClipRule,
        nvme_folder: pathlib.Path | None = None,
        step: int = 0,
    ) -> None:
        self.kernels, self.store, self.updates = kernels, store, updates
        self.template = kernels.template
        self._clip = clip
        self._transfers = Transfers(kernels.sharded, kernels.compute_dtype)
        self._recorder = Recorder()
        self._copies = ThreadPoolExecutor(2, thread_name_prefix="gradient-copy")
        self._nvme_folder = nvme_folder
        self._nvme: NvmeStore | None = None
        self._forward = ForwardPass(kernels, store, self._transfers)
        self.applied_steps = step
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self._steps = 0
        self._pending: UpdateStep | None = None
        self._step_state: _StepState | None = None
        self.on_operation: Callable[[Operation], None] | None = None
        self.set_plan(plan)

    def set_plan(self, plan: Plan) -> None:
        """Uses another plan from the next step on.

        Raises:
            PlanError: the plan does not fit the model, the mesh or the machine.
        """
        names = [self.template.kind(i).residual_names for i in range(len(self.template.spec.layers))]
        validate_plan(plan, self.template.spec, names)
        for index, layer in enumerate(plan.layers):
            uses_nvme = (
                layer.boundary.tier is Tier.NVME or Tier.NVME in layer.saved.values() or layer.state == "nvme"
            )
            if uses_nvme and self._nvme_folder is None:
                raise PlanError(
                    f"layers.{index}: the plan uses NVMe; give a folder for it (plan.nvme_folder)"
                )
        if plan.microbatch_rows % self.kernels.mesh.size:
            raise PlanError(
                f"microbatches: {plan.microbatch_rows} rows each cannot be split over "
                f"{self.kernels.mesh.size} devices"
            )
        self.flush()
        self.plan = plan
        self.schedule = self._schedule(plan.sequence_length)
        if self._nvme_folder is not None and self._nvme is None:
            self._nvme = NvmeStore(self._nvme_folder)
        on_nvme = [index for index, layer in enumerate(plan.layers) if layer.state == "nvme"]
        self.updates.place_states(on_nvme, self._nvme)

    @functools.lru_cache(maxsize=32)  # noqa: B019 - one executor per process, a few sequence lengths
    def _sized_schedule(self, plan: str, sequence_length: int) -> Schedule:
        parsed = Plan.model_validate_json(plan)
        sizes = model_sizes(
            self.template,
            rows=parsed.microbatch_rows,
            sequence_length=sequence_length,
            compute_dtype=self.kernels.compute_dtype,
            gradient_dtype=self.kernels.gradient_dtype,
            devices=self.kernels.mesh.size,
        )
        return build_schedule(parsed, sizes)

    def _schedule(self, sequence_length: int) -> Schedule:
        return self._sized_schedule(self.plan.model_dump_json(), sequence_length)

    def train_step(self, batch: Batch, learning_rate: float) -> StepResult:
        """One step: loss and gradients of `batch`, then the update (or its deferral).

        Raises:
            ValueError: the batch has other rows than the plan, no target tokens, or ids outside the
                vocabulary; nothing ran.
            NonFiniteStepsError: the third non-finite step in a row.
        """
        if batch.rows != self.plan.rows:
            raise ValueError(f"batch has {batch.rows} rows, the plan is for {self.plan.rows}")
        targets = batch.target_tokens
        if not targets:
            raise ValueError("batch has no target tokens: every position is masked out of the loss")
        batch.check_vocabulary(self.template.spec.vocabulary_size)
        start = time.perf_counter()
        self._steps += 1
        self._recorder.begin_step(self._steps)
        pending, self._pending = self._pending, None
        executed = batch.with_rows(self.plan.executed_rows)
        state = _StepState(
            self, self._schedule(batch.sequence_length), executed, learning_rate, pending, targets
        )
        state.walk()
        if not state.decided:
            self._pending = state.decide()
        state.finish()
        result = StepResult(
            loss=state.loss_value,
            gradient_norm=state.norm_value,
            skipped=state.skipped,
            target_tokens=targets,
            real_tokens=batch.real_tokens,
            padded_tokens=batch.rows * batch.sequence_length,
            seconds=time.perf_counter() - start,
            peak_device_bytes=state.peak_bytes,
        )
        self._count(result)
        return result

    def _count(self, result: StepResult) -> None:
        if not result.skipped:
            self._skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MOST_NON_FINITE_STEPS:
            raise NonFiniteStepsError(
                f"{MOST_NON_FINITE_STEPS} steps in a row had a non-finite loss or gradient norm (last: "
                f"loss {result.loss}, norm {result.gradient_norm}); none of them changed the parameters. "
                "Lower the learning rate, or check the checkpoint and the data",
                result,
            )

    def flush(self) -> None:
        """Applies the update that is still pending, if any, and waits for it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        futures = [
            self.updates.submit(layer, pending, lambda kind, start, end: None)
            for layer in range(len(self.store.layers))
        ]
        for future in futures:
            future.result()

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Sum of -log p over the batch's target tokens, and their number; flushes pending updates.

        Raises:
            ValueError: ids outside the vocabulary; nothing ran.
        """
        batch.check_vocabulary(self.template.spec.vocabulary_size)
        self.flush()
        # As many rows at once as in training; a batch of other rows is cut by the same size.
        rows = min(batch.rows, self.plan.microbatch_rows)
        count = -(-batch.rows // rows)
        return self._forward.loss_sum(batch.with_rows(count * rows), count), batch.target_tokens

    def logits(self, batch: Batch) -> np.ndarray:
        """fp32 logits [B, T, V] of a short batch; flushes pending updates.

        Raises:
            ValueError: ids outside the vocabulary; nothing ran.
        """
        batch.check_vocabulary(self.template.spec.vocabulary_size)
        self.flush()
        return self._forward.logits(batch)

    def timeline(self) -> Timeline:
        """Events and memory of the last step (of the one running, from another thread)."""
        return self._recorder.timeline()

    def close(self) -> None:
        """Applies what is pending and stops all threads."""
        self.flush()
        self.updates.close()
        self._recorder.close()
        self._copies.shutdown(wait=True)
        if self._nvme is not None:
            self._nvme.close()
            self._nvme = None


class _StepState:
    """One walk through the schedule: the buffers that exist at this point of the list."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        batch: Batch,
        learning_rate: float,
        pending: UpdateStep | None,
        target_tokens: int,
    ) -> None:
        self.executor, self.schedule, self.batch = executor, schedule, batch
        self.kernels, self.transfers = executor.kernels, executor._transfers
        self.recorder = executor._recorder
        self.learning_rate, self.pending = learning_rate, pending
        self.deferred = executor.plan.update == "deferred"
        self.scale = jax.device_put(np.float32(1.0 / target_tokens), self.kernels.replicated)
        self.device: dict[Buffer, Any] = {}
        self.host: dict[Buffer, Any] = {}
        self.nvme: dict[Buffer, tuple[tuple[int, ...], Any]] = {}
        self.waitable: dict[int, Any] = {}
        self.state_moves = {
            (operation.layer, operation.action.value): operation
            for operation in schedule.operations
            if operation.action in (Action.LOAD_STATE, Action.SPILL_STATE)
        }
        self.to_free: dict[int, tuple[Place, ...]] = {}
        self.window_tokens: collections.deque[tuple[int, Any]] = collections.deque()
        self.losses: list[Any] = []
        self.squared_norms: dict[int, Any] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.decided = False
        self.skipped = False
        self.loss_value = self.norm_value = math.nan
        self.handlers: dict[Action, Callable[[Operation], Any]] = {
            Action.FETCH: self._fetch,
            Action.FORWARD: self._forward,
            Action.RECOMPUTE: self._forward,
            Action.LOSS: self._loss,
            Action.BACKWARD: self._backward,
            Action.OFFLOAD: self._offload,
            Action.RELOAD: self._reload,
            Action.SPILL: self._spill,
            Action.LOAD: self._load,
            Action.GRADIENT_OUT: self._gradient_out,
            Action.UPDATE: self._update,
        }

    def walk(self) -> None:
        """Issues every operation, in order."""
        for operation in self.schedule.operations:
            if operation.action in (Action.LOAD_STATE, Action.SPILL_STATE):
                # The update's own worker moves the state.
                self._account(operation)
                continue
            self._wait_for(operation)
            result = self.handlers[operation.action](operation)
            self._account(operation)
            if operation.resource is Resource.COMPUTE:
                self._free(operation.frees)
            elif operation.frees:
                self.to_free[operation.index] = operation.frees
            if result is not None:
                self.recorder.issued(operation, result)

    def finish(self) -> None:
        """Waits for host work that belongs to this step."""
        for index in list(self.waitable):
            self._finish_transfer(index)
        self.device.clear()
        self.host.clear()

    # Waiting and freeing

    def _wait_for(self, operation: Operation) -> None:
        for waited in operation.waits:
            self._finish_transfer(waited)
        if operation.action is Action.FETCH:
            # Stay at most one window ahead of the device: it then always has work queued, and
            # memory that the list counts as free is free.
            while len(self.window_tokens) > 1:
                jax.block_until_ready(self.window_tokens.popleft()[1])

    def _finish_transfer(self, index: int) -> None:
        """Waits where the host must, then frees what the transfer held."""
        result = self.waitable.pop(index, None)
        if isinstance(result, Future) or hasattr(result, "result"):
            result.result()
        elif result is not None:
            jax.block_until_ready(result)
        self._free(self.to_free.pop(index, ()))

    def _free(self, places: tuple[Place, ...]) -> None:
        for buffer, tier in places:
            if tier is Tier.DEVICE:
                gone = self.device.pop(buffer)
                self.live_bytes -= 0 if gone is None else device_bytes(gone)
            elif tier is Tier.HOST:
                del self.host[buffer]
            else:
                del self.nvme[buffer]

    def _account(self, operation: Operation) -> None:
        if operation.allocates:
            for place, _ in operation.allocates:
                if place.tier is Tier.DEVICE:
                    self.live_bytes += device_bytes(self.device[place.buffer])
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.recorder.memory(Tier.DEVICE.value, self.live_bytes)
        if self.executor.on_operation is not None:
            self.executor.on_operation(operation)

    def _keep_token(self, operation: Operation, token: Any) -> Any:
        if self.window_tokens and self.window_tokens[-1][0] == operation.window:
            self.window_tokens.pop()
        self.window_tokens.append((operation.window, token))
        return token

    # Handlers: one per kind of operation. Each returns what becomes ready when it is done.

    def _fetch(self, operation: Operation) -> Any:
        slab = self.transfers.slab_to_device(self.executor.store.layers[operation.layer])
        self.device[Buffer(BufferRole.PARAMETERS, operation.layer)] = slab
        return slab

    def _names(self, operation: Operation) -> tuple[str, ...]:
        kind = self.executor.template.kind(operation.layer)
        return tuple(name for name in kind.residual_names if name in operation.saved)

    def _microbatch(self, operation: Operation) -> tuple[int, DeviceBatch]:
        assert operation.microbatch is not None
        return operation.microbatch, self.device[Buffer(BufferRole.BATCH, 0, operation.microbatch)]

    def _input(self, layer: int, microbatch: int) -> Any:
        if layer == 0:
            return self.device[Buffer(BufferRole.BATCH, 0, microbatch)].tokens_BT
        return self.device[Buffer(BufferRole.INPUT, layer, microbatch)]

    def _forward(self, operation: Operation) -> Any:
        layer, (microbatch, batch) = operation.layer, self._microbatch(operation)
        names = self._names(operation)
        kernel = self.kernels.forward(self.executor.template.kind(layer), names)
        slab = self.device[Buffer(BufferRole.PARAMETERS, layer)]
        y, residuals, token = kernel(slab, self._input(layer, microbatch), batch.context)
        if any(place.buffer.role is BufferRole.INPUT for place, _ in operation.allocates):
            self.device[Buffer(BufferRole.INPUT, layer + 1, microbatch)] = y
        for name, residual in zip(names, residuals, strict=True):
            self.device[Buffer(BufferRole.RESIDUAL, layer, microbatch, name)] = residual
        return self._keep_token(operation, token)

    def _loss(self, operation: Operation) -> Any:
        layer, (microbatch, batch) = operation.layer, self._microbatch(operation)
        tied = self.schedule.sizes.tied
        accumulator, table = Buffer(BufferRole.ACCUMULATOR, layer), Buffer(BufferRole.ACCUMULATOR, 0)
        slab: DeviceSlab = self.device[Buffer(BufferRole.PARAMETERS, layer)]
        loss, x_gradient, result, table_result, token = self.kernels.loss(
            operation.accumulates, operation.last
        )(
            self.device[accumulator] if operation.accumulates else None,
            self.device[table] if tied and operation.accumulates else None,
            slab,
            self.device[Buffer(BufferRole.PARAMETERS, 0)] if tied else None,
            self._input(layer, microbatch),
            batch,
            self.scale,
        )
        self.losses.append(loss)
        self.device[Buffer(BufferRole.INPUT_GRADIENT, layer, microbatch)] = x_gradient
        if tied:
            self.device[table] = table_result
        self._store_gradient(operation, result)
        return self._keep_token(operation, token)

    def _backward(self, operation: Operation) -> Any:
        layer, (microbatch, batch) = operation.layer, self._microbatch(operation)
        y_gradient = self.device[Buffer(BufferRole.INPUT_GRADIENT, layer + 1, microbatch)]
        accumulator = self.device[Buffer(BufferRole.ACCUMULATOR, layer)] if operation.accumulates else None
        if layer == 0:
            kernel = self.kernels.embed_backward(operation.accumulates, operation.last)
            result, token = kernel(accumulator, batch.tokens_BT, y_gradient)
        else:
            names = self._names(operation)
            kernel = self.kernels.backward(
                self.executor.template.kind(layer), names, operation.accumulates, operation.last
            )
            x_gradient, result, token = kernel(
                accumulator,
                self.device[Buffer(BufferRole.PARAMETERS, layer)],
                self._input(layer, microbatch),
                batch.context,
                tuple(self.device[Buffer(BufferRole.RESIDUAL, layer, microbatch, name)] for name in names),
                y_gradient,
            )
            self.device[Buffer(BufferRole.INPUT_GRADIENT, layer, microbatch)] = x_gradient
        self._store_gradient(operation, result)
        return self._keep_token(operation, token)

    def _store_gradient(self, operation: Operation, result: Any) -> None:
        accumulator = Buffer(BufferRole.ACCUMULATOR, operation.layer)
        if not operation.last:
            self.device[accumulator] = result
            return
        assert isinstance(result, GradientSlab)
        self.device[Buffer(BufferRole.GRADIENT, operation.layer)] = result.gradient_N
        self.squared_norms[operation.layer] = result.squared_norm

    def _offload(self, operation: Operation) -> Any:
        copies = {buffer: self.transfers.to_host(self.device[buffer]) for buffer in operation.reads}
        self.host |= copies
        self.waitable[operation.index] = list(copies.values())
        return self.waitable[operation.index]

    def _reload(self, operation: Operation) -> Any:
        rows = self.executor.plan.microbatch_rows
        for buffer in operation.reads:
            if buffer.role is BufferRole.BATCH:
                part = self.batch.slice_rows(buffer.microbatch * rows, (buffer.microbatch + 1) * rows)
                self.device[buffer] = self.transfers.batch_to_device(part)
            else:
                self.device[buffer] = self.transfers.to_device(self.host[buffer])
        return [self.device[buffer] for buffer in operation.reads]

    def _spill(self, operation: Operation) -> Any:
        nvme = self.executor._nvme
        assert nvme is not None
        writes = []
        start = time.perf_counter()
        for place, _ in operation.allocates:
            array = self.host[place.buffer]
            raw = np.asarray(jax.device_get(array)).reshape(-1).view(np.uint8)
            writes.append(nvme.write(_key(place.buffer), raw))
            self.nvme[place.buffer] = (array.shape, array.dtype)
        self.waitable[operation.index] = self.executor._copies.submit(
            self._time_all, operation, writes, start
        )
        return None

    def _load(self, operation: Operation) -> Any:
        nvme = self.executor._nvme
        assert nvme is not None
        start = time.perf_counter()
        reads, targets = [], {}
        for place, size in operation.allocates:
            targets[place.buffer] = np.empty(size * self.kernels.mesh.size, np.uint8)
            reads.append(nvme.read(_key(place.buffer), targets[place.buffer]))
        self.waitable[operation.index] = self.executor._copies.submit(self._time_all, operation, reads, start)
        self.waitable[operation.index].result()
        for buffer, raw in targets.items():
            self.host[buffer] = self.transfers.from_bytes(raw, *self.nvme[buffer])
        return None

    def _time_all(self, operation: Operation, pending: list[Any], start: float) -> None:
        for entry in pending:
            entry.result()
        self.recorder.finished(operation, start, time.perf_counter())

    def _gradient_out(self, operation: Operation) -> Any:
        delivered = self.transfers.to_host(self.device[Buffer(BufferRole.GRADIENT, operation.layer)])
        target = self.executor.store.layers[operation.layer].gradient
        future = self.executor._copies.submit(copy_into_slab, delivered, target)
        self.waitable[operation.index] = future
        return future

    def _update(self, operation: Operation) -> None:
        if not self.deferred and not self.decided:
            for waited in operation.waits:
                self._finish_transfer(waited)
            self.pending = self.decide()
        if self.pending is not None:
            timed = functools.partial(self._update_finished, operation)
            self.waitable[operation.index] = self.executor.updates.submit(
                operation.layer, self.pending, timed
            )

    def _update_finished(self, operation: Operation, kind: str, start: float, end: float) -> None:
        if kind != Action.UPDATE.value:
            operation = self.state_moves[operation.layer, kind]
        self.recorder.finished(operation, start, end)

    # The end of the step

    def decide(self) -> UpdateStep | None:
        """Reads loss and norms (the step's one wait for the device) and fixes the update, if any."""
        self.decided = True
        losses, squared_norms = jax.device_get((self.losses, self.squared_norms))
        self.loss_value = float(np.sum(np.asarray(losses, np.float64)))
        by_layer = [float(squared_norms[layer]) for layer in range(len(squared_norms))]
        self.norm_value = global_norm(by_layer)
        if not (math.isfinite(self.loss_value) and math.isfinite(self.norm_value)):
            self.skipped = True
            return None
        self.executor.applied_steps += 1
        scales = self.executor._clip.scales(by_layer)
        return UpdateStep(self.learning_rate, self.executor.applied_steps, scales)


def _key(buffer: Buffer) -> str:
    return f"{buffer.role.value}-{buffer.layer}-{buffer.microbatch}-{buffer.name or 'x'}"


def build_executor(
    template: Any,
    plan: Plan,
    store: HostStore,
    optimizer: HostOptimizer,
    *,
    compute_dtype: str = "bfloat16",
    clip: ClipRule,
    mesh: Any = None,
    head_chunk_tokens: int = 1024,
    nvme_folder: pathlib.Path | None = None,
) -> Executor:
    """Puts an executor together from a template, a plan, filled slabs and an optimizer."""
    from lazyjax.execution.kernels import data_mesh

    kernels = Kernels(
        template=template,
        mesh=mesh if mesh is not None else data_mesh(),
        compute_dtype=compute_dtype,
        gradient_dtype=str(store.layers[0].gradient.dtype),
        head_chunk_tokens=head_chunk_tokens,
    )
    return Executor(kernels, plan, store, HostUpdates(store, optimizer), clip=clip, nvme_folder=nvme_folder)
