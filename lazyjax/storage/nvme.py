"""Tensors on NVMe, through TensorStore (the only importer of it).

Every key is a zarr3 array of raw bytes in one chunk. Writes are asynchronous and keep their
source alive; reads go straight into a buffer of the caller.

Each write leaves a stamp of its bytes in memory, and each read is compared with it: a file that is
missing, short, stale or altered is an error that names the key, never a tensor of zeros. The
stamp costs one pass over memory (about 15 GB/s on one core, docs/nvme.md), a drive's transfer
several times as much.
"""

from __future__ import annotations

import pathlib
import threading
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import tensorstore as ts
from jaxtyping import UInt8

from lazyjax.storage.scratch import ScratchFolder, remove_left_behind

_PAGE_BYTES = 4096


class NvmeError(OSError):
    """A read or write on the NVMe folder failed; the message names the key and the folder."""


@runtime_checkable
class DriveTransfer(Protocol):
    """A read or write in flight."""

    def result(self) -> None:
        """Waits for its end; raises `NvmeError` if it failed."""
        ...


@runtime_checkable
class Drive(Protocol):
    """Bytes by key, as the executor uses them."""

    def write(self, key: str, source: np.ndarray) -> DriveTransfer:
        """Starts writing; `source` must not change until the transfer is done."""
        ...

    def read(self, key: str, target: np.ndarray) -> DriveTransfer:
        """Starts reading all bytes of a key into `target`."""
        ...

    def delete(self, key: str) -> None:
        """Forgets a key and its bytes."""
        ...

    def close(self) -> None:
        """Waits for what is in flight and removes everything."""
        ...


class _Entry(NamedTuple):
    array: Any
    size: int


class NvmeStore:
    """Bytes by key in a scratch folder of this run's own, inside `parent`.

    Nothing else in `parent` is touched, except scratch folders of runs that were killed
    (`lazyjax.storage.scratch`). Several threads may read a key; nobody may while another writes it.
    """

    def __init__(self, parent: pathlib.Path, *, run: str = "run", concurrency: int = 4) -> None:
        """Opens the store.

        Raises:
            NvmeError: nothing can be written in `parent`.
        """
        self._context = ts.Context(
            {
                "file_io_concurrency": {"limit": concurrency},
                "file_io_sync": False,
                "file_io_mode": {"mode": "memmap"},
            }
        )
        self._entries: dict[str, _Entry] = {}
        self._stamps: dict[str, int] = {}
        self._in_flight: dict[str, list[_Transfer]] = {}
        self._lock = threading.Lock()
        try:
            self._scratch = ScratchFolder(parent, run)
        except OSError as error:
            raise NvmeError(f"nvme folder {parent}: cannot be used ({error.strerror})") from error
        remove_left_behind(parent)
        self.folder = self._scratch.path

    def write(self, key: str, source: UInt8[np.ndarray, " n"]) -> DriveTransfer:
        """Starts writing; `result()` of what is returned raises `NvmeError` on failure.

        `source` must not change until then. A key may be written again with another size.
        """
        entry = self._entry(key, source.size)
        self._stamps[key] = stamp(source)
        return self._start(key, entry.array.write(source), source, "writing", None)

    def read(self, key: str, target: UInt8[np.ndarray, " n"]) -> DriveTransfer:
        """Starts reading into `target`, whose size is the key's; the same kind of transfer.

        Raises:
            NvmeError: the key was never written, or with another size.
        """
        if key not in self._entries:
            raise NvmeError(f"nvme folder {self.folder}: {key!r} was never written")
        entry = self._entries[key]
        if entry.size != target.size:
            raise NvmeError(
                f"nvme folder {self.folder}: {key!r} has {entry.size} bytes, {target.size} were asked for"
            )
        view = ts.array(target, copy=False, write=True)
        return self._start(key, view.write(entry.array), target, "reading", self._stamps[key])

    def delete(self, key: str) -> None:
        """Forgets a key, after what is in flight on it, and removes its file."""
        self._settle(key)
        entry = self._entries.pop(key, None)
        self._stamps.pop(key, None)
        if entry is None:
            return
        try:
            entry.array.kvstore.delete_range(ts.KvStore.KeyRange()).result()
        except Exception as error:
            raise NvmeError(f"nvme folder {self.folder}: cannot delete {key!r} ({error})") from error

    def close(self) -> None:
        """Waits for what is in flight, forgets all keys and removes the scratch folder."""
        try:
            for key in list(self._in_flight):
                self._settle(key)
        finally:
            self._entries.clear()
            self._stamps.clear()
            self._scratch.remove()

    def _settle(self, key: str) -> None:
        with self._lock:
            transfers = self._in_flight.pop(key, [])
        for transfer in transfers:
            transfer.settle()

    def _start(
        self, key: str, future: Any, memory: np.ndarray, doing: str, expected: int | None
    ) -> DriveTransfer:
        if expected is None:
            self._settle(key)
        transfer = _Transfer(future, f"nvme folder {self.folder}: {doing} {key!r}", memory, expected)
        with self._lock:
            under_way = [other for other in self._in_flight.pop(key, []) if not other.ended]
            self._in_flight[key] = [*under_way, transfer]
        return transfer

    def _entry(self, key: str, size: int) -> _Entry:
        known = self._entries.get(key)
        if known is None or known.size != size:
            # Longer or shorter batches bring other sizes; the file is made anew.
            self._settle(key)
            self._entries[key] = _Entry(self._create(key, size), size)
        return self._entries[key]

    def _create(self, key: str, size: int) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(self.folder / key)},
            # A missing file is an error and zeros are written like all else.
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
            "metadata": {
                "shape": [size],
                "data_type": "uint8",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(size, 1)]}},
                "codecs": [{"name": "bytes"}],
            },
        }
        try:
            return ts.open(spec, create=True, delete_existing=True, context=self._context).result()
        except Exception as error:
            raise NvmeError(f"nvme folder {self.folder}: cannot create {key!r} ({error})") from error


def stamp(raw: UInt8[np.ndarray, " n"]) -> int:
    """A number that tells bytes from other bytes, as fast as memory is read.

    Sums of the 64-bit words of each 4 KiB page, added up with odd weights that differ from page to
    page, and the length. It notices changed words, pages that are missing, swapped or from an
    earlier write, and truncation; it does not notice words that trade places within one page.
    """
    whole = raw.size - raw.size % _PAGE_BYTES
    tail = np.zeros(_PAGE_BYTES, np.uint8)
    tail[: raw.size - whole] = raw[whole:]
    pages = np.add.reduce(raw[:whole].view(np.uint64).reshape(-1, _PAGE_BYTES // 8), axis=1)
    sums = np.append(pages, np.add.reduce(tail.view(np.uint64)))
    weights = np.arange(1, 2 * sums.size, 2, dtype=np.uint64)
    return (int(np.add.reduce(sums * weights)) * 31 + raw.size) % 2**64


class _Transfer:
    """A read or write in flight, with the memory it works on kept alive until it is done."""

    def __init__(self, future: Any, what: str, memory: np.ndarray, expected: int | None) -> None:
        self._future, self._what, self._expected = future, what, expected
        self._memory: np.ndarray | None = memory

    @property
    def ended(self) -> bool:
        """Whether somebody has taken the result."""
        return self._future is None

    def settle(self) -> None:
        """Waits for the end, whether good or bad; the result is still to be had."""
        future = self._future
        if future is not None:
            future.exception()

    def result(self) -> None:
        """Waits until the bytes are where they were to go, and are the ones that were written."""
        future, memory = self._future, self._memory
        if future is None or memory is None:
            return
        try:
            future.result()
        except Exception as error:
            raise NvmeError(f"{self._what} failed: {error}") from error
        finally:
            self._future = self._memory = None
        if self._expected is not None and stamp(memory) != self._expected:
            raise NvmeError(f"{self._what} failed: the file does not hold what was written to it")
