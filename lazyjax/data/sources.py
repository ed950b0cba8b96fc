"""Where rows come from: files, folders, the package, or the Hugging Face hub.

Files are JSON arrays or JSON Lines, plain or gzip-compressed (`.gz`), texts (`.txt`: one document), and
Parquet or Arrow where the package `datasets` is installed. Folders hold several of one kind, or a data set
that `datasets` has saved. Every error names the file and the row, counted from 1.

What the columns of a row mean is the business of `lazyjax.data.formats`.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.resources
import importlib.util
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lazyjax.data import json_rows
from lazyjax.data.formats import (
    BadRow,
    Conversation,
    DataError,
    Format,
    Message,
    Row,
    find_format,
    kind,
)
from lazyjax.data.json_rows import Located
from lazyjax.data.order import permutation

__all__ = [
    "PROBLEMS",
    "BadRow",
    "Conversation",
    "DataError",
    "Message",
    "Row",
    "Source",
    "absolute_name",
    "open_source",
    "problems_folder",
]

#: The name of the data set in the package.
PROBLEMS = "problems"
_JSON_SUFFIXES = (".json", ".jsonl", ".gz")
_TABLE_SUFFIXES = {".parquet": "parquet", ".arrow": "arrow"}
_SPLITS = ("train", "test", "validation", "valid", "dev", "eval")


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
    open_rows: Callable[[], Iterator[Located]]

    def rows(self, unused: set[str] | None = None) -> Iterator[Row | BadRow]:
        """The rows in order, each checked; the first usable one decides the format.

        Args:
            unused: gets the columns that nothing reads.

        Raises DataError where reading cannot go on, or there are no rows.
        """
        format_: Format | None = None
        place = None
        for place, row in self.open_rows():
            if isinstance(row, BadRow):
                yield row
                continue
            try:
                if not isinstance(row, Mapping):
                    raise DataError(f"{place}: expected an object with keys, found {kind(row)}")
                if format_ is None:
                    format_ = find_format(place, row)
                if unused is not None:
                    unused |= format_.unused(row)
                yield format_.read(place, row)
            except DataError as error:
                yield BadRow(str(error))
        if place is None:
            raise DataError(f"{self.name}: no rows")

    def conversations(self) -> Iterator[Conversation]:
        """The conversations in order; raises DataError at the first row that is none."""
        for number, row in enumerate(self.rows(), start=1):
            if isinstance(row, BadRow):
                raise DataError(row.reason)
            if row.text is not None:
                raise DataError(f"{self.name}, row {number}: a text, where a conversation is needed")
            yield row.messages

    def part(self, take: int | float, *, seed: int) -> Source:
        """Some of the rows, drawn by seed, in their order.

        Args:
            take: how many rows (a whole number), or which share of them (below 1).

        The source is read once to count its rows. Raises DataError when it has fewer than asked for.
        """
        total = sum(1 for _ in self.open_rows())
        count = take if isinstance(take, int) else max(1, round(take * total))
        if count > total:
            raise DataError(f"{self.name}: {count:,} rows are to be taken, it has {total:,}")
        chosen_R = np.zeros(total, np.bool_)
        chosen_R[permutation(total, seed)[:count]] = True
        return Source(
            self.name,
            f"{self.fingerprint}/{count} of {total} by {seed}",
            lambda: itertools.compress(self.open_rows(), chosen_R),
        )


def open_source(name: str, *, split: str = "train") -> Source:
    """Finds the rows called `name`.

    Args:
        name: `problems` (the data set in the package); a `.json`, `.jsonl`, `.txt`, `.parquet` or `.arrow`
            file; a folder of such; or a data set of the Hugging Face hub such as `meta-math/MetaMathQA`.
            Parquet, Arrow and the hub need `datasets`. `~` and `$VARIABLES` are expanded.
        split: which split of a hub data set, or of a folder whose files are named after splits.

    Raises:
        DataError: no such file, or `datasets` is not installed or does not find the data set.
    """
    if name == PROBLEMS:
        return _json_source(problems_folder() / "problems.jsonl.gz", PROBLEMS)
    path = expanded(name)
    if path.is_file():
        return _file_source(path)
    if path.is_dir():
        return _folder_source(path, split)
    if path.suffix in {*_JSON_SUFFIXES, ".txt", *_TABLE_SUFFIXES} or name.startswith(("/", "~", ".", "$")):
        raise DataError(f"{path}: no such file")
    return _hub_source(name, split)


def expanded(name: str) -> pathlib.Path:
    """A path as typed, with `~` and `$VARIABLES` put in."""
    return pathlib.Path(os.path.expandvars(name)).expanduser()


def absolute_name(name: str) -> str:
    """The name of the same rows from any working directory: files and folders as absolute paths."""
    path = expanded(name)
    return str(path.absolute()) if name != PROBLEMS and path.exists() else name


def problems_folder() -> pathlib.Path:
    """The folder in the package with the embedded problems and their tokenizer."""
    return pathlib.Path(str(importlib.resources.files("lazyjax.data"))) / "problems"


def _file_source(path: pathlib.Path) -> Source:
    if path.suffix in _TABLE_SUFFIXES:
        return _tables_source([path], str(path))
    if path.suffix == ".txt" or path.suffixes[-2:] == [".txt", ".gz"]:
        return _text_source(path)
    return _json_source(path, str(path))


def _json_source(path: pathlib.Path, name: str) -> Source:
    return Source(name, _digest(path), lambda: json_rows.read_file(path, name))


def _digest(path: pathlib.Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _text_source(path: pathlib.Path) -> Source:
    """A file of plain text is one document."""

    def read() -> Iterator[Located]:
        try:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            yield f"{path}, row 1", {"text": data.decode("utf-8-sig")}
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise DataError(f"{path}: not UTF-8 text ({error})") from error

    return Source(str(path), f"text/{_digest(path)}", read)


def _folder_source(path: pathlib.Path, split: str) -> Source:
    """All files of one kind in a folder, or a data set that `datasets` has saved there."""
    if any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        return _saved_source(path, split)
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    for suffix in _TABLE_SUFFIXES:
        tables = _of_split([file for file in files if file.suffix == suffix], split)
        if tables:
            return _tables_source(tables, str(path))
    found = _of_split([file for file in files if file.suffix in (*_JSON_SUFFIXES, ".txt")], split)
    if not found:
        raise DataError(
            f"{path}: holds no file of rows "
            f"({', '.join((*_TABLE_SUFFIXES, *_JSON_SUFFIXES, '.txt'))}) and no saved data set"
        )
    parts = [_file_source(file) for file in found]
    return Source(
        str(path),
        hashlib.blake2b("/".join(part.fingerprint for part in parts).encode()).hexdigest(),
        lambda: itertools.chain.from_iterable(part.open_rows() for part in parts),
    )


def _of_split(files: Sequence[pathlib.Path], split: str) -> list[pathlib.Path]:
    """The files of `split`, where files are named after splits (as on the hub); else all."""

    def begins(file: pathlib.Path, name: str) -> bool:
        return file.stem == name or file.stem.startswith((f"{name}-", f"{name}_", f"{name}."))

    if not any(begins(file, name) for file in files for name in (*_SPLITS, split)):
        return list(files)
    return [file for file in files if begins(file, split)]


def _datasets(name: str) -> Any:
    """The package `datasets`, which is optional."""
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"{name!r}: Parquet, Arrow and data sets by name need the `datasets` package: "
            f"pip install 'lazyjax[hub]', or give a JSON or JSON Lines file, or {PROBLEMS!r}"
        )
    import datasets

    return datasets


def _tables_source(files: Sequence[pathlib.Path], name: str) -> Source:
    datasets = _datasets(name)
    builder = _TABLE_SUFFIXES[files[0].suffix]
    try:
        rows = datasets.load_dataset(builder, data_files=[str(file) for file in files], split="train")
    except Exception as error:  # the library raises a different type for each way a file can be wrong
        raise DataError(f"{name}: cannot be read as {builder}: {' '.join(str(error).split())}") from error
    digests = [_digest(file) for file in files]
    return Source(name, hashlib.blake2b("/".join(digests).encode()).hexdigest(), _numbered(name, rows))


def _saved_source(path: pathlib.Path, split: str) -> Source:
    datasets = _datasets(str(path))
    try:
        rows = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"{path}: cannot be read as a saved data set: {error}") from error
    if isinstance(rows, Mapping):
        if split not in rows:
            raise DataError(f"{path}: has no split {split!r} (data.hub_split); found {', '.join(rows)}")
        rows = rows[split]
    return Source(str(path), f"{path}/{split}/{rows._fingerprint}", _numbered(str(path), rows))


def _hub_source(name: str, split: str) -> Source:
    datasets = _datasets(name)
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # the library raises a different type for each way a name can be wrong
        raise DataError(f"hub data set {name!r}, split {split!r}: {error}") from error
    return Source(name, f"{name}/{split}/{rows._fingerprint}", _numbered(f"{name} ({split})", rows))


def _numbered(name: str, rows: Any) -> Callable[[], Iterator[Located]]:
    return lambda: ((f"{name}, row {number}", row) for number, row in enumerate(rows, start=1))
