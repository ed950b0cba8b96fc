"""What import and export need of whoever holds a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class LayerParameters(Protocol):
    """One layer's master weights, e.g. `lazyjax.storage.host.LayerSlabs`."""

    def set_master(self, segment_name: str, value: np.ndarray) -> None:
        """Stores one parameter as fp32, without a copy of the whole."""
        ...

    def master_pieces(
        self, segment_name: str, arrange: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """The fp32 values of one parameter as `arrange` orders them, some rows at a time."""
        ...


@runtime_checkable
class ParameterStore(Protocol):
    """A model's master weights by layer, e.g. `lazyjax.storage.host.HostStore`."""

    @property
    def layers(self) -> Sequence[LayerParameters]:
        """In the order of `ModelSpec.layers`."""
        ...
