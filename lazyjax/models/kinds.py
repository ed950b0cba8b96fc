"""From a Flax NNX module to a layer kind: a pure function over a flat tuple of parameters.

The module is built once under `nnx.eval_shape` and split; its graph definition is closed over.
Rebuilding it from the leaves happens while tracing only, so a call costs what `jax.jit` of plain
arrays costs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array, PRNGKeyArray

from lazyjax.models.backend import for_description
from lazyjax.models.decode import Span
from lazyjax.models.template import Context, Decoding, LayerKind
from lazyjax.specs import TensorSpec


@runtime_checkable
class DecoderBlock(Protocol):
    """A module that maps x_BTD to x_BTD, at once or chunk by chunk."""

    def __call__(self, x_BTD: Array, context: Context) -> Array:
        """Whole rows, or several segments in a row."""
        ...

    def in_chunks(self, x_BTD: Array, context: Context, width: int) -> Array:
        """As a call, at most `width` tokens of every row at a time."""
        ...

    def step(self, x_BTD: Array, state: tuple[Array, ...], span: Span) -> tuple[Array, tuple[Array, ...]]:
        """A chunk of every row, after the tokens that `state` holds."""
        ...

    def state_shapes(self, rows: int, tokens: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays of the state."""
        ...


Apply = Callable[[tuple[Array, ...], Array, Context], Array]

#: Any length does: names do not depend on it.
_TRACE_TOKENS = 2


def layer_kind(
    name: str, build: Callable[[nnx.Rngs], nnx.Module], input_shape: jax.ShapeDtypeStruct
) -> LayerKind:
    """Describes the layer that `build` makes, without allocating anything.

    Args:
        build: makes the module; draws initial values from the `params` stream.
        input_shape: the module's first argument for one row, used to trace it once.
    """
    parameters, rebuild = _describe(build)

    def apply(params: tuple[Array, ...], x: Array, context: Context) -> Array:
        y: Array = rebuild(params)(x, context)
        return y

    @jax.jit
    def initialize(key: PRNGKeyArray) -> tuple[Array, ...]:
        return tuple(jax.tree.leaves(nnx.state(build(nnx.Rngs(params=key)))))

    unnamed = LayerKind(name, parameters, (), apply, initialize)
    return dataclasses.replace(unnamed, residual_names=_names(apply, unnamed, input_shape))


def _names(apply: Apply, kind: LayerKind, input_shape: jax.ShapeDtypeStruct) -> tuple[str, ...]:
    shapes = tuple(jax.ShapeDtypeStruct(tensor.shape, jnp.float32) for tensor in kind.parameters)
    row: Any = jax.ShapeDtypeStruct(input_shape.shape[:2], jnp.int32)
    with for_description():
        traced = jax.make_jaxpr(apply)(shapes, input_shape, Context(row, row))
    names = tuple(_checkpoint_names(traced.jaxpr))
    if len(set(names)) != len(names):
        raise ValueError(f"{kind.name}: a residual name stands for two tensors: {names}")
    return names


def _hidden(hidden_size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, _TRACE_TOKENS, hidden_size), jnp.float32)


def block_kind(name: str, build: Callable[[nnx.Rngs], nnx.Module], hidden_size: int) -> LayerKind:
    """The kind of a layer that maps x_BTD to x_BTD: a decoder block or the head."""
    return layer_kind(name, build, _hidden(hidden_size))


def decoder_kind(name: str, build: Callable[[nnx.Rngs], Any], hidden_size: int) -> LayerKind:
    """The kind of a decoder block, a `DecoderBlock`: also how it runs token by token."""
    _, rebuild = _describe(build)
    whole = block_kind(name, build, hidden_size)
    described: DecoderBlock = nnx.eval_shape(lambda: build(nnx.Rngs(params=0)))

    def step(
        params: tuple[Array, ...], x: Array, state: tuple[Array, ...], span: Span
    ) -> tuple[Array, tuple[Array, ...]]:
        return rebuild(params).step(x, state, span)

    @functools.cache
    def in_chunks(width: int) -> LayerKind:
        # One token at a time shows which names there are in chunks of any width.
        return dataclasses.replace(
            whole,
            residual_names=_names(_chunked_apply(rebuild, 1), whole, _hidden(hidden_size)),
            apply=_chunked_apply(rebuild, width),
        )

    return dataclasses.replace(whole, decoding=Decoding(step, described.state_shapes), in_chunks=in_chunks)


def _chunked_apply(rebuild: Callable[[tuple[Array, ...]], Any], width: int) -> Apply:
    def apply(params: tuple[Array, ...], x: Array, context: Context) -> Array:
        y: Array = rebuild(params).in_chunks(x, context, width)
        return y

    return apply


def _describe(
    build: Callable[[nnx.Rngs], nnx.Module],
) -> tuple[tuple[TensorSpec, ...], Callable[[tuple[Array, ...]], Any]]:
    """The parameters of what `build` makes, and how to make it again from their values."""
    graph, state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(params=0))))
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    parameters = tuple(TensorSpec(_dotted(path), tuple(leaf.shape), "float32") for path, leaf in leaves)
    return parameters, lambda params: nnx.merge(graph, jax.tree.unflatten(structure, params))


def embed_kind(build: Callable[[nnx.Rngs], nnx.Module]) -> LayerKind:
    """The kind of a layer that maps tokens_BT to x_BTD."""
    return layer_kind("embed", build, jax.ShapeDtypeStruct((1, _TRACE_TOKENS), jnp.int32))


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))


def _checkpoint_names(jaxpr: Any) -> Iterator[str]:
    """Names given by `checkpoint_name`, in program order, inner programs included but for loops.

    What a loop makes in one of its turns cannot be kept.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("scan", "while", "cond"):
            continue
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _checkpoint_names(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def _is_program(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)
