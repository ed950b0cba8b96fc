"""Screens as text files: what a person sees at 80 and 120 columns, and what a pipe gets.

The files in `golden/screens/` are compared as they are. To record them again after a change that is
meant: `LAZYJAX_RECORD_SCREENS=1 python -m pytest tests/test_screens.py`, then read the difference.
"""

from __future__ import annotations

import io
import os
import pathlib
import re
from collections.abc import Callable

from rich.console import Console

FOLDER = pathlib.Path(__file__).parent / "golden" / "screens"
#: Name of a screen's kind -> columns of the terminal; None: no terminal, a pipe.
KINDS = {"80": 80, "120": 120, "piped": None}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def console_of(kind: str) -> Console:
    """A console in memory of that kind, without colours."""
    width = KINDS[kind]
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=width is not None,
        color_system=None,
        legacy_windows=False,
        _environ={} if width is not None else {"COLUMNS": "80"},
    )


def text_of(console: Console) -> str:
    """What stands on the console's screen, without the spaces that end a line."""
    assert isinstance(console.file, io.StringIO)
    lines = _ESCAPES.sub("", console.file.getvalue()).split("\n")
    return "\n".join(line.rstrip() for line in lines)


def check(name: str, kind: str, show: Callable[[Console], object]) -> str:
    """Compares what `show` prints with the recorded screen, and gives it back.

    No line may be wider than the terminal.
    """
    console = console_of(kind)
    show(console)
    text = text_of(console)
    width = KINDS[kind]
    if width is not None:
        wide = [line for line in text.split("\n") if len(line) > width]
        assert not wide, f"wider than {width} columns: {wide[0]!r}"
    path = FOLDER / f"{name}.{kind}.txt"
    if os.environ.get("LAZYJAX_RECORD_SCREENS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} shows something else"
    return text
