"""Seconds of a decode step's parts, timed on the device in use, for the cost model of decoding."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lazyjax.execution.decode_kernels import decode_kernels
from lazyjax.execution.kernels import Kernels
from lazyjax.execution.transfers import Transfers
from lazyjax.models.decode import Span
from lazyjax.planning.costs.decode import LayerCost
from lazyjax.storage.host import HostStore


def time_decoding(
    kernels: Kernels, store: HostStore, *, rows: int, tokens: int, rounds: int = 5
) -> dict[str, LayerCost]:
    """Kind of layer -> seconds of its fetch, of making its parameters, and of its part of a step.

    Each is timed alone, behind an untimed call of itself, and the median of `rounds` is taken. A tied table
    has no part of its own: the head multiplies by it.
    """
    template, compiled = kernels.template, decode_kernels(kernels)
    transfers = Transfers(kernels.sharded, kernels.compute_dtype)
    head = len(template.spec.layers) - 1
    first = {layer.kind: index for index, layer in reversed(list(enumerate(template.spec.layers)))}

    def put(array: Any) -> jax.Array:
        return jax.device_put(array, kernels.placement.replicated)

    ones = np.ones(rows, np.int32)
    span = Span(put(ones * (tokens // 2)), put(ones))
    x_B1D = put(np.zeros((rows, 1, template.spec.hidden_size), kernels.compute_dtype))
    found: dict[str, LayerCost] = {}
    params = {}
    for kind_name, layer in first.items():
        kind = template.kind(layer)
        fetch, slab = _timed(functools.partial(transfers.slab_to_device, store.layers[layer]), rounds)
        unpack, (params[kind_name], _) = _timed(functools.partial(kernels.parameters(kind), slab), rounds)
        compute = 0.0
        if 0 < layer < head:
            state = [compiled.empty(kind, rows, tokens)()]

            def step(kind: Any = kind, kind_name: str = kind_name, state: Any = state) -> Any:
                x, state[0], token = compiled.step(kind)(params[kind_name], x_B1D, state[0], span)
                return x, token

            compute, _ = _timed(step, rounds)
        found[kind_name] = LayerCost(fetch, unpack, compute)
    table = params["embed"] if template.spec.tied else None
    choose, _ = _timed(lambda: compiled.choose()(params["head"], table, (x_B1D,), span, None), rounds)
    found["head"] = LayerCost(found["head"].fetch_seconds, found["head"].unpack_seconds, choose)
    return found


def _timed(call: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Median seconds, and the last result."""
    result = jax.block_until_ready(call())
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result
