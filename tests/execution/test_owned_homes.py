"""Whatever layers own may live on NVMe, part by part: the same bits, and memory as the schedule counts it."""

from __future__ import annotations

import functools
import itertools
import pathlib

import jax
import pytest

from lazyjax.execution.build import executor_of
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.adamw import Fp32AdamW
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.planning.plan.document import LayerPlan, Plan
from lazyjax.specs import Part
from tests import reference, tiny
from tests.execution.test_oracle import LENGTH, check_against_oracle, mixed_plan

ROWS, STEPS = 4, 3
COMBINATIONS = [frozenset(parts) for count in range(5) for parts in itertools.combinations(Part, count)]
OPTIMIZERS = {"fp32": Fp32AdamW(), "8 bits": Hybrid8bit()}


@functools.cache
def kernels(tied: bool, compute_dtype: str, devices: int = 1) -> Kernels:
    model = tiny.template("qwen2", tied=tied)
    mesh = data_mesh(jax.devices()[:devices])
    return Kernels(model, mesh, compute_dtype, "bfloat16")


def plan_of(model: ModelTemplate, on_nvme: list[frozenset[Part]], **decisions: object) -> Plan:
    """One microbatch more than a layer can keep on the device, and a segment of two layers."""
    homes = ["device", "device", "host", "recompute", "device", "host", "device"]
    layers = [
        LayerPlan(boundary=homes[index], resident=index == 1).with_on_nvme(parts)
        for index, parts in enumerate(on_nvme)
    ]
    return Plan(
        model=model.spec.name, planner="homes", batch_rows=ROWS, sequence_length=LENGTH, microbatches=2,
        layers=tuple(layers), head_chunk=50, **decisions,
    )  # fmt: skip


def outcome(
    tied: bool, compute_dtype: str, optimizer: str, plan: Plan, folder: pathlib.Path, devices: int = 1
) -> tuple[list[float], list[bytes]]:
    """Losses of some steps, an evaluation between them, and all that was learned."""
    model = kernels(tied, compute_dtype, devices).template
    store = tiny.filled_store(
        model, reference.random_parameters(model, seed=1), gradient_dtype="bfloat16", devices=devices
    )
    executor = executor_of(
        kernels(tied, compute_dtype, devices), plan, store, OPTIMIZERS[optimizer],
        clip=ClipRule("global_norm", 0.5), nvme_folder=folder,
    )  # fmt: skip
    try:
        losses = []
        for seed in range(STEPS):
            batch = reference.random_batch(seed, ROWS, LENGTH, tiny.VOCABULARY)
            losses.append(executor.train_step(batch, 1e-3).loss)
            if seed == 1:
                losses.append(executor.evaluate(batch)[0])
        executor.flush()
        arrays = [array.tobytes() for slabs in store.layers for array in (slabs.hi, slabs.lo)]
        for layer in range(len(store.layouts)):
            arrays += [array.tobytes() for array in executor.updates.read_state(layer).values()]
        return losses, arrays
    finally:
        executor.close()


@functools.cache
def on_the_host(tied: bool, compute_dtype: str, optimizer: str, update: str):
    model = kernels(tied, compute_dtype).template
    plan = plan_of(model, [frozenset()] * len(model.spec.layers), update=update)
    return outcome(tied, compute_dtype, optimizer, plan, pathlib.Path("/nonexistent"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("update", ["deferred", "immediate"])
def test_every_combination_gives_the_same_bits(tied, compute_dtype, optimizer, update, tmp_path):
    """Each layer another combination, and all layers all parts; the cases begin at different ones."""
    model = kernels(tied, compute_dtype).template
    count = len(model.spec.layers)
    expected = on_the_host(tied, compute_dtype, optimizer, update)
    start = [*itertools.product((True, False), ("float32", "bfloat16"), OPTIMIZERS)].index(
        (tied, compute_dtype, optimizer)
    )
    for first in (2 * start, 2 * start + count):
        on_nvme = [COMBINATIONS[(first + layer) % len(COMBINATIONS)] for layer in range(count)]
        plan = plan_of(model, on_nvme, update=update)
        assert outcome(tied, compute_dtype, optimizer, plan, tmp_path) == expected, on_nvme
    everything = plan_of(model, [frozenset(Part)] * count, update=update)
    assert outcome(tied, compute_dtype, optimizer, everything, tmp_path) == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("update", ["deferred", "immediate"])
@pytest.mark.parametrize("tied", [True, False])
def test_everything_on_nvme_equals_the_oracle(tied, update, tmp_path):
    model = tiny.template("qwen2", tied=tied)
    plan = mixed_plan(model, 3, interlayer_home="host", update=update)
    layers = tuple(layer.with_on_nvme(frozenset(Part)) for layer in plan.layers)
    check_against_oracle(model, plan.model_copy(update={"layers": layers}), tmp_path)
