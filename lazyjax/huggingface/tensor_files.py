"""Safetensors files, read and written tensor by tensor.

The format (safetensors README, "Format"): eight bytes with the header's length, a JSON header
`key -> {dtype, shape, data_offsets}`, then the tensors' bytes without holes. Everything about a
file can therefore be checked before its first tensor is read, and a file of any size can be
written without holding it.

This module knows nothing about models: which keys a checkpoint should have is the business of
`lazyjax.huggingface.key_maps`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

#: Bytes of one element, for every type that a file may hold.
ELEMENT_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
#: Types that parameters are read from and written in.
FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
#: Bytes moved at a time when a tensor need not be held whole.
CHUNK_BYTES = 4 * 2**20
_MAX_HEADER_BYTES = 100_000_000


class CheckpointError(ValueError):
    """A folder or file that is missing, damaged or not what it should be; the message names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: `bytes` bytes from `offset`, counted from the file's start."""

    key: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, without reading any.

    Raises:
        CheckpointError: naming the file, when it is missing, truncated or not well formed.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: not a safetensors file, or truncated inside its header "
                    f"({size} bytes, header of {header_bytes})"
                )
            text = file.read(header_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: the safetensors header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a table")
    start = 8 + header_bytes
    tensors = {
        key: _stored_tensor(path, key, entry, start) for key, entry in header.items() if key != "__metadata__"
    }
    _check_extent(path, tensors, start, size)
    return tensors


def _stored_tensor(path: Path, key: str, entry: Any, start: int) -> StoredTensor:
    try:
        dtype = entry["dtype"]
        shape = tuple(entry["shape"])
        first, end = entry["data_offsets"]
        element_bytes = ELEMENT_BYTES[dtype]
        well_formed = all(isinstance(n, int) and n >= 0 for n in (*shape, first, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {key}: entry not understood: {entry!r}") from error
    if not well_formed or end - first != math.prod(shape) * element_bytes:
        raise CheckpointError(
            f"{path}: tensor {key}: bytes {first} to {end} do not hold {dtype} of shape {shape}"
        )
    return StoredTensor(key, path, dtype, shape, start + first, end - first)


def _check_extent(path: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """The tensors must cover the file from `start` to `size` without holes or overlaps."""
    position = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset != position:
            raise CheckpointError(f"{path}: tensor {tensor.key}: overlaps another or leaves a hole before it")
        position += tensor.bytes
    if position > size:
        raise CheckpointError(f"{path}: truncated: {size} bytes, its header describes {position}")
    if position < size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor")


def read_tensor(tensor: StoredTensor) -> Shaped[np.ndarray, "..."]:
    """One tensor in its stored type (bf16, f16 or f32) as a new array: its bytes, held once.

    Raises:
        KeyError: another element type. CheckpointError: the file ended early.
    """
    value = np.empty(tensor.shape, FLOAT_DTYPES[tensor.dtype])
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        view = memoryview(value.reshape(-1).view(np.uint8))
        if file.readinto(view) != tensor.bytes:
            raise CheckpointError(f"{tensor.path}: ended inside tensor {tensor.key}")
    return value


def read_chunks(tensor: StoredTensor, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The tensor's bytes in order, whatever its type, at most `chunk_bytes` at a time."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        left = tensor.bytes
        while left:
            chunk = file.read(min(chunk_bytes, left))
            if not chunk:
                raise CheckpointError(f"{tensor.path}: ended inside tensor {tensor.key}")
            left -= len(chunk)
            yield chunk


@dataclasses.dataclass(frozen=True, slots=True)
class OutgoingTensor:
    """One tensor to be written; `chunks` yields its bytes in order and is called once."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[bytes | memoryview]]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def write_file(
    path: Path,
    tensors: Sequence[OutgoingTensor],
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Writes a safetensors file: the header, then each tensor as its chunks come.

    Args:
        path: must not exist.
        tensors: wider element types are placed first, so that every tensor is aligned.
        progress: called with (key, bytes written) after each chunk.

    Raises:
        ValueError: a tensor whose chunks do not add up to its size.
    """
    ordered = sorted(tensors, key=lambda tensor: -ELEMENT_BYTES[tensor.dtype])
    # Transformers refuses files whose metadata does not name a framework's layout.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        header[tensor.key] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.bytes],
        }
        end += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in ordered:
            written = 0
            for chunk in tensor.chunks():
                chunk_bytes = file.write(chunk)
                written += chunk_bytes
                if progress is not None:
                    progress(tensor.key, chunk_bytes)
            if written != tensor.bytes:
                raise ValueError(f"{tensor.key}: {written} bytes given for {tensor.bytes}")
        file.flush()
        os.fsync(file.fileno())
