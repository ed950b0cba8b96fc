"""Ctrl-C that lets the running step finish."""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Callable, Iterator


class StopRequest:
    """Whether someone asked the run to stop; true from the first SIGINT or SIGTERM on."""

    def __init__(self) -> None:
        self._signal_name: str | None = None

    def __bool__(self) -> bool:
        return self._signal_name is not None

    @property
    def signal_name(self) -> str | None:
        """The signal that asked, or None."""
        return self._signal_name

    @contextlib.contextmanager
    def listening(self, announce: Callable[[str], None]) -> Iterator[None]:
        """Catches the first signal; the second one acts as if nobody listened (ends at once).

        Only possible in the main thread, where Python delivers signals.

        Args:
            announce: called with a sentence for the user when the first signal arrives.
        """
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in previous.items():
                signal.signal(number, handler)

        def note(number: int, frame: types.FrameType | None) -> None:
            del frame
            self._signal_name = signal.Signals(number).name
            restore()
            announce(f"{self._signal_name}: stopping after this step; once more to stop at once")

        for number in previous:
            signal.signal(number, note)
        try:
            yield
        finally:
            restore()
