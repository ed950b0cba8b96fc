"""The streamed step equals the plain in-memory step: loss, every gradient, parameters after three."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from lazyjax.execution.build import executor_of
from lazyjax.execution.executor import Executor
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.adamw import Fp32AdamW
from lazyjax.optim.clipping import ClipRule
from lazyjax.planning.plan.baselines import BASELINES
from lazyjax.planning.plan.document import LayerPlan, Plan
from lazyjax.specs import Tier
from lazyjax.storage.host import HostStore
from tests import reference, tiny

ROWS, LENGTH = 12, 21
# Where a gradient is zero but for rounding (a key bias), Adam with a tiny epsilon turns its sign into a
# whole step. An epsilon above the rounding keeps the comparison about the update.
RATE, CLIP, DECAY, EPS = 1e-3, 0.5, 0.1, 1e-6
# Several to a microbatch.
HEAD_CHUNK = 50


@functools.cache
def kernels(model: ModelTemplate, devices: int = 1) -> Kernels:
    """Shared between tests, so that a kernel is compiled once."""
    return Kernels(
        model,
        data_mesh(jax.devices()[:devices]),
        compute_dtype="float32",
        gradient_dtype="float32",
    )


@functools.cache
def expectation(model: ModelTemplate, segments: bool = False, rows: int = ROWS):
    """Losses of three steps, gradients of the first, parameters after the last."""
    parameters = reference.random_parameters(model, seed=1)
    batches = batches_of(segments, rows)
    _, gradients = reference.loss_and_gradients(model, parameters, batches[0])
    losses, final = reference.train(
        model, parameters, batches, learning_rate=RATE, clip_norm=CLIP, weight_decay=DECAY, eps=EPS
    )
    return losses, gradients, final


def batches_of(segments: bool = False, rows: int = ROWS):
    return [
        reference.random_batch(seed, rows, LENGTH, tiny.VOCABULARY, segments=segments) for seed in range(3)
    ]


@contextlib.contextmanager
def executor_for(
    model: ModelTemplate, plan: Plan, folder: pathlib.Path, devices: int = 1
) -> Iterator[tuple[Executor, HostStore]]:
    store = tiny.filled_store(model, reference.random_parameters(model, seed=1), devices=devices)
    optimizer = Fp32AdamW(b1=0.9, b2=0.999, eps=EPS, weight_decay=DECAY)
    executor = executor_of(
        kernels(model, devices),
        plan,
        store,
        optimizer,
        clip=ClipRule("global_norm", CLIP),
        nvme_folder=folder / "nvme",
    )
    try:
        yield executor, store
    finally:
        executor.close()


def assert_close(actual: np.ndarray, expected: object, name: str, bound: float = 1e-5) -> None:
    """Relative to the tensor's norm."""
    expected = np.asarray(jax.device_get(expected))
    error = np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-12)
    assert error <= bound, f"{name}: relative error {error:.2e}"


def check_against_oracle(
    model: ModelTemplate, plan: Plan, folder: pathlib.Path, devices: int = 1, segments: bool = False
) -> None:
    losses, gradients, final = expectation(model, segments, plan.batch_rows)
    with executor_for(model, plan, folder, devices) as (executor, store), jax.transfer_guard("disallow"):
        for step, batch in enumerate(batches_of(segments, plan.batch_rows)):
            result = executor.train_step(batch, RATE)
            assert not result.skipped
            assert result.loss == pytest.approx(losses[step], rel=1e-6 if step == 0 else 1e-5)
            if step == 0:
                norm = np.sqrt(
                    sum(float(np.sum(np.square(jax.device_get(g)))) for gs in gradients for g in gs)
                )
                assert result.gradient_norm == pytest.approx(norm, rel=1e-5)
                executor.timeline()  # waits for gradients on their way to NVMe
                for slabs, layer, expected in zip(store.layers, model.spec.layers, gradients, strict=True):
                    for segment, gradient in zip(slabs.layout.segments, expected, strict=True):
                        part = slice(segment.offset, segment.offset + segment.elements)
                        actual = np.array(slabs.gradient[part]).reshape(segment.shape)
                        assert_close(actual, gradient, f"gradient of {layer.name}.{segment.name}")
        executor.flush()
        for slabs, layer, expected in zip(store.layers, model.spec.layers, final, strict=True):
            for segment, value in zip(slabs.layout.segments, expected, strict=True):
                assert_close(
                    slabs.master(segment.name), value, f"{layer.name}.{segment.name} after three steps"
                )


CASES = [
    ("qwen2", True),
    ("qwen2", False),
    ("qwen3", True),
    ("qwen3", False),
    ("qwen3_5", True),
    ("qwen3_5", False),
]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("planner", sorted(BASELINES))
@pytest.mark.parametrize(("family", "tied"), CASES)
def test_baseline_plans_equal_the_oracle(
    family: str, tied: bool, planner: str, microbatches: int, tmp_path: pathlib.Path
) -> None:
    model = tiny.template(family, tied=tied)
    plan = BASELINES[planner](
        model.spec,
        tiny.residual_names(model),
        batch_rows=ROWS,
        sequence_length=LENGTH,
        microbatches=microbatches,
        interlayer_home="host" if microbatches == 3 and planner != "keep_all" else "device",
        head_chunk=HEAD_CHUNK,
    )
    check_against_oracle(model, plan, tmp_path)


def mixed_plan(model: ModelTemplate, microbatches: int, **decisions: object) -> Plan:
    """A different choice for every layer: all homes, all tiers, a long segment, a resident layer."""
    homes = ["device", "device", "nvme", "host", "recompute", "recompute", "device"]
    layers = []
    for index, names in enumerate(tiny.residual_names(model)):
        tiers = [Tier.HOST, Tier.DEVICE, Tier.NVME]
        saved = {name: tiers[(index + i) % 3] for i, name in enumerate(names) if (index + i) % 4}
        state = "nvme" if index in (0, 2, 3, 5) else "host"
        layers.append(LayerPlan(boundary=homes[index], saved=saved, resident=index == 3, state=state))
    return Plan(
        model=model.spec.name,
        planner="mixed",
        batch_rows=ROWS,
        sequence_length=LENGTH,
        microbatches=microbatches,
        layers=tuple(layers),
        **({"head_chunk": HEAD_CHUNK} | decisions),
    )


@pytest.mark.parametrize(
    "decisions",
    [
        {"microbatches": 3, "interlayer_home": "host", "prefetch": 3, "reload_ahead": 2},
        {"microbatches": 4, "interlayer_home": "device", "prefetch": 1, "backward_prefetch": 1},
        {"microbatches": 1, "update": "immediate"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_5"])
def test_mixed_plans_equal_the_oracle(family: str, decisions: dict, tmp_path: pathlib.Path) -> None:
    model = tiny.template(family, tied=False)
    check_against_oracle(model, mixed_plan(model, **decisions), tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5"])
def test_rows_of_padding_change_nothing(family: str, tmp_path: pathlib.Path) -> None:
    """Five rows in three microbatches of two: the last one holds a row of padding."""
    model = tiny.template(family, tied=True)
    plan = mixed_plan(model, 3, interlayer_home="host").model_copy(update={"batch_rows": 5})
    assert (plan.microbatch_rows, plan.executed_rows) == (2, 6)
    check_against_oracle(model, plan, tmp_path)
    with executor_for(model, plan, tmp_path) as (executor, _):
        batch = batches_of(rows=5)[0]
        whole, tokens = executor.evaluate(batch)
        assert tokens == batch.target_tokens
        executor.set_plan(plan.model_copy(update={"microbatches": 1}))
        assert executor.evaluate(batch)[0] == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(("tied", "head_chunk"), [(True, 20), (False, 100), (True, 1000)])
def test_chunks_of_the_head_equal_the_oracle(tied: bool, head_chunk: int, tmp_path: pathlib.Path) -> None:
    """A token of each row at a time (a loop), a few, and all: only the order of sums differs."""
    model = tiny.template("qwen2", tied=tied)
    plan = mixed_plan(model, 2, head_chunk=head_chunk)
    check_against_oracle(model, plan, tmp_path)
    with executor_for(model, plan, tmp_path) as (executor, _):
        batch = batches_of()[0]
        loss, _ = executor.evaluate(batch)
        executor.set_plan(plan.model_copy(update={"head_chunk": HEAD_CHUNK}))
        assert executor.evaluate(batch)[0] == pytest.approx(loss, rel=1e-6)


def test_token_chunks_equal_the_oracle(tmp_path: pathlib.Path) -> None:
    """Blocks of both kinds that compute 5 of 21 tokens at a time, segments that begin inside."""
    model = tiny.template("qwen3_5", tied=False)
    plan = mixed_plan(model.in_chunks(5), 1, token_chunk=5)
    check_against_oracle(model, plan, tmp_path, segments=True)


@pytest.mark.parametrize("tied", [True, False])
def test_four_devices_equal_the_oracle(tied: bool, tmp_path: pathlib.Path) -> None:
    """Batch and slabs sharded over four virtual devices."""
    model = tiny.template("qwen3_5", tied=tied)
    check_against_oracle(model, mixed_plan(model, 3, interlayer_home="host"), tmp_path, devices=4)


def test_packed_segments_equal_the_oracle(tmp_path: pathlib.Path) -> None:
    model = tiny.template("qwen3_5", tied=False)
    check_against_oracle(model, mixed_plan(model, 3), tmp_path, segments=True)
