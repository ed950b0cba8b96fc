"""Interfaces that the executor needs of kernels and copies, so that other things than a device can stand in.

`lazyjax.execution.kernels` and `lazyjax.execution.transfers` implement this with JAX;
`experiments.emulated` with queues that only take time. Values are opaque here: whatever one
function returns, another one takes, and `jax.block_until_ready` waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lazyjax.batch import Batch
from lazyjax.models.template import LayerKind, ModelTemplate
from lazyjax.storage.host import LayerOnDrive, LayerSlabs


@runtime_checkable
class LayerKernels(Protocol):
    """Functions of layer mathematics; `lazyjax.execution.kernels.Kernels` says what each takes."""

    @property
    def template(self) -> ModelTemplate:
        """The model."""
        ...

    @property
    def devices(self) -> int:
        """Devices that share every batch and slab."""
        ...

    def unpack(self, kind: LayerKind) -> Callable[[Any], Any]:
        """From a slab on the device to what the other functions take as a layer's parameters."""
        ...

    def forward(self, kind: LayerKind, saved: tuple[str, ...]) -> Callable[..., Any]:
        """Forward pass of one microbatch through a layer."""
        ...

    def backward(
        self, kind: LayerKind, saved: tuple[str, ...], accumulates: bool, last: bool
    ) -> Callable[..., Any]:
        """Backward pass of one microbatch through a layer."""
        ...

    def embed_backward(self, accumulates: bool, last: bool) -> Callable[..., Any]:
        """Backward pass of one microbatch through the embedding."""
        ...

    def loss(self, accumulates: bool, last: bool) -> Callable[..., Any]:
        """Head and loss of one microbatch, forward and backward."""
        ...

    def evaluation_loss(self) -> Callable[..., Any]:
        """Head and loss of one microbatch, forward only."""
        ...

    def logits(self) -> Callable[..., Any]:
        """Logits of one microbatch."""
        ...


@runtime_checkable
class Copies(Protocol):
    """Copies between host and device; `lazyjax.execution.transfers.Transfers` says what each does."""

    def slab_to_device(self, slabs: LayerSlabs | LayerOnDrive, *, lasting: bool = True) -> Any:
        """Starts the copy of a layer's parameters."""
        ...

    def batch_to_device(self, batch: Batch) -> Any:
        """Starts the copy of one microbatch."""
        ...

    def scalar_to_device(self, value: float) -> Any:
        """Starts the copy of a float32 scalar."""
        ...

    def to_host(self, arrays: Sequence[Any]) -> list[Any]:
        """Starts the copies of device arrays to pinned host memory."""
        ...

    def to_device(self, arrays: Sequence[Any]) -> list[Any]:
        """Starts the copies of pinned host arrays to the device."""
        ...

    def to_bytes(self, array: Any) -> np.ndarray:
        """The bytes of a pinned host array; waits for them."""
        ...

    def describe(self, array: Any) -> Any:
        """The shape and dtype needed to make an array like `array` again from bytes."""
        ...

    def empty_bytes(self, like: Any) -> np.ndarray:
        """Host memory for the bytes of an array so described."""
        ...

    def from_bytes(self, raw: np.ndarray, like: Any) -> Any:
        """A pinned host array so described, with these bytes."""
        ...

    def into_slab(self, delivered: Any, gradient_N: np.ndarray) -> None:
        """Copies an arrived gradient into its slab."""
        ...

    def read_scalars(self, values: Any) -> list[float]:
        """Values of scalar arrays; waits for them."""
        ...

    def device_bytes(self, tree: Any) -> int:
        """Bytes on one device of all arrays in `tree`."""
        ...
