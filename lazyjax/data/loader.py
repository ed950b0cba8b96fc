"""Batches of one fixed number of sequences, in an order that can be saved and taken up again.

A loader has an epoch planned (`lazyjax.data.epochs`) and fills in arrays batch by batch. Its
state is the epoch, the position in it, and fingerprints of everything that decides what comes next; a
state is only accepted where the same batches follow as when it was saved.

This module knows nothing about files, text or devices.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from lazyjax.batch import Batch
from lazyjax.data import packing
from lazyjax.data.epochs import Batching, Epochs, Partial, Settings, fill
from lazyjax.data.tokens import TokenizedRows

__all__ = ["Batching", "EpochSummary", "Loader", "Partial", "Settings", "StateError"]

_STATE_VERSION = 1


class StateError(ValueError):
    """A saved position that does not belong to this data and these settings."""


@dataclasses.dataclass(frozen=True, slots=True)
class EpochSummary:
    """The contents of one epoch, counted before any batch is made.

    Attributes:
        rows: rows in its batches, each as often as it is met.
        left_out: rows that the last, partial batch would have held (`drop`).
        tokens, response_tokens: of those rows.
        slots: tokens of its batches, with padding.
        batches: number of batches, by sequence length.
    """

    rows: int
    left_out: int
    tokens: int
    response_tokens: int
    slots: int
    batches: Mapping[int, int]

    @property
    def padding_share(self) -> float:
        """Share of the batches' tokens that is padding, 0 to 1."""
        return 1 - self.tokens / self.slots if self.slots else 0.0

    def __str__(self) -> str:
        shapes = ", ".join(f"{count} of length {length}" for length, count in sorted(self.batches.items()))
        text = (
            f"{self.rows:,} rows, {self.tokens:,} tokens ({self.response_tokens:,} to learn from), "
            f"{sum(self.batches.values()):,} batches ({shapes}), {self.padding_share:.1%} padding"
        )
        return text + (f"; {self.left_out:,} rows left out with the last batch" if self.left_out else "")


class Loader:
    """Endless batches over some rows of a data set, epoch after epoch.

    Iterate for training; `epoch_batches` gives one epoch without moving the position. Planning an epoch takes
    a few seconds for 400,000 rows and happens when its first batch is asked for.
    """

    def __init__(
        self,
        rows: TokenizedRows,
        indices_R: Int64[np.ndarray, " R"],
        settings: Settings,
        *,
        padding_token: int,
        weights_R: Float64[np.ndarray, " R"] | None = None,
    ) -> None:
        """Args:
            rows: the data set.
            indices_R: which of its rows to use (`split_rows`).
            settings: how they become batches.
            padding_token: id that fills padding; it is never attended to nor learned.
            weights_R: how often an epoch meets each of the rows (`lazyjax.data.mixture`); by default once.

        Raises ValueError for a row longer than `settings.sequence_length`, or for no batch in an epoch.
        """
        self.settings = settings
        self._rows = rows
        self._padding_token = padding_token
        # Equal orders for equal data, whether or not weights of 1 are given.
        weights_R = None if weights_R is None or (weights_R == 1).all() else weights_R
        self._epochs = Epochs(rows.lengths_R, indices_R, settings, weights_R)
        self._data_fingerprint = _data_fingerprint(rows, indices_R, padding_token, weights_R)
        longest = int(rows.lengths_R[indices_R].max(initial=0))
        if longest > settings.sequence_length:
            raise ValueError(f"a row of {longest} tokens exceeds sequence_length {settings.sequence_length}")
        self.epoch = 0
        self.position = 0
        if not self._epochs.plans(0):
            raise ValueError(
                f"{len(indices_R)} rows make no batch of {settings.batch_rows} sequences; "
                f"use fewer data.rows or more data"
            )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; goes on to the next epoch by itself."""
        while self.position >= len(self._epochs.plans(self.epoch)):
            self.epoch, self.position = self.epoch + 1, 0
        batch = self._batch(self._epochs.plans(self.epoch)[self.position])
        self.position += 1
        return batch

    def batches_in_epoch(self, epoch: int = 0) -> int:
        """Batches of an epoch (packed epochs may differ by a few)."""
        return len(self._epochs.plans(epoch))

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows in memory."""
        return self._rows.held_bytes

    @property
    def epochs_done(self) -> float:
        """How far training has come, in epochs."""
        return self.epoch + self.position / len(self._epochs.plans(self.epoch))

    def epoch_batches(self, epoch: int = 0) -> Iterator[Batch]:
        """All batches of an epoch; the loader's own position stays where it is."""
        for plan in self._epochs.plans(epoch):
            yield self._batch(plan)

    def epoch_rows(self, epoch: int = 0) -> list[tuple[packing.Sequence, ...]]:
        """Which rows each batch of an epoch holds: per batch and sequence, indices into the data set."""
        return [plan.sequences for plan in self._epochs.plans(epoch)]

    def segment_lengths(self, epoch: int = 0) -> list[list[list[int]]]:
        """Tokens of every segment in a sample of an epoch's batches: by batch, sequence and segment."""
        lengths_R = self._rows.lengths_R
        return [
            [[int(lengths_R[row]) for row in sequence] for sequence in plan.sequences]
            for plan in packing.sample(self._epochs.plans(epoch))
        ]

    def describe(self, epoch: int = 0) -> EpochSummary:
        """Counts rows, tokens and padding of an epoch."""
        plans = self._epochs.plans(epoch)
        used_R = np.asarray([row for plan in plans for rows in plan.sequences for row in rows], np.int64)
        return EpochSummary(
            rows=len(used_R),
            left_out=len(self._epochs.rows(epoch)) - len(used_R),
            tokens=int(self._rows.lengths_R[used_R].sum()),
            response_tokens=int(self._rows.learned_R[used_R].sum()),
            slots=sum(plan.length * self.settings.batch_rows for plan in plans),
            batches=dict(collections.Counter(plan.length for plan in plans)),
        )

    def state(self) -> dict[str, Any]:
        """The position, as plain JSON values; `restore` takes it."""
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "order": self._epochs.fingerprint(self.epoch),
            "data": self._data_fingerprint,
            "settings": self._plain_settings(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position: the batches that follow are exactly those that followed it.

        Raises StateError, and stays where it is, when the state was saved with other data or settings.
        """
        expected = self.state()
        if state.keys() != expected.keys():
            raise StateError(
                f"a data position has keys {', '.join(expected)}; found {', '.join(map(str, state))}"
            )
        if state["version"] != _STATE_VERSION:
            raise StateError(
                f"data position of version {state['version']}; this version reads {_STATE_VERSION}"
            )
        if state["settings"] != expected["settings"]:
            raise StateError(
                f"saved with other settings: {_differences(state['settings'], expected['settings'])}"
            )
        if state["data"] != expected["data"]:
            raise StateError("saved with other data: the rows, their tokens or the split have changed")
        epoch, position = state["epoch"], state["position"]
        if type(epoch) is not int or type(position) is not int or epoch < 0:
            raise StateError(f"epoch {epoch!r} and position {position!r} must be whole numbers from 0")
        batches = len(self._epochs.plans(epoch))
        if not 0 <= position <= batches:
            raise StateError(f"position {position} lies outside epoch {epoch} of {batches} batches")
        if state["order"] != self._epochs.fingerprint(epoch):
            raise StateError(f"the order of epoch {epoch} has changed since the position was saved")
        self.epoch, self.position = epoch, position

    def _plain_settings(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self.settings)
        return plain | {"buckets": list(self.settings.lengths)}

    def _batch(self, plan: packing.BatchPlan) -> Batch:
        return fill(plan, self._rows, batch_rows=self.settings.batch_rows, padding_token=self._padding_token)


def _data_fingerprint(
    rows: TokenizedRows,
    indices_R: Int64[np.ndarray, " R"],
    padding_token: int,
    weights_R: Float64[np.ndarray, " R"] | None,
) -> str:
    digest = hashlib.blake2b(f"{rows.fingerprint}/{padding_token}/".encode())
    digest.update(np.ascontiguousarray(indices_R).data)
    if weights_R is not None:
        digest.update(np.ascontiguousarray(weights_R).data)
    return digest.hexdigest()[:32]


def _differences(saved: Any, current: Mapping[str, Any]) -> str:
    """The settings that differ, in words."""
    if not isinstance(saved, Mapping) or saved.keys() != current.keys():
        return f"expected {', '.join(current)}, found {saved!r}"
    changed = [name for name in current if saved[name] != current[name]]
    return ", ".join(f"{name} was {saved[name]!r}, is {current[name]!r}" for name in changed)
