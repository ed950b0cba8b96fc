"""Several drives as one: every key lies on one of them, the emptiest when it was first written."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Sequence

import numpy as np

from lazyjax.storage.nvme import Drive, DriveTransfer, NvmeError, NvmeStore


def open_drives(folders: Sequence[pathlib.Path], *, run: str) -> Drive:
    """A scratch folder of the run's own in each of `folders`, at least one.

    Raises:
        NvmeError: one of them cannot be used; none is left open.
    """
    with contextlib.ExitStack() as opened:
        drives = []
        for folder in folders:
            drives.append(NvmeStore(folder, run=run))
            opened.callback(drives[-1].close)
        opened.pop_all()
    return drives[0] if len(drives) == 1 else StripedDrive(drives)


class StripedDrive:
    """Spreads keys over drives, so that their bytes are about equal; see `Drive`."""

    def __init__(self, drives: Sequence[Drive]) -> None:
        self._drives = tuple(drives)
        self._bytes = [0] * len(self._drives)
        #: Number of the drive and bytes of every key.
        self._where: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def write(self, key: str, source: np.ndarray) -> DriveTransfer:
        """See `Drive.write`; a key stays on its drive."""
        with self._lock:
            if key in self._where:
                number, before = self._where[key]
            else:
                number, before = min(range(len(self._drives)), key=lambda one: self._bytes[one]), 0
            self._where[key] = number, source.size
            self._bytes[number] += source.size - before
        return self._drives[number].write(key, source)

    def read(self, key: str, target: np.ndarray) -> DriveTransfer:
        """See `Drive.read`.

        Raises:
            NvmeError: the key was never written.
        """
        with self._lock:
            if key not in self._where:
                raise NvmeError(f"nvme folders: {key!r} was never written")
            number, _ = self._where[key]
        return self._drives[number].read(key, target)

    def delete(self, key: str) -> None:
        """See `Drive.delete`."""
        with self._lock:
            number, size = self._where.pop(key, (None, 0))
            if number is not None:
                self._bytes[number] -= size
        if number is not None:
            self._drives[number].delete(key)

    def close(self) -> None:
        """Closes all, whatever fails; an error is raised at the end."""
        with contextlib.ExitStack() as stack:
            for drive in self._drives:
                stack.callback(drive.close)
