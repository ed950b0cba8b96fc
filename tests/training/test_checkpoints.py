"""What was saved comes back bit for bit, or is refused by name."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib

import numpy as np
import pytest

from lazyjax.training import checkpoints
from lazyjax.training.checkpoints import (
    MANIFEST,
    CheckpointWriteError,
    DamagedCheckpointError,
    ResumeError,
    list_checkpoints,
    open_checkpoint,
    prune,
)
from tests.training.saved import make_saved, position


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("optimizer", ["hybrid8bit", "fp32_adamw", "bf16_adamw"])
def test_everything_comes_back(tmp_path, optimizer):
    saved, other = make_saved(1, optimizer=optimizer), make_saved(2, optimizer=optimizer)
    path = saved.save(tmp_path / "checkpoints", 20, loss=1.5)
    assert names(tmp_path / "checkpoints") == ["step-00000020"]
    checkpoint = open_checkpoint(path)
    assert checkpoint.position == position(20, 1.5)
    checkpoint.check_identity(other.identity)
    assert other.contents() != saved.contents()
    other.restore(checkpoint)
    assert other.contents() == saved.contents()


def test_another_number_of_devices_has_other_padding_and_the_same_contents(tmp_path):
    one, four, again = make_saved(1), make_saved(None, devices=4), make_saved(2)
    assert one.store.layers[1].hi.size < four.store.layers[1].hi.size
    four.restore(open_checkpoint(one.save(tmp_path / "one", 1)))
    for slabs, wider in zip(one.store.layers, four.store.layers, strict=True):
        for segment in slabs.layout.segments:
            np.testing.assert_array_equal(slabs.master(segment.name), wider.master(segment.name))
    again.restore(open_checkpoint(four.save(tmp_path / "four", 1)))
    assert again.contents() == one.contents()


def test_another_model_or_optimizer_is_refused_by_name(tmp_path):
    checkpoint = open_checkpoint(make_saved(1).save(tmp_path, 1))
    with pytest.raises(ResumeError, match=r"optimizer\.name hybrid8bit, fp32_adamw is asked for"):
        checkpoint.check_identity(make_saved(1, optimizer="fp32_adamw").identity)
    identity = make_saved(1).identity
    layers = json.loads(json.dumps(identity.model["layers"]))
    layers[1][2][0][1] = [3, 5]
    other = dataclasses.replace(identity, model={**identity.model, "layers": layers})
    with pytest.raises(ResumeError, match=r"another model: layer layers\.0 was .*now layers\.0 is"):
        checkpoint.check_identity(other)


def damaged(path: pathlib.Path, where: int, how) -> pathlib.Path:
    """Damages the file that lies at the fraction `where` / 100 of all files."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    file = files[len(files) * where // 100]
    file.write_bytes(how(file.read_bytes()))
    return file


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("how", [flip, lambda content: content[:-1], lambda content: content + b"x"])
@pytest.mark.parametrize("where", range(0, 100, 9))
def test_a_flipped_byte_or_a_torn_file_is_found_and_named(tmp_path, where, how):
    """In any of its files; those of Orbax included that nothing of ours reads."""
    saved, target = make_saved(1), make_saved(None)
    path = saved.save(tmp_path, 1)
    file = damaged(path, where, how)
    try:
        target.restore(open_checkpoint(path))
        said = ""
    except DamagedCheckpointError as error:
        said = str(error)
    if said:
        assert str(path) in said
        assert MANIFEST in said or file.relative_to(path).parts[1] in said
    else:
        # A file whose content does not matter, of a size that is right.
        assert how is flip
        assert target.contents() == saved.contents()


def test_missing_files_are_named(tmp_path):
    path = make_saved(1).save(tmp_path, 1)
    file = next(file for file in path.rglob("0") if file.is_file())
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=rf"{file}: is missing, \d+ were saved"):
        open_checkpoint(path)
    (path / MANIFEST).unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json: cannot be read"):
        open_checkpoint(path)


def test_another_format_is_refused(tmp_path):
    path = make_saved(1).save(tmp_path, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(DamagedCheckpointError, match="format 99; this version reads 1"):
        open_checkpoint(path)


@pytest.mark.parametrize("operation", ["fsync", "rename", "mkdir", "write", "arrays"])
def test_a_full_disk_leaves_what_was_saved_before(tmp_path, monkeypatch, operation):
    saved = make_saved(1)
    first = saved.save(tmp_path, 1)

    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        match operation:
            case "fsync" | "rename":
                patch.setattr(checkpoints.os, operation, full)
            case "mkdir":
                patch.setattr(pathlib.Path, "mkdir", full)
            case "write":
                patch.setattr(pathlib.Path, "write_text", full)
            case "arrays":
                # TensorStore raises no OSError.
                patch.setattr(
                    checkpoints._orbax(), "save", lambda *_: (_ for _ in ()).throw(ValueError("full"))
                )
        with pytest.raises(CheckpointWriteError, match="the checkpoint of step 2 cannot be written"):
            saved.save(tmp_path, 2)
    assert names(tmp_path) == [first.name]
    target = make_saved(None)
    target.restore(open_checkpoint(first))
    assert target.contents() == saved.contents()
    saved.save(tmp_path, 2)


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    saved = make_saved(1)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, None)):
        saved.save(tmp_path, step, loss=loss)
    (tmp_path / ".partial-step-00000006-1").mkdir()
    (tmp_path / ".deleted-step-00000001-1").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "step-00000003" / MANIFEST).write_text("damaged")
    prune(tmp_path, keep_last=2, keep_best=True)
    # The damaged one does not count, and is left to be looked at.
    assert names(tmp_path) == [f"step-{step:08}" for step in (2, 3, 4, 5)] + ["theirs"]
    prune(tmp_path, keep_last=1, keep_best=False)
    assert names(tmp_path) == [f"step-{step:08}" for step in (3, 5)] + ["theirs"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000005", "step-00000003"]


def test_a_step_that_is_saved_again_replaces_what_was_damaged(tmp_path):
    first, second = make_saved(1), make_saved(2)
    damaged(first.save(tmp_path, 1), 50, flip)
    path = second.save(tmp_path, 1)
    target = make_saved(None)
    target.restore(open_checkpoint(path))
    assert target.contents() == second.contents()
    assert names(tmp_path) == ["step-00000001"]


class Drive:
    """What a power cut may leave: the names and contents that were synced, others by chance.

    Stands between `checkpoints` and the operating system. Only what our own code syncs counts, although
    TensorStore syncs files too. At every sync and rename `look` gets the folder's files as
    a cut would leave them: each unsynced content is lost, each unsynced name is lost or kept.
    """

    def __init__(self, monkeypatch, root: pathlib.Path, look) -> None:
        self._root, self._look = root, look
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._rng = np.random.default_rng(0)
        self._rename = os.rename
        # What is there before was synced long ago.
        for path in [root, *root.rglob("*")]:
            self._note(path)
        monkeypatch.setattr(checkpoints.os, "fsync", self.fsync)
        monkeypatch.setattr(checkpoints.os, "rename", self.rename)

    def _note(self, path: pathlib.Path) -> None:
        inode = path.stat().st_ino
        if path.is_dir():
            self._entries[inode] = {each.name: each.stat().st_ino for each in path.iterdir()}
        else:
            self._contents[inode] = path.read_bytes()

    def fsync(self, descriptor: int) -> None:
        self._note(pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        self.cut()

    def rename(self, source, target) -> None:
        self._rename(source, target)
        self.cut()

    def cut(self) -> None:
        for keep in (0.0, *[0.5] * 12, 1.0):
            # Only what is named like a checkpoint is ever looked at.
            tree = self._after(self._root, keep)
            self._look({name: content for name, content in tree.items() if name.startswith("step-")})

    def _after(self, path: pathlib.Path, keep: float) -> dict[str, bytes | None]:
        """Files, and None for folders, as a cut leaves them; unsynced names are kept with chance `keep`."""
        found: dict[str, bytes | None] = {}
        now = {each.name: each for each in path.iterdir()}
        synced = self._entries.get(path.stat().st_ino, {})
        for name, each in now.items():
            if path == self._root and not name.startswith("step-"):
                continue
            inode = each.stat().st_ino
            if synced.get(name) == inode or self._rng.random() < keep:
                found |= self._content(each, name, keep)
        for name in synced.keys() - now.keys():
            # Renamed or deleted, but not on the drive: the old name may still lead to what it was.
            moved = [each for each in now.values() if each.stat().st_ino == synced[name]]
            if moved and self._rng.random() >= keep:
                found |= self._content(moved[0], name, keep)
        return found

    def _content(self, path: pathlib.Path, name: str, keep: float) -> dict[str, bytes | None]:
        if not path.is_dir():
            return {name: self._contents.get(path.stat().st_ino, b"")}
        below = self._after(path, keep)
        return {name: None} | {f"{name}/{key}": content for key, content in below.items()}


def test_a_power_cut_leaves_the_old_checkpoint_or_the_new_one(tmp_path, monkeypatch):
    """At every sync and rename of a save and of the deletion after it, whatever was not synced being lost."""
    old, new = make_saved(1), make_saved(2)
    root = tmp_path / "run" / "checkpoints"
    old.save(root, 1)
    seen, known = [], {}

    def look(tree: dict[str, bytes | None]) -> None:
        """Restores, unless the very same files were restored before."""
        key = tuple(sorted(tree.items()))
        if key not in known:
            folder = tmp_path / "cut" / str(len(known))
            folder.mkdir(parents=True)
            for name, content in key:
                if content is None:
                    (folder / name).mkdir()
                else:
                    (folder / name).write_bytes(content)
            known[key] = restored(folder)
        seen.append(known[key])

    def restored(folder: pathlib.Path) -> int:
        for path in list_checkpoints(folder):
            target = make_saved(None)
            try:
                target.restore(open_checkpoint(path))
            except DamagedCheckpointError:
                continue
            expected = {1: old, 2: new}[checkpoints.step_of(path)]
            assert target.contents() == expected.contents()
            return checkpoints.step_of(path)
        raise AssertionError(f"nothing to resume from among {names(folder)}")

    with monkeypatch.context() as patch:
        Drive(patch, root, look)
        new.save(root, 2)
        prune(root, keep_last=1, keep_best=False)
    assert set(seen) == {1, 2}
    # Once the new one is there for good, it stays.
    assert seen[-1] == 2
    assert names(root) == ["step-00000002"]
