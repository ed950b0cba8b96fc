"""What layers own on the host and on NVMe: the same contents, bounded copies, errors by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.specs import LayerSpec, ModelSpec, Part, TensorSpec
from lazyjax.storage.buffers import BufferPool
from lazyjax.storage.host import HostStore, LayerOnDrive, allocate_host_store
from lazyjax.storage.nvme import NvmeError, NvmeStore
from lazyjax.storage.scratch import MARK
from lazyjax.storage.striped import StripedDrive, open_drives
from tests.storage.test_nvme import file_of, raw

EVERYTHING = frozenset(Part)
SIZES = ((3, 500), (70, 90), (70, 90), (4100,))
SPEC = ModelSpec(
    "four layers", "test", 1, 1, False,
    tuple(LayerSpec(f"layers.{i}", "block", (TensorSpec("w", s, "float32"),)) for i, s in enumerate(SIZES)),
)  # fmt: skip


def filled(store: HostStore, seed: int = 0) -> list[np.ndarray]:
    """Puts random weights in; gives them."""
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(size).astype(np.float32) for size in SIZES]
    for slabs, value in zip(store.layers, values, strict=True):
        slabs.set_master("w", value)
    store.settle()
    return values


def store_on(drive: object, parts: frozenset[Part] = EVERYTHING) -> HostStore:
    return allocate_host_store(SPEC, on_nvme=[parts] * len(SIZES), drive=drive)


@pytest.mark.parametrize(
    "parts",
    [EVERYTHING, {Part.LO}, {Part.HI}, {Part.HI, Part.GRADIENT}],
    # A set's own order differs from process to process.
    ids=lambda parts: "-".join(sorted(parts)),
)
def test_weights_are_what_was_put_in_wherever_they_live(tmp_path, parts):
    drive = NvmeStore(tmp_path)
    store = store_on(drive, frozenset(parts))
    values = filled(store)
    for layer, (slabs, value) in enumerate(zip(store.layers, values, strict=True)):
        assert isinstance(slabs, LayerOnDrive)
        np.testing.assert_array_equal(slabs.master("w"), value)
        chunks = np.concatenate([chunk.reshape(-1) for chunk in slabs.master_chunks("w", lambda a: a)])
        np.testing.assert_array_equal(chunks, value.reshape(-1))
        assert not slabs.gradient.any()
        with store.reading(layer) as copy:
            np.testing.assert_array_equal(copy.master("w"), value)
        with pytest.raises(ValueError, match="read-only"):
            slabs.hi[0] = 1
    # What was read stays what it was when other layers are.
    read = [slabs.hi for slabs in store.layers]
    for hi, slabs in zip(read, store.layers, strict=True):
        np.testing.assert_array_equal(hi, slabs.hi)
    drive.close()
    assert not list(tmp_path.iterdir())


def test_moving_changes_nothing_and_only_what_moves_is_on_the_drive(tmp_path):
    drive = NvmeStore(tmp_path)
    store = allocate_host_store(SPEC)
    values = filled(store)
    for parts in ({Part.LO}, {Part.HI, Part.LO}, {Part.HI, Part.GRADIENT}, ()):
        store.place([frozenset(parts)] * len(SIZES), drive)
        there = {path.name.split("-")[0] for path in drive.folder.iterdir() if path.name != MARK}
        assert there == {part.value for part in parts}
        for slabs, value in zip(store.layers, values, strict=True):
            np.testing.assert_array_equal(slabs.master("w"), value)
    drive.close()


def test_a_step_brings_up_and_takes_down_and_uses_its_buffers_again(tmp_path):
    drive = NvmeStore(tmp_path)
    store = store_on(drive)
    values, owned = filled(store), store.owned
    addresses = set()
    for _ in range(3):
        for layer in (1, 2):
            owned.copies.load(layer, (Part.HI, Part.LO))()
            slabs = store.slabs(layer)
            addresses |= {slabs.hi.ctypes.data, slabs.lo.ctypes.data}
            assert slabs.hi.ctypes.data % 4096 == 0
            slabs.set_master("w", slabs.master("w") + 1)
            owned.copies.store(layer, (Part.HI, Part.LO))()
            assert store.slabs(layer).hi.size == 0
    assert len(addresses) == 2
    for layer in (1, 2):
        np.testing.assert_array_equal(store.layers[layer].master("w"), ((values[layer] + 1) + 1) + 1)
    # A clean copy is dropped, and changes to it with it.
    owned.copies.load(1, (Part.HI,))()
    store.slabs(1).hi[:] = 0
    owned.copies.pool.give_back(owned.copies.take_copy(1, Part.HI))
    np.testing.assert_array_equal(store.layers[1].master("w"), ((values[1] + 1) + 1) + 1)
    drive.close()


def test_a_new_gradient_may_come_while_the_old_one_is_still_held(tmp_path):
    """That of the head comes when the write after its update may not even have begun."""
    drive = NvmeStore(tmp_path)
    store = store_on(drive)
    filled(store)
    owned = store.owned
    for number in (1, 2):
        owned.copies.make_new(3, Part.GRADIENT)["gradient"][:] = number
        owned.copies.store_new(3, Part.GRADIENT)()
        if number == 1:
            owned.copies.load(3, (Part.HI, Part.LO, Part.GRADIENT))()
    assert (store.slabs(3).gradient == 1).all()
    owned.copies.make_new(3, Part.GRADIENT)["gradient"][:] = 3
    end = owned.copies.store(3, (Part.LO, Part.HI))
    owned.copies.store_new(3, Part.GRADIENT)()
    end()
    assert (store.layers[3].gradient == 3).all()
    drive.close()


@pytest.mark.parametrize("harm", ["flip", "tear", "remove"])
@pytest.mark.parametrize("part", [Part.HI, Part.LO, Part.GRADIENT])
def test_a_damaged_file_is_named_and_never_used(tmp_path, part, harm):
    drive = NvmeStore(tmp_path)
    store = store_on(drive)
    filled(store)
    store.owned.copies.make_new(2, Part.GRADIENT)["gradient"][:] = 7
    store.owned.copies.store_new(2, Part.GRADIENT)()
    path = file_of(drive, f"{part.value}-2")
    contents = bytearray(path.read_bytes())
    contents[777] ^= 16
    match harm:
        case "flip":
            path.write_bytes(contents)
        case "tear":
            path.write_bytes(contents[:900])
        case "remove":
            path.unlink()
    with pytest.raises(NvmeError, match=f"'{part.value}-2'"):
        store.owned.copies.load(2, (part,))()
    with pytest.raises(NvmeError, match=f"'{part.value}-2'"), store.owned.reading(2, (part,)):
        pass
    with store.owned.reading(1, (part,)):
        pass
    drive.close()


def test_a_full_drive_is_named_and_leaves_everything_where_it_was(tmp_path, monkeypatch):
    drive = NvmeStore(tmp_path)
    store = allocate_host_store(SPEC)
    values = filled(store)
    write = drive.write

    def full(key, source):
        if key == "lo-2":
            raise NvmeError(f"{key!r}: no space left on device")
        return write(key, source)

    monkeypatch.setattr(drive, "write", full)
    with pytest.raises(NvmeError, match="'lo-2': no space left"):
        store.place([EVERYTHING - {Part.STATE}] * len(SIZES), drive)
    assert not any(store.owned.on_nvme(layer) for layer in range(len(SIZES)))
    for slabs, value in zip(store.layers, values, strict=True):
        np.testing.assert_array_equal(slabs.master("w"), value)
    monkeypatch.undo()
    store.place([EVERYTHING - {Part.STATE}] * len(SIZES), drive)
    np.testing.assert_array_equal(store.layers[2].master("w"), values[2])
    drive.close()


@given(st.lists(st.sampled_from([4096, 8192, 100_000]), max_size=30), st.data())
def test_a_pool_holds_no_more_than_was_ever_in_use(sizes, data):
    pool, used = BufferPool(), []
    for size in sizes:
        used.append(pool.lend({"a": ((size,), "uint8")}))
        if data.draw(st.booleans()):
            pool.give_back(used.pop(data.draw(st.integers(0, len(used) - 1))))
        in_use = sum(lent.arrays["a"].size for lent in used)
        assert in_use + sum(free.size for free in pool._free) <= pool.most_bytes
        assert len({lent.arrays["a"].ctypes.data for lent in used}) == len(used)


def test_keys_are_spread_over_drives_and_stay_where_they_are(tmp_path):
    folders = [tmp_path / name for name in ("one", "two", "three")]
    drive = open_drives(folders, run="test")
    assert isinstance(drive, StripedDrive)
    for round_ in range(2):
        for number in range(9):
            drive.write(f"hi-{number}", raw(1000, seed=number + round_)).result()
    kept = [[path.name for path in folder.glob("*/hi-*")] for folder in folders]
    assert [len(names) for names in kept] == [3, 3, 3]
    for number in range(9):
        target = np.empty(1000, np.uint8)
        drive.read(f"hi-{number}", target).result()
        np.testing.assert_array_equal(target, raw(1000, seed=number + 1))
    drive.delete("hi-0")
    with pytest.raises(NvmeError, match="'hi-0' was never written"):
        drive.read("hi-0", np.empty(1000, np.uint8))
    drive.close()
    assert not [path for folder in folders for path in folder.iterdir()]


def test_a_drive_that_cannot_be_used_leaves_nothing_on_the_others(tmp_path):
    (tmp_path / "file").write_text("a user's")
    with pytest.raises(NvmeError, match="file"):
        open_drives([tmp_path / "one", tmp_path / "file"], run="test")
    assert not list((tmp_path / "one").iterdir())
    assert (tmp_path / "file").read_text() == "a user's"
    alone = open_drives([tmp_path / "one"], run="test")
    assert isinstance(alone, NvmeStore)
    alone.close()
