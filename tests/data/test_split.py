"""Splits and orders from seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.data.order import permutation
from lazyjax.data.split import sample_rows, split_counts, split_rows
from lazyjax.data.tokens import TokenizedRows


def rows_of(
    lengths: list[int], *, rows_read: int | None = None, source: list[int] | None = None
) -> TokenizedRows:
    """Rows of so many tokens, all different; the second half of each is its response."""
    starts_S = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    within_N = np.concatenate([np.arange(length) * 2 >= length for length in lengths] or [np.zeros(0, bool)])
    return TokenizedRows(
        tokens_N=np.arange(1, starts_S[-1] + 1, dtype=np.int32),
        response_N=within_N,
        starts_S=starts_S,
        source_R=np.arange(len(lengths)) if source is None else np.asarray(source, np.int64),
        rows_read=len(lengths) if rows_read is None else rows_read,
        truncated=0,
        dropped=0 if rows_read is None else rows_read - len(lengths),
    )


@given(st.integers(0, 300), st.lists(st.integers(0, 2**63), max_size=3))
def test_a_permutation_holds_every_number_once(count: int, key: list[int]) -> None:
    assert sorted(permutation(count, *key).tolist()) == list(range(count))


def test_permutations_never_change() -> None:
    assert permutation(8, 42).tolist() == RECORDED
    assert (
        len({tuple(permutation(20, seed, epoch).tolist()) for seed in range(10) for epoch in range(10)})
        == 100
    )


#: What every version must give: a run that is taken up again relies on it.
RECORDED = [3, 5, 6, 0, 2, 4, 7, 1]


def test_permutations_are_uniform() -> None:
    places = np.stack([permutation(10, seed) for seed in range(4000)])
    counts = np.stack([np.bincount(column, minlength=10) for column in places.T])
    # Binomial with mean 400 and standard deviation 19.
    assert np.abs(counts - 400).max() < 5 * 19


def test_counts_are_those_of_the_paper() -> None:
    assert split_counts(395_000, 0.7) == (276_499, 118_501)
    assert split_counts(10, 0.5) == (5, 5)
    assert split_counts(10, 1.0) == (10, 0)


@pytest.mark.parametrize(("rows", "fraction"), [(10, 0.0), (10, -1.0), (10, 1.1), (1, 0.5), (0, 0.5)])
def test_impossible_fractions_are_refused(rows: int, fraction: float) -> None:
    with pytest.raises(ValueError, match="train_fraction"):
        split_counts(rows, fraction)


@given(st.integers(2, 200), st.integers(0, 9), st.floats(0.1, 1.0))
def test_every_row_is_on_one_side(count: int, seed: int, fraction: float) -> None:
    rows = rows_of([2] * count)
    if round((1 - fraction) * count + 0.5) >= count:
        return
    train, evaluate = split_rows(rows, train_fraction=fraction, seed=seed)
    assert sorted([*train.tolist(), *evaluate.tolist()]) == list(range(count))
    assert (len(train), len(evaluate)) == split_counts(count, fraction)


def test_sides_depend_on_the_seed_and_not_on_dropped_rows() -> None:
    whole = rows_of([2] * 100)
    train, evaluate = split_rows(whole, train_fraction=0.7, seed=1)
    assert train.tolist() != split_rows(whole, train_fraction=0.7, seed=2)[0].tolist()
    kept = [number for number in range(100) if number % 3]
    fewer = rows_of([2] * len(kept), rows_read=100, source=kept)
    fewer_train, fewer_evaluate = split_rows(fewer, train_fraction=0.7, seed=1)
    assert [kept[index] for index in fewer_train] == [row for row in train.tolist() if row % 3]
    assert [kept[index] for index in fewer_evaluate] == [row for row in evaluate.tolist() if row % 3]


def test_a_sample_keeps_the_order() -> None:
    indices = np.asarray([5, 9, 11, 40, 41], np.int64)
    sample = sample_rows(indices, 3, seed=0).tolist()
    assert len(sample) == 3
    assert sample == sorted(sample)
    assert set(sample) <= set(indices.tolist())
    assert sample_rows(indices, 9, seed=0).tolist() == indices.tolist()
    assert len({tuple(sample_rows(indices, 3, seed=seed).tolist()) for seed in range(30)}) > 5
    with pytest.raises(ValueError, match="count: 0"):
        sample_rows(indices, 0, seed=0)
