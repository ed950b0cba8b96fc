"""The processes of one run: where they are, and how long they go on together."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jax.errors import JaxRuntimeError

from lazyjax.distributed.channel import Channel, PeerError
from lazyjax.distributed.watch import Store, Watch
from lazyjax.hardware.process import boot_id, process_fields, usable_cpus


class Peer(NamedTuple):
    """Where a process runs.

    Attributes:
        machine: equal for processes that share a host's memory.
        pids: equal for processes that see each other by number.
        cpus: those that it may use.
    """

    host: str
    machine: str
    pids: str
    pid: int
    cpus: tuple[int, ...]

    @staticmethod
    def here() -> Peer:
        """The one that asks."""
        host, boot, pids = socket.gethostname(), boot_id(), ""
        if boot:
            with contextlib.suppress(OSError):
                pids = os.readlink("/proc/self/ns/pid")
        return Peer(host, f"{host} {boot}", pids, os.getpid(), tuple(sorted(usable_cpus())))

    def gone(self) -> bool:
        """Whether the process, whose number means the same here, has ended."""
        try:
            state, *_ = process_fields(self.pid)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return state in ("Z", "X")


class Processes:
    """All processes of this run; one of them is this one.

    Args:
        store: None where there is one process.
        timeout_seconds: see `Watch`.
        number: of this run among those of this Python process, so that no two use the same keys.

    Attributes:
        index, count: number of this process, and how many there are.
        peers: by index.
        main: the channel of the main thread.
        watch: None where there is one process.
    """

    def __init__(
        self,
        index: int,
        count: int,
        store: Store | None = None,
        *,
        timeout_seconds: float = 0.0,
        number: int = 0,
    ) -> None:
        self.index, self.count, self._store = index, count, store
        self.peers: tuple[Peer, ...] = (Peer.here(),)
        self.watch: Watch | None = None
        self._run = f"lazyjax/{number}"
        if store is not None:
            keys = f"{self._run}/watch"
            self.watch = Watch(store, keys, index, count, timeout_seconds=timeout_seconds)
        self.main = self.channel("main")
        if self.watch is not None:
            here = self.main.exchange(Peer.here())
            self.peers = tuple(
                Peer(host, machine, pids, pid, tuple(cpus)) for host, machine, pids, pid, cpus in here
            )
            names = [f"process {i} ({peer.host}, pid {peer.pid})" for i, peer in enumerate(self.peers)]
            self.watch.start(names, self._gone)

    def _gone(self) -> list[int]:
        """Processes on this host that have ended; of those on others only their silence tells."""
        own = self.peers[self.index]
        return [
            index
            for index, peer in enumerate(self.peers)
            if own.pids and (peer.machine, peer.pids) == (own.machine, own.pids) and peer.gone()
        ]

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which alone writes and speaks."""
        return self.index == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    @property
    def machines(self) -> int:
        """On how many hosts they run."""
        return len({peer.machine for peer in self.peers})

    @property
    def here(self) -> int:
        """How many of them share this host, this one included."""
        own = self.peers[self.index]
        return sum(peer.machine == own.machine for peer in self.peers)

    def own_cpus(self) -> int:
        """CPUs that this process may take, so that those with the same ones share them evenly."""
        own = self.peers[self.index]
        sharing = sum(peer.machine == own.machine and peer.cpus == own.cpus for peer in self.peers)
        return max(1, len(own.cpus) // sharing)

    def facts(self) -> dict[str, int]:
        """What a run's summary says of them, where there are several."""
        return {"processes": self.count, "hosts": self.machines} if self.several else {}

    def channel(self, name: str) -> Channel:
        """A channel of its own for another thread; made by all in the same order."""
        return Channel(f"{self._run}/{name}", self.index, self.count, self._store, self.watch)

    @contextlib.contextmanager
    def training(self, on_end: Callable[[str], None]) -> Iterator[None]:
        """In it no process may get nowhere for long.

        Args:
            on_end: called with the reason, from another thread, before this process ends with another one.
        """
        if self.watch is None:
            yield
            return
        self.watch.on_end = on_end
        with self.watch.training():
            yield

    @contextlib.contextmanager
    def running(self) -> Iterator[Processes]:
        """Until its end the others wait for this process; an error in it ends them, with its words."""
        try:
            yield self
            self.main.exchange("end")
        except BaseException as error:
            if self.watch is not None and (isinstance(error, PeerError) or error is self.main.told):
                # All know of it, and leave together: the service of process 0 is needed until then.
                with contextlib.suppress(PeerError, JaxRuntimeError):
                    self.main.exchange("end")
            elif self.watch is not None:
                self.watch.tell(error)
            raise
        finally:
            if self.watch is not None:
                self.watch.stop()


def alone() -> Processes:
    """One process."""
    return Processes(0, 1)
