"""Host slabs: the memory in which parameters and gradients live between uses.

Every layer owns three page-aligned flat vectors of the same length: the two halves of the fp32
master weights (`hi` is what is streamed, see `lazyjax.storage.master`) and the gradient that the
device sends back. They are allocated once and reused for the whole run.

Optimizer state belongs to `lazyjax.optim`; this module only knows how to get aligned memory.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from lazyjax.specs import ModelSpec, Segment, SlabLayout, slab_layout
from lazyjax.storage.master import join_master, split_master

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "uint16": np.dtype(np.uint16),
    "int16": np.dtype(np.int16),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
}

#: Elements converted at a time when a tensor is stored.
_PIECE_ELEMENTS = 2**20


class HostMemoryError(MemoryError):
    """Host memory for the training state could not be had; says what was asked for."""


def aligned_zeros(elements: int, dtype: str, *, purpose: str) -> np.ndarray:
    """A zeroed, page-aligned vector.

    Anonymous mappings give pages as they are first written, so that describing a large model
    costs nothing until it is filled.

    Raises:
        HostMemoryError: naming `purpose` and the size, when the mapping is refused.
    """
    element = NUMPY_DTYPES[dtype]
    size = max(elements * element.itemsize, 1)
    try:
        return np.frombuffer(mmap.mmap(-1, size), dtype=element, count=elements)
    except (OSError, MemoryError) as error:
        raise HostMemoryError(
            f"no host memory for {purpose}: {size / 2**30:.2f} GiB refused ({error}); "
            "use a smaller model, 8-bit optimizer state, or a machine with more memory"
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSlabs:
    """One layer's training memory, N elements each.

    Attributes:
        hi: uint16, the bf16 bits that are streamed.
        lo: int16, the rest of the fp32 master weights.
        gradient: bfloat16 or float32, as delivered by the device.
    """

    layout: SlabLayout
    hi: np.ndarray
    lo: np.ndarray
    gradient: np.ndarray

    def master(self, segment_name: str) -> np.ndarray:
        """The fp32 master weights of one tensor, as a new array of its shape."""
        segment = self._segment(segment_name)
        part = slice(segment.offset, segment.offset + segment.elements)
        return join_master(self.hi[part], self.lo[part]).reshape(segment.shape)

    def master_pieces(
        self, segment_name: str, arrange: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """The fp32 master weights of one tensor as `arrange` orders them, some rows at a time.

        Args:
            arrange: from an array of the segment's shape to a view of it with at least one axis,
                e.g. its transpose.

        Raises:
            KeyError: no such tensor.
        """
        segment = self._segment(segment_name)
        part = slice(segment.offset, segment.offset + segment.elements)
        hi = arrange(self.hi[part].reshape(segment.shape))
        lo = arrange(self.lo[part].reshape(segment.shape))
        rows = max(1, _PIECE_ELEMENTS * hi.shape[0] // hi.size)
        for start in range(0, hi.shape[0], rows):
            piece = slice(start, start + rows)
            yield join_master(np.ascontiguousarray(hi[piece]), np.ascontiguousarray(lo[piece]))

    def set_master(self, segment_name: str, value: np.ndarray) -> None:
        """Stores `value` (any float dtype, the segment's shape) as fp32 master weights.

        Raises:
            KeyError: no such tensor. ValueError: another shape.
        """
        segment = self._segment(segment_name)
        if value.shape != segment.shape:
            raise ValueError(f"{segment_name}: shape {value.shape}, expected {segment.shape}")
        # In pieces along the first axis: `value` may be a bf16 or transposed view of a large
        # tensor, and an fp32 copy of the whole would triple the memory it takes.
        row_elements = segment.elements // segment.shape[0]
        rows = max(1, _PIECE_ELEMENTS // row_elements)
        for start in range(0, segment.shape[0], rows):
            flat = np.ascontiguousarray(value[start : start + rows], dtype=np.float32).reshape(-1)
            first = segment.offset + start * row_elements
            part = slice(first, first + flat.size)
            split_master(flat, self.hi[part], self.lo[part])

    def _segment(self, name: str) -> Segment:
        for segment in self.layout.segments:
            if segment.name == name:
                return segment
        raise KeyError(name)


@dataclasses.dataclass(frozen=True, slots=True)
class HostStore:
    """The slabs of a whole model, in layer order."""

    spec: ModelSpec
    layers: tuple[LayerSlabs, ...]


def allocate_host_store(
    spec: ModelSpec, *, gradient_dtype: str = "bfloat16", devices: int = 1, decay_vectors: bool = False
) -> HostStore:
    """Maps zeroed slabs for every layer of `spec`.

    Raises:
        HostMemoryError: naming the layer that did not fit.
    """
    layers = []
    for layer in spec.layers:
        layout = slab_layout(layer.parameters, devices=devices, decay_vectors=decay_vectors)
        layers.append(
            LayerSlabs(
                layout=layout,
                hi=aligned_zeros(layout.length, "uint16", purpose=f"parameters of {layer.name}"),
                lo=aligned_zeros(layout.length, "int16", purpose=f"master weights of {layer.name}"),
                gradient=aligned_zeros(layout.length, gradient_dtype, purpose=f"gradient of {layer.name}"),
            )
        )
    return HostStore(spec, tuple(layers))
