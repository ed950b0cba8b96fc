"""Which bytes of a saved layer belong to a process, whatever number of processes has saved it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lazyjax.execution.host_update import HostUpdates
from lazyjax.optim.base import VERSION
from lazyjax.storage.host import HostStore
from lazyjax.storage.memory import raw_bytes

#: The one array that every part has whole.
VERSION_ARRAY = f"state.{VERSION}"


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not what was saved; the message names the file or array."""


class Place(NamedTuple):
    """Where the arrays that are held here lie in those of all processes, one after another.

    Attributes:
        first: by array, the bytes before.
        last: whether nothing follows.
    """

    first: Mapping[str, int]
    last: bool

    def needs(self, name: str, begin: int, size: int, held: int) -> bool:
        """Whether bytes [begin, begin + size) of an array of which `held` are here concern this process."""
        if name == VERSION_ARRAY:
            return self.first["hi"] == begin == 0
        first, end = self.first[name], begin + size
        return (begin < first + held and first < end) or (self.last and end > first + held)

    def copy_in(
        self, raw: np.ndarray, begin: int, target: np.ndarray, name: str, folder: pathlib.Path
    ) -> None:
        """Copies those of the saved bytes from `begin` on that belong here; zeros alone may lie beyond."""
        mine = raw_bytes(target)
        if name == VERSION_ARRAY:
            # Every part has it whole, and whoever holds no beginning has made it itself.
            if self.first["hi"] == begin == 0:
                mine[: raw.size] = raw
            return
        at = begin - self.first[name]
        if self.last and raw[max(mine.size - at, 0) :].any():
            size = self.first[name] + mine.size
            raise DamagedCheckpointError(
                f"{folder}: {name} has {begin + raw.size} bytes, the slab of this run only {size}"
            )
        lower, upper = max(at, 0), min(at + raw.size, mine.size)
        if lower < upper:
            mine[lower:upper] = raw[lower - at : upper - at]


def place_of(store: HostStore, updates: HostUpdates, layer: int) -> Place:
    """The place of what this process holds of a layer."""
    share, length = store.share, store.whole_layouts[layer].length
    before = share.elements(length).start
    first = {"hi": 2 * before, "lo": 2 * before}
    first |= {f"state.{name}": size for name, size in updates.state_bytes_before(layer).items()}
    return Place(first, share.last == share.devices)
