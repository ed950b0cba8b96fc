"""Signals: a run finishes its step, and nothing interrupts what it writes.

Signals are read from the wake-up descriptor by a thread, so that each one is counted and answered
even while the main thread waits for the device or compiles; Python alone would merge two that come in
that time. Only "at once" needs the main thread: it is raised there.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence

#: Asked politely: the running step is finished and everything is written.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: Bytes of the wake-up descriptor that are no signals.
_END, _WAKE = b"\0", b"\xff"
#: What a run that reached `training.max_hours` gives as its reason, and its exit status (as timeout(1)).
TIME_LIMIT = "time limit"
TIME_LIMIT_STATUS = 124


def exit_status(reason: str | None) -> int:
    """The exit status of a run that was stopped: 128 + the signal's number, 124 at the time limit."""
    if reason is None:
        return 0
    return TIME_LIMIT_STATUS if reason == TIME_LIMIT else 128 + signal.Signals[reason].value


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal during a step: nothing more is written but the records."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(f"{signal_name}, twice")
        self.exit_status = exit_status(signal_name)


class StopRequest:
    """Whether the run was asked to stop; true from the first signal (or the time limit) on.

    Args:
        exchange: where there are several processes, gives what each of them gives here. Then it is true from
            the next `look` on, for all of them, whoever was asked.
    """

    def __init__(self, exchange: Callable[[str | None], Sequence[str | None]] | None = None) -> None:
        self._exchange = exchange
        self._common: str | None = None
        self._reason: str | None = None
        self._arrived = 0
        self._at_once: str | None = None
        self._writing: str | None = None
        self._sentences: collections.deque[str] = collections.deque()
        # Held for a few instructions only, never while a sentence is printed: the main thread may hold
        # the console when a signal arrives.
        self._lock = threading.RLock()
        self._reader = self._writer = -1

    def __bool__(self) -> bool:
        return self.reason is not None

    @property
    def reason(self) -> str | None:
        """The name of the first signal, `TIME_LIMIT`, or None."""
        return self._reason if self._exchange is None else self._common

    def look(self) -> None:
        """Learns whether any process was asked to stop; all do so at the same places."""
        if self._exchange is not None:
            given = self._exchange(self._reason)
            self._common = self._common or next((reason for reason in given if reason is not None), None)

    def time_is_up(self) -> None:
        """Asks for the end of the run as a signal does."""
        with self._lock:
            self._reason = self._reason or TIME_LIMIT

    def writing(self, what: str | None) -> None:
        """From now on signals end nothing; they are answered with `what` is still being done.

        None: they end the run again.
        """
        self._writing = what

    def wait(self, seconds: float) -> bool:
        """Waits; true, and at once, where a signal comes meanwhile."""
        before, end = self._arrived, time.monotonic() + seconds
        while self._arrived == before:
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, 0.2))
        return True

    @contextlib.contextmanager
    def listening(self, announce: Callable[[str], None]) -> Iterator[None]:
        """Catches the signals of `STOPPING`; outside the main thread, where Python has none, nothing.

        SIGHUP stays ignored where it was (nohup). SIGINT does not: shells ignore it for what they start
        in the background, but whoever sends it means it.

        Args:
            announce: called from another thread with a sentence for the user.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        thread = threading.Thread(target=self._serve, args=(announce,), name="signals", daemon=True)
        thread.start()
        previous_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        previous = {number: signal.getsignal(number) for number in STOPPING}
        for number, handler in previous.items():
            if not (number == signal.SIGHUP and handler is signal.SIG_IGN):
                signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(previous_writer)
            os.write(self._writer, _END)
            thread.join()
            os.close(self._writer)
            os.close(self._reader)

    def _serve(self, announce: Callable[[str], None]) -> None:
        """The thread: counts and answers what arrives."""
        goes_on = True
        while goes_on:
            select.select([self._reader], [], [])
            goes_on = self._take()
            while self._sentences:
                with contextlib.suppress(OSError):
                    announce(self._sentences.popleft())

    def _take(self) -> bool:
        """Counts the signals that arrived; false at the end."""
        with self._lock:
            try:
                numbers = os.read(self._reader, 64)
            except BlockingIOError:
                return True
            for number in numbers:
                if number in STOPPING:
                    self._count(signal.Signals(number).name)
            return _END[0] not in numbers

    def _count(self, name: str) -> None:
        first = self._reason is None
        self._arrived += 1
        self._reason = self._reason or name
        if self._writing is not None:
            self._sentences.append(f"{name}: {self._writing}; that ends by itself")
        elif first:
            self._sentences.append(
                f"{name}: stopping after this step; once more to stop at once, without saving"
            )
        else:
            self._at_once = name
            self._sentences.append(f"{name}: stopping at once")

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        """In the main thread, some time after the signal."""
        del number, frame
        self._take()
        os.write(self._writer, _WAKE)
        name, self._at_once = self._at_once, None
        if name is not None and self._writing is None:
            # What is left to do must not be ended by the next signal.
            self._writing = "the records are being written"
            raise StoppedAtOnce(name)
