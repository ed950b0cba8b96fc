"""What an evaluation shows while it runs: rows, rate, time left and the score so far."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lazyjax.evaluation.problems import Scored, total

#: Seconds between lines where there is no terminal to draw a bar on.
_LINE_SECONDS = 15.0


class EvaluationProgress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, rows: int, done: Sequence[Scored]) -> None:
        self._console, self._rows, self._done = console, rows, list(done)
        self._before = len(self._done)
        self._start = self._told = time.perf_counter()
        self._bar = Progress(
            TextColumn("answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("answering", total=rows, completed=self._before, words="")

    def __enter__(self) -> EvaluationProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def row(self, scored: Scored) -> None:
        """One more row."""
        self._done.append(scored)
        words = self.words(time.perf_counter() - self._start)
        self._bar.update(self._task, completed=len(self._done), words=words)
        now = time.perf_counter()
        if not self._console.is_terminal and now - self._told > _LINE_SECONDS:
            self._told = now
            text = f"{len(self._done)} of {self._rows} rows  {words}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def words(self, seconds: float) -> str:
        """Score so far with its interval, rows per second, time left."""
        result = total(self._done)
        low, high = result.interval
        rate = (len(self._done) - self._before) / max(seconds, 1e-9)
        left = datetime.timedelta(seconds=round((self._rows - len(self._done)) / max(rate, 1e-9)))
        return f"{result.score:.1%} right ({low:.1%} to {high:.1%})  {rate:.2f} rows/s  {left} left"
