"""Records that never block or end training.

Entries are appended whole: where one cannot be written it waits in memory and is tried again with the
next, and what a full disk has cut off is taken away before that. Nothing here starts a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

#: Tells the user.
Say = Callable[[str], None]


class AppendedFile:
    """A file to which whole entries are appended, later where it is not possible now.

    Args:
        path: made where it is missing, with its folder; a link is refused.
        say: told once when entries begin to wait, and once when they are written.
        position: bytes to keep of what is there; what follows them is cut off.
    """

    def __init__(self, path: pathlib.Path, say: Say, *, position: int = 0) -> None:
        self._path, self._say = path, say
        self._good_bytes = position
        self._waiting: list[bytes] = []
        self._descriptor: int | None = None
        self._failing = False
        self._try()

    @property
    def position(self) -> int:
        """Bytes of whole entries in the file."""
        return self._good_bytes

    @property
    def waiting(self) -> tuple[bytes, ...]:
        """Entries that are not in the file yet."""
        return tuple(self._waiting)

    def add(self, entry: bytes) -> None:
        """Appends `entry`, now or later."""
        self._waiting.append(entry)
        self._try()

    def sync(self) -> None:
        """Hands what was written to the drive. OSError: it could not be."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Tries a last time; says what is lost."""
        self._try()
        if self._waiting:
            self._say(f"{self._path}: {len(self._waiting)} records could not be written and are lost")
        self._drop()

    def _try(self) -> None:
        try:
            self._write()
        except OSError as error:
            self._drop()
            if not self._failing:
                self._failing = True
                self._say(
                    f"WARNING: {self._path} cannot be written ({error.strerror}); training goes on, "
                    "its records wait in memory and are tried again at every step"
                )
            return
        if self._failing:
            self._failing = False
            self._say(f"{self._path} is written again, nothing is missing")

    def _write(self) -> None:
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self._path, flags, 0o644)
            os.ftruncate(self._descriptor, self._good_bytes)
            os.lseek(self._descriptor, self._good_bytes, os.SEEK_SET)
        while self._waiting:
            rest = memoryview(self._waiting[0])
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._good_bytes += len(self._waiting.pop(0))

    def _drop(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._good_bytes)
            with contextlib.suppress(OSError):
                os.close(descriptor)


def replace_file(path: pathlib.Path, text: str) -> None:
    """Writes `text` to `path`: a reader sees the old content or the new one. OSError: the old one stays."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = pathlib.Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_somewhere(path: pathlib.Path, table: Mapping[str, Any], say: Say) -> None:
    """Writes `table` as JSON to `path`, or where that fails to the temporary folder, or says it."""
    text = json.dumps(table, indent=2) + "\n"
    try:
        replace_file(path, text)
        return
    except OSError as error:
        say(f"WARNING: {path} cannot be written ({error.strerror})")
    spare = pathlib.Path(tempfile.gettempdir()) / f"lazyjax-{path.parent.name}-{path.name}"
    try:
        replace_file(spare, text)
        say(f"it is in {spare} instead")
    except OSError:
        say(text)
