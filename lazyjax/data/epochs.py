"""Which rows go together in the batches of an epoch, planned from their lengths, and the arrays of a batch.

A plan follows from settings, row lengths and the number of the epoch alone, so that an epoch can be planned
again anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, Int64, Integer

from lazyjax.batch import Batch
from lazyjax.data import mixture, packing
from lazyjax.data.tokens import TokenizedRows

Batching = Literal["padded", "bucketed", "packed"]
Partial = Literal["drop", "pad"]


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


class Epochs:
    """Plans of epochs; the one asked for last is remembered.

    Args:
        lengths_R: tokens of every row of the data set.
        indices_R: which of its rows to use.
        weights_R: how often an epoch meets each of these; None: once.
    """

    def __init__(
        self,
        lengths_R: Integer[np.ndarray, " all"],
        indices_R: Int64[np.ndarray, " R"],
        settings: Settings,
        weights_R: Float64[np.ndarray, " R"] | None,
    ) -> None:
        self._lengths_R, self._indices_R, self._weights_R = lengths_R, indices_R, weights_R
        self._settings = settings
        self._planned: _Epoch | None = None

    def plans(self, epoch: int) -> list[packing.BatchPlan]:
        """The batches of an epoch."""
        return self._plan(epoch).plans

    def fingerprint(self, epoch: int) -> str:
        """A digest of the order of an epoch."""
        return self._plan(epoch).fingerprint

    def rows(self, epoch: int) -> Int64[np.ndarray, " E"]:
        """The rows that an epoch meets, each as often as its weight says."""
        if self._weights_R is None:
            return self._indices_R
        return mixture.epoch_rows(self._indices_R, self._weights_R, seed=self._settings.seed, epoch=epoch)

    def _plan(self, epoch: int) -> _Epoch:
        if self._planned is None or self._planned.number != epoch:
            self._planned = _Epoch(epoch, self._make_plan(epoch))
        return self._planned

    def _make_plan(self, epoch: int) -> list[packing.BatchPlan]:
        settings = self._settings
        indices_E = self.rows(epoch)
        order = packing.order_rows(len(indices_E), seed=settings.seed, epoch=epoch, shuffle=settings.shuffle)
        order_E = indices_E[order]
        if settings.partial == "drop" and settings.batching != "packed":
            # Before sorting: the rows left out are then arbitrary ones, not the longest.
            order_E = order_E[: len(order_E) // settings.batch_rows * settings.batch_rows]
        plans = self._batches(order_E, (settings.seed, epoch) if settings.shuffle else None)
        if settings.partial == "drop":
            plans = [plan for plan in plans if len(plan.sequences) == settings.batch_rows]
        return plans

    def _batches(
        self, order_E: Int64[np.ndarray, " E"], key: tuple[int, int] | None
    ) -> list[packing.BatchPlan]:
        settings = self._settings
        rows, length, window = settings.batch_rows, settings.sequence_length, settings.window_batches
        match settings.batching:
            case "padded":
                return packing.plan_padded(order_E, batch_rows=rows, sequence_length=length)
            case "bucketed":
                return packing.plan_bucketed(
                    order_E,
                    self._lengths_R,
                    batch_rows=rows,
                    buckets=settings.lengths,
                    window_batches=window,
                    key=key,
                )
            case "packed":
                return packing.plan_packed(
                    order_E,
                    self._lengths_R,
                    batch_rows=rows,
                    sequence_length=length,
                    window_batches=window,
                    key=key,
                )


def fill(plan: packing.BatchPlan, rows: TokenizedRows, *, batch_rows: int, padding_token: int) -> Batch:
    """The arrays of a planned batch."""
    shape = batch_rows, plan.length
    tokens_BT = np.full(shape, padding_token, np.int32)
    targets_BT = np.full(shape, padding_token, np.int32)
    loss_mask_BT = np.zeros(shape, rows.response_N.dtype)
    segment_ids_BT = np.zeros(shape, np.int32)
    positions_BT = np.zeros(shape, np.int32)
    for line, sequence in enumerate(plan.sequences):
        start = 0
        for segment, index in enumerate(sequence, start=1):
            tokens_T, response_T = rows.row(index)
            stop = start + len(tokens_T)
            tokens_BT[line, start:stop] = tokens_T
            segment_ids_BT[line, start:stop] = segment
            positions_BT[line, start:stop] = np.arange(len(tokens_T), dtype=np.int32)
            # The row's last token has no target of its own row: it stays masked.
            targets_BT[line, start : stop - 1] = tokens_T[1:]
            loss_mask_BT[line, start : stop - 1] = response_T[1:]
            start = stop
    return Batch(tokens_BT, targets_BT, loss_mask_BT, segment_ids_BT, positions_BT)
