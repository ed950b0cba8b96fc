"""Every compiled function of decoding: blocks chunk by chunk, and the choice of the next token.

As in `lazyjax.execution.kernels`, rows are split over the mesh axis `data`; parameters arrive whole, as
`Kernels.parameters` makes them from a slab, so that a layer that stays on the device and one that was just
streamed go through one and the same program, and give the same bits.

Axes: B rows, T tokens, D hidden, V vocabulary, U entries of a table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from lazyjax.execution.kernels import Kernels
from lazyjax.models.decode import Span
from lazyjax.models.template import Context, LayerKind

#: A layer's parameters in flat order and compute dtype.
Parameters = tuple[Array, ...]
#: What a block remembers of its rows.
State = tuple[Array, ...]


class Draw(NamedTuple):
    """How next tokens are drawn; used where decoding is not greedy.

    Attributes:
        seed: of the whole generation.
        temperature: divides the logits; above 0.
        top_p: least probability that the most likely tokens, from which is drawn, have together.
        rows_B: number of each row: what a row draws depends on the seed, its number and the position, not
            on the rows beside it.
    """

    seed: Int32[Array, ""]
    temperature: Float32[Array, ""]
    top_p: Float32[Array, ""]
    rows_B: Int32[Array, " B"]


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeKernels:
    """Compiled functions of decoding for what `kernels` are for; compiled at first use and kept."""

    kernels: Kernels

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def embed(self) -> Callable[..., Any]:
        """(rows_UD, index_BT) -> x_BTD: the embedding of tokens whose table rows the host looked up."""
        kind = self.kernels.template.kind(0)

        @jax.jit
        def embed_tokens(rows_UD: Array, index_BT: Array) -> Array:
            context = Context(index_BT, index_BT)
            return self._split_rows(kind.apply((rows_UD,), index_BT, context))

        return embed_tokens

    @functools.cache  # noqa: B019
    def empty(self, kind: LayerKind, rows: int, tokens: int) -> Callable[[], State]:
        """() -> the state of rows of which no token was seen, with room for `tokens` tokens."""
        assert kind.decoding is not None
        shapes = kind.decoding.state_shapes(rows, tokens, self.kernels.compute_dtype)
        shardings = tuple(self.kernels.sharded for _ in shapes)
        return jax.jit(
            lambda: tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes), out_shardings=shardings
        )

    @functools.cache  # noqa: B019
    def step(self, kind: LayerKind) -> Callable[..., Any]:
        """(parameters, x_BTD, state, span) -> (x_BTD, state, token); the state is donated."""
        decoding = kind.decoding
        assert decoding is not None

        @functools.partial(jax.jit, donate_argnums=2)
        def step_block(
            params: Parameters, x_BTD: Array, state: State, span: Span
        ) -> tuple[Array, State, Array]:
            x_BTD, state = decoding.step(params, x_BTD, state, span)
            return self._split_rows(x_BTD), jax.tree.map(self._split_rows, state), jnp.zeros((), jnp.int32)

        return step_block

    @functools.cache  # noqa: B019
    def place(self) -> Callable[..., Any]:
        """(state, new state, slots) -> state with the new rows at their slots; the state is donated.

        New rows may have room for fewer tokens than the state's. A slot beyond the last drops its row.
        """

        @functools.partial(jax.jit, donate_argnums=0)
        def place_rows(state: State, new: State, slots_R: Int32[Array, " R"]) -> State:
            placed = []
            for whole, part in zip(state, new, strict=True):
                region = tuple(slice(0, size) for size in part.shape[1:])
                placed.append(self._split_rows(whole.at[(slots_R, *region)].set(part, mode="drop")))
            return tuple(placed)

        return place_rows

    @functools.cache  # noqa: B019
    def choose(self) -> Callable[..., Any]:
        """(head parameters, table parameters | None, chunks of x_BTD, span, draw | None) -> next tokens_B.

        The table's parameters are given where it is tied, i.e. belongs to the embedding. Without `draw` the
        most likely token is taken.
        """

        @jax.jit
        def choose_tokens(
            head_params: Parameters,
            table_params: Parameters | None,
            chunks: tuple[Array, ...],
            span: Span,
            draw: Draw | None,
        ) -> Int32[Array, " B"]:
            x_BTD = jnp.concatenate(chunks, axis=1)
            logits_BV = self._last_logits(head_params, table_params, x_BTD, span)
            if draw is None:
                return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
            return _draw(logits_BV, span.starts_B + span.counts_B, draw)

        return choose_tokens

    def _last_logits(
        self, head_params: Parameters, table_params: Parameters | None, x_BTD: Array, span: Span
    ) -> Float32[Array, "B V"]:
        """fp32 logits behind the last real token of every row."""
        template = self.kernels.template
        head = template.kind(len(template.spec.layers) - 1)
        last_B = jnp.maximum(span.counts_B - 1, 0)
        x_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
        none_B1 = jnp.zeros((x_BTD.shape[0], 1), jnp.int32)
        normed_B1D = head.apply(head_params, x_B1D, Context(none_B1, none_B1))
        owner = head_params if table_params is None else table_params
        table_VD = owner[template.table.parameter_index]
        return jnp.einsum("bd,vd->bv", normed_B1D[:, 0], table_VD, preferred_element_type=jnp.float32)

    def _split_rows(self, array: Array) -> Array:
        return jax.lax.with_sharding_constraint(array, self.kernels.sharded)


@functools.cache
def decode_kernels(kernels: Kernels) -> DecodeKernels:
    """The same for the same `kernels`, so that nothing is compiled twice."""
    return DecodeKernels(kernels)


def _draw(logits_BV: Float[Array, "B V"], positions_B: Int32[Array, " B"], draw: Draw) -> Int32[Array, " B"]:
    """Draws from the smallest set of most likely tokens that has `top_p` (nucleus sampling).

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration, 2020, section 3.1.
    """
    logits_BV = logits_BV / draw.temperature
    ordered_BV = jax.lax.top_k(logits_BV, logits_BV.shape[-1])[0]
    before_BV = jnp.cumsum(jax.nn.softmax(ordered_BV, axis=-1), axis=-1) - jax.nn.softmax(ordered_BV, axis=-1)
    # The most likely token is always in: nothing comes before it.
    inside_BV = before_BV < jnp.maximum(draw.top_p, jnp.finfo(jnp.float32).tiny)
    least_B1 = jnp.min(jnp.where(inside_BV, ordered_BV, jnp.inf), axis=-1, keepdims=True)
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)

    def draw_row(row: Array, position: Array, logits_V: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(draw.seed), row), position)
        return jax.random.categorical(key, logits_V)

    return jax.vmap(draw_row)(draw.rows_B, positions_B, logits_BV).astype(jnp.int32)
