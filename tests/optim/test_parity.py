"""Host optimizers against optax, over many steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lazyjax.optim import codes
from lazyjax.optim.adamw import Bf16AdamW, Fp32AdamW
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.optim.hybrid8bit import hybrid8bit_adamw
from lazyjax.storage.host import LayerSlabs
from tests.optim.slabs import LAYOUT, available_paths, fill_gradient, make_slabs, masters

every_path = pytest.mark.parametrize("path", available_paths())
MASK = {segment.name: segment.decay for segment in LAYOUT.segments}
SETTINGS: dict[str, float] = {"b1": 0.9, "b2": 0.99, "eps": 1e-7, "weight_decay": 0.1}


def learning_rate(count: int) -> float:
    return 1e-3 * min(count / 10, 1.0)


def walk_together(
    optimizer: Any, transform: optax.GradientTransformation, steps: int, gradient_dtype: str = "float32"
) -> tuple[LayerSlabs, dict[str, np.ndarray], dict[str, jax.Array], Any]:
    """Both take the same gradients with the same clip factor from the same parameters."""
    slabs = make_slabs(gradient_dtype=gradient_dtype)
    state = optimizer.create_state(LAYOUT)
    params = {name: jnp.asarray(master) for name, master in masters(slabs).items()}
    optax_state = transform.init(params)
    step = jax.jit(transform.update)
    rng = np.random.default_rng(7)
    for count in range(1, steps + 1):
        gradient = fill_gradient(slabs, rng)
        scale = 0.5 if count % 3 else 1.0
        optimizer.update(slabs, state, learning_rate=learning_rate(count), count=count, scale=scale)
        scaled = {name: jnp.asarray(value * np.float32(scale)) for name, value in gradient.items()}
        updates, optax_state = step(scaled, optax_state, params)
        params = jax.jit(optax.apply_updates)(params, updates)
    return slabs, state, params, optax_state


def schedule(count: jax.Array) -> jax.Array:
    return 1e-3 * jnp.minimum((count + 1) / 10, 1.0)


@every_path
def test_fp32_adamw_is_optax_adamw(path: str) -> None:
    transform = optax.adamw(schedule, mask=MASK, **SETTINGS)
    slabs, _, params, _ = walk_together(Fp32AdamW(path=path, **SETTINGS), transform, steps=60)  # type: ignore[arg-type]
    for name, master in masters(slabs).items():
        # 60 steps of 1e-3 and rounding of values near 1: a few units of 1e-7.
        np.testing.assert_allclose(master, params[name], atol=2e-6, rtol=0)
        assert np.abs(master - masters(make_slabs())[name]).max() > 1e-2


@every_path
def test_8bit_adamw_is_the_optax_transform(path: str) -> None:
    """Codes and scales bit for bit; masters up to the rounding of the bias corrections."""
    transform = hybrid8bit_adamw(schedule, mask=MASK, **SETTINGS)  # type: ignore[arg-type]
    optimizer = Hybrid8bit(path=path, **SETTINGS)  # type: ignore[arg-type]
    slabs, state, params, optax_state = walk_together(optimizer, transform, steps=60)
    coded = [segment for segment in LAYOUT.segments if segment.elements >= 4096]
    small = [segment for segment in LAYOUT.segments if segment.elements < 4096]
    for name in ("m", "v"):
        moments = [getattr(optax_state.moments[segment.name], name) for segment in coded]
        expected = np.concatenate([np.asarray(moment.codes_KS).reshape(-1) for moment in moments])
        np.testing.assert_array_equal(state[f"{name}_codes"], expected)
        expected = np.concatenate([np.asarray(moment.scale_K) for moment in moments])
        np.testing.assert_array_equal(state[f"{name}_scales"], expected)
        offset = 0
        for segment in small:
            rest = getattr(optax_state.moments[segment.name], f"{name}_rest_R")
            part = state[f"{name}32"][offset : offset + segment.elements]
            np.testing.assert_array_equal(part, rest)
            offset += -(-segment.elements // 256) * 256
    for name, master in masters(slabs).items():
        np.testing.assert_allclose(master, params[name], atol=2e-6, rtol=0)


@every_path
def test_8bit_adamw_stays_near_fp32_adamw(path: str) -> None:
    exact, _ = walk_alone(Fp32AdamW(path=path))
    coded, _ = walk_alone(Hybrid8bit(path=path))
    start = masters(make_slabs())
    for name in start:
        difference = np.sqrt(np.mean((exact[name] - coded[name]) ** 2))
        travelled = np.sqrt(np.mean((exact[name] - start[name]) ** 2))
        assert difference < (0.1 * travelled if start[name].size >= 4096 else 1e-6)


def walk_alone(optimizer: Any, steps: int = 60) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    slabs = make_slabs()
    state = optimizer.create_state(LAYOUT)
    rng = np.random.default_rng(7)
    for count in range(1, steps + 1):
        fill_gradient(slabs, rng)
        optimizer.update(slabs, state, learning_rate=1e-3, count=count, scale=1.0)
    return masters(slabs), state


@every_path
def test_an_eight_bit_fraction_codes_leading_blocks_alone(path: str) -> None:
    transform = hybrid8bit_adamw(schedule, mask=MASK, eight_bit_fraction=0.3, **SETTINGS)  # type: ignore[arg-type]
    optimizer = Hybrid8bit(path=path, eight_bit_fraction=0.3, **SETTINGS)  # type: ignore[arg-type]
    slabs, state, params, optax_state = walk_together(optimizer, transform, steps=20)
    moments = optax_state.moments["matrix"]
    assert moments.m.codes_KS.shape == (int(0.3 * (131 * 257 // 256)), 256)
    np.testing.assert_array_equal(
        state["m_codes"][: moments.m.codes_KS.size], np.asarray(moments.m.codes_KS).reshape(-1)
    )
    for name, master in masters(slabs).items():
        np.testing.assert_allclose(master, params[name], atol=2e-6, rtol=0)


@every_path
def test_bf16_adamw_rounds_every_step_to_nearest_even(path: str) -> None:
    """The reference: one optax step on bf16 parameters widened to fp32, rounded by XLA."""
    optimizer = Bf16AdamW(path=path)
    slabs = make_slabs()
    state = optimizer.create_state(LAYOUT)
    slabs.lo[:] = 0
    params = {name: jnp.asarray(master) for name, master in masters(slabs).items()}
    transform = optax.adamw(1e-2, weight_decay=0.01, mask=MASK)
    optax_state = transform.init(params)
    rng = np.random.default_rng(7)
    for count in range(1, 11):
        gradient = fill_gradient(slabs, rng)
        optimizer.update(slabs, state, learning_rate=1e-2, count=count, scale=1.0)
        updates, optax_state = transform.update(gradient, optax_state, params)
        params = jax.tree.map(lambda p, u: (p + u).astype(jnp.bfloat16).astype(jnp.float32), params, updates)
    values = np.concatenate([master.reshape(-1) for master in masters(slabs).values()])
    expected = np.concatenate([np.asarray(params[name]).reshape(-1) for name in masters(slabs)])
    # Near a tie, the last bit of fp32 decides which way a value rounds.
    assert (values != expected).mean() < 2e-3
    np.testing.assert_allclose(values, expected, rtol=2**-6, atol=1e-7)


@every_path
def test_kernel_codes_are_those_of_the_pure_functions(path: str) -> None:
    """With b1 = b2 = 0 the moments are the gradient and its square, whatever came before."""
    optimizer = Hybrid8bit(b1=0.0, b2=0.0, path=path)
    slabs = make_slabs(gradient_dtype="float32")
    state = optimizer.create_state(LAYOUT)
    rng = np.random.default_rng(0)
    matrix = LAYOUT.segments[0]
    blocks = -(-matrix.elements // 256)
    for count, (spread, size) in enumerate(((0.0, 1e-3), (1.0, 1e15), (4.0, 1e-6), (9.0, 1e-3)), start=1):
        fill_gradient(slabs, rng, spread)
        np.multiply(slabs.gradient, np.float32(size), out=slabs.gradient)
        slabs.gradient[:512:2] = 0
        optimizer.update(slabs, state, learning_rate=0.0, count=count, scale=1.0)
        m_KS = jnp.asarray(slabs.gradient[: blocks * 256].reshape(blocks, 256))
        v_KS = jax.jit(jnp.square)(m_KS)
        for name, coded in (("m", codes.encode_m(m_KS)), ("v", codes.encode_v(v_KS, jnp.int32(count)))):
            np.testing.assert_array_equal(
                state[f"{name}_codes"][: blocks * 256], np.asarray(coded.codes_KS).reshape(-1)
            )
            np.testing.assert_array_equal(state[f"{name}_scales"][:blocks], coded.scale_K)


def test_a_zero_learning_rate_changes_no_master() -> None:
    """Every normal fp32 value and both zeros survive the update's join and split."""
    special = np.array(
        [0.0, -0.0, 1.2e-38, -3.4e38, 3.4028235e38, 1.0, 1.00390625, 1.0039061, 1.4999999, 123.456]
    ).astype(np.float32)
    slabs = make_slabs()
    matrix = LAYOUT.segments[0]
    bits = np.random.default_rng(0).integers(0, 2**32, matrix.elements, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.where(np.isfinite(values) & (np.abs(values) >= 2**-126), values, np.float32(1))
    values[: special.size] = special
    slabs.set_master("matrix", values.reshape(matrix.shape))
    before = slabs.master("matrix").view(np.uint32).copy()
    for optimizer in (Hybrid8bit(weight_decay=0.0), Fp32AdamW(weight_decay=0.0)):
        state = optimizer.create_state(LAYOUT)
        optimizer.update(slabs, state, learning_rate=0.0, count=1, scale=1.0)
        after = slabs.master("matrix").view(np.uint32)
        np.testing.assert_array_equal(after, before)
