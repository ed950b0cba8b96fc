"""What every optimizer that updates host slabs offers, and the checks at its border.

An implementation sees one layer at a time: the layer's slabs and its own state arrays. It knows
nothing of the device, the schedule or other layers; the only value that crosses layers, the clip
factor, arrives as an argument. All checks run before the first byte is written.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from lazyjax.config import SMALLEST_EPSILON
from lazyjax.specs import SlabLayout, TensorSpec, item_bytes, slab_layout
from lazyjax.storage.host import NUMPY_DTYPES, LayerSlabs, aligned_zeros

#: Name, in every state, of the array that carries the version tag.
VERSION = "version"
VERSION_BYTES = 64
ALIGNMENT_BYTES = 64

StateDescription = dict[str, tuple[tuple[int, ...], str]]
HostState = dict[str, np.ndarray]


class HostUpdateError(ValueError):
    """A slab, state array or scalar that a host update refuses; nothing was written."""


@runtime_checkable
class HostOptimizer(Protocol):
    """Updates one layer's slabs in place."""

    @property
    def name(self) -> str:
        """As accepted by `lazyjax.optim.make.make_host_optimizer`."""
        ...

    @property
    def master_bytes(self) -> int:
        """Bytes per parameter of the master weights that an update reads and writes."""
        ...

    @property
    def state_version(self) -> str:
        """Format of the state arrays; a state of another version is refused."""
        ...

    def describe_state(self, layout: SlabLayout) -> StateDescription:
        """Array name -> (shape, dtype name) of the state of one layer; allocates nothing.

        A layout may be of a part of a slab (`lazyjax.specs.slab_part`). Every array but the version is then a
        flat vector, and those of successive parts are, one after another, that of the whole slab.
        """
        ...

    def create_state(self, layout: SlabLayout) -> HostState:
        """The state before the first update: aligned, zero except for the version tag."""
        ...

    def update(
        self, slabs: LayerSlabs, state: HostState, *, learning_rate: float, count: int, scale: float
    ) -> None:
        """One step, in place on `slabs.hi`, `slabs.lo` and `state`.

        Args:
            slabs: the gradient is read only.
            learning_rate: finite.
            count: steps including this one, from 1.
            scale: finite factor on the gradient (the clip factor, or 1).

        Raises:
            HostUpdateError: before anything is written.

        Calls for different layers may run in different threads.
        """
        ...


#: Elements of the slab over which `touched_bytes` takes its mean.
_MANY_ELEMENTS = 2**20


def touched_bytes(optimizer: HostOptimizer, gradient_dtype: str) -> float:
    """Bytes per parameter that one update reads and writes: masters and state twice, the gradient once."""
    layout = slab_layout((TensorSpec("weights", (_MANY_ELEMENTS // 1024, 1024), "float32"),))
    state = sum(
        math.prod(shape) * item_bytes(dtype)
        for name, (shape, dtype) in optimizer.describe_state(layout).items()
        if name != VERSION
    )
    return 2 * (optimizer.master_bytes + state / _MANY_ELEMENTS) + item_bytes(gradient_dtype)


def version_tag(state_version: str) -> UInt8[np.ndarray, "64"]:
    """The version as ASCII bytes, padded with zeros."""
    encoded = state_version.encode("ascii")
    if len(encoded) > VERSION_BYTES:
        raise ValueError(f"state version {state_version!r} is longer than {VERSION_BYTES} bytes")
    return np.frombuffer(encoded.ljust(VERSION_BYTES, b"\0"), dtype=np.uint8)


def read_version(state: HostState) -> str:
    """The version that a state says it has."""
    return bytes(state[VERSION]).rstrip(b"\0").decode("ascii", errors="replace")


def create_described(description: StateDescription, state_version: str) -> HostState:
    """Allocates a described state: zeros, page-aligned, with its version tag."""
    state = {
        name: aligned_zeros(math.prod(shape), dtype, purpose=f"optimizer state {name}").reshape(shape)
        for name, (shape, dtype) in description.items()
    }
    state[VERSION][:] = version_tag(state_version)
    return state


def check_update(
    slabs: LayerSlabs,
    state: HostState,
    description: StateDescription,
    state_version: str,
    *,
    learning_rate: float,
    count: int,
    scale: float,
) -> None:
    """Refuses anything that an update could not work on; reads only.

    Raises:
        HostUpdateError: naming the array or scalar, what it is and what it has to be.
    """
    length = slabs.layout.length
    for name, value in (("learning_rate", learning_rate), ("scale", scale)):
        if not math.isfinite(value):
            raise HostUpdateError(f"{name} is {value}; it has to be finite")
    if count < 1:
        raise HostUpdateError(f"count is {count}; the first step has count 1")
    _check_array("hi", slabs.hi, (length,), ("uint16",), writable=True)
    _check_array("lo", slabs.lo, (length,), ("int16",), writable=True)
    _check_array("gradient", slabs.gradient, (length,), ("bfloat16", "float32"), writable=False)
    if missing := sorted(description.keys() ^ state.keys()):
        found = f", whose version is {read_version(state)!r}," if VERSION in state else ""
        raise HostUpdateError(
            f"the state{found} and version {state_version!r} differ in the arrays {', '.join(missing)}"
        )
    _check_array(VERSION, state[VERSION], (VERSION_BYTES,), ("uint8",), writable=False)
    if not np.array_equal(state[VERSION], version_tag(state_version)):
        raise HostUpdateError(
            f"the state has version {read_version(state)!r}, this optimizer writes {state_version!r}; "
            "restore it with the optimizer and options it was made with"
        )
    for name, (shape, dtype) in description.items():
        _check_array(name, state[name], shape, (dtype,), writable=True)


def _check_array(
    name: str, array: np.ndarray, shape: tuple[int, ...], dtypes: tuple[str, ...], *, writable: bool
) -> None:
    if array.dtype not in [NUMPY_DTYPES[dtype] for dtype in dtypes]:
        raise HostUpdateError(f"{name} has dtype {array.dtype}, expected {' or '.join(dtypes)}")
    if array.shape != shape:
        raise HostUpdateError(f"{name} has shape {array.shape}, expected {shape}")
    if not array.flags.c_contiguous:
        raise HostUpdateError(f"{name} is not contiguous")
    if array.size and array.ctypes.data % ALIGNMENT_BYTES:
        raise HostUpdateError(f"{name} is not aligned to {ALIGNMENT_BYTES} bytes")
    if writable and not array.flags.writeable:
        raise HostUpdateError(f"{name} is read-only")


def check_hyperparameters(b1: float, b2: float, eps: float, weight_decay: float, threads: int) -> None:
    """Refuses AdamW settings that no step could use.

    Raises:
        ValueError: naming the setting.
    """
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= decay < 1:
            raise ValueError(f"{name} is {decay}, not within [0, 1)")
    check_epsilon(eps)
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay is {weight_decay}; it has to be finite and not negative")
    if threads < 1:
        raise ValueError(f"threads is {threads}; at least one updates")


def check_epsilon(eps: float) -> None:
    """Refuses what float32 units flush to zero: a parameter without gradient would divide zero by zero.

    Raises:
        ValueError: below the smallest normal number, or not finite.
    """
    if not SMALLEST_EPSILON <= eps < math.inf:
        raise ValueError(
            f"eps is {eps}; it has to be at least {SMALLEST_EPSILON:.4g}, the smallest normal float32"
        )
