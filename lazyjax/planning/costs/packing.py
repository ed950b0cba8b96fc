"""How long the segments of packed rows are, and how much of their attention is therefore computed.

Attention in a loop skips the pairs of blocks in which no row of a call has a common segment. How many it
visits follows from a sample of packed rows, by the function that attention itself decides with.

Axes: B rows, T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from lazyjax.models.attention import layout_of, visited_pairs
from lazyjax.planning.costs.trace import Visits

#: Rows of a packing that is described by the length of a segment: their segments begin at different places.
_UNIFORM_ROWS = 64
#: Multiples of it, modulo 1, lie apart for any number of neighbours.
_GOLDEN = (5**0.5 - 1) / 2


@dataclasses.dataclass(frozen=True)
class Packing:
    """A sample of the packed rows that a run meets.

    Attributes:
        batches: per batch and row the tokens of each segment, in order. What they leave of a row is padding.
    """

    batches: tuple[tuple[tuple[int, ...], ...], ...]

    def visits(self, sequence_length: int, microbatch_rows: int, devices: int = 1) -> Visits:
        """Pairs of blocks that a call visits in the mean, rounded, and all pairs.

        A call has the rows of one microbatch on one device.
        """
        layout = layout_of(sequence_length)
        counts = [
            visited_pairs(part_BT, layout)
            for rows_BT in self._microbatches(sequence_length, microbatch_rows)
            for part_BT in np.split(rows_BT, devices)
        ]
        return Visits(round(sum(counts) / len(counts)), layout.pair_count)

    def representative(
        self, sequence_length: int, microbatch_rows: int, devices: int = 1
    ) -> Int32[np.ndarray, "B T"]:
        """Segment ids of the microbatch in the sample whose calls visit about as many pairs as the mean."""
        layout = layout_of(sequence_length)
        mean, _ = self.visits(sequence_length, microbatch_rows, devices)

        def off(rows_BT: Int32[np.ndarray, "B T"]) -> int:
            parts = np.split(rows_BT, devices)
            return abs(sum(visited_pairs(part_BT, layout) for part_BT in parts) - devices * mean)

        return min(self._microbatches(sequence_length, microbatch_rows), key=off)

    def _microbatches(
        self, sequence_length: int, microbatch_rows: int
    ) -> Iterator[Int32[np.ndarray, "B T"]]:
        """Segment ids of the microbatches of every batch; rows of padding fill the last one of a batch."""
        for batch in self.batches:
            for first in range(0, len(batch), microbatch_rows):
                ids_BT = np.zeros((microbatch_rows, sequence_length), np.int32)
                for row, lengths in enumerate(batch[first : first + microbatch_rows]):
                    ids_BT[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
                yield ids_BT


def packing_of(batches: Sequence[Sequence[Sequence[int]]]) -> Packing:
    """The packing of rows whose segments have these lengths, by batch and row."""
    return Packing(tuple(tuple(tuple(map(int, row)) for row in batch) for batch in batches))


@functools.cache
def uniform_packing(segment_tokens: int, batch_rows: int, sequence_length: int) -> Packing:
    """Rows full of segments of `segment_tokens`; the first of a row is cut, of every row elsewhere.

    The ends of real segments lie anywhere in a block: were all rows alike, a call of many rows would visit
    too few pairs.
    """
    count = -(-_UNIFORM_ROWS // batch_rows) * batch_rows
    rows = [
        _full_row(segment_tokens, int(index * _GOLDEN % 1 * segment_tokens), sequence_length)
        for index in range(count)
    ]
    return packing_of([rows[first : first + batch_rows] for first in range(0, count, batch_rows)])


def _full_row(segment_tokens: int, first_tokens: int, sequence_length: int) -> list[int]:
    """Lengths that fill a row: `first_tokens`, whole segments, and what is left."""
    ends = [*range(first_tokens or segment_tokens, sequence_length, segment_tokens), sequence_length]
    return np.diff([0, *ends]).tolist()


def positions_of(segment_ids_BT: Int32[np.ndarray, "B T"]) -> Int32[np.ndarray, "B T"]:
    """Positions of tokens inside their segments, from 0."""
    tokens_T = np.arange(segment_ids_BT.shape[1], dtype=np.int32)
    begins_BT = np.diff(segment_ids_BT, axis=1, prepend=-1) != 0
    return tokens_T - np.maximum.accumulate(np.where(begins_BT, tokens_T, 0), axis=1)
