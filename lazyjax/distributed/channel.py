"""Common decisions of several processes, through the key-value store of JAX's coordination service.

Devices talk through the collectives that XLA puts into kernels. What steers a run (is it to stop, did
something fail, which plan) goes another way, so that it never mixes with them, whichever thread decides.

All processes call the functions of one channel in the same order. Each thread that decides something has a
channel of its own. With one process every function answers at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from jax.errors import JaxRuntimeError

from lazyjax.distributed.watch import Store, Watch

#: Seconds that one wait for another process's word lasts before it is begun again. Who does not come at all
#: is `Watch`'s business.
_WAIT_SECONDS = 20
#: Characters of one value of the store; longer ones are sent in chunks (a gRPC message holds 4 MiB).
_CHUNK = 2**20


class PeerError(RuntimeError):
    """Another process cannot go on, so this one does not either; the message names it."""


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
