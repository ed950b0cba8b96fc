"""Tensors on NVMe, through TensorStore (the only importer of it).

Every key is a zarr3 array of raw bytes in one chunk. Writes are asynchronous and keep their
source alive; reads go straight into a buffer of the caller.
"""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import numpy as np
import tensorstore as ts
from jaxtyping import UInt8


class NvmeError(OSError):
    """A read or write on the NVMe folder failed; the message names the key and the folder."""


class NvmeStore:
    """Bytes by key in one folder. The folder is scratch space: it is emptied when opened."""

    def __init__(self, folder: pathlib.Path, *, concurrency: int = 4) -> None:
        self._folder = folder
        self._context = ts.Context(
            {
                "file_io_concurrency": {"limit": concurrency},
                "file_io_sync": False,
                "file_io_mode": {"mode": "memmap"},
            }
        )
        self._arrays: dict[str, Any] = {}
        try:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        except OSError as error:
            raise NvmeError(f"nvme folder {folder}: cannot be used ({error.strerror})") from error

    def write(self, key: str, source: UInt8[np.ndarray, " n"]) -> Any:
        """Starts writing; the returned future's `result()` raises `NvmeError` on failure.

        `source` must not change until the future is done.
        """
        if key not in self._arrays:
            self._arrays[key] = self._create(key, source.size)
        return _Pending(self._arrays[key].write(source), key, self._folder, source)

    def read(self, key: str, target: UInt8[np.ndarray, " n"]) -> Any:
        """Starts reading into `target`; the same kind of future. KeyError: never written."""
        view = ts.array(target, copy=False, write=True)
        return _Pending(view.write(self._arrays[key]), key, self._folder, target)

    def close(self) -> None:
        """Forgets all keys and removes the scratch folder."""
        self._arrays.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _create(self, key: str, size: int) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(self._folder / key)},
            "metadata": {
                "shape": [size],
                "data_type": "uint8",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(size, 1)]}},
                "codecs": [{"name": "bytes"}],
            },
        }
        try:
            return ts.open(spec, create=True, delete_existing=True, context=self._context).result()
        except (ValueError, OSError) as error:
            raise NvmeError(f"nvme folder {self._folder}: cannot create {key!r} ({error})") from error


class _Pending:
    """A read or write in flight, with the memory it works on kept alive."""

    def __init__(self, future: Any, key: str, folder: pathlib.Path, memory: np.ndarray) -> None:
        self._future, self._key, self._folder, self._memory = future, key, folder, memory

    def result(self) -> None:
        """Waits until the bytes are where they were to go."""
        try:
            self._future.result()
        except (ValueError, OSError) as error:
            raise NvmeError(f"nvme folder {self._folder}: {self._key!r} failed ({error})") from error
