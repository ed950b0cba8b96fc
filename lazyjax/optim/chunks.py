"""How a slab is cut into the chunks that update threads take, and where each keeps its state."""

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
    parts: list[np.ndarray] = []
    filled = {True: 0, False: 0}
    for segment in layout.segments:
        padded = -(-segment.elements // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        # Decided for the tensor, also where the slab holds a part of it.
        blocks = eight_bit_blocks(
            segment.tensor_elements, BLOCK_ELEMENTS, min_8bit_size, eight_bit_fraction
        )
        coded_here = blocks * BLOCK_ELEMENTS - segment.first
        border = segment.offset + min(max(coded_here, 0), padded)
        for begin, end, coded in (
            (segment.offset, border, True),
            (border, segment.offset + padded, False),
        ):
            parts.append(_cut(begin, end, filled[coded], segment.decay, coded))
            filled[coded] += end - begin
    return _table(parts, filled[True], filled[False])


@functools.lru_cache(maxsize=1024)
def fp32_chunks(layout: SlabLayout) -> ChunkTable:
    """Chunks for state that has the slab's own positions."""
    parts: list[np.ndarray] = []
    for segment in layout.segments:
        padded = -(-segment.elements // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        end = segment.offset + padded
        parts.append(_cut(segment.offset, end, segment.offset, segment.decay, False))
    return _table(parts, 0, layout.length)


def _cut(begin: int, end: int, state_offset: int, decay: bool, coded: bool) -> np.ndarray:
    first = np.arange(begin, end, CHUNK_ELEMENTS)
    chunks = np.empty(len(first), CHUNK_DTYPE)
    chunks["begin"] = first
    chunks["length"] = np.minimum(CHUNK_ELEMENTS, end - first)
    chunks["state_offset"] = state_offset + first - begin
    chunks["decay"] = decay
    chunks["eight_bit"] = coded
    return chunks


def _table(parts: list[np.ndarray], coded: int, fp32: int) -> ChunkTable:
    chunks = np.concatenate([np.empty(0, CHUNK_DTYPE), *parts], dtype=CHUNK_DTYPE)
    chunks.setflags(write=False)
    return ChunkTable(chunks, coded, fp32)
