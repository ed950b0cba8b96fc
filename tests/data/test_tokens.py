"""Data sets as flat token arrays: length limits, counts, cache."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from lazyjax.data import chat, tokens
from lazyjax.data.sources import DataError, Source, open_source


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat.load_tokenizer()


def _source(tmp_path: pathlib.Path, *lengths: tuple[int, int]) -> Source:
    """Rows whose queries and responses have so many digits (one token each)."""
    rows = [{"query": "1" * query, "response": "2" * response} for query, response in lengths]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return open_source(str(path))


#: Tokens of a row besides its query Q and response R:
#: <|im_start|> user \n Q <|im_end|> \n <|im_start|> assistant \n R <|im_end|>
_AROUND = 9


def test_rows_are_kept_one_after_the_other(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    rows = tokens.tokenize(_source(tmp_path, (3, 2), (1, 4), (9, 9)), tokenizer, sequence_length=100)
    assert rows.lengths_R.tolist() == [_AROUND + 5, _AROUND + 5, _AROUND + 18]
    assert (len(rows), rows.rows_read, rows.truncated, rows.dropped) == (3, 3, 0, 0)
    for index, (query, response) in enumerate(((3, 2), (1, 4), (9, 9))):
        tokens_T, response_T = rows.row(index)
        text = f"<|im_start|>user\n{'1' * query}<|im_end|>\n<|im_start|>assistant\n{'2' * response}<|im_end|>"
        assert tokenizer.decode(tokens_T) == text
        assert response_T.tolist() == [False] * (_AROUND - 1 + query) + [True] * (response + 1)
        prompt_T, answer_T = rows.prompt_and_response(index)
        assert tokenizer.decode(prompt_T) + tokenizer.decode(answer_T) == text
        assert tokenizer.decode(answer_T) == "2" * response + "<|im_end|>"


def test_prompt_and_response_take_the_last_turn(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    turns = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    rows = tokens.tokenize(open_source(str(path)), tokenizer, sequence_length=100)
    prompt_T, answer_T = rows.prompt_and_response(0)
    assert tokenizer.decode(prompt_T).endswith("user\n3<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(answer_T) == "4<|im_end|>"


def test_rows_that_are_too_long(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    limit = _AROUND + 5
    source = _source(tmp_path, (3, 2), (3, 3), (30, 2), (1, 1))
    cut = tokens.tokenize(source, tokenizer, sequence_length=limit, too_long="truncate")
    assert cut.source_R.tolist() == [0, 1, 3]
    assert (cut.truncated, cut.dropped, cut.rows_read) == (1, 1, 4)
    assert cut.lengths_R.tolist() == [limit, limit, _AROUND + 2]
    assert tokenizer.decode(cut.prompt_and_response(1)[1]) == "222"
    dropped = tokens.tokenize(source, tokenizer, sequence_length=limit, too_long="drop")
    assert dropped.source_R.tolist() == [0, 3]
    assert (dropped.truncated, dropped.dropped) == (0, 2)
    with pytest.raises(
        DataError, match=rf"rows\.jsonl, row 2: {limit + 1} tokens, but a sequence holds {limit}"
    ):
        tokens.tokenize(source, tokenizer, sequence_length=limit, too_long="error")
    with pytest.raises(DataError, match="none of 4 rows keeps a response within 4 tokens"):
        tokens.tokenize(source, tokenizer, sequence_length=4)


def test_wrong_arguments_are_named(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    source = _source(tmp_path, (1, 1))
    with pytest.raises(ValueError, match="sequence_length: 1"):
        tokens.tokenize(source, tokenizer, sequence_length=1)


def test_a_row_the_template_cannot_write_is_named(tmp_path: pathlib.Path) -> None:
    tokenizer = chat.load_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') if messages[0].content == '11' else '' }}" + str(
        tokenizer.chat_template
    )
    with pytest.raises(DataError, match=r"rows\.jsonl, row 3: the chat template cannot write"):
        tokens.tokenize(_source(tmp_path, (1, 1), (3, 1), (2, 1)), tokenizer, sequence_length=50)


@pytest.mark.parametrize("chunk", [1, 2, 3, 1000])
def test_chunks_change_nothing(
    tokenizer: Any, tmp_path: pathlib.Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source(tmp_path, (3, 2), (30, 1), (30, 1), (1, 4), (9, 9))
    whole = tokens.tokenize(source, tokenizer, sequence_length=30)
    monkeypatch.setattr(tokens, "_CHUNK_ROWS", chunk)
    seen: list[int] = []
    parts = tokens.tokenize(source, tokenizer, sequence_length=30, progress=seen.append)
    assert parts.fingerprint == whole.fingerprint
    assert (parts.rows_read, parts.dropped) == (whole.rows_read, whole.dropped) == (5, 2)
    assert seen == [*range(chunk, 5, chunk), 5]


def test_the_cache_serves_the_same_rows_only(
    tokenizer: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    source = _source(tmp_path, (3, 2), (1, 40))
    made = tokens.tokenize(source, tokenizer, sequence_length=30, cache_folder=folder)
    [file] = folder.iterdir()
    work: list[str] = []
    encode = chat.encode
    monkeypatch.setattr(chat, "encode", lambda *items: work.append("") or encode(*items))
    again = tokens.tokenize(source, tokenizer, sequence_length=30, cache_folder=folder)
    assert not work
    assert again.fingerprint == made.fingerprint
    assert (again.rows_read, again.truncated, again.dropped) == (2, 1, 0)
    np.testing.assert_array_equal(again.tokens_N, made.tokens_N)
    # A damaged file is made again.
    file.write_bytes(file.read_bytes()[:100])
    assert (
        tokens.tokenize(source, tokenizer, sequence_length=30, cache_folder=folder).fingerprint
        == made.fingerprint
    )
    assert len(work) == 1
    # Anything else that is asked for is another file.
    tokens.tokenize(source, tokenizer, sequence_length=31, cache_folder=folder)
    tokens.tokenize(source, tokenizer, sequence_length=30, too_long="drop", cache_folder=folder)
    tokens.tokenize(_source(tmp_path, (3, 2)), tokenizer, sequence_length=30, cache_folder=folder)
    assert len(work) == 4
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("damage", ["empty", "text", "half", "other_arrays", "out_of_range"])
def test_a_damaged_cache_file_is_made_again(tokenizer: Any, tmp_path: pathlib.Path, damage: str) -> None:
    folder = tmp_path / "cache"
    source = _source(tmp_path, (3, 2), (1, 4))
    made = tokens.tokenize(source, tokenizer, sequence_length=30, cache_folder=folder)
    [file] = folder.iterdir()
    with np.load(file) as whole:
        arrays = dict(whole)
    match damage:
        case "empty":
            file.write_bytes(b"")
        case "text":
            file.write_text("not an archive")
        case "half":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        case "other_arrays":
            np.savez(file, **arrays | {"starts_S": arrays["starts_S"][:-1]})
        case "out_of_range":
            np.savez(file, **arrays | {"source_R": arrays["source_R"] + 5})
    again = tokens.tokenize(source, tokenizer, sequence_length=30, cache_folder=folder)
    assert again.fingerprint == made.fingerprint
    with np.load(file) as whole:
        np.testing.assert_array_equal(whole["starts_S"], made.starts_S)


def test_a_cache_folder_is_tried_before_the_work(
    tokenizer: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "rows", lambda *_: pytest.fail("was read"))
    source = _source(tmp_path, (3, 2))
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", pathlib.Path("/proc/none")):
        with pytest.raises(DataError, match=r"data\.cache_folder: .* cannot be written"):
            tokens.tokenize(source, tokenizer, sequence_length=30, cache_folder=folder)


def test_a_cache_file_that_cannot_be_kept_costs_nothing(
    tokenizer: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, **arrays: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="not kept .No space left"):
        rows = tokens.tokenize(
            _source(tmp_path, (3, 2)), tokenizer, sequence_length=30, cache_folder=tmp_path / "cache"
        )
    assert len(rows) == 1
    assert list((tmp_path / "cache").iterdir()) == []


def test_rows_that_cannot_be_used_are_refused_or_counted_and_named(
    tokenizer: Any, tmp_path: pathlib.Path
) -> None:
    good = {"instruction": "1", "output": "2"}
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in (good, good | {"output": ""}, good, good | {"instruction": 3})]
    path.write_text("\n".join([*lines, "nonsense", json.dumps(good)]))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2 \(line 2\): 'output' is empty"):
        tokens.tokenize(open_source(str(path)), tokenizer, sequence_length=30)
    folder = tmp_path / "cache"
    for _ in range(2):  # the second time from the cache
        rows = tokens.tokenize(
            open_source(str(path)), tokenizer, sequence_length=30, bad_rows="skip", cache_folder=folder
        )
        assert rows.source_R.tolist() == [0, 2, 5]
        assert (rows.rows_read, rows.bad, rows.dropped) == (6, 3, 0)
        assert [reason.rpartition(": ")[2] for reason in rows.reasons[:2]] == [
            "'output' is empty",
            "'instruction' must be text, found a number",
        ]
        assert "row 5 (line 5): invalid JSON" in rows.reasons[2]
    path.write_text("\n".join(["nonsense", "{}"]))
    with pytest.raises(DataError, match=r"none of 2 rows .*first that cannot be used: .*row 1 \(line 1\)"):
        tokens.tokenize(open_source(str(path)), tokenizer, sequence_length=30, bad_rows="skip")


def test_a_long_text_goes_on_in_the_next_rows(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": "1" * count}) for count in (3, 25, 10)))
    rows = tokens.tokenize(open_source(str(path)), tokenizer, sequence_length=10)
    assert rows.source_R.tolist() == [0, 1, 1, 1, 2]
    # The last digit of 10 and its end are 11 tokens; a piece of one token has nothing to predict it from.
    assert rows.lengths_R.tolist() == [4, 10, 10, 6, 10]
    assert (rows.truncated, rows.dropped) == (0, 0)
    assert tokenizer.decode(rows.row(3)[0]) == "1" * 5 + tokenizer.eos_token
    assert all(rows.row(index).response_T.all() for index in range(len(rows)))
    dropped = tokens.tokenize(open_source(str(path)), tokenizer, sequence_length=10, too_long="drop")
    assert (dropped.source_R.tolist(), dropped.dropped) == ([0], 2)
    with pytest.raises(DataError, match=r"row 2: 26 tokens, but a sequence holds 10"):
        tokens.tokenize(open_source(str(path)), tokenizer, sequence_length=10, too_long="error")


def test_the_fingerprint_sees_every_part(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    rows = tokens.tokenize(_source(tmp_path, (3, 2), (1, 4)), tokenizer, sequence_length=100)

    def changed(**parts: Any) -> str:
        fields = {name: getattr(rows, name) for name in ("tokens_N", "response_N", "starts_S", "source_R")}
        return tokens.TokenizedRows(**(fields | parts), rows_read=2, truncated=0, dropped=0).fingerprint

    other = rows.starts_S.copy()
    other[1] += 1
    prints = {
        rows.fingerprint,
        changed(tokens_N=rows.tokens_N[::-1]),
        changed(response_N=~rows.response_N),
        changed(starts_S=other),
        changed(source_R=rows.source_R + 1),
    }
    assert len(prints) == 5
    assert changed() == rows.fingerprint
