"""Blocks that compute some tokens at a time: equal to whole rows, in memory that does not grow with them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazyjax.models.backend import for_accelerator
from lazyjax.models.registry import build_template
from lazyjax.models.residuals import backward_from, forward_saving
from lazyjax.models.template import Context
from tests.huggingface.architectures import SMALL
from tests.reference import random_parameters

ROWS, TOKENS = 2, 75
BLOCKS = [("qwen2", "full_attention"), ("qwen3_5", "full_attention"), ("qwen3_5", "linear_attention")]


def _context(tokens: int = TOKENS) -> Context:
    """Segments that begin and end inside chunks, and padding."""
    segments_BT = np.ones((ROWS, tokens), np.int32)
    segments_BT[0, 30:] = 2
    segments_BT[0, 33:] = 3
    segments_BT[1, tokens - 9 :] = 0
    starts = np.diff(segments_BT, axis=1, prepend=-1) != 0
    here = np.broadcast_to(np.arange(tokens), segments_BT.shape)
    positions_BT = here - np.maximum.accumulate(np.where(starts, here, 0), axis=1)
    return Context(jnp.asarray(positions_BT, jnp.int32), jnp.asarray(segments_BT))


@functools.cache
def _whole_rows(name: str, kind_name: str):
    template, params, x_BTD = _block(name, kind_name)
    return _run(template.kinds[kind_name], (), params, x_BTD)


@functools.cache
def _block(name: str, kind_name: str):
    template = build_template(SMALL[name])
    index = [layer.kind for layer in template.spec.layers].index(kind_name)
    x_BTD = jax.random.normal(jax.random.key(1), (ROWS, TOKENS, template.spec.hidden_size))
    return template, random_parameters(template, seed=0)[index], x_BTD


def _run(kind, names, params, x_BTD):
    context = _context()

    @jax.jit
    def step(params, x_BTD):
        y_BTD, residuals = forward_saving(kind.apply, names, params, x_BTD, context)
        gradient = jnp.cos(y_BTD) * (context.segment_ids_BT > 0)[..., None]
        return y_BTD, backward_from(kind.apply, names, params, x_BTD, context, residuals, gradient)

    y_BTD, gradients = step(params, x_BTD)
    return y_BTD * (context.segment_ids_BT > 0)[..., None], gradients


@pytest.mark.parametrize(("name", "kind_name"), BLOCKS)
@pytest.mark.parametrize("width", [13, 32])
def test_chunks_equal_whole_rows(name: str, kind_name: str, width: int) -> None:
    template, params, x_BTD = _block(name, kind_name)
    expected = _whole_rows(name, kind_name)
    chunked = template.in_chunks(width).kinds[kind_name]
    assert template.in_chunks(width) is template.in_chunks(width)
    assert template.in_chunks(None) is template
    for names in ((), chunked.residual_names):
        actual = _run(chunked, names, params, x_BTD)
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert float(jnp.abs(one - other).max()) <= 2e-5 * float(jnp.abs(other).max())


def test_inner_tensors_of_chunks_cannot_be_kept() -> None:
    template = build_template(SMALL["qwen3_5"]).in_chunks(16)
    attention = ("query", "key", "value", "attention_out", "attention_lse", "post_mixer")
    assert template.kinds["full_attention"].residual_names == attention
    delta_net = ("delta_qkv", "delta_z", "delta_out", "post_mixer")
    assert template.kinds["linear_attention"].residual_names == delta_net


@pytest.mark.parametrize(("name", "kind_name"), BLOCKS)
def test_bfloat16_gradients_are_summed_over_chunks_in_float32(name: str, kind_name: str) -> None:
    """75 chunks of one token: each tensor stays near the gradient of the same weights in float32."""
    template, params, x_BTD = _block(name, kind_name)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    x_BTD = (x_BTD + 1).astype(jnp.bfloat16)
    _, (actual, _) = _run(template.in_chunks(1).kinds[kind_name], (), narrow, x_BTD)
    _, (expected, _) = _run(template.kinds[kind_name], (), wide, x_BTD.astype(jnp.float32))
    _, (whole, _) = _run(template.kinds[kind_name], (), narrow, x_BTD)
    names = [tensor.name for tensor in template.kinds[kind_name].parameters]
    for tensor, one, other, usual in zip(names, actual, expected, whole, strict=True):
        scale = float(jnp.linalg.norm(other))
        error = float(jnp.linalg.norm(one.astype(jnp.float32) - other)) / scale
        at_once = float(jnp.linalg.norm(usual.astype(jnp.float32) - other)) / scale
        assert error <= max(0.01, 1.5 * at_once), f"{tensor}: {error:.3g}, whole rows {at_once:.3g}"


def test_working_memory_of_the_mlp_does_not_grow_with_the_tokens() -> None:
    """By XLA's own count: what four times as many tokens add is their activations, not their MLP's."""
    template = build_template(SMALL["qwen2"].model_copy(update={"intermediate_size": 4096}))

    def temporary_bytes(tokens: int, width: int | None) -> int:
        kind = template.in_chunks(width).kinds["full_attention"]
        params = tuple(jax.ShapeDtypeStruct(t.shape, jnp.float32) for t in kind.parameters)
        x = jax.ShapeDtypeStruct((1, tokens, template.spec.hidden_size), jnp.float32)
        row = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        backward = jax.jit(lambda p, x, c, dy: backward_from(kind.apply, (), p, x, c, (), dy))
        compiled = backward.lower(params, x, Context(row, row), x).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    with for_accelerator():
        whole = temporary_bytes(2048, None) - temporary_bytes(512, None)
        chunked = temporary_bytes(2048, 256) - temporary_bytes(512, 256)
    inner_bytes = 1536 * 4096 * 4  # one inner tensor of the tokens that are added
    assert whole > 2 * inner_bytes
    assert chunked < inner_bytes / 2
