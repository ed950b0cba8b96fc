"""Gradients in bfloat16 against those of the same weights and inputs in float32, tensor by tensor."""

import jax
import jax.numpy as jnp
import pytest

from lazyjax.models.registry import build_template
from lazyjax.models.template import Context
from tests.huggingface.architectures import SMALL
from tests.reference import random_parameters

#: 16k tokens: what is summed over tokens in bfloat16 has long stopped growing.
ROWS, TOKENS = 256, 64
BOUND = 0.02


def _values(seed: int, size: int) -> jax.Array:
    """Channels with a mean, as activations and their gradients have: sums over tokens then grow with them."""
    token_key, channel_key = jax.random.split(jax.random.key(seed))
    x_BTD = jax.random.normal(token_key, (ROWS, TOKENS, size)) + jax.random.normal(channel_key, (size,))
    return x_BTD.astype(jnp.bfloat16)


CASES = [
    (name, kind)
    for name in ("llama-tied", "qwen2", "qwen3", "qwen3_5")
    for kind in sorted(build_template(SMALL[name]).kinds)
    if kind != "embed"
]


@pytest.mark.parametrize(("name", "kind_name"), CASES)
def test_every_gradient_is_near_that_of_float32(name: str, kind_name: str) -> None:
    template = build_template(SMALL[name])
    kind = template.kinds[kind_name]
    index = [layer.kind for layer in template.spec.layers].index(kind_name)
    positions_BT = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (ROWS, TOKENS))
    context = Context(positions_BT, jnp.ones((ROWS, TOKENS), jnp.int32))
    params = tuple(p.astype(jnp.bfloat16) for p in random_parameters(template, seed=0)[index])
    x_BTD, y_gradient_BTD = (_values(seed, template.spec.hidden_size) for seed in (1, 2))

    @jax.jit
    def gradients(params, x_BTD, y_gradient_BTD):
        _, pullback = jax.vjp(lambda p, x: kind.apply(p, x, context), params, x_BTD)
        return pullback(y_gradient_BTD)

    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, x_BTD, y_gradient_BTD))
    actual, x_actual = gradients(params, x_BTD, y_gradient_BTD)
    expected, x_expected = gradients(*wide)
    names = [tensor.name for tensor in kind.parameters]
    for tensor, one, other in zip(
        [*names, "input"], (*actual, x_actual), (*expected, x_expected), strict=True
    ):
        error = float(jnp.linalg.norm(one.astype(jnp.float32) - other))
        assert error <= BOUND * float(jnp.linalg.norm(other)), f"{tensor}: off by {error:.3g}"
