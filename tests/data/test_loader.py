"""Batches: every row's tokens exactly, targets inside segments, positions that can be taken up again."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.batch import Batch
from lazyjax.data import packing
from lazyjax.data.loader import Loader, Settings, StateError
from lazyjax.data.tokens import TokenizedRows
from tests.data.test_split import rows_of

MODES = ("padded", "bucketed", "packed")
LENGTH = 24
LENGTHS = st.lists(st.integers(2, LENGTH), min_size=1, max_size=60)


def _settings(**changes: Any) -> Settings:
    settings = Settings(batch_rows=3, sequence_length=LENGTH, partial="pad", buckets=(8, 16, LENGTH))
    settings = dataclasses.replace(settings, window_batches=2)
    return dataclasses.replace(settings, **changes)


def _loader(rows: TokenizedRows, settings: Settings, indices: list[int] | None = None) -> Loader:
    chosen = np.arange(len(rows)) if indices is None else np.asarray(indices, np.int64)
    return Loader(rows, chosen, settings, padding_token=0)


def _key(batch: Batch) -> tuple[bytes, ...]:
    return tuple(getattr(batch, field.name).tobytes() for field in dataclasses.fields(batch))


def _segments(batch: Batch) -> list[tuple[int, slice]]:
    """(line, span) of each segment; also checks ids, order and padding."""
    found = []
    for line, ids_T in enumerate(batch.segment_ids_BT):
        count = int(ids_T.max())
        start = 0
        for segment in range(1, count + 1):
            stop = start + int((ids_T == segment).sum())
            assert (ids_T[start:stop] == segment).all()
            assert stop > start
            found.append((line, slice(start, stop)))
            start = stop
        assert (ids_T[start:] == 0).all()
        assert (batch.tokens_BT[line, start:] == 0).all()
        assert not batch.loss_mask_BT[line, start:].any()
        assert (batch.positions_BT[line, start:] == 0).all()
    return found


@pytest.mark.parametrize("batching", MODES)
@given(lengths=LENGTHS, shuffle=st.booleans(), most=st.sampled_from([1, 7, 512]))
def test_segment_lengths_are_those_of_batches(
    batching: str, lengths: list[int], shuffle: bool, most: int
) -> None:
    """Of all batches where they are few, else of batches spread over the epoch, in order."""
    loader = _loader(rows_of(lengths), _settings(batching=batching, shuffle=shuffle))
    batches = [
        [[int((ids_T == segment).sum()) for segment in range(1, ids_T.max() + 1)] for ids_T in rows_BT]
        for rows_BT in (batch.segment_ids_BT for batch in loader.epoch_batches())
    ]
    # The last batch may have fewer sequences of its own.
    batches = [[row for row in batch if row] for batch in batches]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_SAMPLED_SEQUENCES", most)
        found = loader.segment_lengths()
    count = min(len(batches), max(1, most // len(batches[0])))
    assert found == [batches[number * len(batches) // count] for number in range(count)]


@pytest.mark.parametrize("batching", MODES)
@given(lengths=LENGTHS, shuffle=st.booleans())
def test_batches_reproduce_every_row(batching: str, lengths: list[int], shuffle: bool) -> None:
    rows = rows_of(lengths)
    loader = _loader(rows, _settings(batching=batching, shuffle=shuffle))
    seen: collections.Counter[tuple[int, ...]] = collections.Counter()
    learned = 0
    for batch in loader.epoch_batches():
        assert batch.tokens_BT.shape[0] == 3
        assert batch.sequence_length in loader.settings.lengths
        for line, span in _segments(batch):
            tokens_T = batch.tokens_BT[line, span]
            seen[tuple(tokens_T.tolist())] += 1
            index = int(np.searchsorted(rows.starts_S, tokens_T[0] - 1))
            row_T, response_T = rows.row(index)
            np.testing.assert_array_equal(tokens_T, row_T)
            np.testing.assert_array_equal(batch.positions_BT[line, span], np.arange(len(row_T)))
            np.testing.assert_array_equal(batch.targets_BT[line, span][:-1], row_T[1:])
            np.testing.assert_array_equal(batch.loss_mask_BT[line, span], [*response_T[1:], False])
            learned += int(response_T[1:].sum())
            if batching != "packed":
                assert span.start == 0
    assert seen == collections.Counter(tuple(rows.row(index)[0].tolist()) for index in range(len(rows)))
    assert learned == sum(batch.target_tokens for batch in loader.epoch_batches())


@pytest.mark.parametrize("batching", MODES)
@given(lengths=LENGTHS, data=st.data())
def test_a_restored_loader_goes_on_exactly(batching: str, lengths: list[int], data: st.DataObject) -> None:
    rows = rows_of(lengths)
    settings = _settings(batching=batching, partial=data.draw(st.sampled_from(["pad", "drop"])))
    try:
        loader = _loader(rows, settings)
    except ValueError:  # too few rows for one batch
        return
    steps = data.draw(st.integers(0, 3 * loader.batches_in_epoch()))
    for _ in range(steps):
        next(loader)
    saved = json.loads(json.dumps(loader.state()))
    following = [_key(batch) for batch in itertools.islice(loader, 2 * loader.batches_in_epoch() + 1)]
    other = _loader(rows, settings)
    for _ in range(data.draw(st.integers(0, 5))):
        next(other)
    other.restore(saved)
    assert other.state() == saved
    assert [_key(batch) for batch in itertools.islice(other, len(following))] == following


def test_epochs_follow_each_other_in_other_orders() -> None:
    rows = rows_of([4, 9, 9, 17, 5, 6, 21, 2, 3, 10, 11, 12])
    for batching in MODES:
        loader = _loader(rows, _settings(batching=batching))
        first, second = list(loader.epoch_batches(0)), list(loader.epoch_batches(1))
        stream = [_key(batch) for batch in itertools.islice(loader, len(first) + len(second))]
        assert stream == [_key(batch) for batch in first + second]
        assert {*stream[: len(first)]} != {*stream[len(first) :]}
        assert loader.epochs_done == 2.0
        plain = _loader(rows, _settings(batching=batching, shuffle=False))
        assert list(map(_key, plain.epoch_batches(0))) == list(map(_key, plain.epoch_batches(1)))


def test_an_epoch_in_between_leaves_the_position() -> None:
    loader = _loader(rows_of([5] * 20), _settings())
    next(loader)
    state = loader.state()
    list(loader.epoch_batches(3))
    assert loader.state() == state


def test_the_partial_batch_is_dropped_or_padded() -> None:
    rows = rows_of([5, 6, 7, 8, 9, 10, 11])
    for batching in ("padded", "bucketed"):
        dropped = _loader(rows, _settings(batching=batching, partial="drop"))
        assert dropped.batches_in_epoch() == 2
        assert dropped.describe().left_out == 1
        # Not always the longest: over many epochs every row is met.
        met = {
            row
            for epoch in range(30)
            for batch in dropped.epoch_rows(epoch)
            for rows in batch
            for row in rows
        }
        assert met == set(range(7))
        padded = list(_loader(rows, _settings(batching=batching)).epoch_batches())
        assert sum(int((batch.segment_ids_BT[:, 0] > 0).sum()) for batch in padded) == 7
        [last] = [batch for batch in padded if not batch.segment_ids_BT.any(axis=1).all()]
        assert not last.loss_mask_BT[1:].any()
        assert last.target_tokens > 0


def test_only_the_chosen_rows_are_used() -> None:
    rows = rows_of([5, 6, 7, 8, 9, 10, 11])
    for batching in MODES:
        held = _loader(rows, _settings(batching=batching), [1, 4, 6]).epoch_rows()
        assert sorted(row for batch in held for sequence in batch for row in sequence) == [1, 4, 6]


def test_the_summary_counts_what_the_batches_hold() -> None:
    rows = rows_of([4, 9, 9, 17, 5, 6, 21, 2, 3, 10], rows_read=12)
    # A plain text is learned whole; the first token of each row still has nothing to predict it from.
    rows = dataclasses.replace(rows, response_N=rows.response_N | (np.arange(len(rows.tokens_N)) < 30))
    for batching, partial in itertools.product(MODES, ("drop", "pad")):
        loader = _loader(rows, _settings(batching=batching, partial=partial))
        batches = list(loader.epoch_batches())
        summary = loader.describe()
        real = sum(batch.real_tokens for batch in batches)
        slots = sum(batch.tokens_BT.size for batch in batches)
        assert summary.tokens == real
        assert summary.response_tokens == sum(batch.target_tokens for batch in batches)
        assert summary.padding_share == pytest.approx(1 - real / slots)
        assert summary.batches == collections.Counter(batch.sequence_length for batch in batches)
        assert summary.rows + summary.left_out == 10
        assert ("left out" in str(summary)) == (summary.left_out > 0)


@pytest.mark.parametrize("batching", MODES)
def test_rows_are_met_as_often_as_they_weigh(batching: str) -> None:
    rows = rows_of([5] * 20)
    weights_R = np.repeat([2.0, 0.5, 1.25, 1.0], 5)
    loader = Loader(
        rows,
        np.arange(20),
        _settings(batching=batching, batch_rows=1),
        padding_token=0,
        weights_R=weights_R,
    )
    met = np.zeros(20, int)
    for epoch in range(4):
        used = [row for batch in loader.epoch_rows(epoch) for rows_ in batch for row in rows_]
        assert len(used) == loader.describe(epoch).rows == 10 + 2 + 6 + 5
        met += np.bincount(used, minlength=20)
    assert met[:5].tolist() == [8] * 5
    assert met[15:].tolist() == [4] * 5
    # Shares of rows are handed round: over four epochs no row is more than one ahead.
    assert np.ptp(met[5:10]) <= 1
    assert np.ptp(met[10:15]) <= 1
    plain = _loader(rows, _settings(batching=batching, batch_rows=1))
    assert plain.state()["data"] != loader.state()["data"]


def test_packing_and_buckets_save_padding() -> None:
    rows = rows_of(np.random.default_rng(0).integers(2, LENGTH + 1, 600).tolist())
    share = {}
    for batching in MODES:
        settings = _settings(batching=batching, batch_rows=8, window_batches=8)
        share[batching] = _loader(rows, settings).describe().padding_share
    assert share["padded"] > 0.4
    assert share["bucketed"] < 0.25
    assert share["packed"] < 0.08


ROWS = rows_of([4, 9, 9, 17, 5, 6, 21, 2, 3, 10])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 43}, "other settings: seed was 42, is 43"),
        ({"batch_rows": 2}, "batch_rows was 3, is 2"),
        ({"batching": "packed", "buckets": ()}, "batching was 'bucketed', is 'packed', buckets was"),
        ({"window_batches": 3}, "window_batches was 2, is 3"),
        ({"buckets": (LENGTH,)}, r"buckets was \[8, 16, 24\], is \[24\]"),
        ({"partial": "drop"}, "partial was 'pad', is 'drop'"),
    ],
)
def test_a_state_of_other_settings_is_refused(changes: dict[str, Any], message: str) -> None:
    saved = _loader(ROWS, _settings()).state()
    other = _loader(ROWS, _settings(**changes))
    next(other)
    before = other.state()
    with pytest.raises(StateError, match=message):
        other.restore(saved)
    assert other.state() == before


def test_a_state_of_other_data_is_refused() -> None:
    saved = _loader(ROWS, _settings()).state()
    for other in (
        _loader(ROWS, _settings(), list(range(9))),
        _loader(rows_of([4, 9, 9, 17, 5, 6, 21, 2, 10, 3]), _settings()),
        Loader(ROWS, np.arange(10), _settings(), padding_token=1),
    ):
        with pytest.raises(StateError, match="saved with other data"):
            other.restore(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2; this version reads 1"),
        ({"epoch": -1}, "must be whole numbers from 0"),
        ({"epoch": 1.5}, "must be whole numbers from 0"),
        ({"position": 99}, "position 99 lies outside epoch 0"),
        ({"position": -1}, "position -1 lies outside epoch 0"),
        ({"epoch": 1}, "order of epoch 1 has changed"),
        ({"order": "x"}, "order of epoch 0 has changed"),
        ({"settings": {}}, "saved with other settings: expected batch_rows"),
        ({"extra": 1}, "a data position has keys"),
    ],
)
def test_a_damaged_state_is_refused(changes: dict[str, Any], message: str) -> None:
    loader = _loader(ROWS, _settings())
    next(loader)
    before = copy.deepcopy(loader.state())
    with pytest.raises(StateError, match=message):
        loader.restore(before | changes)
    assert loader.state() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_rows": 0}, "batch_rows: 0; must be at least 1"),
        ({"buckets": (8, 16)}, "must increase and end with sequence_length, 24"),
        ({"buckets": (16, 8, 24)}, "must increase"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _settings(**changes)


def test_rows_that_cannot_be_batched_are_refused() -> None:
    with pytest.raises(ValueError, match="a row of 21 tokens exceeds sequence_length 20"):
        _loader(ROWS, _settings(sequence_length=20, buckets=()))
    with pytest.raises(ValueError, match="10 rows make no batch of 11 sequences"):
        _loader(ROWS, _settings(batch_rows=11, partial="drop"))
    with pytest.raises(ValueError, match="0 rows make no batch"):
        _loader(ROWS, _settings(), [])
