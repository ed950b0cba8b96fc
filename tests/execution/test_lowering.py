"""Every kernel of every family lowers for CUDA, on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lazyjax.execution.kernels import DeviceBatch, Kernels, data_mesh
from lazyjax.models.backend import for_accelerator
from lazyjax.specs import slab_layout
from tests import tiny

ROWS, TOKENS = 2, 80


def _shape(*sizes: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def _lower(kernel: Any, *arguments: Any) -> None:
    text = kernel.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo" in text


@pytest.mark.parametrize("token_chunk", [None, 32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False), ("qwen3_5", False)])
def test_every_kernel_lowers_for_cuda(family: str, tied: bool, dtype: str, token_chunk: int | None) -> None:
    template = tiny.template(family, tied=tied, blocks=4).in_chunks(token_chunk)
    kernels = Kernels(template, data_mesh(), compute_dtype=dtype, gradient_dtype=dtype)
    spec = template.spec
    x_BTD = _shape(ROWS, TOKENS, spec.hidden_size, dtype=dtype)
    row_BT = _shape(ROWS, TOKENS, dtype="int32")
    batch = DeviceBatch(row_BT, row_BT, _shape(ROWS, TOKENS, dtype="bool"), row_BT, row_BT)
    halves = ("bfloat16",) if dtype == "bfloat16" else ("uint16", "int16")

    def slab(kind: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(_shape(slab_layout(kind.parameters).length, dtype=half) for half in halves)

    def given(kind: Any) -> Any:
        return jax.eval_shape(kernels.unpack(kind), slab(kind))

    accumulator = kernels.placement.gathering.shapes
    embed, head = template.kind(0), template.kind(len(spec.layers) - 1)
    table = (given(embed), accumulator(embed)) if tied else (None, None)
    with for_accelerator():
        _lower(kernels.forward(embed, ()), given(embed), row_BT, batch.context)
        for kind in template.kinds.values():
            if kind in (embed, head):
                continue
            _lower(kernels.unpack(kind), slab(kind))
            for saved in ((), kind.residual_names):
                _lower(kernels.forward(kind, saved), given(kind), x_BTD, batch.context)
                residuals = jax.eval_shape(kernels.forward(kind, saved), given(kind), x_BTD, batch.context)[1]
                backward = kernels.backward(kind, saved, True, False)
                _lower(backward, accumulator(kind), given(kind), x_BTD, batch.context, residuals, x_BTD)
        for last in (False, True):
            _lower(kernels.embed_backward(True, last), accumulator(embed), row_BT, x_BTD)
            _lower(
                kernels.loss(64, True, last), accumulator(head), table[1], given(head), table[0], x_BTD,
                batch, _shape(dtype="float32"),
            )  # fmt: skip
        _lower(kernels.evaluation_loss(64), given(head), table[0], x_BTD, batch)
        _lower(kernels.logits(), given(head), table[0], x_BTD, batch.context)
