"""Measurements that say something of a model on this machine: its matrix shapes, its host optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np

from lazyjax.hardware.measure import MatrixShape, UpdateProbe
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import make_host_optimizer
from lazyjax.specs import TensorSpec, slab_layout
from lazyjax.storage.host import LayerSlabs, aligned_zeros

#: FLOPs of one product beyond which more rows do not make its rate more certain.
_ENOUGH_FLOPS = {"cpu": 2e9, "gpu": 2e12}


def block_shapes(template: ModelTemplate, tokens: int) -> tuple[MatrixShape, ...]:
    """Distinct matrices of the blocks as products on `tokens` rows, the largest first."""
    enough = _ENOUGH_FLOPS["cpu" if jax.default_backend() == "cpu" else "gpu"]
    matrices = {
        tensor.shape
        for layer in template.spec.layers[1:-1]
        for tensor in layer.parameters
        if len(tensor.shape) == 2 and min(tensor.shape) > 16
    }
    return tuple(
        MatrixShape(max(16, min(tokens, int(enough / (2 * inner * columns)))), inner, columns)
        for inner, columns in sorted(matrices, key=math.prod, reverse=True)
    )


def update_probe(optimizer: str) -> UpdateProbe:
    """Times `optimizer` on a slab of random gradients, with all CPUs of this process."""

    def probe(elements: int) -> Callable[[], None]:
        layout = slab_layout((TensorSpec("weights", (elements // 1024, 1024), "float32"),))
        slabs = LayerSlabs(
            layout=layout,
            hi=aligned_zeros(layout.length, "uint16", purpose="profile: parameters"),
            lo=aligned_zeros(layout.length, "int16", purpose="profile: master weights"),
            gradient=aligned_zeros(layout.length, "bfloat16", purpose="profile: gradient"),
        )
        slabs.gradient[:] = np.random.default_rng(0).standard_normal(layout.length, np.float32)
        host_optimizer = make_host_optimizer(optimizer)
        state = host_optimizer.create_state(layout)
        count = 0

        def update() -> None:
            nonlocal count
            count += 1
            host_optimizer.update(slabs, state, learning_rate=1e-5, count=count, scale=1.0)

        return update

    return probe
