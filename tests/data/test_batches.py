"""From a configuration's data keys to batches, and the words about what became of every row."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.config import ConfigError, DataConfig, dump_config, load_config, with_absolute_paths
from lazyjax.data import chat
from lazyjax.data.batches import load_data_tokenizer, read_batches, read_sides
from lazyjax.data.mixture import epoch_rows, join
from lazyjax.data.sources import DataError
from tests.data.test_split import rows_of


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat.load_tokenizer()


def write(path: pathlib.Path, *lengths: int, extra: tuple[str, ...] = ()) -> str:
    """Rows whose responses have so many digits (one token each); around them are 10 tokens."""
    lines = [json.dumps({"query": "1", "response": "2" * length, "id": 3}) for length in lengths]
    path.write_text("\n".join([*lines, *extra]))
    return str(path)


def config(*words: str) -> DataConfig:
    fixed = ("--data.rows", "2", "--data.sequence-length", "30")
    return load_config(None, ["--model", "m", *fixed, *words]).data


def numbers(line: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", line)]


def test_every_row_is_accounted_for(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    name = write(tmp_path / "a.jsonl", *[4] * 20, 100, 100, extra=("nonsense", "{}"))
    keys = ("--data", name, "--data.bad-rows", "skip", "--data.too-long", "drop")
    batches = read_batches(config(*keys), tokenizer, 3)
    first, skipped, unused, epoch, evaluation = batches.report
    read, training, held_out, dropped, bad = (
        int(re.search(pattern, first)[1])  # type: ignore[index]
        for pattern in (r"(\d+) rows", r"(\d+) for tr", r"(\d+) held", r"(\d+) dropped", r"(\d+) skipped")
    )
    assert (read, dropped, bad) == (24, 2, 2)
    assert training + held_out + dropped + bad == read
    assert "data.train_fraction 0.7; 1 trains on all" in first
    assert "row 23 (line 23): invalid JSON" in skipped
    assert unused == "columns that nothing reads: id"
    assert numbers(epoch)[0] + (1 if "left out" in epoch else 0) == training
    assert evaluation == f"each evaluation: 3 of {held_out} held-out rows"
    cut = read_batches(config("--data", name, "--data.bad-rows", "skip"), tokenizer, 0)
    assert "; 2 of them truncated" in cut.report[0]
    assert cut.evaluation is None


def test_all_rows_train_with_one_key(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    name = write(tmp_path / "a.jsonl", *[4] * 10)
    batches = read_batches(config("--data", name, "--data.train-fraction", "1"), tokenizer, 5)
    assert batches.evaluation is None
    assert batches.report[0].endswith("10 rows read = 10 for training")


def test_a_validation_file(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    keys = ("--data", write(tmp_path / "a.jsonl", *[4] * 10))
    keys += ("--data.validation", write(tmp_path / "b.jsonl", *[7] * 6))
    batches = read_batches(config(*keys), tokenizer, 4)
    assert batches.report[0].endswith("a.jsonl: 10 rows read = 10 for training")
    assert any(line.endswith("b.jsonl: 6 rows read = 6 held out") for line in batches.report)
    assert batches.evaluation is not None
    assert batches.evaluation.describe().rows == 4
    assert batches.evaluation.describe().response_tokens == 4 * 8
    assert batches.training.describe().response_tokens == 10 * 5
    with pytest.raises(ConfigError, match="both hold rows out: leave one of them out"):
        config(*keys, "--data.train-fraction", "0.5")


def test_several_sources_with_weights(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    a, b = write(tmp_path / "a.jsonl", *[4] * 8), write(tmp_path / "b.jsonl", *[7] * 6)
    keys = f"[{a}, {{source: {b}, weight: 2.5, take: 4}}]"
    data = config("--data", keys, "--data.train-fraction", "1")
    sides = read_sides(data, tokenizer)
    assert [fate.training for fate in sides.fates] == [8, 4]
    assert sides.weights_R.tolist() == [1.0] * 8 + [2.5] * 4
    assert sides.rows.rows_read == 12
    batches = read_batches(data, tokenizer, 0)
    assert batches.training.describe().rows == 8 + 10
    lines = ["data:", "  sequence_length: 30", "  rows: 2", "  train_fraction: 1", "  source:"]
    lines += [f"    - {a}", f"    - source: {b}", "      weight: 2.5", "      take: 4"]
    (tmp_path / "c.yaml").write_text("\n".join(["model: {folder: m}", *lines]))
    assert load_config(tmp_path / "c.yaml").data == data


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "[a, {source: b, weigth: 2}]"), "data.source: item 2: weigth: .*source, weight, take"),
        (("--data", "[a, {weight: 2}]"), "item 2: source: Field required"),
        (("--data", "[a, {source: b, weight: 0}]"), "item 2: weight: Input should be greater than 0"),
        (("--data", "[a"), "is no list in YAML"),
        (("--data", "[]"), "must be a name, or a list"),
        (("--data", "[a, b]", "--data.take", "3"), "take belongs to each of several sources"),
        (("--data.take", "0"), "data.take: must be a number of rows from 1, or a share"),
        (("--data.take", "1.5"), "data.take: must be a number of rows from 1, or a share"),
        (("--data.take", "many"), "data.take: must be a number of rows from 1, or a share"),
    ],
)
def test_wrong_keys_are_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*words)


@pytest.mark.parametrize(("take", "rows"), [("5", 5), ("0.25", 5), ("1", 1), ("20", 20)])
def test_a_number_or_a_share_of_rows(tokenizer: Any, tmp_path: pathlib.Path, take: str, rows: int) -> None:
    name = write(tmp_path / "a.jsonl", *range(1, 21))
    keys = config("--data", name, "--data.take", take, "--data.train-fraction", "1")
    assert read_sides(keys, tokenizer).rows.rows_read == rows
    with pytest.raises(DataError, match="21 rows are to be taken, it has 20"):
        read_sides(config("--data", name, "--data.take", "21"), tokenizer)


def test_a_model_that_cannot_stop_is_warned_of(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    name = write(tmp_path / "a.jsonl", *[4] * 10)
    assert read_batches(config("--data", name), tokenizer, 0).warnings == ()
    template = "{% for m in messages %}{{ '# ' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
    (tmp_path / "endless.jinja").write_text(
        template + "{{ '# assistant\n' if add_generation_prompt else '' }}"
    )
    keys = config("--data", name, "--data.chat-template", str(tmp_path / "endless.jinja"))
    endless = load_data_tokenizer(keys, None)
    [warning] = read_batches(keys, endless, 0).warnings
    assert "no row ends with a special token" in warning
    bare = chat.load_tokenizer()
    bare.chat_template = None
    [warning] = read_batches(config("--data", name), bare, 0).warnings
    assert "no chat template" in warning


WEIGHTS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.75, 3.0]), min_size=1, max_size=40)


@given(WEIGHTS, st.integers(0, 5), st.data())
def test_weights_hand_shares_round(weights: list[float], seed: int, data: st.DataObject) -> None:
    weights_R = np.asarray(weights)
    indices_R = np.arange(100, 100 + len(weights))
    epochs = data.draw(st.integers(1, 9))
    met = np.zeros(len(weights), int)
    for epoch in range(epochs):
        rows = epoch_rows(indices_R, weights_R, seed=seed, epoch=epoch)
        assert (np.diff(rows) >= 0).all()
        counts = np.bincount(rows - 100, minlength=len(weights))
        assert (np.abs(counts - weights_R) < 1).all()
        met += counts
    for weight in set(weights):
        assert np.ptp(met[weights_R == weight]) <= 1


def test_joined_rows_are_the_rows() -> None:
    parts = [rows_of([3, 4, 2]), rows_of([5]), rows_of([2, 6], rows_read=4, source=[1, 3])]
    joined = join(parts)
    assert joined.source_R.tolist() == [0, 1, 2, 3, 5, 7]
    assert (joined.rows_read, joined.dropped, len(joined)) == (8, 2, 6)
    originals = [part.row(index) for part in parts for index in range(len(part))]
    for index, original in enumerate(originals):
        np.testing.assert_array_equal(joined.row(index).tokens_T, original.tokens_T)
        np.testing.assert_array_equal(joined.row(index).response_T, original.response_T)


def test_a_record_means_the_same_from_everywhere(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "v.jsonl", "t.jinja"):
        (tmp_path / name).write_text("")
    words = ["--model", "m", "--data", "[a.jsonl, {source: b.jsonl, weight: 2}, problems]"]
    words += ["--data.validation", "v.jsonl", "--data.chat-template", "t.jinja"]
    config = with_absolute_paths(load_config(None, words))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "config.yaml").write_text(dump_config(config))
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = load_config(tmp_path / "config.yaml").data
    assert again == config.data
    assert [one.source for one in again.sources] == [
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "b.jsonl"),
        "problems",
    ]
    assert [one.weight for one in again.sources] == [1, 2, 1]
    assert again.validation == str(tmp_path / "v.jsonl")
    assert again.chat_template == str(tmp_path / "t.jinja")


def test_weights_of_turns_reach_the_loss_mask(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    turns = [
        {"role": role, "content": content, "weight": weight} if weight else {"role": role, "content": content}
        for role, content, weight in (
            ("user", "1", None),
            ("assistant", "2", 0.5),
            ("user", "3", None),
            ("assistant", "4", 2),
        )
    ]
    plain = [{"role": "user", "content": "5"}, {"role": "assistant", "content": "6"}]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in (turns, plain)))
    keys = ("--data", str(path), "--data.train-fraction", "1", "--data.cache-folder", str(tmp_path / "cache"))
    for _ in range(2):  # made, then read from the cache
        [batch] = list(read_batches(config(*keys), tokenizer, 0).training.epoch_batches())
        assert batch.loss_mask_BT.dtype == np.float32
        # Two tokens a response: the digit and the token that ends the turn.
        assert sorted(batch.loss_mask_BT[batch.loss_mask_BT > 0].tolist()) == [0.5, 0.5, 1, 1, 2, 2]
        assert (batch.target_tokens, batch.target_weight) == (6, 7.0)
