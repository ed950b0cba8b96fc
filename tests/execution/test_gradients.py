"""Gradients inside kernels: added up in place, tensor by tensor, and delivered as one slab."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazyjax.execution.kernels import DeviceBatch, Kernels, data_mesh
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import LayerKind, ModelTemplate
from lazyjax.specs import slab_layout

VOCABULARY, HIDDEN, TOKENS = 2048, 64, 48


@functools.cache
def model(tied: bool) -> ModelTemplate:
    """A table that is much larger than anything else."""
    return build_template(
        Qwen2Architecture(
            name=f"table-{tied}", vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
            rms_norm_eps=1e-6, tie_word_embeddings=tied, rope=Rope(theta=1e4), qkv_bias=True,
        )
    )  # fmt: skip


@functools.cache
def kernels(tied: bool, dtype: str = "bfloat16") -> Kernels:
    return Kernels(model(tied), data_mesh(), compute_dtype=dtype, gradient_dtype=dtype)


def given(made: Kernels, kind: LayerKind, seed: int = 0) -> Any:
    """Random parameters, as a fetch gives them."""
    length = slab_layout(kind.parameters).length
    values = 0.02 * np.random.default_rng(seed).standard_normal(length, np.float32)
    return made.unpack(kind)((jnp.asarray(values, made.compute_dtype),))


def random_batch(seed: int) -> DeviceBatch:
    random = np.random.default_rng(seed)
    # Few of the words, each several times.
    tokens = random.integers(0, 9, (1, TOKENS), dtype=np.int32)
    ones = np.ones((1, TOKENS), np.int32)
    return DeviceBatch(*map(jnp.asarray, (tokens, tokens[:, ::-1], ones.astype(bool), ones, ones)))


def filled(shapes: Any, seed: int) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(seed)
    return tuple(jnp.asarray(random.standard_normal(shape.shape, np.float32)) for shape in shapes)


def hidden(seed: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((1, TOKENS, HIDDEN), np.float32), dtype)


@pytest.mark.parametrize("accumulates", [False, True])
def test_rows_of_a_table_equal_the_whole_table(accumulates: bool) -> None:
    """Adding and delivering rows gives what a float32 table of zeros with all gradients added gives."""
    made = kernels(True)
    embed, gathering = made.template.kind(0), made.placement.gathering
    accumulator = filled(gathering.shapes(embed), 1)
    batch, gradient = random_batch(2), hidden(3, "bfloat16")
    expected = np.zeros((VOCABULARY, HIDDEN)) if not accumulates else np.asarray(accumulator[0], np.float64)
    np.add.at(expected, np.asarray(batch.tokens_BT), np.asarray(gradient, np.float64))
    previous = accumulator if accumulates else None
    slab, _ = made.embed_backward(accumulates, True)(previous, batch.tokens_BT, gradient)
    np.testing.assert_allclose(
        np.asarray(slab.gradient_N, np.float64), expected.ravel(), rtol=2**-8, atol=1e-6
    )
    squares = np.sum(np.square(np.asarray(slab.gradient_N, np.float64)))
    assert float(slab.squared_norm) == pytest.approx(squares, rel=1e-5)
    (total,), _ = made.embed_backward(accumulates, False)(previous, batch.tokens_BT, gradient)
    np.testing.assert_allclose(np.asarray(total), expected, rtol=1e-5, atol=1e-5)


def compiled(kernel: Any, *operands: Any) -> Any:
    return kernel.lower(*operands).compile()


def updated_in_place(program: Any) -> int:
    """Bytes of results that lie where operands were."""
    return int(program.memory_analysis().alias_size_in_bytes)


def test_accumulators_are_written_in_place() -> None:
    made = kernels(False)
    block, embed = made.template.kind(1), made.template.kind(0)
    accumulator = made.placement.gathering.shapes(block)
    x, batch = hidden(0, "bfloat16"), random_batch(0)
    program = compiled(
        made.backward(block, (), True, False), accumulator, given(made, block), x, batch.context, (), x
    )
    assert updated_in_place(program) == 4 * sum(tensor.elements for tensor in block.parameters)
    program = compiled(
        made.embed_backward(True, False), made.placement.gathering.shapes(embed), batch.tokens_BT, x
    )
    assert updated_in_place(program) == 4 * VOCABULARY * HIDDEN
    # Neither a table of zeros nor a copy of the accumulator.
    assert program.memory_analysis().temp_size_in_bytes < VOCABULARY * HIDDEN


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("last", [False, True])
def test_the_head_adds_to_the_accumulator_of_the_table(tied: bool, last: bool) -> None:
    """Twice the same microbatch gives twice its gradient; the table's accumulator is the only one."""
    made = kernels(tied, "float32")
    template = made.template
    head, embed = template.kind(2), template.kind(0)

    def parameters(kind: LayerKind, seed: int) -> Any:
        values = 0.02 * np.random.default_rng(seed).standard_normal(slab_layout(kind.parameters).length)
        halves = values.astype(np.float32).view(np.uint32)
        hi, lo = (halves >> 16).astype(np.uint16), np.zeros(len(values), np.int16)
        return made.unpack(kind)((jnp.asarray(hi), jnp.asarray(lo)))

    batch, x, scale = random_batch(1), hidden(1, "float32"), jnp.float32(0.1)
    operands = (parameters(head, 2), parameters(embed, 3) if tied else None, x, batch, scale)
    _, dx, first, table, _ = made.loss(16, False, False)(None, None, *operands)
    expected = [2 * np.asarray(array) for array in (*first, *(table or ()))]
    again = made.loss(16, True, last)
    given_accumulators = (first, table)
    program = compiled(again, *given_accumulators, *operands)
    assert updated_in_place(program) >= 4 * VOCABULARY * HIDDEN
    _, dx_again, result, table_result, _ = again(*given_accumulators, *operands)
    np.testing.assert_array_equal(np.asarray(dx), np.asarray(dx_again))
    found = [*(result.spent if last else result), *(table_result or ())]
    for actual, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(actual), wanted, rtol=1e-5, atol=1e-7)
    if last:
        layout = slab_layout(head.parameters)
        for segment, total in zip(layout.segments, result.spent, strict=True):
            part = result.gradient_N[segment.offset : segment.offset + segment.elements]
            np.testing.assert_array_equal(np.asarray(part), np.asarray(total).ravel())


def test_several_devices_keep_flat_accumulators() -> None:
    made = Kernels(model(False), data_mesh(jax.devices()[:2]))
    (shape,) = made.placement.gathering.shapes(made.template.kind(1))
    assert shape.shape == (slab_layout(made.template.kind(1).parameters, devices=2).length,)
    assert not made.placement.gathering.whole
