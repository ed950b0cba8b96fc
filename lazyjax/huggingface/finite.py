"""Which tensors of a model hold values that are not finite.

A single NaN in a weight makes every loss NaN, and a loss does not say where it came from.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Shaped

from lazyjax.huggingface.key_maps import key_map
from lazyjax.huggingface.parameters import ReadableStore
from lazyjax.models.template import ModelTemplate

#: The bits of the exponent, all set in infinities and NaN.
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
_CHUNK_ELEMENTS = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor, by its Hugging Face key, and how many of its values are NaN and infinite."""

    key: str
    nan: int
    infinite: int

    def __str__(self) -> str:
        counts = {"NaN": self.nan, "infinite": self.infinite}
        return f"{self.key} ({', '.join(f'{count:,} {word}' for word, count in counts.items() if count)})"


def count_nonfinite(values: Shaped[np.ndarray, "..."]) -> tuple[int, int] | None:
    """How many values are NaN and how many infinite; None when all are finite.

    Args:
        values: bfloat16, float16 or float32. Their bits are looked at, some at a time: ml_dtypes has no
            vectorised test.
    """
    bits_N = values.reshape(-1).view(f"u{values.dtype.itemsize}")
    exponent = _EXPONENT[values.dtype.name]
    infinite = odd = 0
    for start in range(0, bits_N.size, _CHUNK_ELEMENTS):
        chunk_N = bits_N[start : start + _CHUNK_ELEMENTS]
        odd_M = chunk_N[(chunk_N & exponent) == exponent]
        if odd_M.size:
            odd += odd_M.size
            infinite += int((odd_M << 1 == exponent << 1).sum())
    return (odd - infinite, infinite) if odd else None


def nonfinite_tensors(template: ModelTemplate, store: ReadableStore) -> tuple[NonFinite, ...]:
    """Every parameter of the store that holds a NaN or an infinity.

    Reads all master weights once, some rows at a time.
    """
    found = []
    for entry in key_map(template):
        chunks = store.layers[entry.layer_index].master_chunks(entry.parameter, lambda array: array)
        counts = [count for count in map(count_nonfinite, chunks) if count is not None]
        if counts:
            nan, infinite = map(sum, zip(*counts, strict=True))
            found.append(NonFinite(entry.key, nan, infinite))
    return tuple(found)
