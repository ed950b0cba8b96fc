"""Checkpoints that several processes write: one commit, read by any number of processes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lazyjax.execution.host_update import HostUpdates
from lazyjax.optim.base import VERSION
from lazyjax.optim.make import OPTIMIZERS, make_host_optimizer
from lazyjax.specs import Share, slab_layout
from lazyjax.storage.host import HostStore, allocate_host_store
from lazyjax.training import checkpoints
from lazyjax.training.checkpoints import (
    CheckpointWriteError,
    DamagedCheckpointError,
    list_checkpoints,
    open_checkpoint,
)
from lazyjax.training.places import place_of
from tests.distributed.stores import channels, in_processes
from tests.training.saved import TEMPLATE, position


@dataclasses.dataclass
class Held:
    """What each of `count` processes holds of one training state."""

    optimizer: str
    count: int
    devices: int

    def __post_init__(self) -> None:
        each = self.devices // self.count
        made = make_host_optimizer(self.optimizer, threads=1, path="pure")
        self.stores = [
            allocate_host_store(
                TEMPLATE.spec, devices=self.devices, share=Share(i * each, (i + 1) * each, self.devices)
            )
            for i in range(self.count)
        ]
        self.updates = [HostUpdates(store, made) for store in self.stores]
        self.identity = checkpoints.identity_of(TEMPLATE.spec, made)

    def arrays(self, layer: int, process: int) -> dict[str, np.ndarray]:
        slabs, state = self.stores[process].slabs(layer), self.updates[process].read_state(layer)
        return {"hi": slabs.hi, "lo": slabs.lo, **{k: a for k, a in state.items() if k != VERSION}}

    def fill(self, values: Callable[[int, str, int], np.ndarray]) -> None:
        """Every array from bytes of its own, those of one process after those of the one before."""
        for layer in range(len(TEMPLATE.spec.layers)):
            begins: dict[str, int] = {}
            for process in range(self.count):
                for name, array in self.arrays(layer, process).items():
                    begin = begins.setdefault(name, 0)
                    raw = array.reshape(-1).view(np.uint8)
                    raw[:] = values(layer, name, begin + raw.size)[begin:]
                    begins[name] += raw.size

    def joined(self) -> list[dict[str, bytes]]:
        """By layer, the bytes of every array of all processes, without the zeros at the end."""
        return [
            {
                name: b"".join(self.arrays(layer, p)[name].tobytes() for p in range(self.count)).rstrip(b"\0")
                for name in self.arrays(layer, 0)
            }
            for layer in range(len(TEMPLATE.spec.layers))
        ]

    def save(self, folder: pathlib.Path, step: int = 20, **options: Any) -> list[Any]:
        made = channels(self.count, "checkpoint")

        def work(process: int) -> pathlib.Path:
            own = {name: option[process] for name, option in options.items()}
            return checkpoints.save(
                folder, TEMPLATE.spec, self.updates[process].reading, position(step), self.identity,
                plan={}, config={}, attention="blocks", devices=self.devices, channel=made[process], **own,
            )  # fmt: skip

        return list(in_processes(self.count, work))

    def restore(self, path: pathlib.Path) -> None:
        for store, updates in zip(self.stores, self.updates, strict=True):
            restore(path, store, updates)


def restore(path: pathlib.Path, store: HostStore, updates: HostUpdates) -> None:
    checkpoint = open_checkpoint(path)
    for layer in range(len(store.layouts)):
        with updates.writing(layer) as (slabs, state):
            checkpoint.restore_layer(layer, slabs, state, place_of(store, updates, layer))


def random_bytes(layer: int, name: str, size: int) -> np.ndarray:
    """The same for every number of processes, with zeros where slabs of some of them are longer."""
    seed = [layer, *name.encode()]
    raw = np.random.default_rng(seed).integers(1, 256, size, np.uint8)
    last = slab_layout(TEMPLATE.spec.layers[layer].parameters).segments[-1]
    bytes_each = {"hi": 2, "lo": 2, "m32": 4, "v32": 4}
    if name in bytes_each:
        raw[bytes_each[name] * (last.offset + last.elements) :] = 0
    return raw


@pytest.mark.parametrize("optimizer", ["fp32_adamw", "hybrid8bit"])
@pytest.mark.parametrize("before", [(1, 1), (2, 2), (4, 4), (2, 4)])
@pytest.mark.parametrize("after", [(1, 1), (1, 2), (2, 2), (4, 4)])
def test_any_number_of_processes_and_devices_reads_what_another_has_saved(
    tmp_path: pathlib.Path, optimizer: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    saved, restored = Held(optimizer, *before), Held(optimizer, *after)
    saved.fill(random_bytes)
    paths = saved.save(tmp_path)
    assert paths == [tmp_path / "step-00000020"] * saved.count
    # Of what was there nothing is left.
    restored.fill(lambda layer, name, size: np.full(size, 7, np.uint8))
    restored.restore(paths[0])
    assert restored.joined() == saved.joined()


def test_every_optimizer_is_one_of_those(tmp_path: pathlib.Path) -> None:
    for number, name in enumerate(sorted(OPTIMIZERS)):
        saved, restored = Held(name, 4, 4), Held(name, 2, 2)
        saved.fill(random_bytes)
        restored.restore(saved.save(tmp_path / str(number))[0])
        assert restored.joined() == saved.joined()


def test_one_process_that_cannot_write_leaves_no_checkpoint_and_all_know(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Held("hybrid8bit", 3, 3)
    first = saved.save(tmp_path, step=10)[0]
    save_plain = checkpoints._save_plain

    def full(folder: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
        if folder.name == "1" and folder.parent.name == "0002":
            raise OSError(28, "No space left on device")
        save_plain(folder, arrays)

    monkeypatch.setattr(checkpoints, "_save_plain", full)
    found = saved.save(tmp_path)
    assert all(isinstance(error, CheckpointWriteError) for error in found)
    assert all("No space left" in str(error) for error in found)
    assert "process 1" in str(found[0])
    assert list(tmp_path.iterdir()) == [first]
    open_checkpoint(first)


def test_a_process_that_gives_up_ends_the_save_of_all(tmp_path: pathlib.Path) -> None:
    saved = Held("hybrid8bit", 2, 2)

    def stop(layer: int) -> None:
        if layer == 1:
            raise InterruptedError("given up")

    found = saved.save(tmp_path, layer_saved=[lambda layer: None, stop])
    assert all(isinstance(error, OSError) for error in found)
    assert not list_checkpoints(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_part_is_named(tmp_path: pathlib.Path, damage: str) -> None:
    saved = Held("hybrid8bit", 2, 2)
    saved.fill(random_bytes)
    path = saved.save(tmp_path)[0]
    file = path / "layers" / "0001" / "1" / "hi"
    match damage:
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "changed":
            file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        case "missing":
            file.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"0001/1"):
        Held("hybrid8bit", 1, 1).restore(path)


def test_what_is_beyond_the_slab_of_fewer_devices_has_to_be_zero(tmp_path: pathlib.Path) -> None:
    saved = Held("fp32_adamw", 4, 4)
    saved.fill(lambda layer, name, size: np.full(size, 1, np.uint8))
    with pytest.raises(DamagedCheckpointError, match="the slab of this run only"):
        Held("fp32_adamw", 1, 1).restore(saved.save(tmp_path)[0])


def test_the_manifest_says_how_many_devices_there_were(tmp_path: pathlib.Path) -> None:
    path = Held("hybrid8bit", 2, 4).save(tmp_path)[0]
    assert open_checkpoint(path).devices == 4
    assert json.loads((path / checkpoints.MANIFEST).read_text())["format"] == checkpoints.FORMAT_OF_PARTS

