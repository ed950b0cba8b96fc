"""Work and working set of every kernel of a template, and which sets of tensors are worth saving.

Programs are traced once per kind at two row counts; those of other microbatches follow, because
every size in them is affine in the rows. The backward pass with saved tensors is the one without,
cut where those tensors are named. All of it is shape arithmetic: no array exists.

The kernels of `lazyjax.execution` are mirrored here as far as they do work: backward ends with
the gradients in one flat float32 slab, the head runs in chunks of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lazyjax.models.backend import for_description
from lazyjax.models.cross_entropy import cross_entropy_and_gradients
from lazyjax.models.residuals import backward_from, forward_keeping
from lazyjax.models.template import Context, LayerKind, ModelTemplate
from lazyjax.planning.costs.trace import (
    Graph,
    Marking,
    UnknownCostError,
    Visits,
    Work,
    between,
    saved_in_order,
    trace,
)

#: Mark of values inside a layer's parts, see `_marks`.
INSIDE = "inside"
#: Row counts at which programs are traced; one row could lose an axis to broadcasting.
_LOW_ROWS, _HIGH_ROWS = 2, 3
#: Sets that a layer chooses from; twice as many gain less than 0.5 % (see the log).
MOST_SAVE_SETS = 12
#: Up to this many named tensors all their sets are weighed.
_EXHAUSTIVE_NAMES = 10


class CallShape(NamedTuple):
    """What a kernel is traced for: hidden size, T tokens and the compute dtype's name.

    Attributes:
        visits: pairs of blocks that attention visits, where packed rows let it skip some
            (`lazyjax.planning.costs.packing`); None: all of them.
    """

    hidden_size: int
    sequence_length: int
    compute_dtype: str
    visits: Visits | None = None


class SaveSet(NamedTuple):
    """A set of named tensors that may be kept, for one microbatch.

    Attributes:
        names: in the order in which the layer computes them.
        bytes: what keeping them takes.
        backward_seconds: of the backward pass, with what it still has to compute again.
    """

    names: tuple[str, ...]
    bytes: int
    backward_seconds: float


def kind_inputs(
    kind: LayerKind, hidden_size: int, device_rows: int, sequence_length: int, compute_dtype: str
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], jax.ShapeDtypeStruct, Context]:
    """Abstract (parameters, x, context) of one call of `kind` on [device_rows, sequence_length] tokens."""
    dtype = jnp.dtype(compute_dtype)
    tokens: Any = jax.ShapeDtypeStruct((device_rows, sequence_length), jnp.int32)
    params = tuple(jax.ShapeDtypeStruct(tensor.shape, dtype) for tensor in kind.parameters)
    hidden = jax.ShapeDtypeStruct((device_rows, sequence_length, hidden_size), dtype)
    return params, tokens if kind.name == "embed" else hidden, Context(tokens, tokens)


def forward_graph(kind: LayerKind, shape: CallShape, device_rows: int, saved: Collection[str] = ()) -> Graph:
    """The forward pass on `device_rows` x T tokens that also returns the tensors in `saved`."""
    graph = _visiting(_forward, kind, shape, device_rows)
    y, *named = graph.outputs
    kept = [value for name, value in zip(kind.residual_names, named, strict=True) if name in saved]
    return graph.needed((y, *kept))


def backward_graph(kind: LayerKind, shape: CallShape, device_rows: int, saved: Collection[str] = ()) -> Graph:
    """The backward pass, recomputing what is not in `saved`: input gradient and flat float32 slab."""
    graph = _visiting(_backward, kind, shape, device_rows)
    return graph.needed(graph.outputs, saved=saved) if saved else graph


def named_bytes(kind: LayerKind, shape: CallShape, device_rows: int) -> dict[str, int]:
    """Bytes of the tensors that a layer names, for `device_rows` x T tokens."""
    graph = _forward(kind, shape._replace(visits=None), device_rows)
    return {
        name: graph.sizes[value] for name, value in zip(kind.residual_names, graph.outputs[1:], strict=True)
    }


def _visiting(
    pass_of: Callable[[LayerKind, CallShape, int], Graph], kind: LayerKind, shape: CallShape, device_rows: int
) -> Graph:
    """A pass, traced once for whole and for packed rows."""
    graph = pass_of(kind, shape._replace(visits=None), device_rows)
    return graph if shape.visits is None else graph.visiting(shape.visits)


def _marks(shape: CallShape) -> Marking:
    """Marks what is inside a mixer or an MLP: neither as wide as the residual stream, nor the result of a
    projection."""

    def mark(primitive: str, axes: tuple[int, ...]) -> str:
        projected = axes[-1:] == (shape.hidden_size,) or primitive == "dot_general"
        return INSIDE if len(axes) >= 4 or (len(axes) == 3 and not projected) else ""

    return mark


@functools.lru_cache(maxsize=256)
def _forward(kind: LayerKind, shape: CallShape, device_rows: int) -> Graph:
    """Outputs: y, then all named tensors."""

    names = kind.residual_names

    def forward(params: Any, x: Array, context: Any) -> Any:
        if not names:
            return kind.apply(params, x, context), ()
        return forward_keeping(kind.apply, names, params, x, context)

    def at(count: int) -> Graph:
        inputs = kind_inputs(kind, shape.hidden_size, count, shape.sequence_length, shape.compute_dtype)
        with for_description():
            graph = trace(forward, *inputs, marking=_marks(shape))
        y, *kept = graph.outputs
        found = {graph.name_of(value): value for value in kept}
        if found.keys() != set(names):
            raise ValueError(f"{kind.name}: saving {list(names)} keeps tensors called {list(found)}")
        return dataclasses.replace(graph, outputs=(y, *(found[name] for name in names)))

    return at_rows(at, ("forward", kind, shape), device_rows)


@functools.lru_cache(maxsize=256)
def _backward(kind: LayerKind, shape: CallShape, device_rows: int) -> Graph:
    def at(count: int) -> Graph:
        inputs = kind_inputs(kind, shape.hidden_size, count, shape.sequence_length, shape.compute_dtype)
        dtype = jnp.dtype(shape.compute_dtype)
        dy = jax.ShapeDtypeStruct((count, shape.sequence_length, shape.hidden_size), dtype)

        def backward(params: Any, x: Array, context: Any, dy: Array) -> Any:
            if kind.name == "embed":
                table = jnp.zeros(kind.parameters[0].shape, jnp.float32)
                return table.at[x].add(dy.astype(jnp.float32))
            gradients, dx = backward_from(kind.apply, (), params, x, context, (), dy)
            return dx, _flat(gradients)

        with for_description():
            return trace(backward, *inputs, dy, marking=_marks(shape))

    return at_rows(at, ("backward", kind, shape), device_rows)


@functools.lru_cache(maxsize=256)
def loss_graph(template: ModelTemplate, shape: CallShape, device_rows: int, chunk_tokens: int) -> Graph:
    """Final norm, logits, cross-entropy and their gradients in chunks of at most `chunk_tokens` tokens."""
    spec = template.spec
    head = template.kind(len(spec.layers) - 1)
    params, x, context = kind_inputs(
        head, shape.hidden_size, device_rows, shape.sequence_length, shape.compute_dtype
    )
    table = jax.ShapeDtypeStruct((spec.vocabulary_size, shape.hidden_size), jnp.dtype(shape.compute_dtype))

    def loss(
        params: Any, table_VD: Array, x_BTD: Array, context: Any, targets_BT: Array, mask_BT: Array
    ) -> Any:
        normed_BTD, pullback = jax.vjp(lambda p, x: head.apply(p, x, context), params, x_BTD)
        found = cross_entropy_and_gradients(
            normed_BTD, table_VD, targets_BT, mask_BT, jnp.float32(1), chunk_tokens
        )
        gradients, dx = pullback(found.normed_gradient_BTD)
        shapes = [tensor.shape for tensor in head.parameters]
        small = tuple(g for g, size in zip(gradients, shapes, strict=True) if len(size) < 2)
        return found.loss, dx, _flat((*small, found.table_gradient_VD))

    tokens = jax.ShapeDtypeStruct((device_rows, shape.sequence_length), jnp.int32)
    mask = jax.ShapeDtypeStruct((device_rows, shape.sequence_length), jnp.bool_)
    return trace(loss, params, table, x, context, tokens, mask)


def save_sets(
    kind: LayerKind,
    shape: CallShape,
    device_rows: int,
    seconds: Callable[[Work], float],
    *,
    most: int | None = None,
) -> tuple[SaveSet, ...]:
    """Sets worth choosing from: none uses more bytes than another that saves as much time.

    Starts with the empty set, bytes ascend and backward seconds descend strictly. At most
    `most` (by default `MOST_SAVE_SETS`) are kept: the two ends, then those whose omission would cost most.

    Args:
        seconds: time of some work on the hardware at hand.
    """
    return _thin(
        _pareto(_all_sets(kind, shape, device_rows, seconds)), MOST_SAVE_SETS if most is None else most
    )


def _all_sets(
    kind: LayerKind, shape: CallShape, device_rows: int, seconds: Callable[[Work], float]
) -> list[SaveSet]:
    sizes = named_bytes(kind, shape, device_rows)
    names = tuple(name for name in kind.residual_names if name in sizes)

    def weigh(saved: Collection[str]) -> SaveSet:
        ordered = saved_in_order(names, saved)
        work = backward_graph(kind, shape, device_rows, ordered).work()
        return SaveSet(ordered, sum(sizes[name] for name in ordered), seconds(work))

    if len(names) <= _EXHAUSTIVE_NAMES:
        subsets = itertools.chain.from_iterable(
            itertools.combinations(names, count) for count in range(len(names) + 1)
        )
        return [weigh(subset) for subset in subsets]
    found = [weigh(())]
    while len(found[-1].names) < len(names):
        before = found[-1]
        rest = [weigh({*before.names, name}) for name in names if name not in before.names]
        found.append(
            max(
                rest,
                key=lambda s: (before.backward_seconds - s.backward_seconds) / (s.bytes - before.bytes),
            )
        )
    return found


def _pareto(sets: list[SaveSet]) -> list[SaveSet]:
    front: list[SaveSet] = []
    for candidate in sorted(sets, key=lambda s: (s.bytes, s.backward_seconds, len(s.names))):
        if not front or candidate.backward_seconds < front[-1].backward_seconds * (1 - 1e-9) - 1e-15:
            front.append(candidate)
    return front


def _thin(front: list[SaveSet], most: int) -> tuple[SaveSet, ...]:
    """Drops the set that lies least below the line between its neighbours until `most` remain."""
    kept = list(front)
    while len(kept) > most:

        def loss(i: int) -> float:
            a, b, c = kept[i - 1], kept[i], kept[i + 1]
            share = (b.bytes - a.bytes) / (c.bytes - a.bytes)
            line = a.backward_seconds + share * (c.backward_seconds - a.backward_seconds)
            return (line - b.backward_seconds) * (c.bytes - a.bytes)

        kept.pop(min(range(1, len(kept) - 1), key=loss))
    return tuple(kept)


_Traced = dict[tuple[Any, ...], tuple[Graph, Graph]]
_traced: _Traced = {}


def at_rows(at: Callable[[int], Graph], key: tuple[Any, ...], device_rows: int) -> Graph:
    """The graph that `at` traces, at any number of rows, from two tracings that are kept under `key`."""
    if key not in _traced:
        _traced[key] = (at(_LOW_ROWS), at(_HIGH_ROWS))
    try:
        return between(*_traced[key], _LOW_ROWS, _HIGH_ROWS, device_rows)
    except UnknownCostError:
        return at(device_rows)


def _flat(gradients: tuple[Array, ...]) -> Array:
    return jnp.concatenate([gradient.astype(jnp.float32).reshape(-1) for gradient in gradients])
