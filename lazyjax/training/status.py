"""What is going on before training starts: a line per stage, and a bar where there is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

#: Gets what is done next, how much is done, and of how much.
Advance = Callable[[str, int, int], None]


@contextlib.contextmanager
def stage(console: Console | None, what: str) -> Iterator[Advance]:
    """Prints `what` and shows, on a terminal, how far it has come; without a console nothing."""
    if console is None:
        yield lambda next_, done, total: None
        return
    say(console, what)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def advance(next_: str, done: int, total: int) -> None:
            bar.update(task, description=next_, completed=done, total=total)

        yield advance


def say(console: Console | None, text: str) -> None:
    """Prints a sentence, where there is a console: wrapped at words on a terminal, one line in a pipe."""
    if console is not None:
        console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)
