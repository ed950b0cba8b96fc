"""Output whose reader may go away: whoever writes goes on.

Imports nothing large: every command uses it from its first line on.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, cast

from rich.console import Console


class SilencedWhenClosed(io.TextIOBase):
    """A text stream that goes silent when the reader's end closes (a pipe's, or a dropped terminal's).

    Whoever wrote to it goes on. The descriptor is pointed at the null device, so that libraries and the
    interpreter's last flush are silent too.
    """

    def __init__(self, stream: io.TextIOBase) -> None:
        self._stream = stream
        self._closed = False

    def write(self, text: str) -> int:
        """Writes, or does nothing any more."""
        if not self._closed:
            try:
                self._stream.write(text)
            except (OSError, ValueError):
                self._silence()
        return len(text)

    def flush(self) -> None:
        """Flushes, or does nothing any more."""
        if not self._closed:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._silence()

    def isatty(self) -> bool:
        """Whether a terminal reads."""
        return not self._closed and self._stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor. OSError: it has none."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's."""
        return self._stream.encoding

    def _silence(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def silence_when_closed(console: Console) -> None:
    """A console whose pipe or terminal goes away ends nothing; one in memory is left as it is."""
    try:
        console.file.fileno()
    except (OSError, ValueError):
        return
    if not isinstance(console.file, SilencedWhenClosed):
        stream: Any = SilencedWhenClosed(cast(io.TextIOBase, console.file))
        console.file = stream


@contextlib.contextmanager
def silenced_when_closed() -> Iterator[None]:
    """In it, standard output that nobody reads any more (`| head`) ends nothing and is no error."""
    if isinstance(sys.stdout, SilencedWhenClosed):
        yield
        return
    stream: Any = SilencedWhenClosed(cast(io.TextIOBase, sys.stdout))
    with contextlib.redirect_stdout(stream):
        try:
            yield
        finally:
            # Here, because the interpreter's own last flush would complain.
            stream.flush()
