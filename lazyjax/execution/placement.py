"""How slabs, batches and gradients lie on the devices, and how kernels get a layer's tensors from a slab.

Axes: B rows, T tokens, N elements of a slab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32

from lazyjax.execution.gradients import Gathering
from lazyjax.models.template import Context, LayerKind
from lazyjax.specs import slab_layout

DATA_AXIS = "data"
#: How arguments and results of a kernel lie on the mesh: split by rows (or elements), or the same everywhere.
SPLIT, WHOLE = PartitionSpec(DATA_AXIS), PartitionSpec()

#: `(hi,)`, as bfloat16, for bfloat16 compute; `(hi, lo)` for float32: the halves of the split master.
DeviceSlab = tuple[Array, ...]
#: What kernels take as a layer's parameters: see `Kernels.unpack`.
Parameters = tuple[Array, ...]
Token = Array


class DeviceBatch(NamedTuple):
    """One microbatch on the device; see `lazyjax.batch.Batch`."""

    tokens_BT: Int32[Array, "B T"]
    targets_BT: Int32[Array, "B T"]
    loss_mask_BT: Bool[Array, "B T"] | Float32[Array, "B T"]
    segment_ids_BT: Int32[Array, "B T"]
    positions_BT: Int32[Array, "B T"]

    @property
    def context(self) -> Context:
        """What the layers need of it."""
        return Context(self.positions_BT, self.segment_ids_BT)


def data_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-axis mesh over `devices` (default: the first device)."""
    chosen = list(devices) if devices is not None else jax.devices()[:1]
    return jax.make_mesh((len(chosen),), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=chosen)


def first_axis(mesh: Mesh) -> NamedSharding:
    """The first axis of an array split over the mesh."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def token() -> Token:
    """A scalar that becomes ready with a kernel's results."""
    return jnp.zeros((), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and the dtypes of what is on it.

    Attributes:
        compute_dtype: dtype of parameters and activations, `bfloat16` or `float32`.
        gradient_dtype: dtype in which gradients leave the device.
    """

    mesh: Mesh
    compute_dtype: str
    gradient_dtype: str

    def __post_init__(self) -> None:
        if self.compute_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"compute_dtype: {self.compute_dtype!r}, expected 'bfloat16' or 'float32'")

    @property
    def devices(self) -> int:
        """Devices that share every batch and slab."""
        return int(self.mesh.size)

    @property
    def sharded(self) -> NamedSharding:
        """First axis split over the mesh."""
        return first_axis(self.mesh)

    @property
    def replicated(self) -> NamedSharding:
        """The same value on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def gathering(self) -> Gathering:
        """What becomes of gradients on this mesh."""
        return Gathering(self.sharded, self.gradient_dtype)

    def on_each_device[**Given, Result](
        self, function: Callable[Given, Result], takes: tuple[PartitionSpec, ...], gives: Any
    ) -> Callable[Given, Result]:
        """The function, run by every device for itself on what it has of each argument."""
        if self.devices == 1:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=takes, out_specs=gives, check_vma=False)

    def cuts(self, kind: LayerKind) -> bool:
        """Whether kernels take the tensors of a layer one by one, and not its slab."""
        return self.devices > 1 or len(kind.parameters) > 1

    def tensors(self, kind: LayerKind, given: Parameters) -> tuple[Array, ...]:
        """The parameters of `kind` in compute dtype, from what `unpack` gave."""
        return given if self.cuts(kind) else self.unflatten(kind, given)

    def unflatten(self, kind: LayerKind, slab: DeviceSlab) -> tuple[Array, ...]:
        """The parameters of `kind` in compute dtype, from its streamed slab."""
        gathered = tuple(jax.lax.with_sharding_constraint(half, self.replicated) for half in slab)
        if self.compute_dtype == "bfloat16":
            (flat_N,) = gathered
        else:
            hi, lo = gathered
            bits = (hi.astype(jnp.uint32) << 16) + lo.astype(jnp.int32).astype(jnp.uint32)
            flat_N = jax.lax.bitcast_convert_type(bits, jnp.float32)
        layout = slab_layout(kind.parameters, devices=self.mesh.size)
        return tuple(
            jax.lax.slice(flat_N, (segment.offset,), (segment.offset + segment.elements,)).reshape(
                segment.shape
            )
            for segment in layout.segments
        )

    def split_rows(self, array: Array) -> Array:
        """Keeps the rows of a result where they were computed."""
        # Over several devices a kernel sees its own rows only.
        return jax.lax.with_sharding_constraint(array, self.sharded) if self.devices == 1 else array
