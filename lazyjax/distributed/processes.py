"""The processes of one run: how they find each other, and how they come to common decisions.

Devices talk through the collectives that XLA puts into kernels. What steers a run (is it to stop, did
something fail, which plan) goes through the key-value store of JAX's coordination service instead, so that it
never mixes with them. A run of one process has none of this: every function then answers at once.

All processes call `exchange`, `decide` and `together` of one channel in the same order. Each thread that
decides something has a channel of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.errors import JaxRuntimeError

from lazyjax.config import ConfigError, DistributedConfig
from lazyjax.distributed.watch import Store, Watch

#: Seconds that one wait for another process's word lasts before it is begun again. Who does not come at all
#: is `Watch`'s business.
_WAIT_SECONDS = 20
#: Seconds to wait for the others when a process ends.
_SHUTDOWN_SECONDS = 20
#: Characters of one value of the store; longer ones are sent in chunks (a gRPC message holds 4 MiB).
_CHUNK = 2**20


class ProcessesError(RuntimeError):
    """Processes that did not come together."""


class PeerError(RuntimeError):
    """Another process cannot go on, so this one does not either; the message names it."""


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
        host, boot, pids = socket.gethostname(), "", ""
        with contextlib.suppress(OSError):
            boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            pids = os.readlink("/proc/self/ns/pid")
        return Peer(host, f"{host} {boot}", pids, os.getpid(), tuple(sorted(_cpus())))

    def gone(self) -> bool:
        """Whether the process, whose number means the same here, has ended."""
        try:
            stat = pathlib.Path(f"/proc/{self.pid}/stat").read_text()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        # The command, in parentheses, may itself hold spaces and parentheses.
        return stat.rpartition(")")[2].split()[0] in ("Z", "X")


def _cpus() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on Linux
        return set(range(os.cpu_count() or 1))


class Channel:
    """A sequence of common decisions.

    Args:
        store: None where there is one process.

    Attributes:
        told: an error that all processes know of, because this one has told it or because all have it.
    """

    def __init__(self, name: str, index: int, count: int, store: Store | None, watch: Watch | None) -> None:
        self._name, self._index, self._count = name, index, count
        self._store, self._watch, self._number = store, watch, 0
        self.told: BaseException | None = None

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self._index == 0

    @property
    def index(self) -> int:
        """Of this process."""
        return self._index

    @property
    def count(self) -> int:
        """How many processes there are."""
        return self._count

    def exchange(self, value: Any) -> list[Any]:
        """What every process gives here, by process, as plain JSON values.

        Raises:
            PeerError: another process has failed meanwhile; the message names it.
        """
        if self._store is None:
            return [value]
        words = self._round([None, value])
        for process, (failure, _) in enumerate(words):
            if failure is not None:
                raise PeerError(f"process {process} cannot go on ({failure})")
        return [given for _, given in words]

    def decide(self, make: Callable[[], Any]) -> Any:
        """What process 0 makes of `make`, for all; the others do not call it.

        Raises:
            Exception: what `make` raised, at process 0. PeerError: at the others.
        """
        with self._telling():
            made = make() if self._index == 0 else None
        return self.exchange(made)[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Work of all processes, none of which goes on where one has failed.

        Raises:
            Exception: this process's own. PeerError: another process's.
        """
        with self._telling():
            yield
        self.exchange(None)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """An error in it is what this process gives in the next round, whatever that is for the others."""
        try:
            yield
        except Exception as error:
            # What another process has told is known to all.
            if self._store is not None and not isinstance(error, PeerError) and error is not self.told:
                self.told = error
                self._round([f"{type(error).__name__}: {error}", None])
            raise

    def _round(self, word: list[Any]) -> list[list[Any]]:
        assert self._store is not None
        self._number += 1
        here = f"{self._name}/{self._number}"
        if self._watch is not None:
            self._watch.advance()
        if self._index:
            self._send(f"{here}/{self._index}", json.dumps(word))
            return json.loads(self._receive(f"{here}/all"))
        words = [word, *(json.loads(self._receive(f"{here}/{other}")) for other in range(1, self._count))]
        text = json.dumps(words)
        self._send(f"{here}/all", text)
        # Whoever has sent its word now has read everything of the round before.
        self._store.key_value_delete(f"{self._name}/{self._number - 1}/")
        return json.loads(text)

    def _send(self, key: str, text: str) -> None:
        assert self._store is not None
        chunks = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
        for number, chunk in enumerate(chunks[1:], start=1):
            self._store.key_value_set(f"{key}+{number}", chunk)
        self._store.key_value_set(key, f"{len(chunks)} {chunks[0]}")

    def _receive(self, key: str) -> str:
        count, _, text = self._wait_for(key).partition(" ")
        return text + "".join(self._wait_for(f"{key}+{number}") for number in range(1, int(count)))

    def _wait_for(self, key: str) -> str:
        assert self._store is not None
        assert self._watch is not None
        while True:
            if self._watch.ended is not None:
                raise PeerError(self._watch.ended)
            try:
                return self._store.blocking_key_value_get(key, 1000 * _WAIT_SECONDS)
            except JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


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


#: Numbers of the runs of this Python process, the same in all processes that run them.
_numbers = itertools.count(1)


def start(config: DistributedConfig, environment: Mapping[str, str] | None = None) -> Processes:
    """Finds the other processes; has to come before the first device is opened.

    The configuration names them, or the launcher's variables do (SLURM, Open MPI, MPICH, an indexed job of
    Kubernetes), which `jax.distributed.initialize` reads itself. Without either there is one process.

    Raises:
        ProcessesError: the others did not come. ConfigError: the numbers do not fit together.
    """
    environment = os.environ if environment is None else environment
    by_hand = config.coordinator is not None
    if not by_hand and (config.processes == 1 or launcher(environment) is None):
        if not jax.distributed.is_initialized():
            return alone()
    elif not jax.distributed.is_initialized():
        _initialize(config, None if by_hand else launcher(environment))
    # `jax.process_count` would open the devices.
    from jax._src import distributed

    state = distributed.global_state
    if config.processes not in (None, state.num_processes):
        raise ConfigError(f"distributed.processes is {config.processes}, but there are {state.num_processes}")
    store = state.client if state.num_processes > 1 else None
    return Processes(
        state.process_id,
        state.num_processes,
        store,
        timeout_seconds=config.timeout_seconds,
        number=next(_numbers),
    )


def launcher(environment: Mapping[str, str]) -> str | None:
    """Who started several processes, by the variables that each leaves; None where nobody did."""
    for name, count, others in _LAUNCHERS:
        enough = count is None or (count in environment and int(environment[count]) > 1)
        if enough and all(variable in environment for variable in others):
            return name
    return None


#: Launcher, variable with the number of processes, and variables that are there besides.
_LAUNCHERS: Sequence[tuple[str, str | None, tuple[str, ...]]] = (
    ("slurm", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")),
    ("ompi", "OMPI_COMM_WORLD_SIZE", ()),
    ("mpi4py", "PMI_SIZE", ()),
    ("k8s", None, ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")),
)


def _initialize(config: DistributedConfig, found: str | None) -> None:
    # Signals are answered by `lazyjax.training.interrupt`, SIGTERM too.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.processes,
            config.process,
            cluster_detection_method="deactivate" if found is None else found,
            initialization_timeout=int(config.timeout_seconds),
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        where = config.coordinator or f"the coordinator that {found} names"
        raise ProcessesError(
            f"distributed: the processes did not come together at {where} within "
            f"{config.timeout_seconds:g} s ({' '.join(str(error).split())[:300]})"
        ) from error
