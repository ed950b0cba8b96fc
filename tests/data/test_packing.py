"""Plans of batches: every row once and whole, within capacity, deterministic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.data import packing
from lazyjax.data.split import permutation

CAPACITY = 24
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=80)


def _array(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int64)


@given(LENGTHS)
def test_packing_keeps_every_row_once_and_whole(lengths: list[int]) -> None:
    sequences = packing.pack(_array(lengths), CAPACITY)
    assert sorted(row for rows in sequences for row in rows) == list(range(len(lengths)))
    fills = [sum(lengths[row] for row in rows) for rows in sequences]
    assert all(0 < fill <= CAPACITY for fill in fills)
    assert sequences == packing.pack(_array(lengths), CAPACITY)
    # Best fit never leaves two sequences that fit into one: at most one is filled to half or less.
    assert sum(fill * 2 <= CAPACITY for fill in fills) <= 1


def test_packing_is_tight_on_real_lengths() -> None:
    lengths = np.random.default_rng(0).integers(40, 500, 2000)
    sequences = packing.pack(lengths, 1024)
    assert lengths.sum() / (len(sequences) * 1024) > 0.98


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="25 tokens does not fit into sequences of 24"):
        packing.pack(_array([3, 25]), CAPACITY)


@pytest.mark.parametrize(
    ("length", "settings", "expected"),
    [
        (1024, {}, (256, 512, 768, 1024)),
        (128, {}, (32, 64, 96, 128)),
        (160, {}, (64, 96, 128, 160)),
        (100, {}, (32, 64, 96, 100)),
        (20, {}, (20,)),
        (1000, {"count": 2, "multiple": 64}, (512, 1000)),
        (1000, {"count": 1}, (1000,)),
    ],
)
def test_bucket_lengths(length: int, settings: dict[str, int], expected: tuple[int, ...]) -> None:
    assert packing.bucket_lengths(length, **settings) == expected


@given(LENGTHS, st.integers(1, 7), st.integers(1, 4), st.booleans())
def test_every_plan_holds_every_row_once(lengths: list[int], rows: int, window: int, shuffle: bool) -> None:
    order = packing.order_rows(len(lengths), seed=3, epoch=1, shuffle=shuffle)
    key = (3, 1) if shuffle else None
    buckets = (8, 16, CAPACITY)
    plans = {
        "padded": packing.plan_padded(order, batch_rows=rows, sequence_length=CAPACITY),
        "bucketed": packing.plan_bucketed(
            order, _array(lengths), batch_rows=rows, buckets=buckets, window_batches=window, key=key
        ),
        "packed": packing.plan_packed(
            order, _array(lengths), batch_rows=rows, sequence_length=CAPACITY, window_batches=window, key=key
        ),
    }
    for name, batches in plans.items():
        held = [row for batch in batches for sequence in batch.sequences for row in sequence]
        assert sorted(held) == list(range(len(lengths))), name
        assert all(1 <= len(batch.sequences) <= rows for batch in batches)
        assert sum(len(batch.sequences) < rows for batch in batches) <= 1
        for batch in batches:
            fills = [sum(lengths[row] for row in sequence) for sequence in batch.sequences]
            assert max(fills) <= batch.length
            if name == "bucketed":
                assert batch.length == min(bucket for bucket in buckets if bucket >= max(fills))
                assert all(len(sequence) == 1 for sequence in batch.sequences)


def test_buckets_gather_rows_of_like_length() -> None:
    lengths = np.random.default_rng(1).integers(1, 1025, 4000)
    order = permutation(4000, 0)
    plans = packing.plan_bucketed(
        order,
        lengths,
        batch_rows=8,
        buckets=(256, 512, 768, 1024),
        window_batches=50,
        key=(0, 0),
    )
    padding = 1 - lengths.sum() / sum(plan.length * len(plan.sequences) for plan in plans)
    assert padding < 0.25  # all at 1024: 0.5
    # Shuffled inside the window: lengths come mixed, not sorted.
    first = [plan.length for plan in plans[:50]]
    assert first != sorted(first)
