"""Ways from host to device: equal arrays, buffers that are not overwritten, and the choice among them."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

from lazyjax.execution.kernels import data_mesh
from lazyjax.execution.slab_paths import (
    PATHS,
    Pageable,
    PathError,
    Ring,
    choose_path,
    fastest_path,
)
from lazyjax.execution.transfers import Transfers
from lazyjax.specs import TensorSpec, slab_layout
from lazyjax.storage.host import LayerSlabs, aligned_zeros
from tests import tiny
from tests.execution.test_oracle import batches_of, executor_for, kernels, mixed_plan


def sharding(devices: int = 1):
    return jax.sharding.NamedSharding(
        data_mesh(jax.devices()[:devices]), jax.sharding.PartitionSpec("data")
    )


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("name", sorted(PATHS))
def test_what_arrives_is_what_was_sent(name: str, devices: int) -> None:
    random = np.random.default_rng(0)
    sent = [random.integers(0, 2**16, 4096 * size, dtype=np.uint16) for size in (4, 8, 4, 4, 4, 8)]
    with contextlib.ExitStack() as stack:
        try:
            path = PATHS[name](sharding(devices))
            stack.callback(path.close)
            arrived = [path.send([slab, slab.view(np.int16)]) for slab in sent]
        except PathError as error:
            pytest.skip(f"{name}: {error}")
        for slab, arrays in zip(sent, arrived, strict=True):
            assert [array.sharding.memory_kind for array in arrays] == ["device", "device"]
            assert arrays[0].sharding.is_equivalent_to(sharding(devices), 1)
            np.testing.assert_array_equal(np.asarray(arrays[0]), slab)
            np.testing.assert_array_equal(np.asarray(arrays[1]), slab.view(np.int16))


def test_a_buffer_is_filled_again_only_when_its_copy_has_arrived() -> None:
    """More slabs of one shape than buffers, each kept: none of them changes afterwards."""
    ring = Ring(sharding(), threads=2)
    slabs = [np.full(2**16, value, np.uint16) for value in range(7)]
    arrived = [ring.send([slab])[0] for slab in slabs]
    for value, array in enumerate(arrived):
        assert (np.asarray(array) == value).all()
    ring.close()


class Wrong(Pageable):
    """Delivers something else."""

    def send(self, halves):
        return super().send([half + 1 for half in halves])


class Failing(Pageable):
    """Is not there."""

    def send(self, halves):
        raise PathError("no such driver\nat all")


def test_wrong_and_failing_ways_are_not_taken() -> None:
    ways = {"wrong": Wrong, "failing": Failing, "pageable": Pageable, "ring": Ring}
    choice = fastest_path(sharding(), ways, 2**16)
    assert choice.name in ("pageable", "ring")
    assert set(choice.bytes_per_second) == {"pageable", "ring"}
    for words in ("wrong failed (PathError: other bytes", "failing failed (PathError: no such driver at all"):
        assert words in choice.reason
    with pytest.raises(PathError, match="no such driver"):
        fastest_path(sharding(), {"failing": Failing}, 2**16)


def test_a_cpu_has_one_way() -> None:
    choice = choose_path(sharding(), platform="cpu")
    assert (choice.name, choice.bytes_per_second) == ("pageable", {})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_copies_use_the_way_they_are_given(dtype: str) -> None:
    layout = slab_layout([TensorSpec("w", (8192,), "float32")])
    slabs = LayerSlabs(
        layout,
        *(aligned_zeros(layout.length, kind, purpose="test") for kind in ("uint16", "int16", "bfloat16")),
    )
    slabs.hi[:] = np.arange(layout.length) % 30000
    slabs.lo[:] = 7
    ring = Ring(sharding())
    through, plain = (
        copies.slab_to_device(slabs)
        for copies in (Transfers(sharding(), dtype, path=ring), Transfers(sharding(), dtype))
    )
    assert len(through) == (2 if dtype == "float32" else 1)
    for one, other in zip(through, plain, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    ring.close()


def test_training_through_pinned_buffers_gives_the_same_bits(tmp_path) -> None:
    model = tiny.template("qwen2", tied=True)
    found = []
    for way in (None, Ring):
        with executor_for(model, mixed_plan(model, 3), tmp_path) as (executor, store):
            if way is not None:
                made = kernels(model)
                path = way(made.sharded)
                executor._machinery = executor._machinery._replace(
                    copies=Transfers(made.sharded, made.compute_dtype, path=path)
                )
            losses = [executor.train_step(batch, 1e-3).loss for batch in batches_of()]
            executor.flush()
            found.append((losses, [slabs.hi.tobytes() for slabs in store.layers]))
    assert found[0] == found[1]
