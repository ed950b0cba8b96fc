"""A model's master weights, of which every process holds a part, read as wholes by one process.

The process that reads (process 0) asks for layer after layer; the others serve. A layer is gathered on the
devices, over what connects them; on the host there is one tensor of it at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from lazyjax.distributed.processes import Processes
from lazyjax.execution.kernels import first_axis
from lazyjax.execution.shards import put_parts
from lazyjax.huggingface.parameters import ReadableLayer, ReadableStore
from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.specs import Segment
from lazyjax.storage.host import HostStore, joined_chunks

Result = TypeVar("Result")


class _Layer:
    """One layer, gathered when it is first read."""

    def __init__(self, gathering: Gathering, index: int) -> None:
        self._gathering, self._index = gathering, index

    def master_chunks(
        self, segment_name: str, arrange: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """As `LayerSlabs.master_chunks`."""
        hi, lo = self._gathering.tensor(self._index, segment_name)
        yield from joined_chunks(hi, lo, arrange)


class Gathering:
    """The store of one run, for readers of whole tensors.

    Args:
        mesh: over which slabs are split.
    """

    def __init__(self, processes: Processes, store: HostStore, mesh: Mesh) -> None:
        self._processes, self._store, self._mesh = processes, store, mesh
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._gather = jax.jit(lambda half: half, out_shardings=self._replicated)
        self._held: tuple[int, tuple[Array, ...]] | None = None

    @property
    def layers(self) -> Sequence[ReadableLayer]:
        """In the order of `ModelSpec.layers`; process 0 alone reads them, in `read`."""
        return tuple(_Layer(self, index) for index in range(len(self._store.layouts)))

    def read(self, work: Callable[[ReadableStore], Result]) -> Result:
        """What `work` makes of whole tensors at process 0 (plain JSON), for all; all call this.

        Raises:
            Exception: what `work` raised, at process 0. CheckpointError: at the others.
        """
        if not self._processes.several:
            return work(self._store)
        channel = self._processes.main
        try:
            if self._processes.leads:
                return self._lead(work)
            while True:
                order: Any = channel.exchange(None)[0]
                if "layer" in order:
                    self._bring(order["layer"])
                elif "failure" in order:
                    raise CheckpointError(f"process 0 cannot go on ({order['failure']})")
                else:
                    result: Result = order["result"]
                    return result
        finally:
            self._held = None

    def _lead(self, work: Callable[[ReadableStore], Result]) -> Result:
        channel = self._processes.main
        try:
            result = work(self)
        except (OSError, CheckpointError) as error:
            # May be tried again, by all.
            channel.exchange({"failure": str(error)})
            raise
        channel.exchange({"result": result})
        return result

    def tensor(self, layer: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Both halves of one whole tensor, at process 0."""
        if self._held is None or self._held[0] != layer:
            self._processes.main.exchange({"layer": layer})
            self._bring(layer)
        assert self._held is not None
        segment = self._segment(layer, name)
        part = slice(segment.offset, segment.offset + segment.elements)
        hi, lo = (np.asarray(half.addressable_data(0)[part]).reshape(segment.shape) for half in self._held[1])
        return hi, lo

    def _segment(self, layer: int, name: str) -> Segment:
        for segment in self._store.whole_layouts[layer].segments:
            if segment.name == name:
                return segment
        raise KeyError(name)

    def _bring(self, layer: int) -> None:
        """Gathers a layer on the devices of every process."""
        self._held = None
        with self._store.reading(layer) as slabs:
            parts = put_parts([slabs.hi, slabs.lo], first_axis(self._mesh))
            self._held = layer, jax.block_until_ready(tuple(map(self._gather, parts)))
