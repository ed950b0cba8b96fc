"""What the executor promises beside the right numbers: memory, skipping, deferral, records."""

from __future__ import annotations

import dataclasses
import gc
import math
import pathlib

import jax
import numpy as np
import pytest

from lazyjax.batch import Batch
from lazyjax.execution import walk
from lazyjax.execution.executor import Executor, NonFiniteStepsError
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.planning.costs.sizes import BATCH_BYTES_PER_TOKEN
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan, PlanError
from lazyjax.planning.program.schedule import STATE_ACTIONS, Operation
from lazyjax.specs import Tier
from lazyjax.storage.host import HostStore
from tests import reference, tiny
from tests.execution.test_oracle import LENGTH, ROWS, assert_close, executor_for, mixed_plan

MODEL = tiny.template("qwen2", tied=False)
#: Its blocks fill their slabs to 1 %, also those over two devices: tensors that are cut out of a slab leave
#: its gaps behind.
WIDE = build_template(
    MODEL.config.model_copy(update={"name": "wide", "hidden_size": 128, "intermediate_size": 562})
)
BATCH = reference.random_batch(0, ROWS, LENGTH, tiny.VOCABULARY)


def host_plan(model: ModelTemplate, rows: int, microbatches: int) -> Plan:
    """Boundaries and waiting activations on the host: device memory depends on neither depth nor batch."""
    inner = [LayerPlan(boundary=Boundary.HOST)] * (len(model.spec.layers) - 2)
    return Plan(
        model=model.spec.name,
        planner="host",
        batch_rows=rows,
        sequence_length=LENGTH,
        microbatches=microbatches,
        interlayer_home="host",
        layers=(LayerPlan(), *inner, LayerPlan()),
    )


def live_device_bytes() -> int:
    """What JAX itself says is allocated in device memory, on one device."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.live_arrays()
        if array.sharding.memory_kind == "device" and array.ndim > 0
    )


@pytest.mark.parametrize(("microbatches", "devices"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_live_bytes_follow_the_schedule(microbatches: int, devices: int, tmp_path: pathlib.Path) -> None:
    """After every operation, the arrays alive are those the schedule lists, as JAX counts them."""
    plan = mixed_plan(WIDE, microbatches, interlayer_home="host" if microbatches == 3 else "device")
    with executor_for(WIDE, plan, tmp_path, devices) as (executor, _):
        executor.train_step(BATCH, 1e-3)
        # What earlier tests left in cycles would vanish at a moment of the collector's choice.
        gc.collect()
        before = live_device_bytes()
        predicted = {index: live[Tier.DEVICE] for index, live in executor.schedule.live_bytes()}
        measured: dict[int, int] = {}

        def look(operation: Operation) -> None:
            if operation.action in STATE_ACTIONS:
                return  # touches nothing on the device, and is issued before its turn
            executor.timeline()  # waits until nothing is held only because it is being timed
            measured[operation.index] = live_device_bytes() - before

        executor.on_operation = look
        result = executor.train_step(BATCH, 1e-3)
    assert len(measured) > len(predicted) / 2
    for index in measured:
        expected = predicted[index]
        assert measured[index] == pytest.approx(expected, abs=0.02 * max(predicted.values())), (
            executor.schedule.operations[index]
        )
    peak = executor.schedule.peak_bytes()[Tier.DEVICE]
    assert max(measured.values()) == pytest.approx(peak, rel=0.02)
    assert result.peak_device_bytes == pytest.approx(peak, rel=0.02)


def test_a_plan_in_use_is_not_written_down_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are its waits worked out again: both take longer than an operation may."""
    with executor_for(MODEL, mixed_plan(MODEL, 3), tmp_path) as (executor, _):
        executor.train_step(BATCH, 1e-3)

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("done again")

        monkeypatch.setattr(Plan, "model_dump_json", refuse)
        monkeypatch.setattr(walk, "prepare", refuse)
        executor.train_step(BATCH, 1e-3)


def peak_bytes(model: ModelTemplate, rows: int, microbatches: int, folder: pathlib.Path) -> int:
    plan = host_plan(model, rows, microbatches)
    with executor_for(model, plan, folder) as (executor, _):
        return executor.train_step(
            reference.random_batch(0, rows, LENGTH, tiny.VOCABULARY), 1e-3
        ).peak_device_bytes


def test_peak_does_not_grow_with_depth_or_batch(tmp_path: pathlib.Path) -> None:
    deeper = tiny.template("qwen2", tied=False, blocks=11)
    peak = peak_bytes(MODEL, 4 * 4, 4, tmp_path)
    assert peak_bytes(deeper, 4 * 4, 4, tmp_path) == peak
    # Only the batch arrays themselves stay on the device.
    batch_bytes = 4 * LENGTH * BATCH_BYTES_PER_TOKEN
    assert peak_bytes(MODEL, 4 * 12, 12, tmp_path) == peak + (12 - 4) * batch_bytes


def snapshot(executor: Executor, store: HostStore) -> list[bytes]:
    slabs = [array.tobytes() for layer in store.layers for array in (layer.hi, layer.lo)]
    states = [executor.updates.read_state(layer) for layer in range(len(store.layers))]
    return slabs + [array.tobytes() for state in states for array in state.values()]


def test_deferred_update_is_bit_identical_to_immediate(tmp_path: pathlib.Path) -> None:
    results = []
    for update in ("deferred", "immediate"):
        with executor_for(MODEL, mixed_plan(MODEL, 3, update=update), tmp_path) as (executor, store):
            losses = [executor.train_step(BATCH, 1e-2).loss for _ in range(3)]
            executor.flush()
            results.append((losses, snapshot(executor, store)))
    assert results[0] == results[1]
    assert results[0][0][2] < results[0][0][0]


def test_deferred_update_really_waits(tmp_path: pathlib.Path) -> None:
    """Nothing has been written when the step returns; flushing writes it."""
    with executor_for(MODEL, mixed_plan(MODEL, 1), tmp_path) as (executor, store):
        before = snapshot(executor, store)
        executor.train_step(BATCH, 1e-2)
        assert snapshot(executor, store) == before
        executor.flush()
        assert snapshot(executor, store) != before


@pytest.mark.parametrize("update", ["deferred", "immediate"])
def test_non_finite_steps_change_nothing_and_three_abort(update: str, tmp_path: pathlib.Path) -> None:
    with executor_for(MODEL, mixed_plan(MODEL, 3, update=update), tmp_path) as (executor, store):
        executor.train_step(BATCH, 1e-2)
        executor.flush()
        name = MODEL.spec.layers[3].parameters[0].name
        good = store.layers[3].master(name)
        bad = good.copy()
        bad.flat[0] = np.inf
        store.layers[3].set_master(name, bad)
        before = snapshot(executor, store)
        assert executor.train_step(BATCH, 1e-2).skipped
        assert executor.train_step(BATCH, 1e-2).skipped
        assert executor.counts.skipped == 2
        with pytest.raises(NonFiniteStepsError, match="3 steps in a row"):
            executor.train_step(BATCH, 1e-2)
        executor.flush()
        assert snapshot(executor, store) == before
        assert executor.counts.applied == 1
        store.layers[3].set_master(name, good)
        assert not executor.train_step(BATCH, 1e-2).skipped
        assert executor.counts.applied == 2


def test_evaluation_and_logits_equal_the_oracle(tmp_path: pathlib.Path) -> None:
    for model in (MODEL, tiny.template("qwen3", tied=True)):
        parameters = reference.random_parameters(model, seed=1)
        with executor_for(model, mixed_plan(model, 3), tmp_path) as (executor, _):
            total, targets = executor.evaluate(BATCH)
            assert total / targets == pytest.approx(reference.loss(model, parameters, BATCH), rel=1e-6)
            expected = reference.logits(model, parameters, BATCH)
            np.testing.assert_allclose(executor.logits(BATCH), expected, rtol=1e-4, atol=1e-5)


def test_evaluation_sees_the_pending_update(tmp_path: pathlib.Path) -> None:
    with executor_for(MODEL, mixed_plan(MODEL, 1), tmp_path) as (executor, _):
        before, _ = executor.evaluate(BATCH)
        executor.train_step(BATCH, 1e-2)
        after, _ = executor.evaluate(BATCH)
        assert after < before


def test_every_operation_leaves_an_event(tmp_path: pathlib.Path) -> None:
    with executor_for(MODEL, mixed_plan(MODEL, 3), tmp_path) as (executor, _):
        executor.train_step(BATCH, 1e-3)
        executor.train_step(BATCH, 1e-3)
        timeline = executor.timeline()
        assert {event.operation for event in timeline.events} == set(range(len(executor.schedule.operations)))
        assert all(event.end_seconds >= event.start_seconds >= 0 for event in timeline.events)
        assert timeline.memory
        assert timeline.source == "measured"


def test_bad_batches_are_refused(tmp_path: pathlib.Path) -> None:
    with executor_for(MODEL, mixed_plan(MODEL, 1), tmp_path) as (executor, store):
        before = snapshot(executor, store)
        with pytest.raises(ValueError, match=f"batch has 3 rows, the plan is for {ROWS}"):
            executor.train_step(BATCH.slice_rows(0, 3), 1e-3)
        empty = Batch(
            BATCH.tokens_BT,
            BATCH.targets_BT,
            np.zeros_like(BATCH.loss_mask_BT),
            BATCH.segment_ids_BT,
            BATCH.positions_BT,
        )
        with pytest.raises(ValueError, match="no target tokens"):
            executor.train_step(empty, 1e-3)
        executor.flush()
        assert snapshot(executor, store) == before


def test_plan_that_does_not_fit_is_refused(tmp_path: pathlib.Path) -> None:
    with executor_for(MODEL, mixed_plan(MODEL, 1), tmp_path) as (executor, _):
        other = tiny.template("qwen3", tied=False)
        made_for = {"architecture": other.spec.architecture}
        with pytest.raises(PlanError, match="architecture"):
            executor.set_plan(mixed_plan(other, 1).model_copy(update=made_for))


def test_shorter_sequences_run_under_the_same_plan(tmp_path: pathlib.Path) -> None:
    short = reference.random_batch(5, ROWS, 9, tiny.VOCABULARY)
    with executor_for(MODEL, mixed_plan(MODEL, 3), tmp_path) as (executor, _):
        expected = reference.loss(MODEL, reference.random_parameters(MODEL, seed=1), short)
        assert executor.train_step(short, 1e-3).loss == pytest.approx(expected, rel=1e-6)


def test_a_drive_serves_batches_of_several_lengths(tmp_path: pathlib.Path) -> None:
    """Buckets change the length, and so the size of everything that passes through NVMe."""
    parameters = reference.random_parameters(MODEL, seed=1)
    with executor_for(MODEL, mixed_plan(MODEL, 3), tmp_path) as (executor, _):
        assert "nvme" in {layer.boundary.value for layer in executor.plan.layers}
        for length in (LENGTH, 9, 15, LENGTH):
            batch = reference.random_batch(5, ROWS, length, tiny.VOCABULARY)
            expected = reference.loss(MODEL, parameters, batch)
            assert executor.train_step(batch, 0.0).loss == pytest.approx(expected, rel=1e-6)


def test_ids_outside_the_vocabulary_are_refused_before_anything_runs(tmp_path: pathlib.Path) -> None:
    """Where the target is masked out any value will do; -100 is usual."""
    with executor_for(MODEL, mixed_plan(MODEL, 1), tmp_path) as (executor, _):
        masked = BATCH.targets_BT.copy()
        masked[~BATCH.loss_mask_BT] = -100
        assert np.isfinite(executor.evaluate(dataclasses.replace(BATCH, targets_BT=masked))[0])
        tokens = BATCH.tokens_BT.copy()
        tokens[2, 5] = tiny.VOCABULARY
        bad_tokens = dataclasses.replace(BATCH, tokens_BT=tokens)
        bad_targets = dataclasses.replace(BATCH, targets_BT=np.where(BATCH.loss_mask_BT, -1, 0).astype("i4"))
        for call in (lambda b: executor.train_step(b, 1e-3), executor.evaluate, executor.logits):
            with pytest.raises(ValueError, match=f"row 2, position 5 .* token {tiny.VOCABULARY}"):
                call(bad_tokens)
            with pytest.raises(ValueError, match="target -1 is outside"):
                call(bad_targets)
        assert executor.counts.applied == 0


def test_a_target_counts_with_its_weight(tmp_path: pathlib.Path) -> None:
    """Loss and gradients of the weighted mean, over microbatches, against the plain step."""
    random = np.random.default_rng(3)
    weights_BT = (BATCH.loss_mask_BT * random.uniform(0.1, 3, BATCH.loss_mask_BT.shape)).astype(np.float32)
    batch = dataclasses.replace(BATCH, loss_mask_BT=weights_BT)
    parameters = reference.random_parameters(MODEL, seed=1)
    loss, gradients = reference.loss_and_gradients(MODEL, parameters, batch)
    with executor_for(MODEL, mixed_plan(MODEL, 3), tmp_path) as (executor, store):
        total, weight = executor.evaluate(batch)
        assert weight == pytest.approx(weights_BT.sum(dtype=np.float64))
        assert total / weight == pytest.approx(float(loss), rel=1e-6)
        result = executor.train_step(batch, 1e-3)
        assert result.loss == pytest.approx(float(loss), rel=1e-6)
        assert result.target_tokens == BATCH.target_tokens
        for slabs, layer, expected in zip(store.layers, MODEL.spec.layers, gradients, strict=True):
            for segment, gradient in zip(slabs.layout.segments, expected, strict=True):
                part = slice(segment.offset, segment.offset + segment.elements)
                actual = np.array(slabs.gradient[part]).reshape(segment.shape)
                assert_close(actual, gradient, f"gradient of {layer.name}.{segment.name}")
