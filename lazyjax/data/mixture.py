"""Several tokenized sources as one, and how often an epoch meets each of their rows.

A row of weight 2 is met twice in every epoch. Of rows with weight 0.5 every other one is met, and by the
next epoch the others: over many epochs all are met equally often.

This module knows nothing about batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

from lazyjax.data.order import permutation
from lazyjax.data.tokens import TokenizedRows

#: Told apart in the hash that orders things, so that no two orders repeat each other.
_SHARE_KEY = 3


def join(parts: Sequence[TokenizedRows]) -> TokenizedRows:
    """All rows, one source after the other; the rows of the sources are numbered through."""
    if len(parts) == 1:
        return parts[0]
    reads = np.cumsum([0, *(part.rows_read for part in parts)])
    tokens = np.cumsum([0, *(len(part.tokens_N) for part in parts)])
    starts = [part.starts_S[:-1] + first for part, first in zip(parts, tokens[:-1], strict=True)]
    sources = [part.source_R + first for part, first in zip(parts, reads[:-1], strict=True)]
    return TokenizedRows(
        tokens_N=np.concatenate([part.tokens_N for part in parts]),
        response_N=np.concatenate([part.response_N for part in parts]),
        starts_S=np.concatenate([*starts, tokens[-1:]]).astype(np.int64),
        source_R=np.concatenate(sources).astype(np.int64),
        rows_read=int(reads[-1]),
        truncated=sum(part.truncated for part in parts),
        dropped=sum(part.dropped for part in parts),
        bad=sum(part.bad for part in parts),
        reasons=tuple(reason for part in parts for reason in part.reasons),
        unused=tuple(sorted({column for part in parts for column in part.unused})),
        drops=tuple(reason for part in parts for reason in part.drops),
        full_lengths_K=np.concatenate([part.full_lengths_K for part in parts]),
    )


def row_weights(parts: Sequence[TokenizedRows], weights: Sequence[float]) -> Float64[np.ndarray, " R"]:
    """The weight of every row of `join(parts)`."""
    counts = [len(part) for part in parts]
    return np.repeat(np.asarray(weights, np.float64), counts)


def epoch_rows(
    indices_R: Int64[np.ndarray, " R"], weights_R: Float64[np.ndarray, " R"], *, seed: int, epoch: int
) -> Int64[np.ndarray, " E"]:
    """The rows of one epoch: each as often as its weight says, in the order of `indices_R`.

    Of R rows with fraction f after the point, round(f R) are met once more; every epoch goes on where the
    one before stopped, in an order that the seed decides.
    """
    whole_R = np.floor(weights_R).astype(np.int64)
    fraction_R = weights_R - whole_R
    for fraction in np.unique(fraction_R[fraction_R > 0]):
        members_M = np.flatnonzero(fraction_R == fraction)
        count = round(float(fraction) * len(members_M))
        order_M = permutation(len(members_M), seed, _SHARE_KEY)
        turn = (epoch * count + np.arange(count)) % len(members_M)
        whole_R[members_M[order_M[turn]]] += 1
    return np.repeat(indices_R, whole_R)
