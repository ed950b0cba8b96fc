"""The file of one evaluation: every answer as it comes, so that a stopped evaluation can go on.

JSON Lines. The first line says what was asked for; then one line per row, in the order in which rows were
finished; the last one, once all are there, is the result. A line that was cut off by a crash is dropped.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from lazyjax.evaluation.problems import Scored


class AnswersFileError(ValueError):
    """A file that belongs to another evaluation, or cannot be written; the message says what to do."""


class AnswersFile:
    """Appends to a file of answers, new or begun; `close` it."""

    def __init__(self, path: pathlib.Path, facts: Mapping[str, Any]) -> None:
        """Opens `path`, with what it holds in `answered`.

        Args:
            facts: what decides the answers; a file that was begun with others is not touched.

        Raises:
            AnswersFileError: the file was begun with other facts, is something else, or cannot be written.
        """
        self.path = path
        self.answered: dict[int, Scored] = {}
        header = {"kind": "evaluation", **facts}
        whole = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                whole = self._read(header)
            self._file = path.open("r+b" if path.exists() else "w+b")
            self._file.truncate(whole)
            self._file.seek(whole)
        except OSError as error:
            raise AnswersFileError(f"{path}: cannot be written ({error.strerror})") from error
        if not whole:
            self._write(header)

    def add(self, scored: Scored) -> None:
        """Writes a row, at once."""
        self.answered[scored.row] = scored
        self._write({"kind": "row", **scored.record()})

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes the result."""
        self._write({"kind": "result", **result})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise AnswersFileError(
                f"{self.path}: cannot be written ({error.strerror}); {len(self.answered)} answers are in it, "
                "and the same command goes on from there"
            ) from error

    def _read(self, header: Mapping[str, Any]) -> int:
        """Takes in the rows that are there; returns the bytes that are worth keeping."""
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                record = _parse(line)
                if record is None:
                    if number and not line.endswith(b"\n"):
                        break  # cut off: the row is answered again
                    raise AnswersFileError(
                        f"{self.path}, line {number + 1}: no file of answers; name another"
                    )
                if number == 0:
                    self._check(record, header)
                elif record["kind"] == "row":
                    one = Scored(**{key: value for key, value in record.items() if key != "kind"})
                    self.answered[one.row] = one
                elif record["kind"] == "result":
                    break  # written again at the end
                whole += len(line)
        return whole

    def _check(self, found: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        if found["kind"] != "evaluation":
            raise AnswersFileError(f"{self.path}: no file of answers; name another")
        for key in sorted({*found, *header}):
            before = found[key] if key in found else None
            now = header[key] if key in header else None
            if before != now:
                raise AnswersFileError(
                    f"{self.path} holds answers of another evaluation: {key} was {before!r}, it is {now!r} "
                    "now; name another file with --out, or remove this one"
                )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record and line.endswith(b"\n") else None


def fingerprint(folder: pathlib.Path) -> str:
    """Changes when the weights in a folder may have: names, sizes and times of its files."""
    files = sorted(folder.glob("*.safetensors"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return json.dumps([os.fspath(folder.resolve()), stats])
