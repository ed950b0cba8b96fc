"""The interface between model families and everything that runs, plans or stores a model.

A template says what the layers of a model are (names, shapes, which tensors are worth keeping)
and gives one pure function per layer kind. It holds no arrays: shapes come from
`nnx.eval_shape`, so the template of a 72B model costs nothing. How a kind is made from a Flax NNX
module is the business of `lazyjax.models.kinds`; this module knows no family.

Axes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jaxtyping import Array, Int32, PRNGKeyArray

from lazyjax.models.architecture import Architecture
from lazyjax.models.decode import Span
from lazyjax.specs import ModelSpec, TensorSpec


class Context(NamedTuple):
    """What every layer needs besides its parameters and its input.

    Attributes:
        positions_BT: position of a token inside its segment, restarting at 0.
        segment_ids_BT: 1, 2, ... for the packed rows of a sequence, 0 for padding. A token sees
            only earlier tokens of its own segment.
    """

    positions_BT: Int32[Array, "B T"]
    segment_ids_BT: Int32[Array, "B T"]


@dataclasses.dataclass(frozen=True, eq=False)
class Decoding:
    """How a block runs over a chunk of its rows, given what it remembers of the tokens before.

    Attributes:
        step: pure function (parameters in flat order, x_BTD, state, span) -> (x_BTD, state).
        state_shapes: (rows, tokens that a row may come to, compute dtype) -> arrays of the state, rows first.
    """

    step: Callable[
        [tuple[jax.Array, ...], jax.Array, tuple[jax.Array, ...], Span],
        tuple[jax.Array, tuple[jax.Array, ...]],
    ]
    state_shapes: Callable[[int, int, str], tuple[jax.ShapeDtypeStruct, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerKind:
    """One kind of layer, shared by all layers that have its shapes; compared by identity.

    Attributes:
        name: `embed`, `head`, or the name of a block kind, e.g. `full_attention`.
        parameters: tensors in flat order, named relative to the layer. The dtype is nominal
            (`float32`); the compute dtype is the dtype of what is passed to `apply`.
        residual_names: tensors marked with `jax.ad_checkpoint.checkpoint_name`, in order of
            appearance; each is [B, T, ...] or, for the states of a recurrence, [B, chunks, ...].
        apply: pure function (parameters in flat order, input, context) -> output.
            embed: tokens_BT -> x_BTD in the dtype of the parameters.
            block: x_BTD -> x_BTD, dtype kept.
            head: x_BTD -> x_BTD, the final norm only; logits are the executor's business.
        initialize: key -> float32 arrays in flat order, as the family initialises them.
        decoding: for blocks, how they run token by token.
        in_chunks: for blocks, the same layer computed so many tokens of a row at a time; it names fewer
            tensors. Equal widths give the same object.
    """

    name: str
    parameters: tuple[TensorSpec, ...]
    residual_names: tuple[str, ...]
    apply: Callable[[tuple[jax.Array, ...], jax.Array, Context], jax.Array]
    initialize: Callable[[PRNGKeyArray], tuple[jax.Array, ...]]
    decoding: Decoding | None = None
    in_chunks: Callable[[int], LayerKind] | None = None


class ParameterRef(NamedTuple):
    """One parameter of the model: which layer, and which of its parameters in flat order."""

    layer_index: int
    parameter_index: int


@dataclasses.dataclass(frozen=True, eq=False)
class ModelTemplate:
    """A whole model: embed, blocks, head.

    Attributes:
        config: the validated architecture.
        spec: shapes and names of every layer.
        kinds: kind name -> kind.
        table: the [V, D] table that logits are taken with: in `head` when the model owns one, in
            `embed` when it is tied.
        token_chunk: tokens of a row that blocks compute at a time; None: all of them. See `in_chunks`.
    """

    config: Architecture
    spec: ModelSpec
    kinds: Mapping[str, LayerKind]
    table: ParameterRef
    token_chunk: int | None = None

    def kind(self, layer_index: int) -> LayerKind:
        """The kind of layer `layer_index`, numbered as in `spec.layers`."""
        return self.kinds[self.spec.layers[layer_index].kind]

    def in_chunks(self, width: int | None) -> ModelTemplate:
        """The same model with blocks that compute `width` tokens of a row at a time; None: whole rows.

        Equal widths give the same object.
        """
        if width == self.token_chunk:
            return self
        if self.token_chunk is not None:
            raise ValueError(f"blocks compute {self.token_chunk} tokens at a time already, not {width}")
        return _in_chunks(self, width)


@functools.cache
def _in_chunks(template: ModelTemplate, width: int | None) -> ModelTemplate:
    assert width is not None
    kinds = {
        name: kind if kind.in_chunks is None else kind.in_chunks(width)
        for name, kind in template.kinds.items()
    }
    return dataclasses.replace(template, kinds=types.MappingProxyType(kinds), token_chunk=width)
