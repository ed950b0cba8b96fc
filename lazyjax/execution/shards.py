"""Arrays that are split over all devices of a mesh, made of and read as what this process holds of them.

Where one process owns all devices this is an ordinary copy. One of several gives, and gets, the parts of its
own devices only: a part here is what a `lazyjax.specs.Share` cuts off along the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jaxtyping import Array

from lazyjax.specs import Share


def share_of(mesh: Mesh | AbstractMesh) -> Share:
    """The devices of a one-axis mesh that belong to this process.

    Raises:
        ValueError: it has none of them, or they do not follow one another.
    """
    assert isinstance(mesh, Mesh)
    own = [
        position
        for position, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    if not own or own != list(range(own[0], own[-1] + 1)):
        raise ValueError(f"devices {own} of a mesh of {mesh.size} belong to process {jax.process_index()}")
    return Share(own[0], own[-1] + 1, int(mesh.size))


def put_parts(parts: Sequence[np.ndarray], sharding: NamedSharding) -> list[Array]:
    """Starts the copies of arrays whose first axis is split over the mesh.

    Args:
        parts: of each array what belongs to this process's devices.
    """
    if sharding.is_fully_addressable:
        copies: list[Array] = jax.device_put(list(parts), sharding, may_alias=False)
        return copies
    devices = _own_devices(sharding)
    pieces, places = [], []
    for part in parts:
        each = part.shape[0] // len(devices)
        for number, device in enumerate(devices):
            pieces.append(part[number * each : (number + 1) * each])
            places.append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    arrays = jax.device_put(pieces, places, may_alias=False)
    made: list[Array] = []
    for number, part in enumerate(parts):
        own = arrays[number * len(devices) : (number + 1) * len(devices)]
        shape = (part.shape[0] // len(devices) * int(sharding.mesh.size), *part.shape[1:])
        made.append(jax.make_array_from_single_device_arrays(shape, sharding, own))
    return made


def put_replicated(value: np.ndarray | np.generic, sharding: NamedSharding) -> Array:
    """Starts the copies of the same value to every device; all processes give an equal one."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    devices = _own_devices(sharding)
    arrays = jax.device_put([value] * len(devices), devices)
    return jax.make_array_from_single_device_arrays(np.shape(value), sharding, arrays)


def local_parts(array: Array, share: Share) -> list[tuple[slice, Any]]:
    """The pieces of an array that are here, each with its place in what this process holds of it.

    The pieces are in order; of a piece on several devices there is one.
    """
    first = share.elements(array.shape[0]).start
    found: dict[int, tuple[slice, Any]] = {}
    for shard in array.addressable_shards:
        begin, end, _ = shard.index[0].indices(array.shape[0])
        found[begin] = (slice(begin - first, end - first), shard.data)
    return [found[begin] for begin in sorted(found)]


def read_part(array: Array, share: Share) -> np.ndarray:
    """What this process holds of an array that is split over its first axis; waits for it."""
    if array.is_fully_addressable:
        return np.asarray(jax.device_get(array))
    return np.concatenate([np.asarray(piece) for _, piece in local_parts(array, share)])


def _own_devices(sharding: NamedSharding) -> list[jax.Device]:
    return [d for d in sharding.mesh.devices.flat if d.process_index == jax.process_index()]
