"""What every host optimizer has to do, on every path."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lazyjax.config import SMALLEST_EPSILON
from lazyjax.optim.adamw import Bf16AdamW, Fp32AdamW
from lazyjax.optim.base import VERSION, HostUpdateError
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.optim.make import OPTIMIZERS, make_host_optimizer
from lazyjax.storage.host import NUMPY_DTYPES, LayerSlabs, aligned_zeros
from tests.optim.slabs import LAYOUT, all_bytes, available_paths, fill_gradient, make_slabs, masters

PATHS = available_paths()
NAMES = tuple(sorted(OPTIMIZERS))
STEP = {"learning_rate": 1e-3, "count": 1, "scale": 1.0}

every_optimizer = pytest.mark.parametrize("name", NAMES)
every_path = pytest.mark.parametrize("path", PATHS)
gradient_dtypes = pytest.mark.parametrize("gradient_dtype", ["bfloat16", "float32"])


def walk(
    optimizer: Any, gradient_dtype: str = "bfloat16", steps: int = 5, scale: float = 0.7
) -> tuple[LayerSlabs, dict[str, np.ndarray]]:
    slabs = make_slabs(gradient_dtype=gradient_dtype)
    state = optimizer.create_state(LAYOUT)
    rng = np.random.default_rng(1)
    for count in range(1, steps + 1):
        fill_gradient(slabs, rng)
        optimizer.update(slabs, state, learning_rate=1e-3, count=count, scale=scale)
    return slabs, state


@every_optimizer
def test_state_is_what_was_described(name: str) -> None:
    optimizer = make_host_optimizer(name)
    assert optimizer.name == name
    description, state = optimizer.describe_state(LAYOUT), optimizer.create_state(LAYOUT)
    assert description.keys() == state.keys()
    for key, (shape, dtype) in description.items():
        assert state[key].shape == shape
        assert state[key].dtype == NUMPY_DTYPES[dtype]
        if key == VERSION:
            assert bytes(state[key]).rstrip(b"\0").decode() == optimizer.state_version
        else:
            assert not state[key].any()


@every_optimizer
@gradient_dtypes
def test_all_paths_and_thread_counts_give_the_same_bytes(name: str, gradient_dtype: str) -> None:
    expected = all_bytes(*walk(make_host_optimizer(name, path=PATHS[-1], threads=1), gradient_dtype))
    for path in PATHS:
        for threads in (1, 2, 5):
            optimizer = make_host_optimizer(name, path=path, threads=threads)
            assert all_bytes(*walk(optimizer, gradient_dtype)) == expected, (path, threads)


@every_optimizer
@every_path
def test_the_scale_is_folded_into_the_gradient(name: str, path: str) -> None:
    """A power of two scales exactly, so both ways must give the same bytes."""
    optimizer = make_host_optimizer(name, path=path, threads=1)
    slabs, state = make_slabs(), optimizer.create_state(LAYOUT)
    fill_gradient(slabs, np.random.default_rng(3))
    scaled, scaled_state = make_slabs(), optimizer.create_state(LAYOUT)
    scaled.gradient[:] = slabs.gradient.astype(np.float32) * 0.25
    optimizer.update(slabs, state, learning_rate=1e-2, count=1, scale=0.25)
    optimizer.update(scaled, scaled_state, learning_rate=1e-2, count=1, scale=1.0)
    slabs.gradient[:] = scaled.gradient
    assert all_bytes(slabs, state) == all_bytes(scaled, scaled_state)


@every_optimizer
@every_path
def test_decay_covers_matrices_alone(name: str, path: str) -> None:
    optimizer = dataclasses.replace(
        make_host_optimizer(name, path=path, threads=1),  # type: ignore[type-var]
        weight_decay=0.5,
    )
    slabs, state = make_slabs(), optimizer.create_state(LAYOUT)
    slabs.lo[:] = 0
    before = masters(slabs)
    optimizer.update(slabs, state, learning_rate=0.25, count=1, scale=1.0)
    after = masters(slabs)
    for segment in LAYOUT.segments:
        factor = 1 - 0.125 if segment.decay else 1.0
        tolerance = 2**-8 if name == "bf16_adamw" else 1e-6
        np.testing.assert_allclose(after[segment.name], before[segment.name] * factor, rtol=tolerance)
        if not segment.decay:
            np.testing.assert_array_equal(after[segment.name], before[segment.name])


@every_optimizer
@every_path
def test_gaps_and_tail_stay_zero_and_the_gradient_is_read_only(name: str, path: str) -> None:
    optimizer = make_host_optimizer(name, path=path, threads=1, weight_decay=0.1)
    slabs = make_slabs()
    fill_gradient(slabs, np.random.default_rng(0))
    gradient = slabs.gradient.tobytes()
    read_only = dataclasses.replace(slabs, gradient=slabs.gradient.view())
    read_only.gradient.setflags(write=False)
    optimizer.update(read_only, optimizer.create_state(LAYOUT), **STEP)
    assert slabs.gradient.tobytes() == gradient
    used = np.zeros(LAYOUT.length, bool)
    for segment in LAYOUT.segments:
        used[segment.offset : segment.offset + segment.elements] = True
    assert not slabs.hi[~used].any()
    assert not slabs.lo[~used].any()
    assert slabs.hi[used].all()


def misaligned(array: np.ndarray) -> np.ndarray:
    room = aligned_zeros(array.nbytes + 64, "uint8", purpose="test")
    moved = room[array.itemsize : array.itemsize + array.nbytes].view(array.dtype)
    moved[:] = array
    return moved


def strided(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 2)[::2]


SLAB_DAMAGE: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], str]] = {
    "hi misaligned": ("hi", misaligned, "hi is not aligned"),
    "lo misaligned": ("lo", misaligned, "lo is not aligned"),
    "gradient misaligned": ("gradient", misaligned, "gradient is not aligned"),
    "hi of another dtype": ("hi", lambda a: a.view(np.int16), "hi has dtype int16"),
    "gradient of another dtype": ("gradient", lambda a: a.view(np.float16), "gradient has dtype float16"),
    "lo too short": ("lo", lambda a: a[:-4096], "lo has shape"),
    "hi strided": ("hi", strided, "hi is not contiguous"),
}


@every_optimizer
@pytest.mark.parametrize("damage", SLAB_DAMAGE)
def test_bad_slabs_are_refused_before_anything_is_written(name: str, damage: str) -> None:
    optimizer = make_host_optimizer(name, threads=1)
    slabs, state = walk(optimizer, steps=2)
    field, change, message = SLAB_DAMAGE[damage]
    slabs = dataclasses.replace(slabs, **{field: change(getattr(slabs, field))})
    before = all_bytes(slabs, state)
    with pytest.raises(HostUpdateError, match=message):
        optimizer.update(slabs, state, learning_rate=1e-3, count=3, scale=1.0)
    assert all_bytes(slabs, state) == before


@every_optimizer
def test_bad_states_are_refused_before_anything_is_written(name: str) -> None:
    optimizer = make_host_optimizer(name, threads=1)
    slabs, good = walk(optimizer, steps=2)
    key = next(key for key, array in good.items() if key != VERSION and array.size)
    read_only = good[key].view()
    read_only.setflags(write=False)
    other_version = aligned_zeros(64, "uint8", purpose="test")
    other_version[:3] = np.frombuffer(b"old", np.uint8)
    for change, message in (
        ({key: misaligned(good[key])}, f"{key} is not aligned"),
        ({key: good[key][:-256]}, f"{key} has shape"),
        ({key: good[key].view(np.uint16)}, f"{key} has dtype uint16"),
        ({key: read_only}, f"{key} is read-only"),
        ({VERSION: other_version}, "the state has version 'old'"),
        ({"surplus": good[key]}, "surplus"),
    ):
        state = {**good, **change}
        before = all_bytes(slabs, state)
        with pytest.raises(HostUpdateError, match=message):
            optimizer.update(slabs, state, learning_rate=1e-3, count=3, scale=1.0)
        assert all_bytes(slabs, state) == before
    state = {k: array for k, array in good.items() if k != VERSION}
    with pytest.raises(HostUpdateError, match=VERSION):
        optimizer.update(slabs, state, learning_rate=1e-3, count=3, scale=1.0)


def test_each_optimizer_refuses_the_others_states() -> None:
    for name in NAMES:
        slabs, state = walk(make_host_optimizer(name, threads=1), steps=1)
        for other in NAMES:
            if other != name:
                before = all_bytes(slabs, state)
                with pytest.raises(HostUpdateError, match="version"):
                    make_host_optimizer(other).update(slabs, state, learning_rate=1e-3, count=2, scale=1.0)
                assert all_bytes(slabs, state) == before
    slabs, state = walk(Hybrid8bit(), steps=1)
    with pytest.raises(HostUpdateError):
        Hybrid8bit(min_8bit_size=10).update(slabs, state, learning_rate=1e-3, count=2, scale=1.0)


@every_optimizer
@pytest.mark.parametrize(
    "bad",
    [
        {"scale": float("nan")},
        {"scale": float("inf")},
        {"learning_rate": float("nan")},
        {"learning_rate": float("inf")},
        {"count": 0},
    ],
)
def test_bad_scalars_are_refused_before_anything_is_written(name: str, bad: dict[str, Any]) -> None:
    optimizer = make_host_optimizer(name, threads=1)
    slabs, state = walk(optimizer, steps=2)
    before = all_bytes(slabs, state)
    with pytest.raises(HostUpdateError, match=next(iter(bad))):
        optimizer.update(slabs, state, **{**STEP, "count": 3, **bad})
    assert all_bytes(slabs, state) == before


@pytest.mark.parametrize(
    "bad",
    [{"b1": 1.0}, {"b2": -0.1}, {"eps": 0.0}, {"eps": 1e-39}, {"weight_decay": -1.0}, {"threads": -1}],
)
@every_optimizer
def test_bad_settings_are_refused(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        make_host_optimizer(name, **bad)


@every_path
@every_optimizer
def test_the_smallest_epsilon_leaves_unused_parameters_alone(name: str, path: str) -> None:
    """Without gradient and decay nothing moves, whatever 0 is divided by."""
    assert float(np.finfo(np.float32).tiny) == SMALLEST_EPSILON
    optimizer = make_host_optimizer(name, eps=SMALLEST_EPSILON, weight_decay=0.0, path=path)
    slabs = make_slabs()
    slabs.gradient[:] = 0
    before = slabs.hi.copy()
    optimizer.update(slabs, optimizer.create_state(LAYOUT), **STEP)
    np.testing.assert_array_equal(slabs.hi, before)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="bf16_adamw, fp32_adamw, hybrid8bit"):
        make_host_optimizer("sgd")


@every_path
def test_extreme_gradients_keep_8bit_state_finite(path: str) -> None:
    optimizer = Hybrid8bit(path=path)
    slabs = make_slabs(gradient_dtype="float32")
    state = optimizer.create_state(LAYOUT)
    gradients = (1e-30, 1e18, 0.0, 1e-45, 1e-3)
    for count, size in enumerate(gradients, start=1):
        slabs.gradient[:] = 0
        slabs.gradient[: LAYOUT.segments[0].elements : 3] = size
        slabs.gradient[5] = 1e18
        optimizer.update(slabs, state, learning_rate=1e-3, count=count, scale=1.0)
        for name in ("m_scales", "v_scales", "m32", "v32"):
            assert np.isfinite(state[name]).all()
        assert all(np.isfinite(master).all() for master in masters(slabs).values())


def test_8bit_state_is_two_bytes_per_parameter() -> None:
    for fraction, expected in ((1.0, 2 + 8 / 256), (0.0, 8.0)):
        description = Hybrid8bit(eight_bit_fraction=fraction, min_8bit_size=0).describe_state(LAYOUT)
        size = sum(np.prod(shape) * NUMPY_DTYPES[dtype].itemsize for shape, dtype in description.values())
        blocks = sum(-(-segment.elements // 256) * 256 for segment in LAYOUT.segments)
        assert size - 64 == pytest.approx(expected * blocks, rel=1e-6)


def test_bf16_parameters_have_no_hidden_half() -> None:
    slabs, _ = walk(Bf16AdamW(), steps=1)
    assert not slabs.lo.any()


def test_threads_update_layers_at_the_same_time() -> None:
    """Callers share a pool; each still gets its own layer's result."""
    from concurrent.futures import ThreadPoolExecutor

    optimizer = Fp32AdamW(threads=2)
    expected = all_bytes(*walk(optimizer))
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda _: all_bytes(*walk(optimizer)), range(8)))
    assert all(result == expected for result in results)
