"""A whole data set as flat token arrays.

Rows are read, rendered and tokenized once, in chunks, and kept as three flat arrays (5 bytes a token):
400,000 rows of 250 tokens are 500 MB. With a cache folder the work is done once per data, tokenizer and
length limit.

What happens to rows that cannot be used is decided here, and counted.

This module knows nothing about batches.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from lazyjax.data import chat
from lazyjax.data.formats import BadRow, DataError, Row
from lazyjax.data.sources import Source

#: What happens to a row of more tokens than a sequence holds.
TooLong = Literal["truncate", "drop", "error"]
#: What happens to a row that cannot be read or that the chat template cannot write.
BadRows = Literal["error", "skip"]
_CHUNK_ROWS = 1000
#: Reasons that are kept in words; all are counted.
_MOST_REASONS = 100
#: Counts changes of what is kept in a cache file, or of how rows become tokens.
_FORMAT = "4"


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizedRows:
    """R rows of together N tokens.

    Attributes:
        tokens_N: token ids of all rows, one after the other.
        response_N: True on the tokens that count towards the loss; or their weights, where a row gives a
            turn one that is neither 0 nor 1.
        starts_S: where each row starts, and N at the end (S = R + 1).
        source_R: which row of the source each is, from 0. Never decreasing; a text that is longer than a
            sequence is several rows.
        rows_read: rows of the source.
        truncated: rows cut to the length limit.
        dropped: rows left out: over the limit, or with no response token inside it.
        bad: rows skipped because they could not be read or written.
        reasons: what was wrong with the first of them, each named.
        unused: columns of the source that nothing reads.
        drops: why the first of the dropped rows were, each named.
        full_lengths_K: tokens of each of the K rows that could be written, before any was cut or dropped.
    """

    tokens_N: Int32[np.ndarray, " N"]
    response_N: Bool[np.ndarray, " N"] | Float32[np.ndarray, " N"]
    starts_S: Int64[np.ndarray, " S"]
    source_R: Int64[np.ndarray, " R"]
    rows_read: int
    truncated: int
    dropped: int
    bad: int = 0
    reasons: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    full_lengths_K: Int64[np.ndarray, " K"] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.source_R)

    @property
    def lengths_R(self) -> Int64[np.ndarray, " R"]:
        """Tokens of each row."""
        return np.diff(self.starts_S)

    @property
    def held_bytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.tokens_N, self.response_N, self.starts_S, self.source_R, self.full_lengths_K)
        return sum(array.nbytes for array in arrays)

    @functools.cached_property
    def learned_R(self) -> Int64[np.ndarray, " R"]:
        """Tokens of each row that count towards the loss; its first has no predecessor and never does."""
        starts, learned_N = self.starts_S[:-1], self.response_N != 0
        return np.add.reduceat(learned_N, starts, dtype=np.int64) - learned_N[starts]

    def row(self, index: int) -> chat.Encoded:
        """One row's tokens and response mask, as views."""
        span = slice(int(self.starts_S[index]), int(self.starts_S[index + 1]))
        return chat.Encoded(self.tokens_N[span], self.response_N[span])

    def prompt_and_response(
        self, index: int
    ) -> tuple[Int32[np.ndarray, " prompt"], Int32[np.ndarray, " response"]]:
        """One row for generation: the tokens before its last response, and that response."""
        tokens_T, response_T = self.row(index)
        learned_T = response_T != 0
        others = np.flatnonzero(~learned_T[: np.flatnonzero(learned_T)[-1] + 1])
        start = int(others[-1]) + 1 if len(others) else 0
        return tokens_T[:start], tokens_T[start:][learned_T[start:]]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with any token, mask or row border."""
        digest = hashlib.blake2b()
        for array in (self.tokens_N, self.response_N, self.starts_S, self.source_R):
            digest.update(str(array.shape).encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:32]


def tokenize(
    source: Source,
    tokenizer: chat.Tokenizer,
    *,
    sequence_length: int,
    too_long: TooLong = "truncate",
    bad_rows: BadRows = "error",
    cache_folder: pathlib.Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenizedRows:
    """Reads and tokenizes every row.

    Args:
        source: see `open_source`.
        tokenizer: see `load_tokenizer`.
        sequence_length: the most tokens a row may have.
        too_long: `truncate` keeps the first `sequence_length` tokens of a conversation and cuts a text
            into several rows, `drop` leaves the row out, `error` refuses it. A row that keeps no response
            token teaches nothing and is always left out. All are counted.
        bad_rows: `error` refuses the first row that cannot be read or written, `skip` leaves such rows out,
            counted and named.
        cache_folder: where results are kept and looked up; None keeps nothing.
        progress: called with the number of rows read so far.

    Raises:
        DataError: a malformed, unusable or (with `error`) too long row, named; no row is left; or the cache
            folder cannot be used.
    """
    if too_long not in get_args(TooLong):
        raise ValueError(f"too_long: {too_long!r}; allowed: {', '.join(get_args(TooLong))}")
    if bad_rows not in get_args(BadRows):
        raise ValueError(f"bad_rows: {bad_rows!r}; allowed: {', '.join(get_args(BadRows))}")
    if sequence_length < 2:
        raise ValueError(
            f"sequence_length: {sequence_length}; a row needs a prompt token and a response token"
        )
    path = None
    if cache_folder is not None:
        check_cache_folder(cache_folder)
        tokenizer_part = chat.tokenizer_fingerprint(tokenizer)
        parts = (_FORMAT, source.fingerprint, tokenizer_part, str(sequence_length), too_long, bad_rows)
        path = cache_folder / f"tokens-{hashlib.blake2b('/'.join(parts).encode()).hexdigest()[:32]}.npz"
        cached = _load(path)
        if cached is not None:
            return cached
    rows = _Tokenizing(source, tokenizer, sequence_length, too_long, bad_rows).run(progress)
    if path is not None:
        _save(rows, path)
    return rows


def check_cache_folder(folder: pathlib.Path) -> None:
    """Makes the folder and tries to write there, before the work that it shall keep; raises DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise DataError(
            f"data.cache_folder: {folder} cannot be written ({error.strerror}); name another folder, or none"
        ) from error


class _Tokenizing:
    """One pass over a source, and what has been counted and kept so far."""

    def __init__(
        self,
        source: Source,
        tokenizer: chat.Tokenizer,
        sequence_length: int,
        too_long: TooLong,
        bad_rows: BadRows,
    ) -> None:
        self._source, self._tokenizer = source, tokenizer
        self._limit, self._too_long, self._bad_rows = sequence_length, too_long, bad_rows
        self._tokens, self._responses = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)]
        self._lengths: list[int] = []
        self._numbers: list[int] = []
        self._truncated = self._dropped = self._bad = 0
        self._reasons: list[str] = []
        self._drops: list[str] = []
        self._full_lengths: list[int] = []

    def run(self, progress: Callable[[int], None] | None) -> TokenizedRows:
        """Reads everything."""
        rows_read = 0
        unused: set[str] = set()
        rows = enumerate(self._source.rows(unused))
        while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
            self._add(chunk)
            rows_read += len(chunk)
            if progress is not None:
                progress(rows_read)
        if not self._numbers:
            why = f"; the first that cannot be used: {self._reasons[0]}" if self._reasons else ""
            raise DataError(
                f"{self._source.name}: none of {rows_read} rows keeps a response within {self._limit} "
                f"tokens{why}"
            )
        return TokenizedRows(
            tokens_N=np.concatenate(self._tokens),
            response_N=np.concatenate(self._responses),
            starts_S=np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64),
            source_R=np.asarray(self._numbers, np.int64),
            rows_read=rows_read,
            truncated=self._truncated,
            dropped=self._dropped,
            bad=self._bad,
            reasons=tuple(self._reasons),
            unused=tuple(sorted(unused)),
            drops=tuple(self._drops),
            full_lengths_K=np.asarray(self._full_lengths, np.int64),
        )

    def _add(self, chunk: Iterable[tuple[int, Row | BadRow]]) -> None:
        rendered = []
        for number, row in chunk:
            try:
                if isinstance(row, BadRow):
                    raise DataError(row.reason)
                rendered.append((number, row, self._render(number, row)))
            except DataError as error:
                if self._bad_rows == "error":
                    raise DataError(f"{error} (data.bad_rows skip leaves such rows out)") from error
                self._bad += 1
                if len(self._reasons) < _MOST_REASONS:
                    self._reasons.append(str(error))
        encoded = chat.encode(self._tokenizer, [text for *_, text in rendered])
        kept = [
            piece
            for (number, row, _), one in zip(rendered, encoded, strict=True)
            for piece in self._fit(number, row, one)
        ]
        if kept:
            # One array per chunk: 400,000 small ones would cost more than their tokens.
            self._tokens.append(np.concatenate([one.tokens_T for one in kept]))
            self._responses.append(np.concatenate([one.response_T for one in kept]))
            self._lengths.extend(len(one.tokens_T) for one in kept)

    def _render(self, number: int, row: Row) -> chat.Rendered:
        try:
            return chat.render_row(self._tokenizer, row)
        except DataError as error:
            raise DataError(f"{self._source.name}, row {number + 1}: {error}") from error

    def _fit(self, number: int, row: Row, one: chat.Encoded) -> list[chat.Encoded]:
        """The pieces of an encoded row that are kept; also notes which row they are of."""
        length = len(one.tokens_T)
        self._full_lengths.append(length)
        over = length > self._limit
        if over and self._too_long == "error":
            raise DataError(
                f"{self._source.name}, row {number + 1}: {length} tokens, but a sequence holds "
                f"{self._limit}; shorten the row, raise sequence_length, or set too_long to truncate or drop"
            )
        starts = range(0, length, self._limit) if row.text is not None else (0,)
        pieces = [
            chat.Encoded(
                one.tokens_T[start : start + self._limit], one.response_T[start : start + self._limit]
            )
            for start in starts
        ]
        # A piece's first token has no predecessor to be predicted from.
        pieces = [piece for piece in pieces if piece.response_T[1:].any()]
        if not pieces or (over and self._too_long == "drop"):
            self._dropped += 1
            if len(self._drops) < _MOST_REASONS:
                why = f"no response within {self._limit}" if over else "no token to learn from"
                why = f"over {self._limit}" if over and self._too_long == "drop" else why
                self._drops.append(f"{self._source.name}, row {number + 1}: {length} tokens, {why}")
            return []
        self._truncated += over and row.text is None
        self._numbers.extend([number] * len(pieces))
        return pieces


def _save(rows: TokenizedRows, path: pathlib.Path) -> None:
    """Writes beside `path` and renames, so that a torn file is never found.

    A disk that is full now costs the next run some time, and this one nothing.
    """
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, **{field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)})
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        warnings.warn(f"{path}: the tokenized rows are not kept ({error.strerror})", stacklevel=2)


def _load(path: pathlib.Path) -> TokenizedRows | None:
    """Rows kept earlier; None if there are none, or the file is damaged (it is then made again)."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            rows = TokenizedRows(
                tokens_N=file["tokens_N"],
                response_N=file["response_N"],
                starts_S=file["starts_S"],
                source_R=file["source_R"],
                rows_read=int(file["rows_read"]),
                truncated=int(file["truncated"]),
                dropped=int(file["dropped"]),
                bad=int(file["bad"]),
                reasons=tuple(map(str, file["reasons"])),
                unused=tuple(map(str, file["unused"])),
                drops=tuple(map(str, file["drops"])),
                full_lengths_K=file["full_lengths_K"],
            )
    # EOFError: an empty file. TypeError: arrays of other types or shapes than annotated.
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error):
        return None
    return rows if _consistent(rows) else None


def _consistent(rows: TokenizedRows) -> bool:
    """Whether the arrays of a file belong together."""
    starts_S = rows.starts_S
    return bool(
        rows.tokens_N.shape == rows.response_N.shape
        and len(starts_S) == len(rows.source_R) + 1 > 1
        and starts_S[0] == 0
        and starts_S[-1] == len(rows.tokens_N)
        and (np.diff(starts_S) > 0).all()
        and (rows.tokens_N >= 0).all()
        and (rows.response_N >= 0).all()
        and 0 <= rows.source_R.min() <= rows.source_R.max() < rows.rows_read
    )
