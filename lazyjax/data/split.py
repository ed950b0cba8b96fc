"""Which rows train and which evaluate, from a seed.

This module knows nothing about tokens or batches.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Int64

from lazyjax.data.order import permutation
from lazyjax.data.tokens import TokenizedRows


def split_counts(rows: int, train_fraction: float) -> tuple[int, int]:
    """Rows that train and rows that evaluate.

    The evaluation takes ceil((1 - train_fraction) * rows), computed in float64 as scikit-learn and `datasets`
    do: 395,000 rows at 0.7 give 276,499 and 118,501, the counts of the paper.

    Raises ValueError for a fraction outside (0, 1], or one that leaves no row to train on.
    """
    if not 0 < train_fraction <= 1:
        raise ValueError(f"train_fraction: {train_fraction}; allowed: above 0, up to 1")
    evaluate = math.ceil((1 - train_fraction) * rows)
    if evaluate >= rows:
        raise ValueError(f"train_fraction: {train_fraction} of {rows} rows leaves none to train on")
    return rows - evaluate, evaluate


def split_rows(
    rows: TokenizedRows, *, train_fraction: float, seed: int
) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " evaluate"]]:
    """Indices of the rows to train on and to evaluate on, each increasing.

    The rows of the source are split, before any was dropped for its length: which side a row is on depends
    on the seed, its number and the number of rows only.
    """
    train, _ = split_counts(rows.rows_read, train_fraction)
    trains_R = np.zeros(rows.rows_read, np.bool_)
    trains_R[permutation(rows.rows_read, seed)[:train]] = True
    kept_R = trains_R[rows.source_R]
    return np.flatnonzero(kept_R).astype(np.int64), np.flatnonzero(~kept_R).astype(np.int64)


def sample_rows(indices_R: Int64[np.ndarray, " R"], count: int, *, seed: int) -> Int64[np.ndarray, " sample"]:
    """At most `count` of the given indices, drawn by seed, in their given order."""
    if count < 1:
        raise ValueError(f"count: {count}; at least 1 row must be drawn")
    return indices_R[np.sort(permutation(len(indices_R), seed)[:count])]
