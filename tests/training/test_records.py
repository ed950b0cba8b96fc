"""Records wait for a disk, they do not stop a run."""

from __future__ import annotations

import errno
import itertools
import json
import os

import pytest
from tensorboardX.proto.event_pb2 import Event

from lazyjax.training import records
from lazyjax.training.metrics import EvaluationMetrics, MetricsLog, read_records
from lazyjax.training.records import AppendedFile, replace_file, write_somewhere
from tests.training.test_loop import KnownExecutor, make_trainer
from tests.training.test_loop import records as records_of


class Disk:
    """Full for a while: a write then takes a few bytes, and the next one none."""

    def __init__(self, monkeypatch) -> None:
        self.full = False
        self._writes = itertools.count()
        write = os.write

        def maybe(descriptor: int, content: bytes) -> int:
            if not self.full:
                return write(descriptor, content)
            if next(self._writes) % 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, bytes(content[:3]))

        monkeypatch.setattr(records.os, "write", maybe)


def test_entries_wait_for_room_and_come_whole_and_in_order(tmp_path, monkeypatch) -> None:
    disk, said = Disk(monkeypatch), list[str]()
    file = AppendedFile(tmp_path / "deep" / "log", said.append)
    file.add(b"first\n")
    disk.full = True
    for entry in (b"second\n", b"third\n", b"fourth\n"):
        file.add(entry)
    assert (tmp_path / "deep" / "log").read_bytes() == b"first\n"
    assert (file.position, file.waiting) == (6, (b"second\n", b"third\n", b"fourth\n"))
    assert len(said) == 1
    assert "cannot be written (No space left on device)" in said[0]
    disk.full = False
    file.add(b"fifth\n")
    file.close()
    assert (tmp_path / "deep" / "log").read_bytes() == b"first\nsecond\nthird\nfourth\nfifth\n"
    assert len(said) == 2
    assert "written again" in said[1]


def test_what_is_lost_at_the_end_is_said(tmp_path, monkeypatch) -> None:
    disk, said = Disk(monkeypatch), list[str]()
    file = AppendedFile(tmp_path / "log", said.append)
    disk.full = True
    file.add(b"lost\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b""
    assert "1 records could not be written and are lost" in said[-1]


def test_a_link_in_its_place_is_not_followed(tmp_path) -> None:
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "log").symlink_to(tmp_path / "other")
    said = list[str]()
    file = AppendedFile(tmp_path / "log", said.append)
    file.add(b"ours")
    file.close()
    assert (tmp_path / "other").read_text() == "theirs"
    assert "cannot be written" in said[0]


def test_a_run_beside_a_full_disk_ends_and_misses_nothing(tmp_path, monkeypatch) -> None:
    """tensorboardX's thread dies of it and then blocks whoever adds a record."""
    disk = Disk(monkeypatch)

    def fill(step: int) -> None:
        disk.full = 3 <= step < 18

    trainer, output = make_trainer(tmp_path, KnownExecutor(on_step=fill), steps=20)
    assert trainer.run()["status"] == "finished"
    assert [step["step"] for step in records_of(tmp_path, "train")] == list(range(1, 21))
    (path,) = (tmp_path / "tensorboard").iterdir()
    losses = [value for event in events(path) for value in event.summary.value if value.tag == "train/loss"]
    assert len(losses) == 20
    assert output.getvalue().count("metrics.jsonl cannot be written (No space left") == 1


def test_the_summary_is_written_last_somewhere(tmp_path, monkeypatch) -> None:
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr(records.tempfile, "gettempdir", lambda: str(tmp_path / "spare"))
    said = list[str]()
    write_somewhere(tmp_path / "absent" / "summary.json", {"status": "finished"}, said.append)
    (file,) = (tmp_path / "spare").iterdir()
    assert json.loads(file.read_text()) == {"status": "finished"}
    assert str(file) in said[-1]
    file.unlink()
    (tmp_path / "spare").rmdir()
    write_somewhere(tmp_path / "absent" / "summary.json", {"status": "finished"}, said.append)
    assert json.loads(said[-1]) == {"status": "finished"}


def test_a_replaced_file_is_old_or_new(tmp_path, monkeypatch) -> None:
    path = tmp_path / "summary.json"
    replace_file(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_log_goes_on_from_a_saved_position(tmp_path, monkeypatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "metrics.jsonl"
    log = MetricsLog(path, tmp_path / "tensorboard", lambda text: None)
    log.evaluation(EvaluationMetrics(1, 3.0, 10, 0.5))
    disk.full = True
    log.evaluation(EvaluationMetrics(2, 2.0, 10, 0.5))
    position = json.loads(json.dumps(log.position()))
    disk.full = False
    log.evaluation(EvaluationMetrics(3, 1.0, 10, 0.5))
    log.close()
    assert [record["step"] for record in read_records(path, position)] == [1, 2]
    log = MetricsLog(path, tmp_path / "tensorboard", lambda text: None, position=position, first_step=3)
    log.evaluation(EvaluationMetrics(3, 0.9, 10, 0.5))
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 3.0), (2, 2.0), (3, 0.9)]
    last = events(max((tmp_path / "tensorboard").iterdir()))
    assert [event.step for event in last] == [0, 3, 3]
    assert last[1].session_log.status == last[1].session_log.START
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(ValueError, match=r"metrics\.jsonl: 10 bytes.*steps are missing"):
        read_records(path, position)


def events(path) -> list[Event]:
    """A TFRecord file: length (8), its check (4), content, its check (4)."""
    content, found, start = path.read_bytes(), [], 0
    while start < len(content):
        size = int.from_bytes(content[start : start + 8], "little")
        found.append(Event.FromString(content[start + 12 : start + 12 + size]))
        start += 16 + size
    return found
