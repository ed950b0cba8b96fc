"""Host memory through which things pass on their way to and from a drive, used again and again."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lazyjax.storage.memory import NUMPY_DTYPES, aligned_zeros

#: Array name -> (shape, dtype name).
Described = Mapping[str, tuple[tuple[int, ...], str]]
Arrays = dict[str, np.ndarray]


class Lent(NamedTuple):
    """Arrays in memory of a pool; their contents are whatever was there before."""

    arrays: Arrays
    memory: tuple[np.ndarray, ...]


class BufferPool:
    """Page-aligned buffers, given out by size. May be used from several threads.

    No more bytes are kept than were ever in use at once: where another size is asked for, free buffers go,
    the one that was given back first before the others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []
        self._used_bytes = self._most_bytes = 0

    @property
    def most_bytes(self) -> int:
        """The most that was in use at once."""
        return self._most_bytes

    def lend(self, described: Described) -> Lent:
        """Arrays so described."""
        arrays, memory = {}, []
        for name, (shape, dtype) in described.items():
            raw = self._take(math.prod(shape) * NUMPY_DTYPES[dtype].itemsize)
            memory.append(raw)
            arrays[name] = raw.view(NUMPY_DTYPES[dtype]).reshape(shape)
        return Lent(arrays, tuple(memory))

    def give_back(self, lent: Lent) -> None:
        """Nobody uses these arrays any more."""
        with self._lock:
            self._free += lent.memory
            self._used_bytes -= sum(raw.size for raw in lent.memory)

    def clear(self) -> None:
        """Lets go of what is not in use."""
        with self._lock:
            self._free.clear()
            self._most_bytes = self._used_bytes

    def _take(self, size: int) -> np.ndarray:
        with self._lock:
            self._used_bytes += size
            self._most_bytes = max(self._most_bytes, self._used_bytes)
            for position, raw in enumerate(self._free):
                if raw.size == size:
                    return self._free.pop(position)
            while self._free and self._used_bytes + sum(raw.size for raw in self._free) > self._most_bytes:
                self._free.pop(0)
        return aligned_zeros(size, "uint8", purpose="buffers between host and NVMe")
