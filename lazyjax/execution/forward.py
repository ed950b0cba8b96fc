"""A forward pass without a backward pass: evaluation loss and logits, streamed layer by layer.

It keeps to the limits of the training plan, so that what trains also evaluates: microbatches of no
more tokens, no more slabs ahead, and where activations wait on the host between layers, they do so
here. Nothing is kept for a backward pass.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from lazyjax.batch import Batch
from lazyjax.execution.interfaces import Copies, EvaluationKernel, LayerKernels
from lazyjax.planning.plan.document import Plan
from lazyjax.storage.host import HostStore


def fetch(copies: Copies, store: HostStore, layer: int) -> Any:
    """Starts the copy of a layer's parameters to the device, outside of training steps.

    What lives on NVMe is read and copied to its end: the next layer takes its place in memory.
    """
    lasting = not store.owned.on_nvme(layer)
    slab = copies.slab_to_device(store.layers[layer], lasting=lasting)
    if not lasting:
        jax.block_until_ready(slab)
    return slab


class ForwardPass:
    """Streams a model forward over whole batches."""

    def __init__(self, kernels: LayerKernels, store: HostStore, copies: Copies) -> None:
        self._kernels, self._store, self._copies = kernels, store, copies

    def loss_sum(self, batch: Batch, plan: Plan) -> float:
        """Sum of -log p over the target tokens of `batch`, within the limits of `plan`."""
        kernel = self._kernels.evaluation_loss(plan.head_chunk)
        parts = self._run(batch, plan, lambda head, table, x, part: kernel(head, table, x, part))
        return float(np.sum(np.asarray(self._copies.read_scalars(list(parts)), np.float64)))

    def logits(self, batch: Batch, plan: Plan) -> Float32[np.ndarray, "B T V"]:
        """All logits of `batch`; those of one microbatch at a time are on the device."""
        kernel = self._kernels.logits()
        parts = self._run(batch, plan, lambda head, table, x, part: kernel(head, table, x, part.context))
        return np.concatenate([np.asarray(jax.device_get(part)) for part in parts])[: batch.rows]

    def _run(self, batch: Batch, plan: Plan, head_kernel: EvaluationKernel) -> Iterator[Any]:
        """The results of the head's kernel, microbatch by microbatch."""
        template, copies = self._kernels.template.in_chunks(plan.token_chunk), self._copies
        microbatch_rows, count = microbatches_of(batch, plan, devices=self._kernels.devices)
        batch = batch.with_rows(count * microbatch_rows)
        parts = [
            copies.batch_to_device(batch.slice_rows(part * microbatch_rows, (part + 1) * microbatch_rows))
            for part in range(count)
        ]
        activations = _Activations(copies, plan, [part.tokens_BT for part in parts])
        head = len(template.spec.layers) - 1
        previous = None
        for layer, slab in self._slabs(plan.prefetch):
            params = self._kernels.unpack(template.kind(layer))(slab)
            del slab
            if layer == head:
                table = None
                if template.spec.tied:
                    table = self._kernels.unpack(template.kind(0))(fetch(copies, self._store, 0))
                for index in activations.order(reverse=False):
                    yield head_kernel(params, table, activations.take(index), parts[index])
                return
            kernel = self._kernels.forward(template.kind(layer), ())
            # Alternating the direction, the microbatch that leaves a layer last enters the next first.
            for index in activations.order(reverse=layer % 2 == 1):
                y, _, token = kernel(params, activations.take(index), parts[index].context)
                activations.put(index, y)
            if previous is not None:
                # At most one layer ahead of the device, so that what was given up is free.
                jax.block_until_ready(previous)
            previous = token

    def _slabs(self, depth: int) -> Iterator[tuple[int, Any]]:
        """Layers with their parameters, of which `depth` are on the device or on their way."""
        layers = len(self._store.layouts)
        ahead: collections.deque[Any] = collections.deque()
        for layer in range(layers):
            while len(ahead) < min(depth, layers - layer):
                ahead.append(fetch(self._copies, self._store, layer + len(ahead)))
            yield layer, ahead.popleft()


def microbatches_of(batch: Batch, plan: Plan, *, devices: int) -> tuple[int, int]:
    """Rows and number of equal microbatches of no more tokens than one of `plan` has.

    Rows of padding fill the last one; a single row (on each device) may be longer than that.
    """
    tokens = plan.microbatch_rows * plan.sequence_length
    most_units = max(1, tokens // batch.sequence_length // devices)
    units = -(-batch.rows // devices)
    count = -(-units // most_units)
    return -(-units // count) * devices, count


class _Activations:
    """Activations between layers: on the device, or on the host where the plan says so."""

    def __init__(self, copies: Copies, plan: Plan, inputs: list[Any]) -> None:
        self._copies, self._ahead = copies, plan.reload_ahead
        self._offload_window = plan.offload_window
        self._streamed = plan.interlayer_home == "host"
        self._device: dict[int, Any] = dict(enumerate(inputs))
        self._host: dict[int, Any] = {}
        self._leaving: collections.deque[int] = collections.deque()
        self._order: list[int] = list(range(len(inputs)))

    def order(self, *, reverse: bool) -> list[int]:
        """Fixes the order in which the next layer takes the microbatches."""
        self._order = sorted(self._device | self._host, reverse=reverse)
        return self._order

    def take(self, index: int) -> Any:
        """A microbatch's activations, to be used once; those that follow are sent for."""
        position = self._order.index(index)
        for following in self._order[position : position + self._ahead + 1]:
            if following not in self._device:
                (self._device[following],) = self._copies.to_device([self._host.pop(following)])
        if index in self._leaving:
            self._leaving.remove(index)
            self._host.pop(index)
        return self._device.pop(index)

    def put(self, index: int, y: Any) -> None:
        """A microbatch's activations for the next layer."""
        self._device[index] = y
        if not self._streamed:
            return
        (self._host[index],) = self._copies.to_host([y])
        self._leaving.append(index)
        while len(self._leaving) > self._offload_window:
            left = self._leaving.popleft()
            jax.block_until_ready(self._host[left])
            del self._device[left]
