"""Which worker runs which trial, in a folder that several hosts may share.

A claim is a file `DIGEST.GENERATION.json` made with O_EXCL, whose modification time its owner renews.
One that was not renewed for a while has expired: whoever then creates the next generation owns the
trial, and an owner that wakes up late finds a higher generation than its own and keeps its hands off.
No file is ever removed or renamed, so no step of this can be half done. Ages are differences of
modification times of one file system: clocks of hosts need not agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import threading
import uuid
from collections.abc import Iterator

from lazyjax.hardware.process import start_ticks

#: Seconds between two renewals, and after which a claim that was not renewed has expired.
RENEW_SECONDS = 5.0
EXPIRE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Claim:
    """A trial that this process owns."""

    folder: pathlib.Path
    digest: str
    generation: int

    @property
    def path(self) -> pathlib.Path:
        """The claim's file."""
        return self.folder / f"{self.digest}.{self.generation}.json"

    def is_held(self) -> bool:
        """Whether nobody has taken the trial over."""
        return newest_generation(self.folder, self.digest) == self.generation

    def release(self) -> None:
        """Lets others take the trial at once."""
        if self.is_held():
            os.utime(self.path, (0, 0))

    @contextlib.contextmanager
    def renewed(self, every_seconds: float = RENEW_SECONDS) -> Iterator[None]:
        """Renews the claim from a thread while the body runs."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(every_seconds):
                with contextlib.suppress(OSError):  # the next renewal may succeed
                    os.utime(self.path)

        thread = threading.Thread(target=renew, name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def newest_generation(folder: pathlib.Path, digest: str) -> int:
    """The highest generation of a trial's claims; 0 where there is none."""
    numbers = [int(path.name.split(".")[1]) for path in folder.glob(f"{digest}.*.json")]
    return max(numbers, default=0)


def is_claimed(folder: pathlib.Path, digest: str, *, expire_seconds: float = EXPIRE_SECONDS) -> bool:
    """Whether some worker that is alive owns the trial."""
    generation = newest_generation(folder, digest)
    return bool(generation) and not _has_expired(folder / f"{digest}.{generation}.json", expire_seconds)


def claim(folder: pathlib.Path, digest: str, *, expire_seconds: float = EXPIRE_SECONDS) -> Claim | None:
    """Takes a trial; None where another worker owns it.

    Raises:
        OSError: the folder cannot be written.
    """
    generation = newest_generation(folder, digest)
    if generation and not _has_expired(folder / f"{digest}.{generation}.json", expire_seconds):
        return None
    mine = Claim(folder, digest, generation + 1)
    # The content is there when the name appears: another worker may read it at once.
    draft = folder / f".{uuid.uuid4().hex}"
    draft.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **_started()}) + "\n")
    try:
        os.link(draft, mine.path)
    except FileExistsError:
        return None
    finally:
        draft.unlink()
    return mine


def _has_expired(path: pathlib.Path, expire_seconds: float) -> bool:
    try:
        owner = json.loads(path.read_text())
        modified = path.stat().st_mtime
    except (OSError, ValueError):
        return False  # being made by another host; its age will tell
    if owner["host"] == socket.gethostname() and not _lives(owner):
        return True
    return _now(path.parent) - modified > expire_seconds


def _started() -> dict[str, str | None]:
    return {"started": process_start(os.getpid())}


def _lives(owner: dict[str, object]) -> bool:
    """Whether the process of this host that made a claim still runs (and its number was not reused)."""
    pid = int(str(owner["pid"]))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return owner["started"] is None or owner["started"] == process_start(pid)


def process_start(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None where /proc does not say."""
    ticks = start_ticks(pid)
    return None if ticks is None else str(ticks)


def _now(folder: pathlib.Path) -> float:
    """The present time by the clock of the folder's file system."""
    probe = folder / f".clock-{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
