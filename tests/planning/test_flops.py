"""Work read off traced programs: against hand counts, XLA's own count, and the save sets' algebra."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from lazyjax.models.residuals import backward_from, residual_shapes
from lazyjax.models.template import Context, LayerKind
from lazyjax.planning.costs.layers import (
    CallShape,
    backward_graph,
    forward_graph,
    kind_inputs,
    named_bytes,
    save_sets,
)
from lazyjax.planning.costs.trace import Kernel, UnknownCostError, Work, saved_in_order, trace
from lazyjax.specs import TensorSpec
from tests import tiny

HIDDEN, INNER, ROWS, TOKENS = 64, 256, 4, 32
#: FLOPs of one of the three matrix products.
ONE = 2 * ROWS * TOKENS * HIDDEN * INNER


def _mlp(params: Any, x: jax.Array, context: Context) -> jax.Array:
    gate_DF, up_DF, down_FD = params
    gate = checkpoint_name(x @ gate_DF, "gate")
    up = checkpoint_name(x @ up_DF, "up")
    return x + (jax.nn.silu(gate) * up) @ down_FD


def _kind() -> LayerKind:
    parameters = (
        TensorSpec("gate", (HIDDEN, INNER), "float32"),
        TensorSpec("up", (HIDDEN, INNER), "float32"),
        TensorSpec("down", (INNER, HIDDEN), "float32"),
    )
    return LayerKind("mlp", parameters, ("gate", "up"), _mlp, lambda key: ())


KIND = _kind()
SHAPE = CallShape(HIDDEN, TOKENS, "float32")


def _inputs(rows: int = ROWS) -> tuple[Any, jax.ShapeDtypeStruct, Context]:
    tokens = jax.ShapeDtypeStruct((rows, TOKENS), jnp.int32)
    params = tuple(jax.ShapeDtypeStruct(tensor.shape, jnp.float32) for tensor in KIND.parameters)
    return params, jax.ShapeDtypeStruct((rows, TOKENS, HIDDEN), jnp.float32), Context(tokens, tokens)


@pytest.mark.parametrize(("saved", "products"), [((), 8), (("gate",), 7), (("up",), 7), (("gate", "up"), 6)])
def test_backward_recomputes_what_is_not_saved(saved: tuple[str, ...], products: int) -> None:
    """Two gradients per product, and `gate` and `up` again; never `down`, whose output nobody needs."""
    assert backward_graph(KIND, SHAPE, ROWS, saved).work().flops == products * ONE


@pytest.mark.parametrize("saved", [(), ("gate",), ("gate", "up")])
def test_backward_flops_equal_those_of_the_program_that_runs(saved: tuple[str, ...]) -> None:
    params, x, context = _inputs()

    def backward(params: Any, x: Any, context: Any, residuals: Any, dy: Any) -> Any:
        return backward_from(_mlp, saved, params, x, context, residuals, dy)

    residuals = residual_shapes(_mlp, saved, params, x, context)
    direct = trace(backward, params, x, context, residuals, x)
    assert backward_graph(KIND, SHAPE, ROWS, saved).work().flops == direct.work().flops
    compiled = jax.jit(backward).lower(params, x, context, residuals, x).compile()
    # XLA also counts element-wise operations: about ten for silu, its derivative and the products.
    surplus = compiled.cost_analysis()["flops"] - direct.work().flops
    assert 0 <= surplus <= 25 * ROWS * TOKENS * INNER
    predicted_bytes = backward_graph(KIND, SHAPE, ROWS, saved).peak_bytes()
    measured_bytes = compiled.memory_analysis().temp_size_in_bytes
    assert measured_bytes / 2 <= predicted_bytes <= measured_bytes * 2


def test_forward_working_set_is_what_lies_between_the_products() -> None:
    inner_bytes = ROWS * TOKENS * INNER * 4
    assert forward_graph(KIND, SHAPE, ROWS).peak_bytes() == 3 * inner_bytes
    # Saved tensors are results, not working memory; what is left is down's operand and its product.
    product_bytes = ROWS * TOKENS * HIDDEN * 4
    assert forward_graph(KIND, SHAPE, ROWS, ("gate", "up")).peak_bytes() == inner_bytes + product_bytes


def test_rows_are_affine() -> None:
    params, x, context = _inputs(rows=7)
    direct = trace(lambda p, x, c: _mlp(p, x, c), params, x, context)
    assert forward_graph(KIND, SHAPE, 7).work() == direct.work()
    assert forward_graph(KIND, SHAPE, 7).peak_bytes() == direct.peak_bytes()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_5"])
def test_tensors_of_a_forward_pass_are_found_by_their_names(family: str) -> None:
    """In the order in which the layer names them, whatever order JAX keeps them in."""
    template = tiny.template(family, tied=True)
    shape = CallShape(32, TOKENS, "float32")
    for kind in template.kinds.values():
        if kind.residual_names:
            inputs = kind_inputs(kind, 32, ROWS, TOKENS, "float32")
            shapes = residual_shapes(kind.apply, kind.residual_names, *inputs)
            expected = {
                name: found.size * found.dtype.itemsize
                for name, found in zip(kind.residual_names, shapes, strict=True)
            }
            assert named_bytes(kind, shape, ROWS) == expected
            graph = forward_graph(kind, shape, ROWS, kind.residual_names)
            assert [graph.name_of(value) for value in graph.outputs[1:]] == list(kind.residual_names)


def test_element_wise_chains_are_one_kernel() -> None:
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    work = trace(lambda a, b: jnp.tanh(a * 2 + b) * b, x, x).work()
    assert work.kernels == {Kernel(0, 3 * 4000): 1}


def test_dead_products_do_not_count() -> None:
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)

    @jax.jit
    def both(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return a @ b, b @ a @ b

    assert trace(lambda a, b: both(a, b)[0], square, square).work().flops == 2 * 16**3


def test_loops_count_every_iteration_and_branches_the_costliest() -> None:
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)

    def loop(a: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c @ a, None), a, length=5)[0]

    assert trace(loop, square).work().flops == 5 * 2 * 16**3

    def branch(a: jax.Array) -> jax.Array:
        return jax.lax.cond(a[0, 0] > 0, lambda: a @ a @ a, lambda: a)

    assert trace(branch, square).work().flops == 2 * 2 * 16**3


def test_loop_of_unknown_length_is_refused() -> None:
    with pytest.raises(UnknownCostError, match="no known trip count"):
        trace(lambda x: jax.lax.while_loop(lambda y: y < 3, lambda y: y * 2, x), 1.0)


@pytest.mark.parametrize("groups", [1, 8])
def test_convolution(groups: int) -> None:
    x = jax.ShapeDtypeStruct((2, 8, 50), jnp.float32)
    kernel = jax.ShapeDtypeStruct((16, 8 // groups, 4), jnp.float32)

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, (1,), "VALID", feature_group_count=groups)

    assert trace(convolve, x, kernel).work().flops == 2 * (2 * 16 * 47) * (8 // groups) * 4


def test_seconds_are_the_roofline_of_each_kernel() -> None:
    work = Work({Kernel(100, 10): 2, Kernel(0, 50): 1})
    assert work.seconds(flops_per_second=10.0, bytes_per_second=10.0) == 2 * 10.0 + 5.0
    assert (work.flops, work.bytes) == (200, 70)


def test_save_sets_are_the_pareto_front() -> None:
    def seconds(work: Work) -> float:
        return work.seconds(1e12, 1e12)

    found = save_sets(KIND, SHAPE, ROWS, seconds)
    assert found[0].names == ()
    assert found[-1].names == ("gate", "up")
    for first, second in itertools.pairwise(found):
        assert first.bytes < second.bytes
        assert first.backward_seconds > second.backward_seconds
    assert found[-1].bytes == 2 * ROWS * TOKENS * INNER * 4


def test_saved_in_order() -> None:
    assert saved_in_order(("a", "b", "c"), {"c", "a"}) == ("a", "c")
    with pytest.raises(KeyError, match="unknown tensors"):
        saved_in_order(("a",), {"z"})
