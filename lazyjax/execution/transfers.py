"""Copies between host and device, and their accounting.

Parameters cross as slabs, activations as arrays in `pinned_host` memory, gradients through
`pinned_host` into their host slab. Every copy is explicit, so a transfer guard finds the others.
On a CPU backend the same code runs; a copy may then be an alias, and bytes are counted all the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from lazyjax.batch import Batch
from lazyjax.execution.kernels import DeviceBatch, DeviceSlab
from lazyjax.execution.shards import local_parts, put_parts, put_replicated, read_part, share_of
from lazyjax.execution.slab_paths import Pageable, SlabPath
from lazyjax.storage.host import LayerOnDrive, LayerSlabs


class Transfers:
    """Copies in the layouts of one sharding (first axis over the mesh).

    Args:
        path: of slabs to the device; None: JAX's own copy. Who made it closes it.
    """

    def __init__(
        self, sharded: NamedSharding, compute_dtype: str, *, path: SlabPath | None = None
    ) -> None:
        self._device, self._share = sharded, share_of(sharded.mesh)
        self._plain = Pageable(sharded)
        self._path = self._plain if path is None else path
        self._host = sharded.with_memory_kind("pinned_host")
        self._replicated = NamedSharding(sharded.mesh, PartitionSpec())
        self._both_halves = compute_dtype == "float32"
        self._shared = not sharded.is_fully_addressable
        self._device_is_host = sharded.mesh.devices.flat[0].platform == "cpu"

    def slab_to_device(self, slabs: LayerSlabs | LayerOnDrive, *, lasting: bool = True) -> DeviceSlab:
        """Starts the copy of a layer's parameters.

        The slabs must not change until the last kernel that uses the result has finished: on a CPU
        backend JAX makes a page-aligned slab itself the device array, also where `may_alias` is
        off. Updates keep to this, as they follow the norm, and the norm follows every kernel.

        Args:
            lasting: where not, the slabs must not change until the result is there.
        """
        halves = [slabs.hi, slabs.lo] if self._both_halves else [slabs.hi.view(ml_dtypes.bfloat16)]
        if lasting:
            return tuple(self._path.send(halves))
        # Memory that comes and goes is not worth pinning.
        if self._device_is_host:
            halves = [half.copy() for half in halves]
        return tuple(self._plain.send(halves))

    def batch_to_device(self, batch: Batch) -> DeviceBatch:
        """Starts the copy of one microbatch, which every process has whole, to its rows' devices."""
        own = batch.slice_rows(*self._share.rows(batch.rows).indices(batch.rows)[:2])
        arrays = (
            own.tokens_BT,
            own.targets_BT,
            own.loss_mask_BT,
            own.segment_ids_BT,
            own.positions_BT,
        )
        contiguous = [np.ascontiguousarray(array) for array in arrays]
        return DeviceBatch(*put_parts(contiguous, self._device))

    def scalar_to_device(self, value: float) -> Array:
        """A float32 scalar on every device."""
        return put_replicated(np.float32(value), self._replicated)

    def to_host(self, arrays: Sequence[Array]) -> list[Array]:
        """Starts the copies of device arrays into pinned host memory."""
        return jax.device_put(list(arrays), self._host)

    def to_device(self, arrays: Sequence[Array]) -> list[Array]:
        """Starts the copies of pinned host arrays to the device."""
        return jax.device_put(list(arrays), self._device)

    def to_bytes(self, array: Array) -> np.ndarray:
        """The bytes of a pinned host array, or this process's of them; waits for the copy that fills it."""
        return np.ascontiguousarray(read_part(array, self._share)).reshape(-1).view(np.uint8)

    def describe(self, array: Array) -> jax.ShapeDtypeStruct:
        """Shape and dtype of an array, without its contents."""
        return jax.ShapeDtypeStruct(array.shape, array.dtype)

    def empty_bytes(self, like: jax.ShapeDtypeStruct) -> np.ndarray:
        """Host memory for all bytes of such an array, or for this process's of them."""
        return np.empty(math.prod(self._own_shape(like)) * like.dtype.itemsize, np.uint8)

    def from_bytes(self, raw: np.ndarray, like: jax.ShapeDtypeStruct) -> Array:
        """A pinned host array from bytes that were read back from NVMe."""
        own = raw.view(like.dtype).reshape(self._own_shape(like))
        (array,) = put_parts([own], self._host) if self._shared else (jax.device_put(own, self._host),)
        return array

    def _own_shape(self, like: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        own = self._share.elements(like.shape[0])
        return (own.stop - own.start, *like.shape[1:])

    def into_slab(self, delivered: Array, gradient_N: np.ndarray) -> None:
        """Copies a gradient from pinned host memory, where it has arrived, into its slab."""
        for place, piece in local_parts(delivered, self._share):
            gradient_N[place] = np.asarray(piece)

    def read_scalars(self, values: Any) -> list[float]:
        """The values of scalar arrays; waits for the kernels that compute them."""
        return [float(value) for value in jax.device_get(values)]

    def device_bytes(self, tree: Any) -> int:
        """Bytes on one device of all arrays in `tree` (the largest shard of each)."""
        if isinstance(tree, jax.Array):
            return _shard_bytes(tree.shape, tree.dtype, tree.sharding)
        return sum(_shard_bytes(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(tree))


@functools.lru_cache(maxsize=4096)
def _shard_bytes(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> int:
    """A step asks for the same few hundred shapes again and again."""
    return math.prod(sharding.shard_shape(shape)) * dtype.itemsize
