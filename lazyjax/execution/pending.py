"""Work that was issued and is not known to be done: arrays on their way, or a host thread's task."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, slots=True)
class Arrays:
    """Device or pinned host arrays that a dispatched kernel or copy will fill."""

    values: Any

    def wait(self) -> None:
        """Returns when all of them are there; raises what the device raised."""
        jax.block_until_ready(self.values)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Something that a host thread does."""

    future: Future[None]

    def wait(self) -> None:
        """Returns when it is done; raises what it raised."""
        self.future.result()


Pending = Arrays | Task
