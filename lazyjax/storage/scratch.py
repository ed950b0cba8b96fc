"""A run's own folder on a drive, in a folder that belongs to the user.

Nothing that the user has is touched: a run makes one subfolder, named after itself and its process,
puts a mark into it, and removes that subfolder at the end. Subfolders that a killed process left
behind are recognised by their mark and removed when another run opens the same folder.

A mark names the machine, the process and when that process started; the process also holds a lock
on the file while it lives. A subfolder counts as left behind only if it is marked, belongs to the
same user and machine, its process is gone, and nobody holds the lock. The lock covers containers,
which may see each other's files but not each other's processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
from typing import Any

from lazyjax.hardware.process import boot_id, start_ticks

PREFIX = "lazyjax-scratch-"
MARK = "lazyjax-scratch.json"
_FORMAT = "lazyjax scratch 1"


class ScratchFolder:
    """A private subfolder of `parent`, from its making until `remove`.

    Attributes:
        path: the subfolder.
    """

    def __init__(self, parent: pathlib.Path, run: str) -> None:
        """Makes `parent` where it is missing, and the subfolder in it.

        Raises:
            OSError: either cannot be made or marked; a subfolder that could not be marked is gone.
        """
        parent.mkdir(parents=True, exist_ok=True)
        self._token = secrets.token_hex(4)
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", run)[:60]
        self.path = parent / f"{PREFIX}{readable}-{os.getpid()}-{self._token}"
        self.path.mkdir(mode=0o700)
        try:
            self._lock = open(self.path / MARK, "x")  # noqa: SIM115 - held until `remove`
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            json.dump(_own_mark() | {"token": self._token, "run": run}, self._lock)
            self._lock.flush()
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Removes the subfolder and all that is in it; does nothing the second time.

        A folder of that name without this run's mark was put there by somebody else and stays.
        """
        if self._lock.closed:
            return
        mark = _read_mark(self.path)
        if mark is not None and mark["token"] == self._token:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_left_behind(parent: pathlib.Path) -> list[pathlib.Path]:
    """Removes the scratch folders in `parent` whose processes are gone; returns what was removed."""
    removed = []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        if _left_behind(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _left_behind(path: pathlib.Path) -> bool:
    mark = None if path.is_symlink() else _read_mark(path)
    if mark is None:
        return False
    own = _own_mark()
    try:
        if path.stat().st_uid != os.geteuid() or mark["machine"] != own["machine"]:
            return False
        same_boot = mark["boot"] == own["boot"]
        if same_boot and _alive(int(mark["pid"]), mark["started"]):
            return False
        with open(path / MARK) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, KeyError, ValueError, TypeError):
        return False
    return True


def _read_mark(path: pathlib.Path) -> dict[str, Any] | None:
    """What the mark of a scratch folder says; None where there is none that this release wrote."""
    try:
        mark = json.loads((path / MARK).read_text())
    except (OSError, ValueError):
        return None
    return mark if isinstance(mark, dict) and mark.get("format") == _FORMAT and "token" in mark else None


def _own_mark() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "format": _FORMAT,
        "machine": socket.gethostname(),
        "boot": boot_id(),
        "pid": pid,
        "started": start_ticks(pid),
    }


def _alive(pid: int, started: int | None) -> bool:
    """Whether the process that began at `started` still runs; another may have got its number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    now = start_ticks(pid)
    return started is None or now is None or now == started
