"""A forward pass without a backward pass: evaluation loss and logits, streamed layer by layer.

Needs no plan: every layer's parameters come once, one layer ahead, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32

from lazyjax.batch import Batch
from lazyjax.execution.kernels import DeviceBatch, DeviceSlab, Kernels
from lazyjax.execution.transfers import Transfers
from lazyjax.storage.host import HostStore


class ForwardPass:
    """Streams a model forward over whole batches."""

    def __init__(self, kernels: Kernels, store: HostStore, transfers: Transfers) -> None:
        self._kernels, self._store, self._transfers = kernels, store, transfers

    def loss_sum(self, batch: Batch, microbatches: int) -> float:
        """Sum of -log p over the target tokens of `batch`, cut into `microbatches` equal parts."""
        kernel = self._kernels.evaluation_loss()
        parts = self._run(batch, microbatches, kernel, needs_batch=True)
        return float(np.sum(np.asarray(jax.device_get(parts), np.float64)))

    def logits(self, batch: Batch) -> Float32[np.ndarray, "B T V"]:
        """All logits of `batch`; their size is B T V x 4 bytes on the device."""
        (logits,) = self._run(batch, 1, self._kernels.logits(), needs_batch=False)
        return np.asarray(jax.device_get(logits))

    def _run(
        self, batch: Batch, microbatches: int, head_kernel: Callable[..., Any], *, needs_batch: bool
    ) -> list[Array]:
        template = self._kernels.template
        rows = batch.rows // microbatches
        parts = [
            self._transfers.batch_to_device(batch.slice_rows(start, start + rows))
            for start in range(0, batch.rows, rows)
        ]
        activations: list[Array] = [part.tokens_BT for part in parts]
        head = len(template.spec.layers) - 1
        for layer, slab in self._slabs():
            if layer < head:
                kernel = self._kernels.forward(template.kind(layer), ())
                # One result at a time, so that an input is dropped as soon as it was used.
                for index, part in enumerate(parts):
                    activations[index] = kernel(slab, activations[index], part.context)[0]
                continue
            table_slab = self._transfers.slab_to_device(self._store.layers[0]) if template.spec.tied else None
            return [
                head_kernel(slab, table_slab, x_BTD, part if needs_batch else part.context)
                for x_BTD, part in zip(activations, parts, strict=True)
            ]
        raise AssertionError("a model has a head")

    def _slabs(self) -> Iterator[tuple[int, DeviceSlab]]:
        """Layers with their parameters; the next layer's copy is under way while one computes."""
        following = self._transfers.slab_to_device(self._store.layers[0])
        for layer in range(len(self._store.layers)):
            slab = following
            if layer + 1 < len(self._store.layers):
                following = self._transfers.slab_to_device(self._store.layers[layer + 1])
            yield layer, slab


__all__ = ["DeviceBatch", "ForwardPass"]
