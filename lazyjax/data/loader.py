"""Batches of one fixed number of sequences, in an order that can be saved and taken up again.

A loader plans an epoch from row lengths (`lazyjax.data.packing`) and fills in arrays batch by batch. Its
state is the epoch, the position in it, and fingerprints of everything that decides what comes next; a
state is only accepted where the same batches follow as when it was saved.

This module knows nothing about files, text or devices.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float64, Int64

from lazyjax.batch import Batch
from lazyjax.data import mixture, packing
from lazyjax.data.tokens import TokenizedRows

Batching = Literal["padded", "bucketed", "packed"]
Partial = Literal["drop", "pad"]
_STATE_VERSION = 1


class StateError(ValueError):
    """A saved position that does not belong to this data and these settings."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How rows become batches. Everything here, with the data, decides what a loader yields.

    Attributes:
        batch_rows: sequences of every batch (B).
        sequence_length: tokens of the longest sequence (T).
        batching: `padded` (one row a sequence, padded to sequence_length), `bucketed` (one row a sequence,
            rows of like length together, padded to the smallest bucket that holds them) or `packed` (several
            whole rows in one sequence, told apart by segment ids).
        seed: of the order.
        shuffle: a new order every epoch; otherwise the order of the data.
        partial: the last batch of an epoch, if rows run out: `drop` leaves its rows out (training; they
            are others in every epoch), `pad` fills it up with fully masked sequences (evaluation; also the
            paper's training, whose 3,841 steps of 72 rows cover all 276,499).
        buckets: sequence lengths of `bucketed`, increasing, the last one sequence_length; empty: four, evenly
            spaced (`packing.bucket_lengths`). The other modes use none.
        window_batches: rows of about so many batches are sorted or packed together: more wastes less
            padding, fewer mixes lengths better.
    """

    batch_rows: int
    sequence_length: int
    batching: Batching = "bucketed"
    seed: int = 42
    shuffle: bool = True
    partial: Partial = "drop"
    buckets: tuple[int, ...] = ()
    window_batches: int = 32

    def __post_init__(self) -> None:
        for name in ("batch_rows", "sequence_length", "window_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; must be at least 1")
        for name, allowed in (("batching", get_args(Batching)), ("partial", get_args(Partial))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if self.buckets and (
            list(self.buckets) != sorted(set(self.buckets))
            or self.buckets[0] < 1
            or self.buckets[-1] != self.sequence_length
        ):
            raise ValueError(
                f"buckets: {self.buckets}; must increase and end with sequence_length, {self.sequence_length}"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every sequence length that a batch can have: one compiled shape each."""
        if self.batching != "bucketed":
            return (self.sequence_length,)
        return self.buckets or packing.bucket_lengths(self.sequence_length)


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


@dataclasses.dataclass(frozen=True)
class _Epoch:
    """An epoch's batches before their arrays exist."""

    number: int
    plans: list[packing.BatchPlan]

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b()
        for plan in self.plans:
            digest.update(repr(plan).encode())
        return digest.hexdigest()[:32]


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
        self._indices_R = indices_R
        self._padding_token = padding_token
        # Equal orders for equal data, whether or not weights of 1 are given.
        self._weights_R = None if weights_R is None or (weights_R == 1).all() else weights_R
        self._lengths_R = rows.lengths_R
        self._data_fingerprint = _data_fingerprint(rows, indices_R, padding_token, self._weights_R)
        longest = int(self._lengths_R[indices_R].max(initial=0))
        if longest > settings.sequence_length:
            raise ValueError(f"a row of {longest} tokens exceeds sequence_length {settings.sequence_length}")
        self._planned: _Epoch | None = None
        self.epoch = 0
        self.position = 0
        if not self._plan(0):
            raise ValueError(
                f"{len(indices_R)} rows make no batch of {settings.batch_rows} sequences; "
                f"use fewer data.rows or more data"
            )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; goes on to the next epoch by itself."""
        while self.position >= len(self._plan(self.epoch)):
            self.epoch, self.position = self.epoch + 1, 0
        batch = self._fill(self._plan(self.epoch)[self.position])
        self.position += 1
        return batch

    def batches_in_epoch(self, epoch: int = 0) -> int:
        """Batches of an epoch (packed epochs may differ by a few)."""
        return len(self._plan(epoch))

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows in memory."""
        return self._rows.held_bytes

    @property
    def epochs_done(self) -> float:
        """How far training has come, in epochs."""
        return self.epoch + self.position / len(self._plan(self.epoch))

    def epoch_batches(self, epoch: int = 0) -> Iterator[Batch]:
        """All batches of an epoch; the loader's own position stays where it is."""
        for plan in self._plan(epoch):
            yield self._fill(plan)

    def epoch_rows(self, epoch: int = 0) -> list[tuple[packing.Sequence, ...]]:
        """Which rows each batch of an epoch holds: per batch and sequence, indices into the data set."""
        return [plan.sequences for plan in self._plan(epoch)]

    def describe(self, epoch: int = 0) -> EpochSummary:
        """Counts rows, tokens and padding of an epoch."""
        plans = self._plan(epoch)
        used_R = np.asarray([row for plan in plans for rows in plan.sequences for row in rows], np.int64)
        return EpochSummary(
            rows=len(used_R),
            left_out=len(self._epoch_rows(epoch)) - len(used_R),
            tokens=int(self._lengths_R[used_R].sum()),
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
            "order": self._order(self.epoch),
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
        batches = len(self._plan(epoch))
        if not 0 <= position <= batches:
            raise StateError(f"position {position} lies outside epoch {epoch} of {batches} batches")
        if state["order"] != self._order(epoch):
            raise StateError(f"the order of epoch {epoch} has changed since the position was saved")
        self.epoch, self.position = epoch, position

    def _plain_settings(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self.settings)
        return plain | {"buckets": list(self.settings.lengths)}

    def _plan(self, epoch: int) -> list[packing.BatchPlan]:
        """The epoch's batches; the last epoch asked for is remembered."""
        if self._planned is None or self._planned.number != epoch:
            self._planned = _Epoch(epoch, self._make_plan(epoch))
        return self._planned.plans

    def _order(self, epoch: int) -> str:
        """Fingerprint of an epoch's plan."""
        self._plan(epoch)
        assert self._planned is not None
        return self._planned.fingerprint

    def _make_plan(self, epoch: int) -> list[packing.BatchPlan]:
        settings = self.settings
        indices_E = self._epoch_rows(epoch)
        order = packing.order_rows(
            len(indices_E), seed=settings.seed, epoch=epoch, shuffle=settings.shuffle
        )
        order_R = indices_E[order]
        if settings.partial == "drop" and settings.batching != "packed":
            # Before sorting: the rows left out are then arbitrary ones, not the longest.
            order_R = order_R[: len(order_R) // settings.batch_rows * settings.batch_rows]
        key = (settings.seed, epoch) if settings.shuffle else None
        rows, length, window = settings.batch_rows, settings.sequence_length, settings.window_batches
        match settings.batching:
            case "padded":
                plans = packing.plan_padded(order_R, batch_rows=rows, sequence_length=length)
            case "bucketed":
                plans = packing.plan_bucketed(
                    order_R,
                    self._lengths_R,
                    batch_rows=rows,
                    buckets=settings.lengths,
                    window_batches=window,
                    key=key,
                )
            case "packed":
                plans = packing.plan_packed(
                    order_R,
                    self._lengths_R,
                    batch_rows=rows,
                    sequence_length=length,
                    window_batches=window,
                    key=key,
                )
        if settings.partial == "drop":
            plans = [plan for plan in plans if len(plan.sequences) == rows]
        return plans

    def _epoch_rows(self, epoch: int) -> Int64[np.ndarray, " E"]:
        """The rows that an epoch meets, each as often as its weight says."""
        if self._weights_R is None:
            return self._indices_R
        return mixture.epoch_rows(self._indices_R, self._weights_R, seed=self.settings.seed, epoch=epoch)

    def _fill(self, plan: packing.BatchPlan) -> Batch:
        """The arrays of a planned batch."""
        shape = self.settings.batch_rows, plan.length
        tokens_BT = np.full(shape, self._padding_token, np.int32)
        targets_BT = np.full(shape, self._padding_token, np.int32)
        loss_mask_BT = np.zeros(shape, self._rows.response_N.dtype)
        segment_ids_BT = np.zeros(shape, np.int32)
        positions_BT = np.zeros(shape, np.int32)
        for line, sequence in enumerate(plan.sequences):
            start = 0
            for segment, index in enumerate(sequence, start=1):
                tokens_T, response_T = self._rows.row(index)
                stop = start + len(tokens_T)
                tokens_BT[line, start:stop] = tokens_T
                segment_ids_BT[line, start:stop] = segment
                positions_BT[line, start:stop] = np.arange(len(tokens_T), dtype=np.int32)
                # The row's last token has no target of its own row: it stays masked.
                targets_BT[line, start : stop - 1] = tokens_T[1:]
                loss_mask_BT[line, start : stop - 1] = response_T[1:]
                start = stop
        return Batch(tokens_BT, targets_BT, loss_mask_BT, segment_ids_BT, positions_BT)


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
