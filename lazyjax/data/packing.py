"""Which rows share a sequence, and which sequences share a batch.

Everything is planned from row lengths before a single batch is made, so an epoch can be repeated, or
entered in the middle, exactly. An epoch's rows are taken in windows: inside a window they are sorted by
length (to pad little) or packed, and its sequences are shuffled again, so that a window's long rows do not
come in a row.

This module knows nothing about tokens.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from lazyjax.data.order import permutation

#: Rows that follow one another in a sequence, by index.
Sequence = tuple[int, ...]
#: Told apart in the hash that orders things, so that no two orders repeat each other.
_ROWS_KEY, _WINDOW_KEY = 1, 2
#: Most that `sample` gives, where one batch is no more.
_SAMPLED_SEQUENCES, _SAMPLED_TOKENS = 512, 2**22


class BatchPlan(NamedTuple):
    """One batch before its arrays exist: its sequences, all padded to `length` tokens."""

    length: int
    sequences: tuple[Sequence, ...]


def bucket_lengths(sequence_length: int, *, count: int = 4, multiple: int = 32) -> tuple[int, ...]:
    """At most `count` sequence lengths, evenly spaced up to `sequence_length` itself.

    All but the last are rounded up to `multiple`. Few lengths mean few compiled shapes.
    """
    if count < 1 or multiple < 1:
        raise ValueError(f"bucket count {count} and multiple {multiple} must be at least 1")
    steps = (-(-sequence_length * step // count) for step in range(1, count))
    rounded = {min(-(-step // multiple) * multiple, sequence_length) for step in steps}
    return (*sorted(rounded - {sequence_length}), sequence_length)


def pack(lengths_R: Int64[np.ndarray, " R"], capacity: int) -> list[Sequence]:
    """Packs rows into sequences of at most `capacity` tokens: best fit, longest rows first.

    Every row lands in exactly one sequence, whole. Deterministic: equal lengths keep their order, and
    equally full sequences are filled in the order in which they were opened.

    Raises ValueError for a row longer than `capacity`.
    """
    if len(lengths_R) and lengths_R.max() > capacity:
        raise ValueError(f"a row of {lengths_R.max()} tokens does not fit into sequences of {capacity}")
    opened: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (tokens left, sequence), sorted
    for row in np.argsort(-lengths_R, kind="stable").tolist():
        length = int(lengths_R[row])
        at = bisect.bisect_left(spaces, (length, -1))
        if at < len(spaces):
            space, sequence = spaces.pop(at)
        else:
            space, sequence = capacity, len(opened)
            opened.append([])
        opened[sequence].append(row)
        bisect.insort(spaces, (space - length, sequence))
    return [tuple(rows) for rows in opened]


def order_rows(count: int, *, seed: int, epoch: int, shuffle: bool) -> Int64[np.ndarray, " R"]:
    """The order in which an epoch meets its rows."""
    return permutation(count, seed, epoch, _ROWS_KEY) if shuffle else np.arange(count, dtype=np.int64)


def plan_padded(
    order_R: Int64[np.ndarray, " R"], *, batch_rows: int, sequence_length: int
) -> list[BatchPlan]:
    """Batches of rows in order, every row padded to `sequence_length`; the last may be smaller."""
    return _batches([(int(row),) for row in order_R], batch_rows, sequence_length)


def plan_bucketed(
    order_R: Int64[np.ndarray, " R"],
    lengths_A: Int64[np.ndarray, " A"],
    *,
    batch_rows: int,
    buckets: tuple[int, ...],
    window_batches: int,
    key: tuple[int, ...] | None,
) -> list[BatchPlan]:
    """Batches of rows of similar length, each padded to the smallest bucket that holds its longest row.

    `order_R` lists rows, `lengths_A` has the lengths of all rows. `key` shuffles the batches of a window;
    None leaves them sorted. The last batch of the last window may be smaller.
    """
    plans = []
    for number, window_R in enumerate(_windows(order_R, window_batches * batch_rows)):
        sorted_R = window_R[np.argsort(lengths_A[window_R], kind="stable")]
        batches = []
        for start in range(0, len(sorted_R), batch_rows):
            rows_B = sorted_R[start : start + batch_rows]
            longest = int(lengths_A[rows_B].max())
            length = buckets[bisect.bisect_left(buckets, longest)]
            batches.append(BatchPlan(length, tuple((int(row),) for row in rows_B)))
        plans.extend(_shuffled(batches, key, number))
    return plans


def plan_packed(
    order_R: Int64[np.ndarray, " R"],
    lengths_A: Int64[np.ndarray, " A"],
    *,
    batch_rows: int,
    sequence_length: int,
    window_batches: int,
    key: tuple[int, ...] | None,
) -> list[BatchPlan]:
    """Batches of sequences packed full of rows; the last batch may be smaller.

    `order_R` lists rows, `lengths_A` has the lengths of all rows. A window holds the rows of about
    `window_batches` batches. `key` shuffles the sequences of a window; None leaves them as packed.
    """
    mean = max(1.0, float(lengths_A[order_R].mean())) if len(order_R) else 1.0
    window_rows = max(1, round(window_batches * batch_rows * sequence_length / mean))
    sequences: list[Sequence] = []
    for number, window_R in enumerate(_windows(order_R, window_rows)):
        packed = pack(lengths_A[window_R], sequence_length)
        named = [tuple(int(row) for row in window_R[list(rows)]) for rows in packed]
        sequences.extend(_shuffled(named, key, number))
    return _batches(sequences, batch_rows, sequence_length)


def sample(batches: list[BatchPlan]) -> list[BatchPlan]:
    """Batches spread evenly over an epoch: one at least, beyond that what tells how the others are filled."""
    rows, tokens = len(batches[0].sequences), batches[0].length
    count = min(_SAMPLED_SEQUENCES, _SAMPLED_TOKENS // tokens) // rows
    count = min(len(batches), max(1, count))
    return [batches[number * len(batches) // count] for number in range(count)]


def _windows(order_R: Int64[np.ndarray, " R"], rows: int) -> list[Int64[np.ndarray, " _"]]:
    return [order_R[start : start + rows] for start in range(0, len(order_R), rows)]


def _shuffled[T](items: list[T], key: tuple[int, ...] | None, window: int) -> list[T]:
    if key is None:
        return items
    return [items[index] for index in permutation(len(items), *key, _WINDOW_KEY, window)]


def _batches(sequences: list[Sequence], batch_rows: int, length: int) -> list[BatchPlan]:
    starts = range(0, len(sequences), batch_rows)
    return [BatchPlan(length, tuple(sequences[start : start + batch_rows])) for start in starts]
