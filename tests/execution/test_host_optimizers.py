"""8-bit AdamW inside the executor: bit-identity, its optax twin, bad gradients, clipping, memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import tracemalloc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lazyjax.execution.build import executor_of
from lazyjax.execution.executor import Executor
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.clipping import ClipMode, ClipRule
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.optim.hybrid8bit import hybrid8bit_adamw
from lazyjax.planning.plan.baselines import BASELINES
from lazyjax.planning.plan.document import Plan
from lazyjax.specs import TensorSpec, slab_layout
from lazyjax.storage.host import HostStore, LayerSlabs, aligned_zeros
from tests import reference, tiny

ROWS, LENGTH, RATE = 4, 16, 1e-2
MODEL = tiny.template("qwen2", tied=False, blocks=2)
BATCHES = [reference.random_batch(seed, ROWS, LENGTH, tiny.VOCABULARY) for seed in range(4)]
#: The tiny model's matrices have 512 to 1952 elements: with this border some are coded, some are not.
SETTINGS: dict[str, Any] = {"weight_decay": 0.1, "eps": 1e-6, "min_8bit_size": 1024}


def kernels_of(model: ModelTemplate) -> Kernels:
    return Kernels(model, data_mesh(), compute_dtype="bfloat16", gradient_dtype="bfloat16")


KERNELS = kernels_of(MODEL)


@functools.cache
def plan(update: str) -> Plan:
    return BASELINES["recompute_all"](
        MODEL.spec,
        tiny.residual_names(MODEL),
        batch_rows=ROWS,
        sequence_length=LENGTH,
        microbatches=2,
        update=update,
    )


@contextlib.contextmanager
def executor_for(
    optimizer: Hybrid8bit, clip: ClipRule, update: str = "deferred"
) -> Iterator[tuple[Executor, HostStore]]:
    parameters = reference.random_parameters(MODEL, seed=1)
    store = tiny.filled_store(MODEL, parameters, gradient_dtype="bfloat16")
    executor = executor_of(KERNELS, plan(update), store, optimizer, clip=clip)
    try:
        yield executor, store
    finally:
        executor.close()


def states(executor: Executor) -> list[dict[str, np.ndarray]]:
    return [executor.updates.read_state(layer) for layer in range(len(executor.store.layers))]


def snapshot(executor: Executor) -> list[bytes]:
    """All bytes of parameters and optimizer state."""
    arrays = [array for slabs in executor.store.layers for array in (slabs.hi, slabs.lo)]
    return [array.tobytes() for array in arrays + [a for state in states(executor) for a in state.values()]]


def tensors(store: HostStore, of: str) -> dict[str, np.ndarray]:
    """Copies of every tensor's master weights or delivered gradient."""
    result = {}
    for index, slabs in enumerate(store.layers):
        for segment in slabs.layout.segments:
            part = slice(segment.offset, segment.offset + segment.elements)
            value = slabs.gradient[part].reshape(segment.shape).copy()
            result[f"{index}.{segment.name}"] = slabs.master(segment.name) if of == "master" else value
    return result


def test_state_is_partly_coded() -> None:
    """What the other tests are about."""
    description = Hybrid8bit(**SETTINGS).describe_state(KERNELS.layout(1))
    assert description["m_codes"][0][0] > 0
    assert description["m32"][0][0] > 0


def test_deferral_and_threads_change_no_bit() -> None:
    results = []
    for update, threads in (("deferred", 1), ("immediate", 1), ("deferred", 3), ("immediate", 3)):
        optimizer = Hybrid8bit(threads=threads, **SETTINGS)
        with executor_for(optimizer, ClipRule("global_norm", 0.5), update) as (executor, _):
            start = snapshot(executor)
            losses = [executor.train_step(batch, RATE).loss for batch in BATCHES]
            executor.flush()
            results.append((losses, snapshot(executor)))
            halves = 2 * len(MODEL.spec.layers)
            assert all(a != b for a, b in zip(start[:halves], results[-1][1][:halves], strict=True))
    assert results[1:] == results[:1] * 3


@pytest.mark.parametrize("clip", [ClipRule("none"), ClipRule("global_norm", 0.5)], ids=lambda c: c.mode)
def test_streamed_steps_are_those_of_the_optax_transform(clip: ClipRule) -> None:
    """Without clipping codes and scales are equal bit for bit, masters up to the bias corrections.

    The clip factor comes from partial sums in another order than optax sums in; a factor that differs by
    a rounding can turn single codes over. What the masters travelled then agrees to 1e-4.
    """
    clip_norm = None if clip.mode == "none" else clip.max_norm
    with executor_for(Hybrid8bit(**SETTINGS), clip) as (executor, store):
        start = tensors(store, "master")
        decays = {
            f"{index}.{segment.name}": segment.decay
            for index, slabs in enumerate(store.layers)
            for segment in slabs.layout.segments
        }
        transform = hybrid8bit_adamw(RATE, mask=decays, clip_norm=clip_norm, **SETTINGS)
        params = {name: jnp.asarray(value) for name, value in start.items()}
        state = transform.init(params)
        step = jax.jit(transform.update)
        for batch in BATCHES:
            executor.train_step(batch, RATE)
            gradients = {name: jnp.asarray(value) for name, value in tensors(store, "gradient").items()}
            updates, state = step(gradients, state, params)
            params = optax.apply_updates(params, updates)
        executor.flush()
        streamed, host_states = tensors(store, "master"), states(executor)
        layouts = [slabs.layout for slabs in store.layers]

    for name, value in streamed.items():
        error = np.linalg.norm(value - params[name]) / np.linalg.norm(value - start[name])
        assert error < 1e-4, f"{name}: {error:.1e} of the way travelled"
        if clip.mode == "none":
            np.testing.assert_allclose(value, params[name], atol=1e-6, rtol=0, err_msg=name)
    for index, (layout, host_state) in enumerate(zip(layouts, host_states, strict=True)):
        for moment in ("m", "v"):
            coded = [
                np.asarray(getattr(state.moments[f"{index}.{segment.name}"], moment).codes_KS).reshape(-1)
                for segment in layout.segments
            ]
            same = np.concatenate(coded) == host_state[f"{moment}_codes"]
            assert same.size == 0 or np.mean(same) >= (1.0 if clip.mode == "none" else 0.999)


def poisoned(model: ModelTemplate, bad: float) -> ModelTemplate:
    """The same model, but one element of the final norm's gradient is `bad`; the loss is as before."""

    @jax.custom_vjp
    def poison(weight_D: jax.Array) -> jax.Array:
        return weight_D

    poison.defvjp(lambda weight_D: (weight_D, None), lambda _, g_D: (g_D.at[0].set(bad),))
    head = model.kinds["head"]

    def apply(params: tuple[jax.Array, ...], x_BTD: jax.Array, context: Any) -> jax.Array:
        return head.apply((poison(params[0]), *params[1:]), x_BTD, context)

    return dataclasses.replace(model, kinds={**model.kinds, "head": dataclasses.replace(head, apply=apply)})


@pytest.mark.parametrize("update", ["deferred", "immediate"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_in_one_layer_leaves_every_byte(bad: float, update: str) -> None:
    rule = ClipRule("global_norm", 0.5)
    with executor_for(Hybrid8bit(**SETTINGS), rule, update) as (executor, store):
        loss = executor.train_step(BATCHES[0], RATE).loss
        executor.flush()
        before = snapshot(executor)
        damaged = executor_of(
            kernels_of(poisoned(MODEL, bad)), plan(update), store, Hybrid8bit(**SETTINGS),
            clip=rule, step=1, updates=executor.updates,
        )  # fmt: skip
        result = damaged.train_step(BATCHES[0], RATE)
        damaged.flush()
        bad_layers = [not np.isfinite(slabs.gradient.astype(np.float32)).all() for slabs in store.layers]
        assert bad_layers == [False] * (len(store.layers) - 1) + [True]
        assert result.skipped
        assert np.isfinite(result.loss)
        assert result.loss < loss
        assert not np.isfinite(result.gradient_norm)
        assert snapshot(executor) == before
        assert damaged.counts.applied == 1
        # Training goes on as if the bad step had not been.
        assert not executor.train_step(BATCHES[0], RATE).skipped
        executor.flush()
        assert snapshot(executor) != before


@functools.cache
def one_step(mode: ClipMode, max_norm: float) -> dict[str, np.ndarray]:
    """How far every tensor moved in one step whose size follows the gradient's (large epsilon)."""
    optimizer = Hybrid8bit(weight_decay=0.0, eps=1.0, min_8bit_size=1024)
    with executor_for(optimizer, ClipRule(mode, max_norm)) as (executor, store):
        start = tensors(store, "master")
        executor.train_step(BATCHES[0], RATE)
        squared_norms = [
            float(np.sum(np.square(slabs.gradient.astype(np.float64)))) for slabs in store.layers
        ]
        if mode == "none":
            factors = [1.0] * len(squared_norms)
        elif mode == "per_layer":
            factors = [min(1.0, max_norm / np.sqrt(squared)) for squared in squared_norms]
        else:
            factors = [min(1.0, max_norm / np.sqrt(sum(squared_norms)))] * len(squared_norms)
        gradients = tensors(store, "gradient")
        executor.flush()
        moved = {name: value - start[name] for name, value in tensors(store, "master").items()}
    for name, way in moved.items():
        # Adam's first step: m and v are the gradient and its square after bias correction.
        g = gradients[name].astype(np.float64) * factors[int(name.split(".")[0])]
        expected = -RATE * g / (np.abs(g) + 1.0)
        # 2e-7: rounding of masters near 1.
        np.testing.assert_allclose(way, expected, rtol=1e-4, atol=2e-7, err_msg=name)
    return moved


@pytest.mark.parametrize("mode", ["none", "global_norm", "per_layer"])
def test_every_clip_mode_scales_as_it_says(mode: ClipMode) -> None:
    moved = one_step(mode, 0.05)
    unclipped = one_step("none", 0.05)
    size = {name: np.linalg.norm(way) for name, way in moved.items()}
    if mode == "none":
        assert max(size.values()) > 1e-3
        return
    assert sum(size.values()) < 0.5 * sum(np.linalg.norm(way) for way in unclipped.values())
    if mode == "per_layer":
        other = one_step("global_norm", 0.05)
        assert sum(size.values()) > 1.2 * sum(np.linalg.norm(way) for way in other.values())


def test_gradient_slabs_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step no memory is mapped, and gradients land in the same place."""
    with executor_for(Hybrid8bit(**SETTINGS), ClipRule("global_norm", 0.5)) as (executor, store):
        executor.train_step(BATCHES[0], RATE)
        addresses = [slabs.gradient.ctypes.data for slabs in store.layers]

        def refuse(*_: object) -> None:
            raise AssertionError("memory was mapped within a step")

        monkeypatch.setattr(mmap, "mmap", refuse)
        for batch in BATCHES[1:]:
            before = [slabs.gradient.tobytes() for slabs in store.layers]
            executor.train_step(batch, RATE)
            assert all(
                slabs.gradient.tobytes() != old for slabs, old in zip(store.layers, before, strict=True)
            )
        executor.flush()
        assert [slabs.gradient.ctypes.data for slabs in store.layers] == addresses


def test_an_update_allocates_next_to_nothing() -> None:
    layout = slab_layout([TensorSpec("matrix", (1024, 1024), "float32")])
    kinds = ("uint16", "int16", "bfloat16")
    slabs = LayerSlabs(layout, *(aligned_zeros(layout.length, kind, purpose="test") for kind in kinds))
    slabs.gradient[:] = 1e-3
    optimizer = Hybrid8bit(threads=2)
    state = optimizer.create_state(layout)
    optimizer.update(slabs, state, learning_rate=RATE, count=1, scale=1.0)
    tracemalloc.start()
    try:
        optimizer.update(slabs, state, learning_rate=RATE, count=2, scale=0.5)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < slabs.gradient.nbytes / 50
