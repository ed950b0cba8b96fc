"""What the layers of a model own from step to step, part by part: in memory, or on NVMe.

A part (`lazyjax.specs.Part`) of a layer is a few named arrays. One that lives on NVMe is in memory only as
a copy: for a step, between the operations that bring it up and take it down again, or for a reader of its
own. Copies lie in buffers that are used again and again. When anything moves is decided elsewhere.

A part on NVMe that was never written is as it was made: nothing is read for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from lazyjax.specs import Part
from lazyjax.storage.buffers import Arrays, BufferPool, Described, Lent
from lazyjax.storage.memory import raw_bytes
from lazyjax.storage.nvme import Drive, DriveTransfer


class _Kind(NamedTuple):
    make: Callable[[int], Arrays]
    describe: Callable[[int], Described]


class _DriveCopies:
    """Parts as they are on the drive, and buffers to read them into."""

    def __init__(self, drive: Drive | None) -> None:
        self.drive = drive
        self.kinds: dict[Part, _Kind] = {}
        self.pool = BufferPool()
        self._written: set[tuple[int, Part]] = set()

    def bring(self, layer: int, part: Part) -> tuple[Lent, list[DriveTransfer]]:
        """A copy, and the reads that fill it; one that was never written is made as it was."""
        if (layer, part) not in self._written:
            return Lent(self.kinds[part].make(layer), ()), []
        lent = self.pool.lend(self.kinds[part].describe(layer))
        return lent, self._start_reading(layer, part, lent.arrays)

    def restored(self, layer: int, part: Part) -> Arrays:
        """A part in new memory, as it is on the drive."""
        arrays = self.kinds[part].make(layer)
        if (layer, part) in self._written:
            _finish(self._start_reading(layer, part, arrays))
        return arrays

    def start_writing(self, layer: int, part: Part, arrays: Arrays) -> list[DriveTransfer]:
        """Starts writing all arrays of a part."""
        drive = self._required_drive()
        self._written.add((layer, part))
        return [drive.write(_key(layer, part, name), raw_bytes(array)) for name, array in arrays.items()]

    def delete(self, layer: int, part: Part) -> None:
        """Removes a part from the drive, if it is there."""
        if (layer, part) in self._written:
            self._written.remove((layer, part))
            for name in self.kinds[part].describe(layer):
                self._required_drive().delete(_key(layer, part, name))

    def _start_reading(self, layer: int, part: Part, arrays: Arrays) -> list[DriveTransfer]:
        drive = self._required_drive()
        return [drive.read(_key(layer, part, name), raw_bytes(array)) for name, array in arrays.items()]

    def _required_drive(self) -> Drive:
        assert self.drive is not None
        return self.drive


class StepCopies:
    """Copies of what lives on the drive, for the steps that work on them.

    They may be brought up and taken down from several threads, one part of a layer at a time.

    Args:
        on_nvme: what of every layer lives on the drive; changes with what `OwnedMemory` places there.
    """

    def __init__(self, drive_copies: _DriveCopies, on_nvme: Sequence[frozenset[Part]]) -> None:
        self._drive_copies, self._on_nvme = drive_copies, on_nvme
        self._copies: dict[tuple[int, Part], Lent] = {}
        self._new: dict[tuple[int, Part], Lent] = {}
        self._lock = threading.Lock()
        self.pool = drive_copies.pool

    def find(self, layer: int, part: Part) -> Arrays | None:
        """The copy that was brought up; None where there is none."""
        with self._lock:
            lent = self._copies[layer, part] if (layer, part) in self._copies else None
        return None if lent is None else lent.arrays

    def load(self, layer: int, parts: Collection[Part]) -> Callable[[], None]:
        """Starts bringing up those of `parts` that live on the drive; returns what waits for the end."""
        reads = []
        for part in self._on_nvme[layer].intersection(parts):
            lent, own = self._drive_copies.bring(layer, part)
            with self._lock:
                self._copies[layer, part] = lent
            reads += own
        return lambda: _finish(reads)

    def store(self, layer: int, parts: Collection[Part]) -> Callable[[], None]:
        """Starts writing those copies of a layer that are of `parts`, and takes all of them away.

        Returns what waits for the end and then gives their memory up.
        """
        with self._lock:
            held = [part for own, part in self._copies if own == layer]
            leaving = {part: self._copies.pop((layer, part)) for part in held}
        return self._store(layer, leaving, parts)

    def make_new(self, layer: int, part: Part) -> Arrays:
        """A copy for new contents, beside what `load` brought up of the old ones."""
        lent = self.pool.lend(self._drive_copies.kinds[part].describe(layer))
        with self._lock:
            self._new[layer, part] = lent
        return lent.arrays

    def store_new(self, layer: int, part: Part) -> Callable[[], None]:
        """The same as `store`, for what `make_new` gave."""
        with self._lock:
            lent = self._new.pop((layer, part))
        return self._store(layer, {part: lent}, (part,))

    def _store(
        self, layer: int, leaving: Mapping[Part, Lent], written: Collection[Part]
    ) -> Callable[[], None]:
        writes = []
        for part in leaving.keys() & set(written):
            writes += self._drive_copies.start_writing(layer, part, leaving[part].arrays)

        def end() -> None:
            _finish(writes)
            for lent in leaving.values():
                self.pool.give_back(lent)

        return end

    def take_copy(self, layer: int, part: Part) -> Lent:
        """Takes a step's copy away; whoever does gives its memory back to the pool."""
        with self._lock:
            return self._copies.pop((layer, part))


class OwnedMemory:
    """The parts of all layers.

    Args:
        on_nvme: what of every layer lives on the drive from the beginning.

    Attributes:
        copies: what steps bring up and take down.
    """

    def __init__(self, on_nvme: Sequence[frozenset[Part]], drive: Drive | None = None) -> None:
        self._on_nvme, self._below = list(on_nvme), _DriveCopies(drive)
        self._resident: dict[tuple[int, Part], Arrays] = {}
        self.copies = StepCopies(self._below, self._on_nvme)

    def add(self, part: Part, make: Callable[[int], Arrays], describe: Callable[[int], Described]) -> None:
        """Adds a part to all layers.

        Args:
            make: gives the arrays of a layer as they are before anything was learned.
            describe: their names, shapes and types, without making them.
        """
        self._below.kinds[part] = _Kind(make, describe)

    def on_nvme(self, layer: int) -> frozenset[Part]:
        """What of a layer lives on the drive."""
        return self._on_nvme[layer]

    def in_memory(self, layer: int, part: Part) -> Arrays | None:
        """A part that lives in memory, or the copy that a step has brought up; None where there is none."""
        if part not in self._on_nvme[layer]:
            if (layer, part) not in self._resident:
                self._resident[layer, part] = self._below.kinds[part].make(layer)
            return self._resident[layer, part]
        return self.copies.find(layer, part)

    @contextlib.contextmanager
    def reading(self, layer: int, parts: Collection[Part]) -> Iterator[dict[Part, Arrays]]:
        """Parts of a layer, as copies of their own where they live on the drive.

        Raises:
            NvmeError: naming the array that could not be read.
        """
        arrays: dict[Part, Arrays] = {}
        with contextlib.ExitStack() as stack:
            reads = []
            for part in parts:
                if part in self._on_nvme[layer]:
                    lent, own = self._below.bring(layer, part)
                    stack.callback(self.copies.pool.give_back, lent)
                    arrays[part] = lent.arrays
                    reads += own
                else:
                    resident = self.in_memory(layer, part)
                    assert resident is not None
                    arrays[part] = resident
            _finish(reads)
            yield arrays

    def write(self, layer: int, arrays: Mapping[Part, Arrays]) -> None:
        """Puts back what `reading` gave, with new contents."""
        written = {part: own for part, own in arrays.items() if part in self._on_nvme[layer]}
        _finish([w for part, own in written.items() for w in self._below.start_writing(layer, part, own)])

    def place(self, on_nvme: Sequence[Collection[Part]], drive: Drive | None) -> None:
        """Moves `on_nvme` of every layer to the drive and everything else into memory.

        What was used before stays where it was until everything has arrived, so that after an error all is
        as before. No step may be under way.

        Raises:
            NvmeError: naming the array that could not be written or read.
        """
        wanted = [frozenset(parts) for parts in on_nvme]
        leaving, coming = [], []
        for layer, (before, after) in enumerate(zip(self._on_nvme, wanted, strict=True)):
            leaving += [(layer, part) for part in sorted(after - before)]
            coming += [(layer, part) for part in sorted(before - after)]
        keeping = self._below.drive
        if leaving:
            self._below.drive = drive
        try:
            for layer, part in leaving:
                arrays = self.in_memory(layer, part)
                assert arrays is not None
                _finish(self._below.start_writing(layer, part, arrays))
        except BaseException:
            self._below.drive = keeping
            raise
        arrived = {}
        for layer, part in coming:
            arrived[layer, part] = self._below.restored(layer, part)
        self._resident |= arrived
        for place in leaving:
            self._resident.pop(place, None)
        for layer, part in coming:
            self._below.delete(layer, part)
        self._on_nvme[:] = wanted
        for layer in range(len(wanted)):
            for part in self._below.kinds.keys() - wanted[layer]:
                self.in_memory(layer, part)  # made now, so that no step has to
        self.copies.pool.clear()


def _finish(transfers: Sequence[DriveTransfer]) -> None:
    """Waits for all, also after an error, so that no memory is given up while a transfer uses it."""
    errors = []
    for transfer in transfers:
        try:
            transfer.result()
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _key(layer: int, part: Part, name: str) -> str:
    return f"{part.value}-{layer}-{name}" if name != part.value else f"{part.value}-{layer}"
