"""Whether the other processes of a run live and go on; where one does not, this one ends too.

A process that waits in a collective for another one cannot be woken, so a thread watches: every process says
every two seconds that it lives and how far it is. One that says nothing for 30 s is dead. Where all train and
none gets on for `timeout_seconds`, the one that is least far hangs, and the others wait for it. Then this
process says so and ends; what was saved before is whole, because a checkpoint is one rename.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from jax.errors import JaxRuntimeError

#: Between two signs of life.
_BEAT_SECONDS = 2.0
#: Without one for so long a process counts as dead, also one that the coordinator is.
DEAD_SECONDS = 30.0
#: Looks of one that waits, between two signs of life.
_LOOKS_A_BEAT = 10
#: Exit status of a process that ends because another one has.
PEER_STATUS = 1


@runtime_checkable
class Store(Protocol):
    """The part of JAX's coordination client that is used."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a value."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Deletes a key, or all below it."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All keys below one, with their values."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for a value."""
        ...


class _Seen:
    """What another process said last, and when that was new."""

    def __init__(self, now: float) -> None:
        self.beat, self.progress, self.training = -1, -1, False
        self.alive_at = self.moved_at = now

    def take(self, word: str, now: float) -> None:
        beat, progress, training = (int(part) for part in word.split())
        if beat != self.beat:
            self.beat, self.alive_at = beat, now
        if progress != self.progress:
            self.progress, self.moved_at = progress, now
        self.training = bool(training)


class _Informed:
    """Processes that know why they end; none of them is the cause."""

    def __init__(self, store: Store, keys: str, count: int) -> None:
        self._store, self._keys, self._count = store, f"{keys}/known/", count

    def add(self, index: int) -> None:
        """Process `index` knows, and ends."""
        self._store.key_value_set(f"{self._keys}{index}", "1")

    def processes(self) -> set[int]:
        """Their numbers."""
        return {int(key.rpartition("/")[2]) for key, _ in self._store.key_value_dir_get(self._keys)}

    def wait(self, *, beats: int) -> None:
        """Until all but one know, the cause, and for so many signs of life at most."""
        for _ in range(beats * _LOOKS_A_BEAT):
            if len(self.processes()) >= self._count - 1:
                return
            time.sleep(_BEAT_SECONDS / _LOOKS_A_BEAT)


class Watch:
    """The thread.

    Args:
        keys: prefix of the keys of this run.
        now, leave: the clock in seconds, and what ends this process with a status.

    Attributes:
        ended: why this process ends; None as long as all go on.
        on_end: called with that sentence before the process ends.
    """

    def __init__(
        self,
        store: Store,
        keys: str,
        index: int,
        count: int,
        *,
        timeout_seconds: float,
        now: Callable[[], float] = time.monotonic,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self._store, self._keys, self._index, self._count = store, keys, index, count
        self._informed = _Informed(store, keys, count)
        self._timeout_seconds, self._now, self._leave = timeout_seconds, now, leave
        self._names: Sequence[str] = [f"process {number}" for number in range(count)]
        self._gone: Callable[[], Sequence[int]] = tuple
        self._beat = self._progress = 0
        self._training = False
        self._seen = [_Seen(now()) for _ in range(count)]
        self._answered_at = now()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = False
        self.ended: str | None = None
        self.on_end: Callable[[str], None] = lambda reason: None

    def start(self, names: Sequence[str], gone: Callable[[], Sequence[int]] = tuple) -> None:
        """Begins; `names` of the processes are for messages, `gone` gives those known to have ended."""
        self._names, self._gone = names, gone
        self._seen = [_Seen(self._now()) for _ in range(self._count)]
        self._answered_at = self._now()
        self._thread = threading.Thread(target=self._run, name="watch-processes", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """The process got on: an operation was issued, a batch evaluated."""
        self._progress += 1

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """In it, getting nowhere counts as hanging; elsewhere nobody knows how long something takes."""
        self._progress += 1
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def tell(self, failure: BaseException) -> None:
        """Tells the others that this process has failed, and waits a little until they know.

        An error of the device may be how another one's end looks from here, whatever it has become on its
        way. Then that is waited for, and this process ends with it.
        """
        if set(self._gone()) - {self._index} or _from_device(failure):
            self._stopped.wait(DEAD_SECONDS + 2 * _BEAT_SECONDS)
        text = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
        self._told = True
        with contextlib.suppress(JaxRuntimeError):
            self._store.key_value_set(f"{self._keys}/failed/{self._index}", text[:2000])
            self._informed.wait(beats=3)

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_BEAT_SECONDS):
            reason = self.look()
            if reason is not None and not self._told and not self._stopped.is_set():
                self._end(reason)
                return

    def look(self) -> str | None:
        """Gives a sign of life and looks for the others'; why this process has to end, if it has to."""
        self._beat += 1
        word = f"{self._beat} {self._progress} {int(self._training)}"
        try:
            self._store.key_value_set(f"{self._keys}/alive/{self._index}", word, allow_overwrite=True)
            alive = self._store.key_value_dir_get(f"{self._keys}/alive/")
            failed = self._store.key_value_dir_get(f"{self._keys}/failed/")
            known = self._informed.processes()
        except JaxRuntimeError as error:
            if self._now() - self._answered_at < DEAD_SECONDS:
                return None
            return f"{self._names[0]}, the coordinator, does not answer ({str(error).splitlines()[0]})"
        now = self._answered_at = self._now()
        for key, word in alive:
            self._seen[int(key.rpartition("/")[2])].take(word, now)
        for key, text in failed:
            process = int(key.rpartition("/")[2])
            if process != self._index:
                return f"{self._names[process]} failed: {text}"
        return self._dead(now, known | {self._index}) or self._hanging(now)

    def _dead(self, now: float, blameless: Collection[int]) -> str | None:
        for process in self._gone():
            if process not in blameless:
                return f"{self._names[process]} has died"
        for process, seen in enumerate(self._seen):
            silent = now - seen.alive_at
            if process not in blameless and silent > DEAD_SECONDS:
                return f"{self._names[process]} has died or hangs: no sign of life for {silent:.0f} s"
        return None

    def _hanging(self, now: float) -> str | None:
        if not all(seen.training for seen in self._seen):
            for seen in self._seen:
                seen.moved_at = now
            return None
        still = now - max(seen.moved_at for seen in self._seen)
        if still <= self._timeout_seconds:
            return None
        least = min(range(self._count), key=lambda process: self._seen[process].progress)
        return (
            f"{self._names[least]} hangs: no process has got on for {still:.0f} s "
            f"(distributed.timeout_seconds {self._timeout_seconds:g}), and it is the one that is least far"
        )

    def _end(self, reason: str) -> None:
        self.ended = reason
        with contextlib.suppress(Exception):
            self._informed.add(self._index)
        with contextlib.suppress(Exception):
            self.on_end(reason)
        with contextlib.suppress(Exception):
            print(f"error: {reason}; process {self._index} ends, what was saved is whole", file=sys.stderr)
            sys.stderr.flush()
            sys.stdout.flush()
        if self._index == 0:
            # The service of the store ends with this process: the others learn the reason first.
            with contextlib.suppress(JaxRuntimeError):
                self._informed.wait(beats=4)
        self._leave(PEER_STATUS)


def _from_device(failure: BaseException | None) -> bool:
    """Whether an error is, or came of, one that a collective raises when another process is gone."""
    while failure is not None:
        if isinstance(failure, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(failure):
            return True
        failure = failure.__cause__ or failure.__context__
    return False
