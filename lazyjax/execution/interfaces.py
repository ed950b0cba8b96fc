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
class ForwardKernel(Protocol):
    """A layer's forward pass of one microbatch."""

    def __call__(self, slab: Any, x_BTD: Any, context: Any, /) -> tuple[Any, tuple[Any, ...], Any]:
        """y_BTD, the saved residuals in the order of their names, and a token to wait for."""
        ...


@runtime_checkable
class BackwardKernel(Protocol):
    """A layer's backward pass of one microbatch."""

    def __call__(
        self,
        accumulator: Any,
        slab: Any,
        x_BTD: Any,
        context: Any,
        residuals: tuple[Any, ...],
        y_gradient_BTD: Any,
        /,
    ) -> tuple[Any, Any, Any]:
        """x_gradient_BTD, a `GradientSlab` or the accumulator, and a token; `accumulator` may be None."""
        ...


@runtime_checkable
class EmbedBackwardKernel(Protocol):
    """The embedding's backward pass of one microbatch."""

    def __call__(self, accumulator: Any, tokens_BT: Any, x_gradient_BTD: Any, /) -> tuple[Any, Any]:
        """A `GradientSlab` or the accumulator, and a token."""
        ...


@runtime_checkable
class ScatterKernel(Protocol):
    """Sums the gradients that devices have of their own rows."""

    def __call__(self, accumulator: Any, partial: Any, /) -> tuple[Any, Any]:
        """A `GradientSlab` or the accumulator, of which each device has a part, and a token."""
        ...


@runtime_checkable
class LossKernel(Protocol):
    """Head and loss of one microbatch, forward and backward."""

    def __call__(
        self,
        accumulator: Any,
        table_accumulator: Any,
        slab: Any,
        table_slab: Any,
        x_BTD: Any,
        batch: Any,
        scale: Any,
        /,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """The scaled loss, x_gradient_BTD, result, the table's accumulator (None where it is the head's own),
        and a token."""
        ...


@runtime_checkable
class EvaluationKernel(Protocol):
    """Head and loss of one microbatch, forward only."""

    def __call__(self, slab: Any, table_slab: Any, x_BTD: Any, batch: Any, /) -> Any:
        """The sum of -log p over unmasked targets."""
        ...


@runtime_checkable
class LogitsKernel(Protocol):
    """The head of one microbatch."""

    def __call__(self, slab: Any, table_slab: Any, x_BTD: Any, context: Any, /) -> Any:
        """logits_BTV in float32."""
        ...


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

    def gather(self) -> Callable[[Any], tuple[Any, Any]]:
        """From a slab of which every device has a part to the whole one on each, and a token."""
        ...

    def scatter(self, accumulates: bool, last: bool) -> ScatterKernel:
        """Sums a microbatch's gradient over the devices."""
        ...

    def forward(self, kind: LayerKind, saved: tuple[str, ...]) -> ForwardKernel:
        """Forward pass of one microbatch through a layer."""
        ...

    def backward(
        self, kind: LayerKind, saved: tuple[str, ...], accumulates: bool, last: bool
    ) -> BackwardKernel:
        """Backward pass of one microbatch through a layer."""
        ...

    def embed_backward(self, accumulates: bool, last: bool) -> EmbedBackwardKernel:
        """Backward pass of one microbatch through the embedding."""
        ...

    def loss(self, head_chunk: int, accumulates: bool, last: bool) -> LossKernel:
        """Head and loss of one microbatch, forward and backward, so many tokens' logits at a time."""
        ...

    def evaluation_loss(self, head_chunk: int) -> EvaluationKernel:
        """Head and loss of one microbatch, forward only."""
        ...

    def logits(self) -> LogitsKernel:
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
