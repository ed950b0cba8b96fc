"""What a run shows on the terminal: a line per logged step, and a bar where there is a terminal."""

from __future__ import annotations

import collections
import datetime
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lazyjax.training.answering import ExactMatchMetrics
from lazyjax.training.metrics import EvaluationMetrics, StepMetrics
from lazyjax.training.replanning import Replan
from lazyjax.training.status import say

#: Steps whose mean time gives the time left.
_RECENT_STEPS = 10
_MIB = 2**20
_GIB = 2**30


class Display:
    """Prints progress; `log_every` thins the lines, not the bar."""

    def __init__(self, console: Console, *, steps: int, log_every: int) -> None:
        self._console, self._steps, self._log_every = console, steps, log_every
        self._recent: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=steps, left="")

    def say(self, text: str) -> None:
        """Prints a sentence."""
        say(self._console, text)

    def start(self) -> None:
        """Shows the bar."""
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Shows one step."""
        self._recent.append(metrics.step_seconds - metrics.compile_seconds)
        # Compiling happens once per kernel: it says nothing of the steps to come.
        left = format_seconds((self._steps - metrics.step) * sum(self._recent) / len(self._recent))
        self._progress.update(self._task, completed=metrics.step, left=f"{left} left")
        if metrics.step % self._log_every == 0 or metrics.step in (1, self._steps) or metrics.skipped:
            width = self._console.width if self._console.is_terminal else None
            self.say(format_step(metrics, self._steps, left=left, width=width))

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Shows one evaluation."""
        when = "before training" if metrics.step == 0 else f"after step {metrics.step}"
        self.say(
            f"evaluation {when}: loss {metrics.loss:.4f} over {metrics.target_tokens} target tokens "
            f"({metrics.seconds:.1f} s)"
        )

    def exact_match(self, metrics: ExactMatchMetrics) -> None:
        """Shows one score."""
        when = "before training" if metrics.step == 0 else f"after step {metrics.step}"
        self.say(
            f"exact match {when}: {metrics.exact_match:.1%} ({metrics.low:.1%} to {metrics.high:.1%}, 95 %) "
            f"of {metrics.rows} rows ({format_seconds(metrics.seconds)})"
        )

    def replan(self, outcome: Replan) -> None:
        """Shows what came of planning again."""
        self.say(
            f"planned again after step {outcome.step}: {outcome.running_seconds:.3f} s a step as it runs, "
            f"{outcome.candidate_seconds:.3f} s re-solved (simulated from measured times); "
            + ("the new plan runs from now on" if outcome.swapped else "the plan stays")
        )

    def stop(self) -> None:
        """Takes the bar away."""
        self._progress.stop()


def format_step(metrics: StepMetrics, steps: int, *, left: str, width: int | None = None) -> str:
    """One line about one step.

    Args:
        left: how long the run still takes.
        width: columns of the terminal: what matters least is left out until the line fits; None shows all.
    """
    digits = len(str(steps))
    # Words in their order, each with how soon it is left out (0: never).
    words = [
        (f"step {metrics.step:>{digits}}/{steps}", 0),
        (f"loss {metrics.loss:.4f}", 0),
        ("SKIPPED (not finite)" if metrics.skipped else "", 0),
        (f"grad norm {metrics.gradient_norm:.3g}", 3),
        (f"lr {metrics.learning_rate:.2e}", 5),
        (f"{_short(metrics.step_seconds)} s", 2),
        (f"{metrics.tokens_per_second:,.0f} tokens/s", 1),
        (f"{metrics.model_tflops:.3g} model TFLOPS", 6),
        (f"device {format_bytes(metrics.peak_device_bytes)}", 4),
        (f"host {format_bytes(metrics.host_bytes)}", 7),
        (f"{metrics.compile_seconds:.1f} s compiling" if metrics.compile_seconds else "", 8),
        (f"{left} left", 0),
    ]
    words = [(word, rank) for word, rank in words if word]
    while width is not None and len(_line(words)) > width and any(rank for _, rank in words):
        words.remove(max(words, key=lambda entry: entry[1]))
    return _line(words)


def _line(words: Sequence[tuple[str, int]]) -> str:
    return "  ".join(word for word, _ in words)


def _short(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"


def format_bytes(size: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


def format_seconds(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    return str(datetime.timedelta(seconds=round(seconds)))
