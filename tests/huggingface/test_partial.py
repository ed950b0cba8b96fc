"""Parts of tensors: what is read is what is wanted, and the rest of the file is not touched."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lazyjax.huggingface.checkpoint import load_into, open_checkpoint
from lazyjax.huggingface.key_maps import Transform, to_parameter
from lazyjax.huggingface.partial import read_elements
from lazyjax.huggingface.tensor_files import CheckpointError, StoredTensor, read_header
from lazyjax.specs import Share
from lazyjax.storage.host import allocate_host_store
from tests.huggingface.folders import plain_folder

SHAPES = {Transform.IDENTITY: (13, 7), Transform.TRANSPOSE: (13, 7), Transform.CONVOLUTION: (13, 1, 4)}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[Transform, StoredTensor]:
    path = tmp_path_factory.mktemp("tensors") / "model.safetensors"
    random = np.random.default_rng(0)
    save_file(
        {
            transform.value: random.standard_normal(shape).astype(np.float32)
            for transform, shape in SHAPES.items()
        },
        path,
    )
    held = read_header(path)
    return {transform: held[transform.value] for transform in SHAPES}


@pytest.mark.parametrize("transform", SHAPES)
@given(data=st.data())
def test_elements_are_those_of_the_whole(
    tensors: dict[Transform, StoredTensor], transform: Transform, data: st.DataObject
) -> None:
    tensor = tensors[transform]
    count = math.prod(tensor.shape)
    start = data.draw(st.integers(0, count - 1))
    wanted = range(start, data.draw(st.integers(start + 1, count)))
    whole = to_parameter(transform, read_elements(tensor, transform, range(count)).stored).reshape(-1)
    found = read_elements(tensor, transform, wanted)
    assert found.first <= wanted.start
    flat = found.parameter.reshape(-1)[wanted.start - found.first :][: len(wanted)]
    np.testing.assert_array_equal(flat, whole[wanted.start : wanted.stop])


@pytest.mark.parametrize("transform", SHAPES)
def test_no_more_is_read_than_whole_rows_of_the_parameter(
    tensors: dict[Transform, StoredTensor], transform: Transform, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, read, preadv = tensors[transform], [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *words: read.append(preadv(*words)) or read[-1])
    rows = tensor.shape[0]
    # A quarter of the parameter, which begins and ends inside rows.
    count = math.prod(tensor.shape)
    wanted = range(count // 4 + 1, count // 2 + 1)
    found = read_elements(tensor, transform, wanted)
    more = 0 if transform is Transform.IDENTITY else 2 * (rows - 1)
    assert sum(read) == found.stored.nbytes <= 4 * (len(wanted) + more)


def test_a_file_that_ends_early_is_named(tensors: dict[Transform, StoredTensor], tmp_path: Path) -> None:
    tensor = tensors[Transform.IDENTITY]
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(tensor.path.read_bytes()[: tensor.offset + 40])
    short = StoredTensor(tensor.key, cut, tensor.dtype, tensor.shape, tensor.offset, tensor.bytes)
    with pytest.raises(CheckpointError, match=r"cut\.safetensors: ended inside tensor identity"):
        read_elements(short, Transform.IDENTITY, range(5, 50))


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["llama-tied", "qwen3_5"])
def test_a_folder_is_imported_by_parts(tmp_path: Path, name: str, devices: int) -> None:
    template, _ = plain_folder(tmp_path / "model", name)
    checkpoint = open_checkpoint(tmp_path / "model")
    whole = allocate_host_store(template.spec, devices=devices)
    load_into(checkpoint, template, whole)
    parts = []
    for device in range(devices):
        store = allocate_host_store(template.spec, devices=devices, share=Share(device, device + 1, devices))
        load_into(checkpoint, template, store)
        parts.append(store)
    for layer, slabs in enumerate(whole.layers):
        for array in ("hi", "lo"):
            joined = np.concatenate([getattr(store.layers[layer], array) for store in parts])
            np.testing.assert_array_equal(joined, getattr(slabs, array))
