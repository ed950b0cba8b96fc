"""The trials of a sweep as a table that is drawn again whenever something changed."""

from __future__ import annotations

from rich.table import Table

from experiments.sweeping.document import Sweep
from experiments.sweeping.folder import Outcome, State, SweepFolder

_STYLES = {
    State.PLANNED: "dim",
    State.RUNNING: "cyan",
    State.SUCCEEDED: "green",
    State.INFEASIBLE: "yellow",
    State.FAILED: "red",
    State.INTERRUPTED: "magenta",
}


def trials_table(sweep: Sweep, folder: SweepFolder) -> Table:
    """One line per trial: its state, and its main figure or its message (measured)."""
    metric = sweep.document.compare.metrics[0]
    states = [folder.state(trial) for trial in sweep.trials]
    counts = ", ".join(f"{states.count(state)} {state.value}" for state in State if state in states)
    table = Table(title=f"{sweep.name}: {counts}", title_justify="left")
    table.add_column("trial", overflow="fold")
    table.add_column("seed", justify="right")
    table.add_column("state", no_wrap=True)
    table.add_column(metric, overflow="fold")
    table.add_column("seconds", justify="right", no_wrap=True)
    for trial, state in zip(sweep.trials, states, strict=True):
        outcome = folder.outcome(trial)
        seconds = f"{outcome.seconds:.0f}" if outcome is not None and outcome.seconds else ""
        table.add_row(
            trial.name,
            str(trial.seed),
            f"[{_STYLES[state]}]{state.value}[/]",
            _figure(outcome, metric) if state is not State.RUNNING else "",
            seconds,
        )
    return table


def _figure(outcome: Outcome | None, metric: str) -> str:
    if outcome is None:
        return ""
    if outcome.summary is None:
        return outcome.message.splitlines()[0][:200] if outcome.message else ""
    if metric not in outcome.summary:
        return f"summary.json has no {metric}"
    value = outcome.summary[metric]
    return f"{value:.5g}" if isinstance(value, float) else str(value)
