"""`lazyjax inspect-data`: the words it has for data, before anything else is touched."""

from __future__ import annotations

import io
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lazyjax import cli
from lazyjax.config import load_config
from lazyjax.data import chat, inspection
from lazyjax.data.formats import Message, Row


@pytest.fixture
def rows(tmp_path: pathlib.Path) -> str:
    lines = [
        {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "A"}]},
        {
            "messages": [
                {"role": "user", "content": "One"},
                {"role": "assistant", "content": "No", "weight": 0},
                {"role": "user", "content": "Two"},
                {"role": "assistant", "content": "Yes"},
            ]
        },
        {"messages": [{"role": "user", "content": "1" * 60}, {"role": "assistant", "content": "B"}]},
        {"messages": [{"role": "user", "content": "Last"}, {"role": "assistant", "content": "2" * 40}]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*map(json.dumps, lines), "nonsense"]))
    return str(path)


def screen(width: int, *words: str, terminal: bool = False, colors: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=terminal or colors,
        color_system="standard" if colors else None,
    )
    keys = ["--model.architecture", "unnamed", "--data.rows", "2", "--data.sequence-length", "40", *words]
    inspection.inspect(load_config(None, keys), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_screen(rows: str) -> None:
    text = screen(100, "--data", rows, "--data.train-fraction", "1")
    assert "5 rows read = 3 for training + 1 dropped" in text
    assert "+ 1 skipped; 1 of them truncated" in text
    assert re.search(r"^row 1: \d+ tokens \(2 learned, \d+ context\)$", text, re.M)
    assert "⟦A<|im_end|>⟧" in text
    # A turn of weight 0 is context.
    assert "No<|im_end|>" in text
    assert "⟦Yes<|im_end|>⟧" in text
    around = ("'<|im_start|>user\\n'", "'<|im_end|>\\n<|im_start|>assistant\\n'")
    assert f"written by the template: {around[0]}, {around[1]}" in text
    assert text.count("⟦") == 1 + 2  # the legend and two rows; of the third nothing is left to learn
    assert "1 bad row; training stops at the first (data.bad_rows skip leaves them out):" in text
    assert "rows.jsonl, row 5 (line 5): invalid JSON" in text
    assert "rows.jsonl, row 3: 70 tokens, no response within 40" in text
    for batching in ("padded", "bucketed (chosen)", "packed"):
        assert re.search(rf"^{re.escape(batching)} +\d+ +[\d.]+% +\d+  ", text, re.M)


@pytest.mark.parametrize("width", [80, 120])
def test_lines_break_between_words(rows: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pathlib.Path(rows).parent)
    keys = ("--data", "rows.jsonl", "--data.train-fraction", "1")
    text = screen(width, *keys, terminal=True)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    # The same words as in one long line, none of them cut.
    assert text.split() == screen(100_000, *keys).split()


def test_the_mask_is_seen_in_colour(rows: str) -> None:
    text = screen(100, "--data", rows, colors=True)
    assert "\x1b[32m⟦A<|im_end|>⟧" in text
    assert "\x1b[2m<|im_start|>user" in text


def test_what_was_cut_off_is_said() -> None:
    tokenizer = chat.load_tokenizer()
    row = Row((Message("user", "Hi"), Message("assistant", "1" * 30)))
    [encoded] = chat.encode(tokenizer, [chat.render_row(tokenizer, row)])
    text, counts = inspection.colored(tokenizer, row, encoded, 20)
    assert text.plain.endswith("⟧ ... cut off")
    assert counts["cut off"] == len(encoded.tokens_T) - 20
    assert counts["learned"] + counts["context"] == 20


def test_the_command_needs_no_model_and_trains_nothing(
    rows: str, tmp_path: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["inspect-data", "--data", rows, "--show", "1", "--data.rows", "1"]) == 0
    text = capsys.readouterr().out
    assert "row 1: " in text
    assert "row 2: " not in text
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert cli.main(["inspect-data", "--data", rows, "--show", "some"]) == 2
    assert "--show needs a number of rows" in capsys.readouterr().err
    assert cli.main(["inspect-data", "--data", "absent.jsonl"]) == 2
    assert "absent.jsonl: no such file" in capsys.readouterr().err
    assert cli.main(["inspect-data", "--data", rows, "--data.row", "3"]) == 2
    assert "did you mean data.rows?" in capsys.readouterr().err


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=50))
def test_a_histogram_holds_every_length(lengths: list[int]) -> None:
    bins = inspection.histogram(np.asarray(lengths))
    assert len(bins) <= 12
    assert sum(count for *_, count in bins) == len(lengths)
    for first, last, count in bins:
        assert count == sum(first <= length <= last for length in lengths)
    assert bins[0][2] > 0
