"""Files on a drive, moved between it and memory as fast as it goes, and how fast that is.

Writes go past the page cache (O_DIRECT) where the file system lets them and memory is aligned: what passes
the cache is held up as soon as the kernel finds too much of it unwritten, and takes memory meanwhile. Reads
go through the cache: the kernel reads ahead, a plain O_DIRECT read waits for each request (docs/nvme.md has
figures).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pathlib
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

#: Transfers under way at once, both directions together; the others wait.
CONCURRENT_TRANSFERS = 4
_PAGE_BYTES = 4096
_BLOCK_BYTES = 64 * 2**20


def write_file(path: pathlib.Path, source: np.ndarray) -> None:
    """Makes a file of `source` or writes one anew, whole pages past the page cache where possible.

    Raises:
        OSError: of the system; what the file holds then is not known.
    """
    whole = source.size - source.size % _PAGE_BYTES
    with _opened(path, os.O_WRONLY | os.O_CREAT) as file:
        os.ftruncate(file, source.size)
        written = 0
        if whole and source.ctypes.data % _PAGE_BYTES == 0:
            written = _write_direct(path, source[:whole])
        while written < source.size:
            written += os.pwrite(file, source[written:], written)


def _write_direct(path: pathlib.Path, pages: np.ndarray) -> int:
    """Writes pages with O_DIRECT; the bytes that were written, none where the file system refuses."""
    written = 0
    try:
        with _opened(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0)) as file:
            while written < pages.size:
                written += os.pwrite(file, pages[written:], written)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # After a part of a page the rest is written the ordinary way, from the page's beginning.
    return written - written % _PAGE_BYTES


def read_file(path: pathlib.Path, target: np.ndarray) -> None:
    """Fills `target` from a file's beginning.

    Raises:
        OSError: of the system, or the file is too short.
    """
    done = 0
    with _opened(path, os.O_RDONLY) as file:
        while done < target.size:
            got = os.preadv(file, [target[done:]], done)
            if not got:
                raise OSError(f"the file has {done} bytes, {target.size} were written")
            done += got


@contextlib.contextmanager
def _opened(path: pathlib.Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def forget(path: pathlib.Path) -> None:
    """Writes what of a file waits in memory to the drive, and drops its pages from the page cache."""
    with _opened(path, os.O_RDONLY) as file:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


class DriveRates(NamedTuple):
    """Bytes per second of each direction alone, and of both together while as many go either way."""

    read: float
    write: float
    shared: float


def drive_rates(folder: pathlib.Path, size: int) -> DriveRates:
    """Rates of files of 64 MiB, `size` bytes in each direction: each alone, then both at once.

    As many are under way at once as in training. What is read was dropped from the page cache. Nothing is
    left behind.

    Raises:
        OSError: `folder` cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    block = min(size, _BLOCK_BYTES)
    count = max(1, size // block)
    source = aligned_bytes(block)
    source[:] = np.random.default_rng(0).integers(0, 256, block, dtype=np.uint8)
    targets: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
    for _ in range(CONCURRENT_TRANSFERS):
        target = aligned_bytes(block)
        target[:] = 0
        targets.put(target)

    def write(path: pathlib.Path) -> None:
        write_file(path, source)

    def read(path: pathlib.Path) -> None:
        target = targets.get()
        try:
            read_file(path, target)
        finally:
            targets.put(target)

    with (
        tempfile.TemporaryDirectory(prefix="lazyjax-profile-", dir=folder) as name,
        ThreadPoolExecutor(CONCURRENT_TRANSFERS) as threads,
    ):
        paths = [pathlib.Path(name) / str(number) for number in range(2 * count)]

        def finish(*directions: tuple[Callable[[pathlib.Path], None], list[pathlib.Path]]) -> None:
            """All files of each direction, the directions by turns."""
            by_turns = zip(*([(work, path) for path in some] for work, some in directions), strict=True)
            for done in [threads.submit(work, path) for turn in by_turns for work, path in turn]:
                done.result()

        read_from, write_to = paths[:count], paths[count:]
        finish((write, paths))
        for _ in range(2):  # a drive may still be busy with what was written: the second time counts
            _forget_all(paths)
            reading = _seconds(lambda: finish((read, read_from)))
        writing = _seconds(lambda: finish((write, write_to)))
        _forget_all(paths)
        together = _seconds(lambda: finish((read, read_from), (write, write_to)))
    moved = count * block
    return DriveRates(moved / reading, moved / writing, 2 * moved / together)


def _forget_all(paths: list[pathlib.Path]) -> None:
    for path in paths:
        forget(path)


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def aligned_bytes(size: int) -> np.ndarray:
    """A page-aligned uint8 vector."""
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8, count=size)
