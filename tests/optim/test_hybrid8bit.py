"""The optax transform by itself."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from lazyjax.optim.hybrid8bit import eight_bit_blocks, hybrid8bit_adamw


def make_tree(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {
        "block": [{"w": array(70, 61), "b": array(61)}, (array(3, 40, 50),)],
        "scalar": array(),
        "empty": array(0, 4),
    }


def walk(
    transform: optax.GradientTransformation, steps: int = 8, dtype: Any = jnp.float32
) -> tuple[Any, Any]:
    params = make_tree(0, dtype)
    state = transform.init(params)
    update = jax.jit(transform.update)
    for step in range(steps):
        updates, state = update(make_tree(step + 1, dtype), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def distance(a: Any, b: Any) -> float:
    squares = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), a, b)
    return float(jnp.sqrt(sum(jax.tree.leaves(squares))))


def assert_equal_trees(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_near_adamw_on_any_tree() -> None:
    params, state = walk(hybrid8bit_adamw(1e-2))
    exact, _ = walk(optax.adamw(1e-2, weight_decay=1e-2))
    start = make_tree()
    assert distance(params, exact) < 0.06 * distance(start, exact)
    assert int(state.count) == 8
    assert state.moments["block"][0]["w"].m.codes_KS.shape == (-(-70 * 61 // 256), 256)
    for name in ("m", "v"):
        assert getattr(state.moments["block"][0]["b"], name).codes_KS.shape == (0, 256)
    # Small tensors keep fp32 state, so they agree to fp32 rounding.
    np.testing.assert_allclose(params["block"][0]["b"], exact["block"][0]["b"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(params["scalar"], exact["scalar"], rtol=1e-5)


def test_without_coded_tensors_it_is_adamw() -> None:
    settings = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
    exact, _ = walk(optax.adamw(1e-2, **settings))
    for transform in (
        hybrid8bit_adamw(1e-2, min_8bit_size=10**9, **settings),  # type: ignore[arg-type]
        hybrid8bit_adamw(1e-2, eight_bit_fraction=0.0, **settings),  # type: ignore[arg-type]
    ):
        params, _ = walk(transform)
        jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=2e-5, atol=1e-6), params, exact)


def test_schedule_and_injected_hyperparameters_agree_with_a_constant() -> None:
    settings: dict[str, float] = {"b1": 0.875, "b2": 0.9375, "weight_decay": 0.125}  # exact in fp32
    constant, _ = walk(hybrid8bit_adamw(1e-2, **settings))  # type: ignore[arg-type]
    scheduled, _ = walk(hybrid8bit_adamw(optax.constant_schedule(1e-2), **settings))  # type: ignore[arg-type]
    static = ("block_size", "min_8bit_size", "eight_bit_fraction")
    inject = optax.inject_hyperparams(hybrid8bit_adamw, static_args=static)
    injected, state = walk(inject(learning_rate=1e-2, **settings))
    assert_equal_trees(constant, scheduled)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(1e-2)
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, atol=1e-6), constant, injected)
    moving, _ = walk(hybrid8bit_adamw(optax.linear_schedule(1e-2, 0.0, 4), **settings))  # type: ignore[arg-type]
    assert distance(moving, constant) > 1e-2


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 1e6])
def test_clipping_is_that_of_optax(clip_norm: float) -> None:
    inside, inside_state = walk(hybrid8bit_adamw(1e-2, clip_norm=clip_norm))
    chained, chained_state = walk(optax.chain(optax.clip_by_global_norm(clip_norm), hybrid8bit_adamw(1e-2)))
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, atol=1e-3), inside, chained)
    assert distance(inside, chained) < 1e-3 * distance(make_tree(), chained)
    scale = inside_state.moments["block"][0]["w"].m.scale_K
    np.testing.assert_allclose(scale, chained_state[1].moments["block"][0]["w"].m.scale_K, rtol=1e-5)


def test_mask_limits_decay() -> None:
    params, zeros = make_tree(), jax.tree.map(jnp.zeros_like, make_tree())

    def decayed(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, tree)

    for mask in (decayed, decayed(params)):
        transform = hybrid8bit_adamw(0.1, weight_decay=0.5, mask=mask)
        updates, _ = transform.update(zeros, transform.init(params), params)
        np.testing.assert_allclose(updates["block"][0]["w"], -0.05 * params["block"][0]["w"], rtol=1e-6)
        assert not updates["block"][0]["b"].any()
        assert not updates["scalar"].any()


def test_updates_keep_the_params_dtype() -> None:
    params, _ = walk(hybrid8bit_adamw(1e-2), dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("fraction", [1.0, 0.02, 0.5])
def test_state_survives_orbax_and_the_walk_goes_on_as_before(tmp_path: pathlib.Path, fraction: float) -> None:
    transform = hybrid8bit_adamw(1e-2, block_size=64, min_8bit_size=1000, eight_bit_fraction=fraction)
    params, state = walk(transform)
    empty = jax.tree.map(lambda x: x.size == 0, (params, state))
    checkpointer = ocp.StandardCheckpointer()
    # Orbax refuses arrays without elements; they hold nothing.
    kept = [x for x, e in zip(jax.tree.leaves((params, state)), jax.tree.leaves(empty), strict=True) if not e]
    checkpointer.save(tmp_path / "state", kept)
    checkpointer.wait_until_finished()
    restored = iter(checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.zeros_like, kept)))
    params_again, state_again = jax.tree.map(lambda x, e: x if e else next(restored), (params, state), empty)
    assert_equal_trees(state, state_again)
    gradient = make_tree(99)
    update = jax.jit(transform.update)
    assert_equal_trees(update(gradient, state, params), update(gradient, state_again, params_again))


def test_block_counts() -> None:
    assert eight_bit_blocks(4095, 256, 4096, 1.0) == 0
    assert eight_bit_blocks(4097, 256, 4096, 1.0) == 17
    assert eight_bit_blocks(10**6, 4096, 4096, 0.02) == 4
    assert eight_bit_blocks(10**6, 256, 4096, 0.0) == 0


@pytest.mark.parametrize(
    "bad", [{"block_size": 0}, {"min_8bit_size": -1}, {"eight_bit_fraction": 1.5}, {"eps": 1e-39}]
)
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        hybrid8bit_adamw(1e-3, **bad)


def test_params_are_needed() -> None:
    transform = hybrid8bit_adamw(1e-3)
    with pytest.raises(ValueError, match="needs the params"):
        transform.update(make_tree(), transform.init(make_tree()))
