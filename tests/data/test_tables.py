"""Parquet, Arrow and saved data sets: read through `datasets` where it is installed, named where not."""

from __future__ import annotations

import pathlib
import sys
import types
from typing import Any

import pytest

from lazyjax.data import sources
from lazyjax.data.sources import DataError, open_source

ROW = {"query": "1 + 1?", "response": "2"}


class Rows(list):
    _fingerprint = "abc"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A module in place of `datasets` that notes how it is called."""
    calls: list[Any] = []

    def load_dataset(builder: str, *, data_files: list[str], split: str) -> Rows:
        calls.append((builder, [pathlib.Path(file).name for file in data_files], split))
        if builder == "arrow":
            raise OSError("not an Arrow file")
        return Rows([ROW, {"query": "x"}])

    def load_from_disk(path: str) -> dict[str, Rows]:
        return {"train": Rows([ROW]), "test": Rows([ROW, ROW])}

    module = types.SimpleNamespace(load_dataset=load_dataset, load_from_disk=load_from_disk)
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_files_and_folders(stand_in: list[Any], tmp_path: pathlib.Path) -> None:
    (tmp_path / "one.parquet").write_bytes(b"x")
    rows = list(open_source(str(tmp_path / "one.parquet")).rows())
    assert rows[0].messages[1].content == "2"
    assert "one.parquet, row 2: missing key 'response'" in rows[1].reason
    (tmp_path / "set").mkdir()
    for name in ("train-00000.parquet", "train-00001.parquet", "test-00000.parquet", "README.md"):
        (tmp_path / "set" / name).write_bytes(b"x")
    open_source(str(tmp_path / "set"))
    open_source(str(tmp_path / "set"), split="test")
    assert [call[1:] for call in stand_in[-2:]] == [
        (["train-00000.parquet", "train-00001.parquet"], "train"),
        (["test-00000.parquet"], "train"),
    ]
    (tmp_path / "broken.arrow").write_bytes(b"x")
    with pytest.raises(DataError, match=r"broken\.arrow: cannot be read as arrow: not an Arrow file"):
        open_source(str(tmp_path / "broken.arrow"))


def test_saved_data_sets(stand_in: list[Any], tmp_path: pathlib.Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert len(list(open_source(str(tmp_path), split="test").rows())) == 2
    with pytest.raises(DataError, match=r"has no split 'dev' \(data\.hub_split\); found train, test"):
        open_source(str(tmp_path), split="dev")


def test_without_the_package_it_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.parquet").write_bytes(b"x")
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"one\.parquet.*need the `datasets` package.*lazyjax\[hub\]"):
        open_source(str(tmp_path / "one.parquet"))


def test_the_library_itself(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    turns = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}],
        [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "weight": None}],
    ]
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"messages": turns, "id": [1, 2]}), str(tmp_path / "rows.parquet")
    )
    table = datasets.load_dataset(
        "parquet", data_files=[str(tmp_path / "rows.parquet")], split="train", cache_dir=str(tmp_path / "c")
    )
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "splits"))
    [arrow] = (tmp_path / "saved").glob("*.arrow")
    for name in (tmp_path / "rows.parquet", tmp_path / "saved", tmp_path / "splits", arrow):
        source = open_source(str(name))
        unused: set[str] = set()
        rows = list(source.rows(unused))
        assert [row.messages[1].content for row in rows] == ["b", "d"], name
        assert unused == {"id"}
        assert source.fingerprint == open_source(str(name)).fingerprint
