"""Layers split by names, with JAX's checkpoints of today and with those that `jax_remat3` switches on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from lazyjax.models.registry import build_template
from lazyjax.models.residuals import backward_from, forward_saving
from tests.huggingface.architectures import SMALL


@pytest.fixture(params=[False, True], ids=["remat", "remat3"])
def remat3(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether `jax_remat3` is on."""
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this JAX has one kind of checkpoint")
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", before)


def _layer(params: tuple[jax.Array, ...], x: jax.Array, context: Any) -> jax.Array:
    gate, up, down = params
    gated = checkpoint_name(x @ gate, "gate")
    # Used before `gate` is, so that JAX's own order is not that of the names.
    raised = jnp.sin(checkpoint_name(x @ up, "up"))
    return (raised * jax.nn.silu(gated) + context) @ down


@pytest.mark.parametrize("names", [(), ("gate",), ("up",), ("gate", "up")])
def test_tensors_are_kept_by_name(remat3: bool, names: tuple[str, ...]) -> None:
    half = jnp.float32(0.5)
    keys = jax.random.split(jax.random.key(0), 5)
    gate, up = (jax.random.normal(key, (4, 6)) for key in keys[:2])
    params = gate, up, jax.random.normal(keys[2], (6, 4))
    x, y_gradient = (jax.random.normal(key, (3, 4)) for key in keys[3:])
    y, kept = jax.jit(lambda p, x: forward_saving(_layer, names, p, x, half))(params, x)
    tensors = {"gate": x @ gate, "up": x @ up}
    assert len(kept) == len(names)
    for name, tensor in zip(names, kept, strict=True):
        np.testing.assert_allclose(tensor, tensors[name], rtol=1e-6, atol=1e-6)
    expected_y, pullback = jax.vjp(lambda p, x: _layer(p, x, half), params, x)
    np.testing.assert_allclose(y, expected_y, rtol=1e-6, atol=1e-6)
    found = jax.jit(lambda *args: backward_from(_layer, names, *args))(params, x, half, kept, y_gradient)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(pullback(y_gradient)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    # Zeros in the place of what was kept change gradients, unless nothing was.
    zeros = jax.tree.map(jnp.zeros_like, kept)
    changed = jax.jit(lambda *args: backward_from(_layer, names, *args))(params, x, half, zeros, y_gradient)
    assert bool(jnp.all(changed[0][2] == found[0][2])) == (names == ())


def test_models_refuse_what_their_gradients_cannot_keep(remat3: bool) -> None:
    """Names in the forward rule of a custom gradient would be lost without a word."""
    if not remat3:
        build_template(SMALL["qwen2"])
        return
    with pytest.raises(ValueError, match="jax_remat3"):
        build_template(SMALL["qwen2"])
