"""The buffers that exist at one point of a schedule, and how many bytes they take on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lazyjax.planning.program.operations import ROLE_OF
from lazyjax.planning.program.schedule import Buffer, Operation, Place
from lazyjax.specs import Tier

_OWNED = frozenset(ROLE_OF.values())


class StepBuffers:
    """The buffers on the device, on the host and on NVMe, by the schedule's names.

    Attributes:
        device, host: arrays.
        nvme: shape and dtype of what a key holds.
        packed: layers whose parameters on the device are still the slab that was copied or gathered.
        live_bytes, peak_bytes: on one device, counted from the arrays themselves as they are allocated.
    """

    def __init__(self, device_bytes: Callable[[Any], int]) -> None:
        self.device: dict[Buffer, Any] = {}
        self.host: dict[Buffer, Any] = {}
        self.nvme: dict[Buffer, Any] = {}
        self.packed: set[int] = set()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._device_bytes = device_bytes
        self._counted: dict[Buffer, int] = {}

    def count(self, operation: Operation) -> None:
        """Counts what an operation that was just issued has allocated on the device."""
        for place, _ in operation.allocates:
            if place.tier is Tier.DEVICE:
                counted = self._device_bytes(self.device[place.buffer])
                self._counted[place.buffer] = counted
                self.live_bytes += counted
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def free(self, places: Sequence[Place]) -> None:
        """Lets go of buffers."""
        for buffer, tier in places:
            if tier is Tier.HOST and buffer.role in _OWNED:
                continue  # copies of what layers own belong to the store
            if tier is Tier.DEVICE:
                del self.device[buffer]
                self.live_bytes -= self._counted.pop(buffer)
            elif tier is Tier.HOST:
                del self.host[buffer]
            else:
                del self.nvme[buffer]

    def clear(self) -> None:
        """Lets go of everything."""
        for tier in (self.device, self.host, self.nvme):
            tier.clear()


def nvme_key(buffer: Buffer) -> str:
    """The name of a buffer's file."""
    return f"{buffer.role.value}-{buffer.layer}-{buffer.microbatch}-{buffer.name or 'x'}"
