"""Functions of single tokens, run over chunks of tokens, so that what they need does not grow with T.

Axes: B rows, T tokens, C tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

Arrays = tuple[Array, ...]


class Chunks(NamedTuple):
    """T cut into `number` chunks of `width` tokens; the last `padding` tokens do not exist."""

    number: int
    width: int
    padding: int


def balanced_chunks(rows: int, length: int, most_tokens: int) -> Chunks:
    """The fewest chunks of at most `most_tokens` tokens (over all rows), of nearly equal length.

    Less than one token per chunk and row is padding.
    """
    widest = min(length, max(1, most_tokens // rows))
    number = -(-length // widest)
    width = -(-length // number)
    return Chunks(number, width, number * width - length)


def split_tokens(array: Array, chunks: Chunks) -> Array:
    """[B, T, ...] -> [chunks, B, C, ...], padded with zeros."""
    padded = jnp.pad(array, [(0, 0), (0, chunks.padding)] + [(0, 0)] * (array.ndim - 2))
    split = padded.reshape(array.shape[0], chunks.number, chunks.width, *array.shape[2:])
    return jnp.moveaxis(split, 1, 0)


def join_tokens(array: Array, chunks: Chunks) -> Array:
    """The reverse of `split_tokens`."""
    joined = jnp.moveaxis(array, 0, 1)
    joined = joined.reshape(joined.shape[0], chunks.number * chunks.width, *joined.shape[3:])
    return joined[:, : chunks.number * chunks.width - chunks.padding]


def map_modules(
    function: Callable[..., Any], modules: tuple[nnx.Module, ...], inputs: Arrays, width: int
) -> Any:
    """function(*modules, *inputs) in chunks of at most `width` tokens of every row.

    `function` maps arrays [B, T, ...] to an array or a tuple of arrays [B, T, ...], every token by itself.
    The backward pass computes a chunk again and adds the parameters' gradients up in float32.
    """
    graph, state = nnx.split(modules)
    leaves, structure = jax.tree.flatten(state)

    def apply(leaves: Arrays, inputs: Arrays) -> Any:
        return function(*nnx.merge(graph, jax.tree.unflatten(structure, leaves)), *inputs)

    chunks = balanced_chunks(1, inputs[0].shape[1], width)
    if chunks.number == 1:
        return apply(tuple(leaves), inputs)
    return _map(apply, chunks, tuple(leaves), inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map(apply: Callable[[Arrays, Arrays], Any], chunks: Chunks, leaves: Arrays, inputs: Arrays) -> Any:
    def one(carry: None, chunk: Arrays) -> tuple[None, Any]:
        return carry, apply(leaves, chunk)

    _, outputs = jax.lax.scan(one, None, tuple(split_tokens(array, chunks) for array in inputs))
    return jax.tree.map(lambda array: join_tokens(array, chunks), outputs)


def _map_forward(
    apply: Callable[[Arrays, Arrays], Any], chunks: Chunks, leaves: Arrays, inputs: Arrays
) -> tuple[Any, tuple[Arrays, Arrays]]:
    return _map(apply, chunks, leaves, inputs), (leaves, inputs)


def _map_backward(
    apply: Callable[[Arrays, Arrays], Any],
    chunks: Chunks,
    saved: tuple[Arrays, Arrays],
    gradients: Any,
) -> tuple[Arrays, Arrays]:
    leaves, inputs = saved

    def one(totals: Arrays, chunk: tuple[Arrays, Any]) -> tuple[Arrays, Arrays]:
        chunk_inputs, chunk_gradients = chunk
        _, pullback = jax.vjp(apply, leaves, chunk_inputs)
        leaf_gradients, input_gradients = pullback(chunk_gradients)
        added = jax.tree.map(
            lambda total, part: total + part.astype(jnp.float32), totals, leaf_gradients
        )
        return added, input_gradients

    start = tuple(jnp.zeros(leaf.shape, jnp.float32) for leaf in leaves)
    given = jax.tree.map(lambda array: split_tokens(array, chunks), (inputs, gradients))
    totals, input_gradients = jax.lax.scan(one, start, given)
    return (
        tuple(total.astype(leaf.dtype) for total, leaf in zip(totals, leaves, strict=True)),
        tuple(join_tokens(gradient, chunks) for gradient in input_gradients),
    )


_map.defvjp(_map_forward, _map_backward)
