"""A whole data set as flat token arrays.

Rows are read, rendered and tokenized once, in chunks, and kept as three flat arrays (5 bytes a token):
400,000 rows of 250 tokens are 500 MB. With a cache folder the work is done once per data, tokenizer and
length limit.

This module knows nothing about batches.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
import zipfile
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Int32, Int64

from lazyjax.data import chat
from lazyjax.data.sources import Conversation, DataError, Source

#: What happens to a row of more tokens than a sequence holds.
TooLong = Literal["truncate", "drop", "error"]
_CHUNK_ROWS = 1000
_FORMAT = "1"


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizedRows:
    """R rows of together N tokens.

    Attributes:
        tokens_N: token ids of all rows, one after the other.
        response_N: True on the tokens that count towards the loss.
        starts_S: where each row starts, and N at the end (S = R + 1).
        source_R: which row of the source each is, from 0, increasing.
        rows_read: rows of the source.
        truncated: rows cut to the length limit.
        dropped: rows left out: over the limit, or with no response token inside it.
    """

    tokens_N: Int32[np.ndarray, " N"]
    response_N: Bool[np.ndarray, " N"]
    starts_S: Int64[np.ndarray, " S"]
    source_R: Int64[np.ndarray, " R"]
    rows_read: int
    truncated: int
    dropped: int

    def __len__(self) -> int:
        return len(self.source_R)

    @property
    def lengths_R(self) -> Int64[np.ndarray, " R"]:
        """Tokens of each row."""
        return np.diff(self.starts_S)

    def row(self, index: int) -> chat.Encoded:
        """One row's tokens and response mask, as views."""
        span = slice(int(self.starts_S[index]), int(self.starts_S[index + 1]))
        return chat.Encoded(self.tokens_N[span], self.response_N[span])

    def prompt_and_response(
        self, index: int
    ) -> tuple[Int32[np.ndarray, " prompt"], Int32[np.ndarray, " response"]]:
        """One row for generation: the tokens before its last response, and that response."""
        tokens_T, response_T = self.row(index)
        others = np.flatnonzero(~response_T[: np.flatnonzero(response_T)[-1] + 1])
        start = int(others[-1]) + 1 if len(others) else 0
        return tokens_T[:start], tokens_T[start:][response_T[start:]]

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
    cache_folder: pathlib.Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenizedRows:
    """Reads and tokenizes every row.

    Args:
        source: see `open_source`.
        tokenizer: see `load_tokenizer`.
        sequence_length: the most tokens a row may have.
        too_long: `truncate` keeps the first `sequence_length` tokens, `drop` leaves the row out, `error`
            refuses it. A row that keeps no response token teaches nothing and is always left out. Both are
            counted.
        cache_folder: where results are kept and looked up; None keeps nothing.
        progress: called with the number of rows read so far.

    Raises:
        DataError: a malformed, unusable or (with `error`) too long row, named; or no row is left.
    """
    if too_long not in get_args(TooLong):
        raise ValueError(f"too_long: {too_long!r}; allowed: {', '.join(get_args(TooLong))}")
    if sequence_length < 2:
        raise ValueError(
            f"sequence_length: {sequence_length}; a row needs a prompt token and a response token"
        )
    path = None
    if cache_folder is not None:
        tokenizer_part = chat.tokenizer_fingerprint(tokenizer)
        parts = (_FORMAT, source.fingerprint, tokenizer_part, str(sequence_length), too_long)
        path = cache_folder / f"tokens-{hashlib.blake2b('/'.join(parts).encode()).hexdigest()[:32]}.npz"
        cached = _load(path)
        if cached is not None:
            return cached
    rows = _tokenize(source, tokenizer, sequence_length, too_long, progress)
    if path is not None:
        _save(rows, path)
    return rows


def _tokenize(
    source: Source,
    tokenizer: chat.Tokenizer,
    sequence_length: int,
    too_long: TooLong,
    progress: Callable[[int], None] | None,
) -> TokenizedRows:
    tokens, responses = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)]
    lengths: list[int] = []
    numbers: list[int] = []
    rows_read = truncated = 0
    conversations = enumerate(source.conversations())
    while chunk := list(itertools.islice(conversations, _CHUNK_ROWS)):
        rendered = [_render(source, tokenizer, number, conversation) for number, conversation in chunk]
        kept = []
        for (number, _), one in zip(chunk, chat.encode(tokenizer, rendered), strict=True):
            over = len(one.tokens_T) > sequence_length
            if over and too_long == "error":
                raise DataError(
                    f"{source.name}, row {number + 1}: {len(one.tokens_T)} tokens, but a sequence holds "
                    f"{sequence_length}; shorten the row, raise sequence_length, or set too_long to "
                    f"truncate or drop"
                )
            # The first token has no predecessor to be predicted from.
            if (over and too_long == "drop") or not one.response_T[1:sequence_length].any():
                continue
            truncated += over
            kept.append(chat.Encoded(one.tokens_T[:sequence_length], one.response_T[:sequence_length]))
            numbers.append(number)
        rows_read += len(chunk)
        if kept:
            # One array per chunk: 400,000 small ones would cost more than their tokens.
            tokens.append(np.concatenate([one.tokens_T for one in kept]))
            responses.append(np.concatenate([one.response_T for one in kept]))
            lengths.extend(len(one.tokens_T) for one in kept)
        if progress is not None:
            progress(rows_read)
    if not numbers:
        raise DataError(
            f"{source.name}: none of {rows_read} rows keeps a response within {sequence_length} tokens"
        )
    return TokenizedRows(
        tokens_N=np.concatenate(tokens),
        response_N=np.concatenate(responses),
        starts_S=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        source_R=np.asarray(numbers, np.int64),
        rows_read=rows_read,
        truncated=truncated,
        dropped=rows_read - len(numbers),
    )


def _render(
    source: Source, tokenizer: chat.Tokenizer, number: int, conversation: Conversation
) -> chat.Rendered:
    try:
        return chat.render(tokenizer, conversation)
    except DataError as error:
        raise DataError(f"{source.name}, row {number + 1}: {error}") from error


def _save(rows: TokenizedRows, path: pathlib.Path) -> None:
    """Writes beside `path` and renames, so that a torn file is never found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        np.savez(file, **{field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)})
    temporary.replace(path)


def _load(path: pathlib.Path) -> TokenizedRows | None:
    """Rows kept earlier; None if there are none, or the file is damaged (it is then made again)."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return TokenizedRows(
                tokens_N=file["tokens_N"],
                response_N=file["response_N"],
                starts_S=file["starts_S"],
                source_R=file["source_R"],
                rows_read=int(file["rows_read"]),
                truncated=int(file["truncated"]),
                dropped=int(file["dropped"]),
            )
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
