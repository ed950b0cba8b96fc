"""What a drive is asked to keep comes back, or an error that names it; a user's files stay."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.hardware.process import start_ticks
from lazyjax.storage import scratch
from lazyjax.storage.nvme import NvmeError, NvmeStore, stamp


def raw(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def read(store: NvmeStore, key: str, size: int) -> np.ndarray:
    target = np.full(size, 77, np.uint8)
    store.read(key, target).result()
    return target


def file_of(store: NvmeStore, key: str) -> pathlib.Path:
    return store.folder / key


@pytest.mark.parametrize("size", [1, 4095, 4096, 10_000])
def test_bytes_come_back_and_zeros_too(tmp_path, size):
    store = NvmeStore(tmp_path)
    for written in (raw(size), np.zeros(size, np.uint8), raw(size, seed=1)):
        store.write("key", written).result()
        np.testing.assert_array_equal(read(store, "key", size), written)
    store.close()


def test_a_key_may_change_its_size(tmp_path):
    store = NvmeStore(tmp_path)
    for size in (9000, 300, 12_000):
        store.write("key", raw(size, size)).result()
        np.testing.assert_array_equal(read(store, "key", size), raw(size, size))
    store.close()


def test_bytes_that_are_missing_short_stale_or_altered_are_errors_that_name_the_key(tmp_path):
    store = NvmeStore(tmp_path)
    size = 20_000

    def refused(match: str) -> None:
        with pytest.raises(NvmeError, match=match):
            read(store, "input-3", size)

    store.write("input-3", raw(size)).result()
    stale = file_of(store, "input-3").read_bytes()
    store.write("input-3", raw(size, seed=1)).result()
    fresh = bytearray(file_of(store, "input-3").read_bytes())
    file_of(store, "input-3").write_bytes(stale)
    refused("'input-3' failed: the file does not hold what was written")
    fresh[12_345] ^= 1
    file_of(store, "input-3").write_bytes(fresh)
    refused("'input-3' failed: the file does not hold what was written")
    file_of(store, "input-3").write_bytes(stale[:500])
    refused("'input-3' failed: the file has 500 bytes, 20000 were written")
    file_of(store, "input-3").unlink()
    refused("'input-3' failed: its file is missing")
    with pytest.raises(NvmeError, match="'input-4' was never written"):
        read(store, "input-4", size)
    with pytest.raises(NvmeError, match="'input-3' has 20000 bytes, 10 were asked for"):
        read(store, "input-3", 10)
    store.close()


@given(st.integers(0, 20_000), st.data())
def test_stamps_tell_bytes_apart(size, data):
    original = raw(size)
    assert stamp(original) == stamp(original.copy())
    assert stamp(np.append(original, np.uint8(0))) != stamp(original)
    if size:
        changed = original.copy()
        changed[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
        assert stamp(changed) != stamp(original)
    if size >= 8192:
        swapped = original.copy()
        swapped[:4096], swapped[4096:8192] = original[4096:8192], original[:4096]
        assert stamp(swapped) != stamp(original)


def test_nothing_of_the_users_is_touched(tmp_path):
    mine = tmp_path / "drive" / "mine"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years")
    (tmp_path / "drive" / f"{scratch.PREFIX}notes").mkdir()
    (tmp_path / "drive" / f"{scratch.PREFIX}notes" / "list").write_text("no mark, so not ours")
    before = sorted(tmp_path.rglob("*"))
    store = NvmeStore(tmp_path / "drive", run="my run/1")
    store.write("key", raw(10)).result()
    assert store.folder.parent == tmp_path / "drive"
    assert "my-run-1" in store.folder.name
    store.close()
    store.close()
    assert sorted(tmp_path.rglob("*")) == before


def test_two_stores_in_one_folder_do_not_meet(tmp_path):
    first, second = NvmeStore(tmp_path), NvmeStore(tmp_path)
    first.write("key", raw(100, 1)).result()
    second.write("key", raw(100, 2)).result()
    np.testing.assert_array_equal(read(first, "key", 100), raw(100, 1))
    second.close()
    np.testing.assert_array_equal(read(first, "key", 100), raw(100, 1))
    first.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NvmeError, match=r"file/nvme: cannot be used"):
        NvmeStore(tmp_path / "file" / "nvme")


def left_by_a_killed_process(parent: pathlib.Path) -> pathlib.Path:
    script = (
        "import os, pathlib, sys; from lazyjax.storage.scratch import ScratchFolder\n"
        "folder = ScratchFolder(pathlib.Path(sys.argv[1]), 'killed'); print(folder.path, flush=True)\n"
        "(folder.path / 'slab').write_text('x'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(parent)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    return pathlib.Path(done.stdout.strip())


def test_what_a_killed_process_left_is_removed_and_only_that(tmp_path):
    living = NvmeStore(tmp_path)
    living.write("key", raw(10)).result()
    dead = left_by_a_killed_process(tmp_path)
    assert dead.exists()
    store = NvmeStore(tmp_path)
    assert not dead.exists()
    np.testing.assert_array_equal(read(living, "key", 10), raw(10))
    for each in (store, living):
        each.close()


@pytest.mark.parametrize(
    "change",
    [
        {"machine": "another"},
        {"format": "something else"},
        {"pid": os.getpid(), "started": start_ticks(os.getpid())},
        {"pid": "many"},
    ],
    ids=["another machine", "another format", "a living process", "nonsense"],
)
def test_doubtful_folders_stay(tmp_path, change):
    """Of another machine, in another format, of a living process, or with a mark that makes no sense."""
    dead = left_by_a_killed_process(tmp_path)
    mark = json.loads((dead / scratch.MARK).read_text())
    (dead / scratch.MARK).write_text(json.dumps(mark | change))
    assert scratch.remove_left_behind(tmp_path) == []
    assert dead.exists()
    (dead / scratch.MARK).write_text(json.dumps(mark))
    (tmp_path / f"{scratch.PREFIX}link").symlink_to(dead)
    assert scratch.remove_left_behind(tmp_path) == [dead]


def test_a_number_that_another_process_got_does_not_protect(tmp_path):
    dead = left_by_a_killed_process(tmp_path)
    mark = json.loads((dead / scratch.MARK).read_text())
    started = start_ticks(os.getpid())
    assert started is not None
    (dead / scratch.MARK).write_text(json.dumps(mark | {"pid": os.getpid(), "started": started - 1}))
    assert scratch.remove_left_behind(tmp_path) == [dead]


def test_a_held_lock_protects_a_process_that_cannot_be_seen(tmp_path):
    """Containers share files, but not process numbers."""
    store = NvmeStore(tmp_path)
    mark = json.loads((store.folder / scratch.MARK).read_text())
    (store.folder / scratch.MARK).write_text(json.dumps(mark | {"pid": 2**22 + 1, "started": 1}))
    assert scratch.remove_left_behind(tmp_path) == []
    store.close()
    assert not list(tmp_path.iterdir())


def test_closing_waits_for_writes(tmp_path):
    store = NvmeStore(tmp_path)
    for index in range(20):
        store.write(f"key-{index}", raw(100_000, index))
    store.close()
    assert not list(tmp_path.iterdir())


def test_deleted_keys_are_gone(tmp_path):
    store = NvmeStore(tmp_path)
    store.write("key", raw(5000))
    store.delete("key")
    store.delete("never there")
    assert not file_of(store, "key").exists()
    with pytest.raises(NvmeError, match="'key' was never written"):
        read(store, "key", 5000)
    store.close()
