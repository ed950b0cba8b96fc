"""Rows from every format and container, and errors that name file and row."""

from __future__ import annotations

import gzip
import io
import json
import pathlib
import sys
import tracemalloc
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.data import json_rows, sources
from lazyjax.data.sources import DataError, Message, open_source

METAMATH = {"query": "1 + 1?", "response": "2\nThe answer is: 2", "type": "t", "original_question": "1 + 1?"}
ALPACA = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
MESSAGES = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Bye"},
    ]
}


def _lines(path: pathlib.Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def _read(name: str) -> list[sources.Conversation]:
    return list(open_source(name).conversations())


def test_reads_every_format(tmp_path: pathlib.Path) -> None:
    rows = _read(_lines(tmp_path / "a.jsonl", METAMATH, METAMATH))
    assert rows == [(Message("user", "1 + 1?"), Message("assistant", METAMATH["response"]))] * 2
    assert _read(_lines(tmp_path / "b.jsonl", ALPACA, {"instruction": "Say hi.", "output": "hi"})) == [
        (Message("user", "Add.\n\n1 and 1"), Message("assistant", "2")),
        (Message("user", "Say hi."), Message("assistant", "hi")),
    ]
    [conversation] = _read(_lines(tmp_path / "c.jsonl", MESSAGES))
    assert [message.role for message in conversation] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize("form", ["array", "indented", "lines", "blank_lines", "mark"])
@pytest.mark.parametrize("packed", [False, True])
def test_reads_every_container(tmp_path: pathlib.Path, form: str, packed: bool) -> None:
    rows = [METAMATH | {"query": f"frage {number} äöü \U0001f600 [,]}}{{"} for number in range(5)]
    text = {
        "array": json.dumps(rows),
        "indented": "\n " + json.dumps(rows, indent=2, ensure_ascii=False) + "\n\n",
        "lines": "\n".join(map(json.dumps, rows)),
        "blank_lines": "\n\n".join(map(json.dumps, rows)) + "\n\n",
        "mark": "\ufeff" + json.dumps(rows),
    }[form]
    path = tmp_path / ("rows.json" + ".gz" * packed)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert [conversation[0].content for conversation in _read(str(path))] == [row["query"] for row in rows]


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=40)), max_size=8), st.integers(1, 20))
def test_an_array_is_decoded_across_any_chunk_border(rows: list[dict[str, str]], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_CHUNK_CHARACTERS", chunk)
        for text in (json.dumps(rows), json.dumps(rows, indent=3, ensure_ascii=False)):
            assert [row for _, row in json_rows._array_rows(io.StringIO(text), "x")] == rows


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"query": "a"}, r"rows\.jsonl, row 2 \(line 2\): missing key 'response'; found query"),
        (METAMATH | {"response": 3}, r"row 2 \(line 2\): 'response' must be text, found a number"),
        (METAMATH | {"query": None}, r"row 2 \(line 2\): 'query' must be text, found null"),
        (METAMATH | {"response": " \n"}, r"row 2 \(line 2\): 'response' is empty"),
        (METAMATH | {"response": "\ud800"}, r"row 2 \(line 2\): 'response' holds half of a surrogate pair"),
        ([1], r"row 2 \(line 2\): expected an object with keys, found a list"),
        ('{"query": "a", ', r"row 2 \(line 2\): invalid JSON, .* at column"),
        ("\n\nnonsense", r"row 2 \(line 4\): invalid JSON, Expecting value at column 1"),
        ('{"query": ' + "9" * 5000 + "}", r"row 2 \(line 2\): invalid JSON, Exceeds the limit"),
        ("[" * 200_000, r"row 2 \(line 2\): invalid JSON, nested too deeply"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: pathlib.Path, second: Any, message: str) -> None:
    name = _lines(tmp_path / "rows.jsonl", METAMATH, second, METAMATH)
    with pytest.raises(DataError, match=message):
        _read(name)


def test_rows_that_cannot_be_used_are_told_apart_from_those_that_can(tmp_path: pathlib.Path) -> None:
    """Also before the first usable row, which decides the format."""
    name = _lines(tmp_path / "a.jsonl", "nonsense", [1], {"other": 1}, METAMATH, {"query": "a"}, METAMATH)
    rows = list(open_source(name).rows())
    assert [isinstance(row, sources.BadRow) for row in rows] == [True, True, True, False, True, False]
    assert "a.jsonl, row 5 (line 5): missing key 'response'" in rows[4].reason


def test_columns_that_nothing_reads_are_named(tmp_path: pathlib.Path) -> None:
    name = _lines(tmp_path / "a.jsonl", METAMATH, METAMATH | {"input": "x", "score": 3})
    unused: set[str] = set()
    list(open_source(name).rows(unused))
    assert unused == {"type", "original_question", "score"}


@given(st.integers(1, 30), st.integers(0, 3), st.data())
def test_a_part_is_drawn_by_seed(total: int, seed: int, data: st.DataObject) -> None:
    whole = sources.Source("x", "f", lambda: iter([(str(n), {"text": str(n)}) for n in range(total)]))
    count = data.draw(st.integers(1, total))
    part = whole.part(count, seed=seed)
    texts = [int(row.text) for row in part.rows()]
    assert len(texts) == count
    assert texts == sorted(set(texts))
    assert texts == [int(row.text) for row in whole.part(count, seed=seed).rows()]
    share = whole.part(0.5, seed=seed)
    assert len(list(share.rows())) == max(1, round(0.5 * total))
    assert len({whole.fingerprint, part.fingerprint, whole.part(count, seed=seed + 1).fingerprint}) == 3
    with pytest.raises(DataError, match=f"{total + 1} rows are to be taken, it has {total}"):
        whole.part(total + 1, seed=seed)


def test_folders_and_texts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set").mkdir()
    _lines(tmp_path / "set" / "b.jsonl", METAMATH | {"query": "2"})
    (tmp_path / "set" / "a.json").write_text(json.dumps([METAMATH | {"query": "1"}]))
    (tmp_path / "set" / "README.md").write_text("words")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    rows = _read("$FOLDER/set")
    assert [conversation[0].content for conversation in rows] == ["1", "2"]
    for split in ("train", "test"):
        _lines(tmp_path / "set" / f"{split}.jsonl", METAMATH | {"query": split})
    [conversation] = open_source(str(tmp_path / "set"), split="test").conversations()
    assert conversation[0].content == "test"
    (tmp_path / "a.txt").write_text("Once.\n\nTwice.")
    source = open_source(str(tmp_path / "a.txt"))
    assert [row.text for row in source.rows()] == ["Once.\n\nTwice."]
    with pytest.raises(DataError, match="a text, where a conversation is needed"):
        list(source.conversations())


def test_names_that_hold_from_anywhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _lines(tmp_path / "a.jsonl", METAMATH)
    assert sources.absolute_name("a.jsonl") == str(tmp_path / "a.jsonl")
    for name in ("problems", "owner/name", "absent.jsonl"):
        assert sources.absolute_name(name) == name


def _turns(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hi"}, "'messages' must be a list, found text"),
        ({"messages": []}, "last message must be the assistant's"),
        ({"messages": ["hi"]}, "message 1: expected an object with role and content, found text"),
        (_turns(("user", "a")), "last message must be the assistant's"),
        (_turns(("narrator", "a")), "message 1: role 'narrator'; allowed: system, user, assistant, tool, "),
        (_turns(("user", "a"), ("system", "b")), "message 2: a system message can only come first"),
        (_turns(("user", "a"), ("assistant", "")), "message 2: 'content' is empty"),
        (_turns(("user", "a"), ("user", "b"), ("assistant", "c")), "must take turns"),
        ({"messages": [{"role": "user"}]}, "message 1: missing key 'content'"),
    ],
)
def test_a_malformed_conversation_is_named(tmp_path: pathlib.Path, row: Any, message: str) -> None:
    name = _lines(tmp_path / "rows.jsonl", MESSAGES, row)
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 2 \(line 2\).*{message}"):
        _read(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows"),
        (" \n ", "no rows"),
        ("[]", "no rows"),
        ('[{"query": "a", "response": "b"}', "after row 1: invalid JSON, expected ',' or ']'"),
        ('[{"query": "a", "response": "b"}] x', "after row 1: text after the end"),
        ('[{"query": "a", "response": "b"},]', "row 2: invalid JSON"),
        ('[{"query": "a", "response": "b"}, {"query" 3}]', "row 2: invalid JSON"),
        ('[{"query": "a", "response": "b', "row 1: invalid JSON, Unterminated string"),
        ('[{"query": "a", "response": "b"}, 12]', "row 2: expected an object with keys, found a number"),
        ('{"words": "a"}', "keys words fits no known format; known: query, response; instruction, output; "),
        ('[{"query": ' + "9" * 5000 + "}]", "row 1: invalid JSON, Exceeds the limit"),
        ("[" + '{"a":' * 100_000, "row 1: invalid JSON, nested too deeply"),
        ('{"query": "a", "response": "b", "messages": []}', "fits several formats"),
        ("{}", r"keys \(none\) fits no known format"),
    ],
)
def test_a_broken_file_is_named(tmp_path: pathlib.Path, text: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"rows\.json.*{message}"):
        _read(str(path))


def test_bytes_that_are_no_text_or_no_gzip_are_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"query": "\xff"}')
    with pytest.raises(DataError, match=r"a\.jsonl, row 1 \(line 1\): not UTF-8 text .* at byte 11"):
        _read(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.json").write_bytes(b'[{"query": "\xff"}]')
    with pytest.raises(DataError, match=r"a\.json: not UTF-8"):
        _read(str(tmp_path / "a.json"))
    (tmp_path / "b.jsonl.gz").write_bytes(b'{"query"')
    with pytest.raises(DataError, match=r"b\.jsonl\.gz: damaged or incomplete gzip"):
        _read(str(tmp_path / "b.jsonl.gz"))
    whole = gzip.compress("".join(json.dumps(METAMATH | {"type": str(n)}) for n in range(99)).encode())
    (tmp_path / "c.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"c\.jsonl\.gz: damaged or incomplete gzip"):
        _read(str(tmp_path / "c.jsonl.gz"))


def test_a_missing_source_says_what_would_do(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no such file"):
        open_source(str(tmp_path / "none.json"))
    with pytest.raises(DataError, match="holds no file of rows"):
        open_source(str(tmp_path))
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"lazyjax\[hub\]"):
        open_source("meta-math/MetaMathQA")


def test_a_hub_data_set_is_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(list[Any]):
        _fingerprint = "abc"

    def load_dataset(name: str, *, split: str) -> Rows:
        if name != "owner/name":
            raise FileNotFoundError("no such data set")
        return Rows([METAMATH, {"query": split}])

    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    source = open_source("owner/name", split="test")
    assert source.fingerprint == "owner/name/test/abc"
    rows = source.conversations()
    assert next(rows)[0].content == METAMATH["query"]
    with pytest.raises(DataError, match=r"owner/name \(test\), row 2: missing key 'response'"):
        next(rows)
    with pytest.raises(DataError, match="hub data set 'owner/none', split 'train': no such data set"):
        open_source("owner/none")


def test_the_fingerprint_follows_the_content(tmp_path: pathlib.Path) -> None:
    first = open_source(_lines(tmp_path / "a.jsonl", METAMATH)).fingerprint
    assert open_source(_lines(tmp_path / "b.jsonl", METAMATH)).fingerprint == first
    assert open_source(_lines(tmp_path / "b.jsonl", METAMATH, METAMATH)).fingerprint != first


@pytest.mark.parametrize("form", ["array", "lines"])
def test_memory_does_not_grow_with_the_file(
    tmp_path: pathlib.Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "_CHUNK_CHARACTERS", 1 << 16)
    path = tmp_path / "rows.json"
    row = json.dumps(METAMATH | {"query": "x" * 500})
    rows = 5_000
    text = "[" + ",\n".join([row] * rows) + "]" if form == "array" else (row + "\n") * rows
    path.write_text(text)
    source = open_source(str(path))
    tracemalloc.start()
    count = sum(1 for _ in source.conversations())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == rows
    assert peak < len(text) / 4
