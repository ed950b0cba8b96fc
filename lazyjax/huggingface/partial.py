"""Parts of tensors, read from safetensors files without the rest."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np

from lazyjax.huggingface.key_maps import Transform, to_parameter
from lazyjax.huggingface.tensor_files import FLOAT_DTYPES, CheckpointError, StoredTensor, read_tensor


class Elements(NamedTuple):
    """Some elements of a parameter.

    Attributes:
        stored: what was read, as one array of its own.
        parameter: the same as a view in the parameter's order: its elements from `first` on.
    """

    stored: np.ndarray
    parameter: np.ndarray
    first: int


def read_elements(tensor: StoredTensor, transform: Transform, wanted: range) -> Elements:
    """The elements `wanted` of a parameter (in C order, at least one), and few besides.

    What is not wanted is not read, but for the rest of a row: where stored rows are the parameter's columns,
    of each stored row a piece is read.

    Raises:
        KeyError: another element type. CheckpointError: the file ended early.
    """
    if wanted == range(math.prod(tensor.shape)):
        stored = read_tensor(tensor)
        return Elements(stored, to_parameter(transform, stored), 0)
    if transform is Transform.IDENTITY:
        flat = _read_rows(tensor, 1, math.prod(tensor.shape), wanted).reshape(-1)
        return Elements(flat, flat, wanted.start)
    # Stored [rows, columns], the parameter [columns, rows].
    rows = tensor.shape[0]
    columns = math.prod(tensor.shape[1:])
    some = range(wanted.start // rows, -(-wanted.stop // rows))
    stored = _read_rows(tensor, rows, columns, some)
    return Elements(stored, stored.T, some.start * rows)


def _read_rows(tensor: StoredTensor, rows: int, columns: int, some: range) -> np.ndarray:
    """Columns `some` of every row of a tensor taken as [rows, columns]."""
    values = np.empty((rows, len(some)), FLOAT_DTYPES[tensor.dtype])
    raw, size = memoryview(values.reshape(-1).view(np.uint8)), values.dtype.itemsize
    each = len(some) * size
    with tensor.path.open("rb", buffering=0) as file:
        for row in range(rows):
            offset = tensor.offset + (row * columns + some.start) * size
            target = raw[row * each : (row + 1) * each]
            while target:
                # Linux reads 2 GiB at most at a time.
                count = os.preadv(file.fileno(), [target], offset)
                if not count:
                    raise CheckpointError(f"{tensor.path}: ended inside tensor {tensor.key}")
                target, offset = target[count:], offset + count
    return values
