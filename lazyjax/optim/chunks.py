"""How a slab is cut into the pieces that update threads take, and where each keeps its state."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from lazyjax.optim.hybrid8bit import eight_bit_blocks
from lazyjax.optim.native.library import CHUNK_DTYPE
from lazyjax.specs import BLOCK_ELEMENTS, SlabLayout

#: Elements per chunk, whole blocks. Enough to hide the cost of taking one, few enough to balance
#: threads; the pure path's temporaries for one chunk stay in a core's L2 cache.
CHUNK_ELEMENTS = 64 * BLOCK_ELEMENTS


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkTable:
    """A slab's chunks.

    Attributes:
        chunks: records of `CHUNK_DTYPE`, read-only. Coded parts of segments follow one another in the
            code arrays, the other parts in the fp32 arrays. The tail of the slab behind the last
            segment is in no chunk: it is zero and stays zero.
        coded_elements: length of the code arrays, whole blocks.
        fp32_elements: length of the fp32 arrays, whole blocks.
    """

    chunks: np.ndarray
    coded_elements: int
    fp32_elements: int


@functools.lru_cache(maxsize=1024)
def coded_chunks(layout: SlabLayout, min_8bit_size: int, eight_bit_fraction: float) -> ChunkTable:
    """Chunks for 8-bit state; see `lazyjax.optim.hybrid8bit.eight_bit_blocks` for what is coded."""
    records: list[tuple[int, int, int, int, int]] = []
    filled = {True: 0, False: 0}
    for segment in layout.segments:
        padded = -(-segment.elements // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        blocks = eight_bit_blocks(segment.elements, BLOCK_ELEMENTS, min_8bit_size, eight_bit_fraction)
        border = segment.offset + blocks * BLOCK_ELEMENTS
        parts = ((segment.offset, border, True), (border, segment.offset + padded, False))
        for begin, end, coded in parts:
            records += _cut(begin, end, filled[coded], segment.decay, coded)
            filled[coded] += end - begin
    return _table(records, filled[True], filled[False])


@functools.lru_cache(maxsize=1024)
def fp32_chunks(layout: SlabLayout) -> ChunkTable:
    """Chunks for state that has the slab's own positions."""
    records: list[tuple[int, int, int, int, int]] = []
    for segment in layout.segments:
        padded = -(-segment.elements // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        end = segment.offset + padded
        records += _cut(segment.offset, end, segment.offset, segment.decay, False)
    return _table(records, 0, layout.length)


def _cut(
    begin: int, end: int, state_offset: int, decay: bool, coded: bool
) -> list[tuple[int, int, int, int, int]]:
    return [
        (at, min(CHUNK_ELEMENTS, end - at), state_offset + at - begin, int(decay), int(coded))
        for at in range(begin, end, CHUNK_ELEMENTS)
    ]


def _table(records: list[tuple[int, int, int, int, int]], coded: int, fp32: int) -> ChunkTable:
    chunks = np.array(records, dtype=CHUNK_DTYPE)
    chunks.setflags(write=False)
    return ChunkTable(chunks, coded, fp32)
