"""The interface between import or export and the holder of a model's parameters; folders as such holders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from lazyjax.huggingface.key_maps import Entry, Transform, to_parameter
from lazyjax.huggingface.tensor_files import StoredTensor, read_tensor

_CHUNK_ELEMENTS = 1 << 20


@runtime_checkable
class ReadableLayer(Protocol):
    """One layer's master weights, to be read."""

    def master_chunks(
        self, segment_name: str, arrange: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """The fp32 values of one parameter as `arrange` orders them, some rows at a time."""
        ...


@runtime_checkable
class LayerParameters(ReadableLayer, Protocol):
    """One layer's master weights, e.g. `lazyjax.storage.host.LayerSlabs`."""

    def set_master(self, segment_name: str, value: np.ndarray) -> None:
        """Stores one parameter as fp32, without a copy of the whole."""
        ...

    def range_of(self, segment_name: str) -> range:
        """Which elements of a parameter are held here, in C order."""
        ...

    def set_elements(self, segment_name: str, value: np.ndarray, first: int) -> None:
        """Stores those of them that are among `value`, the parameter's elements from `first` on."""
        ...


@runtime_checkable
class ReadableStore(Protocol):
    """A model's master weights by layer, to be read."""

    @property
    def layers(self) -> Sequence[ReadableLayer]:
        """In the order of `ModelSpec.layers`."""
        ...


@runtime_checkable
class ParameterStore(Protocol):
    """A model's master weights by layer, e.g. `lazyjax.storage.host.HostStore`."""

    @property
    def layers(self) -> Sequence[LayerParameters]:
        """In the order of `ModelSpec.layers`."""
        ...


class _StoredLayer:
    """One layer's parameters where they lie in files."""

    def __init__(self, held: Mapping[str, tuple[Transform, StoredTensor]]) -> None:
        self._held = held

    def master_chunks(
        self, segment_name: str, arrange: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """Reads the tensor whole, in its stored type, and widens some rows at a time."""
        transform, tensor = self._held[segment_name]
        arranged = arrange(to_parameter(transform, read_tensor(tensor)))
        rows = max(1, _CHUNK_ELEMENTS * arranged.shape[0] // max(arranged.size, 1))
        for start in range(0, arranged.shape[0], rows):
            yield np.ascontiguousarray(arranged[start : start + rows], np.float32)


class StoredParameters:
    """A checkpoint's parameters, read when they are asked for; one tensor is held at a time."""

    def __init__(self, entries: Sequence[Entry], stored: Mapping[str, StoredTensor]) -> None:
        """Args: see `lazyjax.huggingface.checkpoint.Binding`."""
        held: list[dict[str, tuple[Transform, StoredTensor]]] = [
            {} for _ in range(1 + max(entry.layer_index for entry in entries))
        ]
        for entry in entries:
            held[entry.layer_index][entry.parameter] = (entry.transform, stored[entry.key])
        self._layers = tuple(map(_StoredLayer, held))

    @property
    def layers(self) -> Sequence[ReadableLayer]:
        """In the order of `ModelSpec.layers`."""
        return self._layers
