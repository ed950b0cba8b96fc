"""JSON arrays and JSON Lines, plain or gzip-compressed, as a stream of rows.

Memory does not grow with the file. Every error names the file and the row, counted from 1 (in JSON
Lines also the line).

This module knows nothing about what a row means.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from lazyjax.data.formats import BadRow, DataError

_CHUNK_CHARACTERS = 1 << 20
#: A JSON error this close to the end of what was read may only mean that more must be read.
_NEAR_END_CHARACTERS = 16
#: What may stand before the first character: blanks, and the mark that some editors write.
_BLANK_BYTES = b" \t\r\n" + codecs.BOM_UTF8
#: A parsed but unchecked row with the words that locate it.
Located = tuple[str, Any]


def read_file(path: pathlib.Path, name: str) -> Iterator[Located]:
    """Rows of a JSON array or of JSON Lines; the first character tells which.

    A line that is no JSON is a `BadRow`, since the next line can be read; an array ends there.
    """
    with (
        _reading_errors(name),
        gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as binary,
    ):
        first = binary.read(1)
        while first and first in _BLANK_BYTES:
            first = binary.read(1)
        binary.seek(0)
        if first == b"[":
            with io.TextIOWrapper(binary, encoding="utf-8-sig") as file:
                yield from _array_rows(file, name)
        else:
            yield from _line_rows(binary, name)


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


def _words(error: Exception, *, column: bool = True) -> str:
    """The fault of a JSON text, in words."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}" if column else error.msg
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error).partition(";")[0]


def _line_rows(lines: Iterable[bytes], name: str) -> Iterator[Located]:
    number = 0
    for line_number, line in enumerate(lines, start=1):
        if line_number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        number += 1
        place = f"{name}, row {number} (line {line_number})"
        try:
            yield place, json.loads(line.decode())
        except UnicodeDecodeError as error:
            yield place, BadRow(f"{place}: not UTF-8 text ({error.reason} at byte {error.start})")
        except (ValueError, RecursionError) as error:
            yield place, BadRow(f"{place}: invalid JSON, {_words(error)}")


def _array_rows(file: io.TextIOBase, name: str) -> Iterator[Located]:
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
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            # Where the next element starts is not known.
            raise DataError(f"{place}: invalid JSON, {_words(error, column=False)}") from error
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
