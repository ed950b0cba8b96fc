"""The key-value store of JAX's coordination service, in memory: processes are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax.errors import JaxRuntimeError

from lazyjax.distributed.channel import Channel
from lazyjax.distributed.watch import Watch


class MemoryStore:
    """Waits as the service does; `fails` makes every call fail, as where the coordinator is gone."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.fails = False
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._check()
        with self._changed:
            assert allow_overwrite or key not in self.values, key
            self.values[key] = value
            self._changed.notify_all()

    def key_value_delete(self, key: str) -> None:
        self._check()
        with self._changed:
            self.values = {name: value for name, value in self.values.items() if not name.startswith(key)}

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self._check()
        with self._changed:
            return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        self._check()
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise JaxRuntimeError("DEADLINE_EXCEEDED: nobody has set it")
            return self.values[key]

    def _check(self) -> None:
        if self.fails:
            raise JaxRuntimeError("UNAVAILABLE: no coordinator")


def channels(count: int, name: str = "main", store: MemoryStore | None = None) -> list[Channel]:
    """One for each process."""
    store = store or MemoryStore()
    watch = Watch(store, "watch", 0, count, timeout_seconds=1.0)
    return [Channel(name, index, count, store, watch) for index in range(count)]


def in_processes(count: int, work: Callable[[int], Any]) -> Sequence[Any]:
    """What `work` gives, or raises, in each of so many processes that run at the same time."""

    def guarded(index: int) -> Any:
        try:
            return work(index)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(guarded, range(count)))
