"""Ways of a slab from host memory to the device, and which of them is used.

An ordinary copy of pageable memory goes through a staging buffer that one thread of XLA fills. A GPU reads
faster from memory that is pinned: either the slabs themselves, mapped once (`Mapped`), or pinned buffers that
several threads of ours fill (`Ring`). Which way is fastest depends on the machine, so it is measured when a
run begins.

All give equal device arrays. None changes a slab, and a slab may change only when its copy has arrived.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from lazyjax.execution.shards import local_parts, put_parts, read_part, share_of
from lazyjax.specs import Share

#: Copies of one shape under way; a third waits for the first.
_SLOTS = 2
#: Bytes that a thread copies at a time.
_CHUNK_BYTES = 2**24
_REPEATS = 3


class PathError(RuntimeError):
    """A way that this device or this host does not have."""


@runtime_checkable
class SlabPath(Protocol):
    """One way."""

    def send(self, halves: Sequence[np.ndarray]) -> Sequence[Array]:
        """Starts the copies of a slab's halves, or of what is held of them, in the device's sharding."""
        ...

    def close(self) -> None:
        """Gives back what was mapped or allocated."""
        ...


class Pageable:
    """JAX's own copy."""

    def __init__(self, device: NamedSharding) -> None:
        self._device = device

    def send(self, halves: Sequence[np.ndarray]) -> Sequence[Array]:
        """Starts the copies."""
        return put_parts(halves, self._device)

    def close(self) -> None:
        """Holds nothing."""


class Mapped:
    """JAX's own copy out of slabs that the driver has pinned where they are; each at its first use."""

    def __init__(self, device: NamedSharding) -> None:
        """Raises `PathError` where the backend cannot map memory."""
        self._device = device
        self._client: Any = device.mesh.devices.flat[0].client
        self._mapped: dict[int, int] = {}
        try:
            self._map = self._client.dma_map
        except AttributeError as error:
            raise PathError("this backend maps no memory") from error

    def send(self, halves: Sequence[np.ndarray]) -> Sequence[Array]:
        """Starts the copies.

        Raises:
            PathError: the driver refuses to pin a slab.
        """
        for half in halves:
            address = half.ctypes.data
            if address not in self._mapped:
                try:
                    self._map(address, half.nbytes)
                except Exception as error:  # jaxlib raises plain RuntimeErrors of its own making
                    raise PathError(f"{half.nbytes} bytes cannot be pinned: {error}") from error
                self._mapped[address] = half.nbytes
        return put_parts(halves, self._device)

    def close(self) -> None:
        """Unmaps all slabs."""
        while self._mapped:
            address, _ = self._mapped.popitem()
            self._client.dma_unmap(address)


class Ring:
    """Copies through pinned buffers, which several threads fill chunk by chunk.

    Takes twice the bytes of every slab's shape in pinned memory.
    """

    def __init__(self, device: NamedSharding, *, threads: int = 8) -> None:
        self._device = device
        self._share = share_of(device.mesh)
        self._host = device.with_memory_kind("pinned_host")
        self._threads = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="staging")
        self._slots: dict[tuple[int, np.dtype[Any]], list[Array]] = {}
        self._leaving: dict[int, Array] = {}

    def send(self, halves: Sequence[np.ndarray]) -> Sequence[Array]:
        """Fills a buffer for each half, and starts their copies."""
        filled = [self._filled(half) for half in halves]
        sent = [jax.device_put(buffer, self._device, may_alias=False) for buffer in filled]
        for buffer, array in zip(filled, sent, strict=True):
            self._leaving[id(buffer)] = array
        return sent

    def _filled(self, half: np.ndarray) -> Array:
        """A pinned buffer that holds `half`; waits for the copy that last left it."""
        slots = self._slots.setdefault((half.size, half.dtype), [])
        if len(slots) < _SLOTS:
            (buffer,) = jax.block_until_ready(put_parts([np.zeros(half.size, half.dtype)], self._host))
        else:
            buffer = slots.pop(0)
            jax.block_until_ready(self._leaving.pop(id(buffer)))
        slots.append(buffer)
        copies = []
        for place, piece in local_parts(buffer, self._share):
            target, source = _bytes_of(piece), half[place].view(np.uint8)
            for start in range(0, source.size, _CHUNK_BYTES):
                chunk = slice(start, start + _CHUNK_BYTES)
                copies.append(self._threads.submit(np.copyto, target[chunk], source[chunk]))
        for copy in copies:
            copy.result()
        return buffer

    def close(self) -> None:
        """Waits for what is under way, and lets go of all buffers."""
        jax.block_until_ready(list(self._leaving.values()))
        self._threads.shutdown()
        self._leaving.clear()
        self._slots.clear()


def _bytes_of(array: Array) -> np.ndarray:
    """The memory of a pinned array, to be written to; nothing else reads this array."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memory, np.uint8)


#: By the names that configurations and records use.
PATHS: Mapping[str, Callable[[NamedSharding], SlabPath]] = {
    "pageable": Pageable,
    "mapped": Mapped,
    "ring": Ring,
}


@dataclasses.dataclass(frozen=True)
class PathChoice:
    """The way in use.

    Attributes:
        name: a key of `PATHS`.
        reason: one sentence for the records.
        bytes_per_second: of the ways that were tried, the time in which the walk is held up included.
    """

    name: str
    reason: str
    bytes_per_second: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def open(self, device: NamedSharding) -> SlabPath:
        """The way itself."""
        return PATHS[self.name](device)


def choose_path(device: NamedSharding, *, platform: str, sample_bytes: int = 2**28) -> PathChoice:
    """The fastest way on this machine; on a CPU, whose device memory is the host's, there is one.

    Args:
        platform: of the device, as JAX names it.
        sample_bytes: copied to measure.
    """
    if platform == "cpu":
        return PathChoice("pageable", "a cpu's device memory is the host's")
    return fastest_path(device, PATHS, sample_bytes)


def fastest_path(
    device: NamedSharding, candidates: Mapping[str, Callable[[NamedSharding], SlabPath]], sample_bytes: int
) -> PathChoice:
    """The fastest of the candidates that deliver what was sent; the others are named with their reasons.

    Raises:
        PathError: none does.
    """
    # As slabs are: whole pages, the same each time.
    sample = np.zeros(sample_bytes + 4096, np.uint8)
    start = -sample.ctypes.data % 4096
    slab = sample[start : start + sample_bytes].view(np.uint16)
    slab[:] = np.arange(slab.size, dtype=np.uint16)
    rates, refused = {}, []
    for name, make in candidates.items():
        try:
            rates[name] = sample_bytes / _seconds(make(device), slab, share_of(device.mesh))
        except Exception as error:  # whatever a driver says to it, there are other ways
            refused.append(f"{name} failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
    if not rates:
        raise PathError(f"no way from host to device: {'; '.join(refused)}")
    best = max(rates, key=lambda name: rates[name])
    return PathChoice(best, "; ".join([f"the fastest of {', '.join(rates)}", *refused]), rates)


def _seconds(path: SlabPath, slab: np.ndarray, share: Share) -> float:
    """The shortest of a few copies.

    Raises:
        PathError: what arrived is not what was sent.
    """
    try:
        (arrived,) = jax.block_until_ready(path.send([slab]))
        if not np.array_equal(read_part(arrived, share), slab):
            raise PathError("other bytes arrived than were sent")
        del arrived
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(path.send([slab]))
            times.append(time.perf_counter() - start)
        return min(times)
    finally:
        path.close()
