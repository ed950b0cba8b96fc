"""Tensors on NVMe, a file of raw bytes per key.

Transfers are asynchronous and go straight between the drive and the caller's memory
(`lazyjax.hardware.drive`).

Each write leaves a stamp of its bytes in memory, and each read is compared with it: a file that is
missing, short, stale or altered is an error that names the key, never a tensor of zeros. The
stamp costs one pass over memory (about 15 GB/s on one core, docs/nvme.md), a drive's transfer
several times as much.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from lazyjax.hardware.drive import CONCURRENT_TRANSFERS, read_file, write_file
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


class NvmeStore:
    """Bytes by key in a scratch folder of this run's own, inside `parent`.

    Nothing else in `parent` is touched, except scratch folders of runs that were killed
    (`lazyjax.storage.scratch`). Several threads may read a key; nobody may while another writes it.
    """

    def __init__(self, parent: pathlib.Path, *, run: str = "run") -> None:
        """Opens the store.

        Raises:
            NvmeError: nothing can be written in `parent`.
        """
        self._sizes: dict[str, int] = {}
        self._stamps: dict[str, int] = {}
        self._in_flight: dict[str, list[_Transfer]] = {}
        self._lock = threading.Lock()
        try:
            self._scratch = ScratchFolder(parent, run)
        except OSError as error:
            raise NvmeError(f"nvme folder {parent}: cannot be used ({error.strerror})") from error
        remove_left_behind(parent)
        self.folder = self._scratch.path
        self._threads = ThreadPoolExecutor(CONCURRENT_TRANSFERS, thread_name_prefix="nvme")

    def write(self, key: str, source: UInt8[np.ndarray, " n"]) -> DriveTransfer:
        """Starts writing; `result()` of what is returned raises `NvmeError` on failure.

        `source` must not change until then. A key may be written again with another size.
        """
        self._settle(key)
        self._sizes[key] = source.size
        self._stamps[key] = stamp(source)
        return self._start(key, lambda: write_file(self.folder / key, source), source, "writing", None)

    def read(self, key: str, target: UInt8[np.ndarray, " n"]) -> DriveTransfer:
        """Starts reading into `target`, whose size is the key's; the same kind of transfer.

        Raises:
            NvmeError: the key was never written, or with another size.
        """
        if key not in self._sizes:
            raise NvmeError(f"nvme folder {self.folder}: {key!r} was never written")
        size = self._sizes[key]
        if size != target.size:
            raise NvmeError(
                f"nvme folder {self.folder}: {key!r} has {size} bytes, {target.size} were asked for"
            )
        expected = self._stamps[key]
        return self._start(key, lambda: read_file(self.folder / key, target), target, "reading", expected)

    def delete(self, key: str) -> None:
        """Forgets a key, after what is in flight on it, and removes its file."""
        self._settle(key)
        self._stamps.pop(key, None)
        if self._sizes.pop(key, None) is None:
            return
        try:
            (self.folder / key).unlink(missing_ok=True)
        except OSError as error:
            raise NvmeError(f"nvme folder {self.folder}: cannot delete {key!r} ({error.strerror})") from error

    def close(self) -> None:
        """Waits for what is in flight, forgets all keys and removes the scratch folder."""
        try:
            self._threads.shutdown(wait=True)
        finally:
            self._in_flight.clear()
            self._sizes.clear()
            self._stamps.clear()
            self._scratch.remove()

    def _settle(self, key: str) -> None:
        with self._lock:
            transfers = self._in_flight.pop(key, [])
        for transfer in transfers:
            transfer.settle()

    def _start(
        self, key: str, work: Callable[[], None], memory: np.ndarray, doing: str, expected: int | None
    ) -> DriveTransfer:
        future = self._threads.submit(work)
        transfer = _Transfer(future, f"nvme folder {self.folder}: {doing} {key!r}", memory, expected)
        with self._lock:
            under_way = [other for other in self._in_flight.pop(key, []) if not other.ended]
            self._in_flight[key] = [*under_way, transfer]
        return transfer


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

    def __init__(self, future: Future[None], what: str, memory: np.ndarray, expected: int | None) -> None:
        self._future: Future[None] | None = future
        self._memory: np.ndarray | None = memory
        self._what, self._expected = what, expected

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
        except FileNotFoundError as error:
            raise NvmeError(f"{self._what} failed: its file is missing") from error
        except OSError as error:
            raise NvmeError(f"{self._what} failed: {error.strerror or error}") from error
        finally:
            self._future = self._memory = None
        if self._expected is not None and stamp(memory) != self._expected:
            raise NvmeError(f"{self._what} failed: the file does not hold what was written to it")
