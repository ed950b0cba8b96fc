"""A stage is one line in a file, a bar on a terminal, and nothing without a console."""

from __future__ import annotations

import io

from rich.console import Console

from lazyjax.training.status import say, stage


def test_a_stage_is_one_line_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=200)
    with stage(console, "timing kernels") as advance:
        advance("timing kernels of 4 rows", 12, 40)
    assert console.file.getvalue() == "timing kernels\n"


def test_a_terminal_sees_how_far_it_is() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, _environ={})
    with stage(console, "timing kernels") as advance:
        advance("timing kernels of 4 rows", 12, 40)
    text = console.file.getvalue()
    assert "timing kernels of 4 rows" in text
    assert "12/40" in text


def test_without_a_console_nothing_is_shown(capsys) -> None:
    with stage(None, "timing kernels") as advance:
        advance("timing kernels of 4 rows", 12, 40)
    say(None, "more")
    assert capsys.readouterr().out == ""
