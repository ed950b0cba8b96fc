"""Page-aligned host memory, and the types of what lies in it."""

from __future__ import annotations

import mmap
from typing import Any

import ml_dtypes
import numpy as np

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "uint16": np.dtype(np.uint16),
    "int16": np.dtype(np.int16),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
}


def raw_bytes(array: np.ndarray) -> np.ndarray:
    """The array's own bytes, not a copy of them."""
    return array.reshape(-1).view(np.uint8)


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
