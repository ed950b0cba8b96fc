"""Host slabs: the memory in which parameters and gradients live between uses.

Every layer owns three page-aligned flat vectors of the same length: the two halves of the fp32
master weights (`hi` is what is streamed, see `lazyjax.storage.master`) and the gradient that the
device sends back. Each of them is in memory for the whole run, or on NVMe with copies in memory
while it is needed (`lazyjax.storage.owned`). One of several processes holds only the parts of its own
devices (`lazyjax.specs.Share`); what is said here of a slab is then said of that part.

Optimizer state belongs to `lazyjax.optim`; this module only knows where slabs are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from lazyjax.specs import ModelSpec, Part, Segment, Share, SlabLayout, slab_layout
from lazyjax.storage.buffers import Arrays
from lazyjax.storage.master import join_master, split_master
from lazyjax.storage.memory import NUMPY_DTYPES, HostMemoryError, aligned_zeros
from lazyjax.storage.nvme import Drive
from lazyjax.storage.owned import OwnedMemory

__all__ = [
    "NUMPY_DTYPES", "HostMemoryError", "HostStore", "LayerOnDrive", "LayerSlabs", "aligned_zeros",
    "allocate_host_store", "joined_chunks",
]  # fmt: skip

#: Elements converted at a time when a tensor is stored.
_CHUNK_ELEMENTS = 2**20
#: What a layer's slabs are called, with what a missing one is doing elsewhere.
SLABS = (Part.HI, Part.LO, Part.GRADIENT)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSlabs:
    """One layer's training memory, N elements each.

    Attributes:
        hi: uint16, the bf16 bits that are streamed.
        lo: int16, the rest of the fp32 master weights.
        gradient: bfloat16 or float32, as delivered by the device.

    A slab that is not in memory, and not needed, has no elements.
    """

    layout: SlabLayout
    hi: np.ndarray
    lo: np.ndarray
    gradient: np.ndarray

    def master(self, segment_name: str) -> np.ndarray:
        """The fp32 master weights of one tensor, as a new array of its shape."""
        segment = self._segment(segment_name)
        part = slice(segment.offset, segment.offset + segment.elements)
        return join_master(self.hi[part], self.lo[part]).reshape(segment.shape)

    def master_chunks(
        self, segment_name: str, arrange: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """The fp32 master weights of one tensor as `arrange` orders them, some rows at a time.

        Args:
            arrange: from an array of the segment's shape to a view of it with at least one axis,
                e.g. its transpose.

        Raises:
            KeyError: no such tensor.
        """
        segment = self._segment(segment_name)
        part = slice(segment.offset, segment.offset + segment.elements)
        yield from joined_chunks(
            self.hi[part].reshape(segment.shape), self.lo[part].reshape(segment.shape), arrange
        )

    def set_master(self, segment_name: str, value: np.ndarray) -> None:
        """Stores `value` (any float dtype, the tensor's shape) as fp32 master weights.

        Of a tensor of which the slab holds a part, that part is stored; it may also be given alone, flat.

        Raises:
            KeyError: no such tensor. ValueError: another shape.
        """
        segment = self._segment(segment_name)
        if value.shape not in (segment.tensor_shape, segment.shape):
            raise ValueError(f"{segment_name}: shape {value.shape}, expected {segment.tensor_shape}")
        self.set_elements(
            segment_name, value, 0 if value.shape == segment.tensor_shape else segment.first
        )

    def range_of(self, segment_name: str) -> range:
        """Which of a tensor's elements the slab holds; none of them where it is elsewhere."""
        return _range_of(self.layout, segment_name)

    def set_elements(self, segment_name: str, value: np.ndarray, first: int) -> None:
        """Stores those elements of a tensor that the slab holds.

        Args:
            value: the tensor's elements from `first` on, in C order, in any shape and float dtype; at least
                those of `range_of`.

        Raises:
            KeyError: none of it is here.
        """
        segment = self._segment(segment_name)
        # In chunks along the first axis: `value` may be a bf16 or transposed view of a large
        # tensor, and an fp32 copy of the whole would triple the memory it takes.
        row_elements = value.size // value.shape[0]
        rows = max(1, _CHUNK_ELEMENTS // row_elements)
        begin, end = segment.first - first, segment.first - first + segment.elements
        last_row = -(-end // row_elements)
        for start in range(begin // row_elements, last_row, rows):
            at = start * row_elements
            chunk = value[start : min(start + rows, last_row)]
            flat = np.ascontiguousarray(chunk, dtype=np.float32).reshape(-1)
            self._put(segment, max(at, begin) - begin, flat[max(begin - at, 0) : end - at])

    def _put(self, segment: Segment, start: int, flat: np.ndarray) -> None:
        """Stores fp32 values from element `start` of a segment on."""
        first = segment.offset + start
        part = slice(first, first + flat.size)
        split_master(flat, self.hi[part], self.lo[part])

    def _segment(self, name: str) -> Segment:
        for segment in self.layout.segments:
            if segment.name == name:
                return segment
        raise KeyError(name)


def _range_of(layout: SlabLayout, name: str) -> range:
    for segment in layout.segments:
        if segment.name == name:
            return range(segment.first, segment.first + segment.elements)
    return range(0)


def joined_chunks(
    hi: np.ndarray, lo: np.ndarray, arrange: Callable[[np.ndarray], np.ndarray]
) -> Iterator[np.ndarray]:
    """The fp32 values of both halves of a tensor as `arrange` orders them, some rows at a time."""
    hi, lo = arrange(hi), arrange(lo)
    rows = max(1, _CHUNK_ELEMENTS * hi.shape[0] // hi.size)
    for start in range(0, hi.shape[0], rows):
        chunk = slice(start, start + rows)
        yield join_master(np.ascontiguousarray(hi[chunk]), np.ascontiguousarray(lo[chunk]))


class LayerOnDrive:
    """A layer of which something lives on NVMe, for everything but training steps.

    What is asked for is read; one layer of a store is held at a time. Arrays are copies that cannot be
    written to; `set_master` changes the layer.
    """

    def __init__(self, store: HostStore, index: int) -> None:
        self._store, self._index = store, index
        self.layout = store.layouts[index]

    @property
    def hi(self) -> np.ndarray:
        """As in `LayerSlabs`."""
        return _frozen(self._store.held(self._index, Part.HI))

    @property
    def lo(self) -> np.ndarray:
        """As in `LayerSlabs`."""
        return _frozen(self._store.held(self._index, Part.LO))

    @property
    def gradient(self) -> np.ndarray:
        """As in `LayerSlabs`."""
        return _frozen(self._store.held(self._index, Part.GRADIENT))

    def master(self, segment_name: str) -> np.ndarray:
        """As `LayerSlabs.master`."""
        return self._masters().master(segment_name)

    def master_chunks(
        self, segment_name: str, arrange: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """As `LayerSlabs.master_chunks`."""
        return self._masters().master_chunks(segment_name, arrange)

    def set_master(self, segment_name: str, value: np.ndarray) -> None:
        """As `LayerSlabs.set_master`; written to the drive when another layer is asked for."""
        self._masters().set_master(segment_name, value)
        self._store.held_changed()

    def range_of(self, segment_name: str) -> range:
        """As `LayerSlabs.range_of`."""
        return _range_of(self.layout, segment_name)

    def set_elements(self, segment_name: str, value: np.ndarray, first: int) -> None:
        """As `LayerSlabs.set_elements`; written as `set_master` is."""
        self._masters().set_elements(segment_name, value, first)
        self._store.held_changed()

    def _masters(self) -> LayerSlabs:
        hi, lo = (self._store.held(self._index, part) for part in (Part.HI, Part.LO))
        return LayerSlabs(self.layout, hi, lo, np.empty(0, np.float32))


def _frozen(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


class HostStore:
    """The slabs of a whole model, in layer order, on the host and on NVMe.

    Args:
        layouts: of every layer's whole slab.
        make: gives new slabs, as long as what is held; asked when one is first needed on the host.
        on_nvme: what of every layer lives on `drive` from the beginning. It is all zeros.
        share: what of every slab is held here.

    Attributes:
        layouts: of what is held here.
        whole_layouts: of the slabs that all processes hold together.
        owned: the slabs, and whatever else layers own and somebody adds there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layouts: Sequence[SlabLayout],
        gradient_dtype: str,
        make: Callable[[Part, int], np.ndarray],
        *,
        on_nvme: Sequence[Collection[Part]] | None = None,
        drive: Drive | None = None,
        share: Share = Share(),  # noqa: B008 - frozen
    ) -> None:
        self.spec, self.gradient_dtype, self.share = spec, gradient_dtype, share
        self.whole_layouts = tuple(layouts)
        self.layouts = tuple(map(share.of, layouts))
        self.owned = OwnedMemory([frozenset(parts) for parts in on_nvme or ((),) * len(layouts)], drive)
        dtypes = {Part.HI: "uint16", Part.LO: "int16", Part.GRADIENT: gradient_dtype}
        for part, dtype in dtypes.items():
            self.owned.add(
                part,
                functools.partial(self._made, part, make),
                functools.partial(self._described, part, dtype),
            )
        self._held: tuple[int, contextlib.ExitStack, dict[Part, np.ndarray]] | None = None
        self._changed = False

    def _made(self, part: Part, make: Callable[[Part, int], np.ndarray], layer: int) -> Arrays:
        return {part.value: make(part, layer)}

    def _described(self, part: Part, dtype: str, layer: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {part.value: ((self.layouts[layer].length,), dtype)}

    @property
    def layers(self) -> Sequence[LayerSlabs | LayerOnDrive]:
        """In the order of `ModelSpec.layers`."""
        return tuple(
            LayerOnDrive(self, layer) if self.owned.on_nvme(layer).intersection(SLABS) else self.slabs(layer)
            for layer in range(len(self.layouts))
        )

    def slabs(self, layer: int) -> LayerSlabs:
        """What of a layer's slabs is in memory: what lives there, and copies that a step has brought up."""
        hi, lo, gradient = (self._in_memory(layer, part) for part in SLABS)
        return LayerSlabs(self.layouts[layer], hi, lo, gradient)

    def _in_memory(self, layer: int, part: Part) -> np.ndarray:
        arrays = self.owned.in_memory(layer, part)
        return _NOTHING if arrays is None else arrays[part.value]

    @contextlib.contextmanager
    def reading(self, layer: int) -> Iterator[LayerSlabs]:
        """Both halves of a layer's master weights, as copies where they live on NVMe; no gradient."""
        with self.owned.reading(layer, (Part.HI, Part.LO)) as arrays:
            hi, lo = (arrays[part][part.value] for part in (Part.HI, Part.LO))
            yield LayerSlabs(self.layouts[layer], hi, lo, _NOTHING)

    # For layers on NVMe, one at a time

    def held(self, layer: int, part: Part) -> np.ndarray:
        """A part of the one layer that is held; the one before is written back if it was changed."""
        if self._held is None or self._held[0] != layer:
            self.settle()
            self._held = (layer, contextlib.ExitStack(), {})
        _, stack, arrays = self._held
        if part not in arrays:
            arrays[part] = stack.enter_context(self.owned.reading(layer, (part,)))[part][part.value]
        return arrays[part]

    def held_changed(self) -> None:
        """The halves of the layer that is held were changed."""
        self._changed = True

    def settle(self) -> None:
        """Writes the layer that is held if it was changed, and lets go of it.

        Raises:
            NvmeError: naming what could not be written.
        """
        held, self._held = self._held, None
        if held is None:
            return
        layer, stack, arrays = held
        with stack:
            if self._changed:
                self._changed = False
                arrays.pop(Part.GRADIENT, None)
                self.owned.write(layer, {part: {part.value: array} for part, array in arrays.items()})

    def place(self, on_nvme: Sequence[Collection[Part]], drive: Drive | None) -> None:
        """See `OwnedMemory.place`."""
        self.settle()
        self.owned.place(on_nvme, drive)


_NOTHING = np.empty(0, np.uint8)


def allocate_host_store(
    spec: ModelSpec,
    *,
    gradient_dtype: str = "bfloat16",
    devices: int = 1,
    decay_vectors: bool = False,
    on_nvme: Sequence[Collection[Part]] | None = None,
    drive: Drive | None = None,
    share: Share | None = None,
) -> HostStore:
    """Maps zeroed slabs for every layer of `spec`, but for what lives on NVMe.

    Args:
        devices: that share every slab.
        share: the devices among them whose parts are held here; None: all.

    Raises:
        HostMemoryError: naming the layer that did not fit.
    """
    layouts = [
        slab_layout(layer.parameters, devices=devices, decay_vectors=decay_vectors) for layer in spec.layers
    ]
    kinds = {
        Part.HI: ("uint16", "parameters"),
        Part.LO: ("int16", "master weights"),
        Part.GRADIENT: (gradient_dtype, "gradient"),
    }

    def make(part: Part, layer: int) -> np.ndarray:
        dtype, purpose = kinds[part]
        length = held.of(layouts[layer]).length
        return aligned_zeros(length, dtype, purpose=f"{purpose} of {spec.layers[layer].name}")

    held = Share(0, devices, devices) if share is None else share
    store = HostStore(spec, layouts, gradient_dtype, make, on_nvme=on_nvme, drive=drive, share=held)
    for layer in range(len(layouts)):
        store.slabs(layer)  # mapped now, so that a refusal comes before anything is read
    return store
