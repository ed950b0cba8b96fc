"""Orders that depend on a seed only.

They come from a counter-based hash (splitmix64) and a stable sort, so they are the same on every machine
and with every NumPy version.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64, UInt64

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def _mix(value_R: UInt64[np.ndarray, " R"]) -> UInt64[np.ndarray, " R"]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    value_R = (value_R ^ (value_R >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value_R = (value_R ^ (value_R >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value_R ^ (value_R >> np.uint64(31))


def permutation(count: int, *key: int) -> Int64[np.ndarray, " R"]:
    """The numbers 0 to count - 1 in an order that depends on `key` only."""
    state_1 = np.zeros(1, np.uint64)
    for part in key:
        state_1 = _mix(state_1 + np.uint64(part & _WORD) + np.uint64(_GOLDEN))
    counter_R = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return np.argsort(_mix(state_1 + counter_R), kind="stable").astype(np.int64)
