"""Shapes, sizes and places as plain data.

Everything here can be computed and compared without allocating an array: the planner, the
schedule, the stores and the executor all describe a model through these types. Sizes come from
`nnx.eval_shape` of a template (see `lazyjax.models`), or from a plan-only description.

This module knows nothing about JAX, files or time.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from collections.abc import Iterable

#: Elements that share one optimizer scale; a slab segment always starts on such a block.
BLOCK_ELEMENTS = 256
#: Slab lengths are multiples of this, so that every 16-bit slab is whole pages.
SLAB_MULTIPLE = 4096

_ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int32": 4,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class Tier(enum.StrEnum):
    """A memory that tensors can live in."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Boundary(enum.StrEnum):
    """Where a layer's input waits for the backward pass."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"
    RECOMPUTE = "recompute"

    @property
    def tier(self) -> Tier | None:
        """The tier that holds the boundary; None where it is recomputed."""
        return None if self is Boundary.RECOMPUTE else Tier(self.value)


class Resource(enum.StrEnum):
    """A queue that serves its operations one after another, in schedule order."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"
    INTERCONNECT = "interconnect"


class Part(enum.StrEnum):
    """What a layer owns from step to step, each of which lives on the host or on NVMe.

    `lo` and `hi` are the halves of the fp32 master weights (`lazyjax.storage.master`).
    """

    STATE = "state"
    LO = "lo"
    GRADIENT = "gradient"
    HI = "hi"


def item_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`; raises KeyError for a type that no slab uses."""
    return _ITEM_BYTES[dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name within the layer, shape and dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.elements * item_bytes(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """One streamed layer: an embedding, a decoder block or the head.

    Attributes:
        name: unique in the model, e.g. `embed`, `layers.7`, `head`.
        kind: layers of one kind have equal parameter shapes and share compiled functions.
        parameters: trainable tensors in slab order.
    """

    name: str
    kind: str
    parameters: tuple[TensorSpec, ...]

    @property
    def parameter_count(self) -> int:
        """Trainable elements, without slab padding."""
        return sum(tensor.elements for tensor in self.parameters)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model as an ordered list of layers: embed, blocks, head.

    `tied` means that the head multiplies by the embedding table and owns none itself; `heads` is what no
    shape tells: attention heads, key/value heads, and a head's size.
    """

    name: str
    family: str
    hidden_size: int
    vocabulary_size: int
    tied: bool
    layers: tuple[LayerSpec, ...]
    heads: tuple[int, ...] = ()

    @property
    def architecture(self) -> str:
        """A short digest of everything that a plan depends on; names of models and folders do not count."""
        layers = [(layer.kind, [(t.name, t.shape) for t in layer.parameters]) for layer in self.layers]
        facts = (self.family, self.hidden_size, self.vocabulary_size, self.tied, self.heads, layers)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    @property
    def parameter_count(self) -> int:
        """Trainable elements of the whole model (a tied table counts once)."""
        return sum(layer.parameter_count for layer in self.layers)

    @property
    def block_count(self) -> int:
        """Decoder blocks, i.e. layers without embed and head."""
        return len(self.layers) - 2


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a tensor a slab holds: its elements from `first` on, of a tensor of `shape`."""

    first: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Where one tensor lies in its layer's slab: elements [offset, offset + elements).

    Attributes:
        cut: where the slab holds a part of the tensor (see `slab_part`); `shape` is then (elements,).
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    decay: bool
    cut: Cut | None = None

    @property
    def elements(self) -> int:
        """Number of elements that the slab holds."""
        return math.prod(self.shape)

    @property
    def first(self) -> int:
        """The first of the tensor's elements that the slab holds."""
        return 0 if self.cut is None else self.cut.first

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.shape if self.cut is None else self.cut.shape

    @property
    def tensor_elements(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.tensor_shape)


@dataclasses.dataclass(frozen=True, slots=True)
class SlabLayout:
    """How a layer's tensors share one flat vector of `length` elements.

    Segments start on block borders (`BLOCK_ELEMENTS`); the gaps and the tail hold zeros, whose
    gradients are zero, so that a pass over the whole slab leaves them zero.
    """

    segments: tuple[Segment, ...]
    length: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def slab_layout(
    parameters: Iterable[TensorSpec], *, devices: int = 1, decay_vectors: bool = False
) -> SlabLayout:
    """Lays tensors out in a slab.

    Args:
        parameters: tensors in slab order.
        devices: the length is a multiple of `SLAB_MULTIPLE * devices`, so that every device's
            shard is whole blocks.
        decay_vectors: whether weight decay also covers tensors with fewer than two axes.
    """
    segments = []
    offset = 0
    for tensor in parameters:
        decay = decay_vectors or len(tensor.shape) >= 2
        segments.append(Segment(tensor.name, offset, tensor.shape, decay))
        offset = _round_up(offset + tensor.elements, BLOCK_ELEMENTS)
    return SlabLayout(
        tuple(segments), max(_round_up(offset, SLAB_MULTIPLE * devices), SLAB_MULTIPLE * devices)
    )


def slab_part(layout: SlabLayout, start: int, stop: int) -> SlabLayout:
    """The elements [start, stop) of a whole slab as a slab of its own: what one process holds of it.

    Whatever an optimizer keeps for successive parts is, one after another, what it keeps for the whole:
    parts begin and end on block borders, and a cut segment knows the tensor that it is of.

    Raises:
        ValueError: a border inside a block, or outside the slab.
    """
    if start % BLOCK_ELEMENTS or stop % BLOCK_ELEMENTS or not 0 <= start <= stop <= layout.length:
        raise ValueError(
            f"elements [{start}, {stop}) of a slab of {layout.length} are no whole blocks of {BLOCK_ELEMENTS}"
        )
    segments = []
    for segment in layout.segments:
        end = segment.offset + segment.elements
        begin, last = max(segment.offset, start), min(end, stop)
        if begin >= last:
            continue
        held = dataclasses.replace(segment, offset=begin - start)
        if (begin, last) != (segment.offset, end):
            cut = Cut(begin - segment.offset, segment.shape)
            held = dataclasses.replace(held, shape=(last - begin,), cut=cut)
        segments.append(held)
    return SlabLayout(tuple(segments), stop - start)


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What of every slab a process holds: the parts of the devices [first, last), of `devices` in all.

    A slab of N elements is cut into `devices` equal parts, in the order of the mesh.
    """

    first: int = 0
    last: int = 1
    devices: int = 1

    def elements(self, length: int) -> slice:
        """The elements of a slab of `length` that are held."""
        each = length // self.devices
        return slice(self.first * each, self.last * each)

    def rows(self, count: int) -> slice:
        """The rows of a microbatch of `count` that belong to these devices."""
        return self.elements(count)

    def of(self, layout: SlabLayout) -> SlabLayout:
        """The layout of what is held of a slab."""
        held = self.elements(layout.length)
        if (held.start, held.stop) == (0, layout.length):
            return layout
        return slab_part(layout, held.start, held.stop)
