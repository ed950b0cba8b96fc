"""What a run shows on the terminal: a line per logged step, and a bar where there is a terminal."""

from __future__ import annotations

import collections
import datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lazyjax.training.metrics import EvaluationMetrics, StepMetrics
from lazyjax.training.replanning import Replan

#: Steps whose mean time gives the time left; the first step, which compiles, soon drops out.
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
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self) -> None:
        """Shows the bar."""
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Shows one step."""
        self._recent.append(metrics.step_seconds)
        left = format_seconds((self._steps - metrics.step) * sum(self._recent) / len(self._recent))
        self._progress.update(self._task, completed=metrics.step, left=f"{left} left")
        if metrics.step % self._log_every == 0 or metrics.step in (1, self._steps) or metrics.skipped:
            self.say(format_step(metrics, self._steps) + f"  {left} left")

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Shows one evaluation."""
        when = "before training" if metrics.step == 0 else f"after step {metrics.step}"
        self.say(
            f"evaluation {when}: loss {metrics.loss:.4f} over {metrics.target_tokens} target tokens "
            f"({metrics.seconds:.1f} s)"
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


def format_step(metrics: StepMetrics, steps: int) -> str:
    """One line about one step."""
    width = len(str(steps))
    words = [
        f"step {metrics.step:>{width}}/{steps}",
        f"loss {metrics.loss:.4f}",
        f"grad norm {metrics.gradient_norm:.3g}",
        f"lr {metrics.learning_rate:.2e}",
        f"{metrics.tokens_per_second:,.0f} tokens/s",
        f"{metrics.model_tflops:.3g} model TFLOPS",
        f"device {format_bytes(metrics.peak_device_bytes)}",
        f"host {format_bytes(metrics.host_bytes)}",
    ]
    if metrics.skipped:
        words.append("SKIPPED (not finite)")
    return "  ".join(words)


def format_bytes(size: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


def format_seconds(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    return str(datetime.timedelta(seconds=round(seconds)))
