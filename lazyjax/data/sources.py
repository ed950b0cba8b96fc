"""Rows of training data as conversations, whatever file or hub data set they come from.

Formats, told apart by the keys of the first row:

    MetaMathQA   {"query", "response"} (and, unused, "type", "original_question")
    alpaca       {"instruction", "output"} (and optionally "input", appended after a blank line)
    messages     {"messages": [{"role": "system" | "user" | "assistant", "content"}, ...]}

Files are JSON arrays or JSON Lines, plain or gzip-compressed (`.gz`), read as a stream: memory does not
grow with the file. Every error names the file and the row, counted from 1 (in JSON Lines also the line).

This module knows nothing about tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.resources
import importlib.util
import io
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

#: The name of the data set in the package.
PROBLEMS = "problems"
ROLES = ("system", "user", "assistant")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CHUNK_CHARACTERS = 1 << 20
#: A JSON error this close to the end of what was read may only mean that more must be read.
_NEAR_END_CHARACTERS = 16


class DataError(ValueError):
    """Data that cannot be found or used; the message names the file and row, and what is wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is one of `ROLES`, `content` is not blank."""

    role: str
    content: str


#: At least one user or system turn, then turns up to a final assistant turn.
Conversation = tuple[Message, ...]
#: A parsed but unchecked row with the words that say where it stands.
_Located = tuple[str, Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where rows come from.

    Attributes:
        name: the file or data set, as it appears in errors.
        fingerprint: changes when the rows may have changed (content of a file, version of a hub data set).
        open_rows: starts reading from the first row.
    """

    name: str
    fingerprint: str
    open_rows: Callable[[], Iterator[_Located]]

    def conversations(self) -> Iterator[Conversation]:
        """The rows in order, each checked; raises DataError at the first malformed one."""
        reader = None
        for place, row in self.open_rows():
            if not isinstance(row, Mapping):
                raise DataError(f"{place}: expected an object with keys, found {_kind(row)}")
            if reader is None:
                reader = _reader(place, row)
            yield reader(place, row)
        if reader is None:
            raise DataError(f"{self.name}: no rows")


def open_source(name: str, *, split: str = "train") -> Source:
    """Finds the rows called `name`.

    Args:
        name: `problems` (the data set in the package), a path to a `.json`, `.jsonl` or `.gz` file, or the
            name of a data set on the Hugging Face hub such as `meta-math/MetaMathQA` (needs `datasets`).
        split: which split of a hub data set; files have none.

    Raises:
        DataError: no such file, or `datasets` is not installed or does not find the data set.
    """
    if name == PROBLEMS:
        return _file_source(problems_folder() / "problems.jsonl.gz", PROBLEMS)
    path = pathlib.Path(name).expanduser()
    if path.is_file():
        return _file_source(path, str(path))
    if path.is_dir():
        raise DataError(f"{name} is a folder; name one file in it")
    if path.suffix in {".json", ".jsonl", ".gz"} or name.startswith(("/", "~", ".")):
        raise DataError(f"{name}: no such file")
    return _hub_source(name, split)


def problems_folder() -> pathlib.Path:
    """The folder in the package with the embedded problems and their tokenizer."""
    return pathlib.Path(str(importlib.resources.files("lazyjax.data"))) / "problems"


def _file_source(path: pathlib.Path, name: str) -> Source:
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "blake2b").hexdigest()
    return Source(name, fingerprint, lambda: _read_file(path, name))


def _hub_source(name: str, split: str) -> Source:
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"{name!r} is no file, and data sets by name need the `datasets` package: "
            f"pip install 'lazyjax[hub]', or give a JSON or JSON Lines file, or {PROBLEMS!r}"
        )
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # the library raises a different type for each way a name can be wrong
        raise DataError(f"hub data set {name!r}, split {split!r}: {error}") from error
    return Source(
        name,
        f"{name}/{split}/{rows._fingerprint}",
        lambda: ((f"{name} ({split}), row {number}", row) for number, row in enumerate(rows, start=1)),
    )


def _read_file(path: pathlib.Path, name: str) -> Iterator[_Located]:
    """Rows of a JSON array or of JSON Lines; the first character tells which."""
    with (
        _reading_errors(name),
        gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as binary,
        io.TextIOWrapper(binary, encoding="utf-8-sig") as file,
    ):
        first = ""
        while first == "" or first.isspace():
            first = file.read(1)
            if not first:
                return
        file.seek(0)
        yield from _array_rows(file, name) if first == "[" else _line_rows(file, name)


@contextlib.contextmanager
def _reading_errors(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: not UTF-8 text ({error.reason} at byte {error.start} of a block)"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{name}: damaged or incomplete gzip file ({error})") from error


def _line_rows(file: io.TextIOBase, name: str) -> Iterator[_Located]:
    number = 0
    for line_number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        number += 1
        place = f"{name}, row {number} (line {line_number})"
        try:
            yield place, json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{place}: invalid JSON, {error.msg} at column {error.colno}") from error


def _array_rows(file: io.TextIOBase, name: str) -> Iterator[_Located]:
    """Elements of a JSON array, decoded one at a time from a sliding window over the text."""
    window = _Window(file)
    window.skip_blanks()
    window.take("[")
    number = 0
    while True:
        window.skip_blanks()
        if number == 0 and window.take("]"):
            break
        number += 1
        place = f"{name}, row {number}"
        try:
            yield place, window.decode()
        except json.JSONDecodeError as error:
            raise DataError(f"{place}: invalid JSON, {error.msg}") from error
        window.skip_blanks()
        if window.take("]"):
            break
        if not window.take(","):
            raise DataError(f"{name}, after row {number}: invalid JSON, expected ',' or ']' (cut off?)")
    window.skip_blanks()
    if not window.at_end:
        raise DataError(f"{name}, after row {number}: text after the end of the array")


class _Window:
    """The part of a text that has been read and not yet used."""

    def __init__(self, file: io.TextIOBase) -> None:
        self._file = file
        self._text = ""
        self._start = 0
        self._exhausted = False
        self._decoder = json.JSONDecoder()

    @property
    def at_end(self) -> bool:
        """Whether everything has been read and used."""
        return self._exhausted and self._start == len(self._text)

    def skip_blanks(self) -> None:
        """Moves to the next character that is no blank, or to the end."""
        while True:
            while self._start < len(self._text) and self._text[self._start] in " \t\r\n":
                self._start += 1
            if self._start < len(self._text) or self._exhausted:
                return
            self._read_more()

    def take(self, character: str) -> bool:
        """Steps over `character` if it comes next."""
        found = self._text.startswith(character, self._start)
        self._start += found
        return found

    def decode(self) -> Any:
        """The JSON value that comes next; raises JSONDecodeError."""
        while True:
            try:
                value, self._start = self._decoder.raw_decode(self._text, self._start)
            except json.JSONDecodeError as error:
                near_end = len(self._text) - error.pos < _NEAR_END_CHARACTERS
                cut_off = near_end or error.msg.startswith("Unterminated string")
                if self._exhausted or not cut_off:
                    raise
                self._read_more()
            else:
                return value

    def _read_more(self) -> None:
        # Reading as much again as is waiting keeps the work linear even for one giant row.
        self._text = self._text[self._start :]
        self._start = 0
        more = self._file.read(max(_CHUNK_CHARACTERS, len(self._text)))
        self._exhausted = not more
        self._text += more


def _kind(value: Any) -> str:
    """A value's type in JSON's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    return names[type(value)] if type(value) in names else "a number"


def _reader(place: str, row: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], Conversation]:
    """The format of a file, from its first row."""
    formats = {
        ("query", "response"): _read_metamath,
        ("instruction", "output"): _read_alpaca,
        ("messages",): _read_messages,
    }
    found = [keys for keys in formats if row.keys() >= set(keys)]
    if len(found) == 1:
        return formats[found[0]]
    known = "; ".join(", ".join(keys) for keys in formats)
    problem = "fits several formats" if found else "fits no known format"
    raise DataError(
        f"{place}: a row with keys {', '.join(map(str, row)) or '(none)'} {problem}; known: {known}"
    )


def _text(place: str, row: Mapping[str, Any], key: str) -> str:
    """The text under `key`, not blank."""
    if key not in row:
        raise DataError(f"{place}: missing key {key!r}; found {', '.join(map(str, row)) or 'none'}")
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key!r} must be text, found {_kind(value)}")
    if not value.strip():
        raise DataError(f"{place}: {key!r} is empty")
    if _SURROGATE.search(value):
        raise DataError(f"{place}: {key!r} holds half of a surrogate pair, which is no character")
    return value


def _read_metamath(place: str, row: Mapping[str, Any]) -> Conversation:
    return (
        Message("user", _text(place, row, "query")),
        Message("assistant", _text(place, row, "response")),
    )


def _read_alpaca(place: str, row: Mapping[str, Any]) -> Conversation:
    prompt = _text(place, row, "instruction")
    if "input" in row and row["input"] not in ("", None):
        prompt += "\n\n" + _text(place, row, "input")
    return Message("user", prompt), Message("assistant", _text(place, row, "output"))


def _read_messages(place: str, row: Mapping[str, Any]) -> Conversation:
    if "messages" not in row:
        raise DataError(f"{place}: missing key 'messages'; found {', '.join(map(str, row)) or 'none'}")
    turns = row["messages"]
    if not isinstance(turns, list):
        raise DataError(f"{place}: 'messages' must be a list, found {_kind(turns)}")
    messages = []
    for number, turn in enumerate(turns, start=1):
        turn_place = f"{place}, message {number}"
        if not isinstance(turn, Mapping):
            raise DataError(f"{turn_place}: expected an object with role and content, found {_kind(turn)}")
        role = _text(turn_place, turn, "role")
        if role not in ROLES:
            raise DataError(f"{turn_place}: role {role!r}; allowed: {', '.join(ROLES)}")
        if role == "system" and number > 1:
            raise DataError(f"{turn_place}: a system message can only come first")
        messages.append(Message(role, _text(turn_place, turn, "content")))
    _check_turns(place, messages)
    return tuple(messages)


def _check_turns(place: str, messages: Iterable[Message]) -> None:
    """User and assistant take turns, from a user turn to an assistant turn."""
    roles = [message.role for message in messages if message.role != "system"]
    if not roles or roles[-1] != "assistant":
        raise DataError(f"{place}: the last message must be the assistant's (there is nothing to learn from)")
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise DataError(f"{place}: user and assistant must take turns, found {', '.join(roles)}")
