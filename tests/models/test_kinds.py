"""Layer kinds: dtypes, names worth saving, initial values, and the embedding's gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazyjax.models.layers import look_up
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.models.residuals import backward_from, forward_saving, residual_shapes
from lazyjax.models.template import Context
from tests.huggingface.architectures import SMALL
from tests.reference import random_parameters

ATTENTION_NAMES = ("query", "key", "value", "attention_out", "attention_lse", "post_mixer", "gate", "up")
DELTA_NET_NAMES = ("delta_qkv", "delta_z", "delta_states", "delta_out", "post_mixer", "gate", "up")
ROWS, TOKENS = 2, 67


def _context():
    positions_BT = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (ROWS, TOKENS))
    return Context(positions_BT, (positions_BT >= 30).astype(jnp.int32) + 1)


def _block(name, kind_name):
    template = build_template(SMALL[name])
    index = [layer.kind for layer in template.spec.layers].index(kind_name)
    x_BTD = jax.random.normal(jax.random.key(1), (ROWS, TOKENS, template.spec.hidden_size))
    return template.kind(index), random_parameters(template, seed=0)[index], x_BTD


@pytest.mark.parametrize("name", SMALL)
def test_kinds_are_shared_and_name_their_residuals(name):
    template = build_template(SMALL[name])
    assert build_template(SMALL[name]) is template
    kinds = [template.kind(index) for index in range(len(template.spec.layers))]
    assert kinds[0].residual_names == kinds[-1].residual_names == ()
    for kind in kinds[1:-1]:
        assert kind is template.kinds[kind.name]
        expected = DELTA_NET_NAMES if kind.name == "linear_attention" else ATTENTION_NAMES
        assert kind.residual_names == expected
    layer, parameter = template.table
    tensor = template.spec.layers[layer].parameters[parameter]
    assert tensor.shape == (template.spec.vocabulary_size, template.spec.hidden_size)


@pytest.mark.parametrize("kind_name", ["full_attention", "linear_attention"])
def test_gradients_do_not_depend_on_what_is_kept(kind_name):
    kind, params, x_BTD = _block("qwen3_5", kind_name)
    context = _context()

    def gradients(names):
        def step(params, x_BTD):
            y_BTD, residuals = forward_saving(kind.apply, names, params, x_BTD, context)
            return backward_from(kind.apply, names, params, x_BTD, context, residuals, jnp.cos(y_BTD))

        return jax.jit(step)(params, x_BTD)

    expected = jax.tree.leaves(gradients(()))
    for names in (kind.residual_names[::2], kind.residual_names[1::2], kind.residual_names):
        for one, other in zip(jax.tree.leaves(gradients(names)), expected, strict=True):
            assert float(jnp.abs(one - other).max()) <= 1e-6 * float(jnp.abs(other).max()), names


@pytest.mark.parametrize("kind_name", ["full_attention", "linear_attention"])
def test_saving_removes_matrix_products(kind_name):
    """Every name takes matrix products out of the backward program, alone or beside those before it.

    Sums of softmax only do beside the outputs: without these the attention runs again anyway.
    """
    kind, params, x_BTD = _block("qwen3_5", kind_name)
    context = _context()

    def products(names):
        residuals = residual_shapes(kind.apply, names, params, x_BTD, context)
        backward = jax.jit(lambda *args: backward_from(kind.apply, names, *args))
        lowered = backward.lower(params, x_BTD, context, residuals, x_BTD)
        return lowered.compiler_ir("stablehlo").operation.get_asm().count("stablehlo.dot_general")

    none = products(())
    for index, name in enumerate(kind.residual_names):
        before = kind.residual_names[:index]
        assert products((name,)) < none or products((*before, name)) < products(before), name


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_5"])
def test_bfloat16_stays_bfloat16_and_near_float32(name):
    template = build_template(SMALL[name])
    parameters = random_parameters(template, seed=0)
    context = _context()
    for kind_name, kind in template.kinds.items():
        index = [layer.kind for layer in template.spec.layers].index(kind_name)
        if kind_name == "embed":
            x = jnp.ones((ROWS, TOKENS), jnp.int32)
        else:
            x = jax.random.normal(jax.random.key(1), (ROWS, TOKENS, 32)).astype(jnp.bfloat16)
        narrow = tuple(tensor.astype(jnp.bfloat16) for tensor in parameters[index])
        y = jax.jit(kind.apply)(narrow, x, context)
        assert y.dtype == jnp.bfloat16
        wide = jax.tree.map(lambda t: t.astype(jnp.float32), narrow)
        x_wide = x if kind_name == "embed" else x.astype(jnp.float32)
        exact = jax.jit(kind.apply)(wide, x_wide, context)
        error = jnp.linalg.norm(y.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
        assert float(error) < 0.02, kind_name


def test_initial_values():
    """As Transformers initialises: normal matrices, identity norms, zero biases, decays over (0.01, 16)."""
    template = build_template(SMALL["qwen3_5"])
    kinds = [layer.kind for layer in template.spec.layers]
    values = init_parameters(template, kinds.index("linear_attention"), jax.random.key(0))
    other = init_parameters(template, kinds.index("linear_attention") + 1, jax.random.key(0))
    assert all(isinstance(value, np.ndarray) and value.dtype == np.float32 for value in values.values())
    kernel = values["mlp.up_proj.kernel"]
    assert abs(kernel.std() - 0.02) < 0.002
    assert not np.array_equal(kernel, other["mlp.up_proj.kernel"])
    assert (values["input_layernorm.weight"] == 0).all()  # the scale is 1 + weight
    assert (values["linear_attn.norm.weight"] == 1).all()
    assert (values["linear_attn.dt_bias"] == 1).all()
    decay = np.exp(values["linear_attn.A_log"])
    assert ((decay > 0.01) & (decay < 16)).all()
    plain = build_template(SMALL["qwen2"])
    values = init_parameters(plain, 1, jax.random.key(0))
    assert (values["input_layernorm.weight"] == 1).all()
    assert (values["self_attn.q_proj.bias"] == 0).all()


def test_embedding_gradient_is_summed_in_float32():
    """4000 equal contributions: added in bfloat16 the sum would stop at 256 times one of them."""
    tokens_BT = jnp.array([[3] * 4000 + [1, 0, 4, 1]], jnp.int32)
    table_VD = jnp.zeros((6, 2), jnp.bfloat16)
    weights_BTD = jnp.full((1, 4004, 2), 0.01, jnp.bfloat16)
    gradient = jax.jit(
        jax.grad(lambda t: jnp.sum((look_up(t, tokens_BT) * weights_BTD).astype(jnp.float32)))
    )(table_VD)
    assert gradient.dtype == jnp.bfloat16
    one = float(weights_BTD[0, 0, 0])
    expected = one * np.array([1, 2, 0, 4000, 1, 0])
    np.testing.assert_allclose(np.asarray(gradient[:, 0], np.float32), expected, rtol=4e-3)


def test_embedding_gradient_equals_autodiff():
    random = np.random.default_rng(0)
    tokens_BT = jnp.asarray(random.integers(0, 9, (3, 40)), jnp.int32)
    table_VD = jnp.asarray(random.normal(size=(9, 5)), jnp.float32)
    weights_BTD = jnp.asarray(random.normal(size=(3, 40, 5)), jnp.float32)
    actual = jax.grad(lambda t: jnp.sum(look_up(t, tokens_BT) * weights_BTD))(table_VD)
    expected = jax.grad(lambda t: jnp.sum(t[tokens_BT] * weights_BTD))(table_VD)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
