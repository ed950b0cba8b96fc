"""Exact softmax attention in blocks: memory grows with T, not with T squared.

Queries and keys are cut into blocks of tokens, and only pairs of blocks that may attend are visited: those
on and below the diagonal, within the sliding window if there is one. A pair's scores exist only while it is
visited. Forward keeps a running maximum and sum per query (Milakov and Gimelshein 2018, Online normalizer
calculation for softmax, algorithm 3); backward computes the scores again and normalises them with the saved
logarithm of the sum (Dao 2023, FlashAttention-2, algorithms 1 and 2). Scores, sums and gradients are float32;
products run in the dtype of their operands.

The output and the logarithms of the sums are named `attention_out` and `attention_lse`: a plan that keeps
both spares the backward pass all of the forward attention.

Pairs are visited by a loop, which skips those where no segment of the one block occurs in the other in any
row. On a CPU few pairs are written out one by one, because XLA:CPU runs the bodies of loops on one thread;
none of them is skipped. `visited_pairs` counts what the loop visits, by the function that it decides with.

Axes, beside those of `lazyjax.models.layers`: G query heads per key/value head, I and J blocks of queries
and of keys, T and S also the tokens of one block of each.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32

from lazyjax.models.backend import SKIPPABLE, describes, traces_for_cpu

#: Longest block: 1 MiB of float32 scores per head.
BLOCK_TOKENS = 512
#: Up to this many pairs are written out on a CPU: those of 4 blocks. XLA:CPU keeps the scores of all of them
#: at once, so that more would need memory like the dense form.
_UNROLLED_PAIRS = 10
#: A score that is masked. Finite: the maximum over a row of masked scores must not make NaN.
_MASKED = -1e30
#: Stand for padding (segment 0) and for tokens added to fill the last block. Above every segment, so that
#: segments of a packed row ascend and the ranges of two blocks tell whether they share one.
_PADDING_SEGMENT = 2**30
_FILLING_SEGMENT = 2**30 + 1


class Layout(NamedTuple):
    """How T tokens are cut: `number` blocks of `width`, the last one filled up with `filling` tokens.

    Attributes:
        window: tokens that a query sees, itself included; None for all earlier ones.
    """

    number: int
    width: int
    filling: int
    window: int | None

    def first_key_block(self, query_block: int) -> int:
        """The earliest block that a token of `query_block` sees."""
        if self.window is None:
            return 0
        return max(0, query_block * self.width - self.window + 1) // self.width

    @property
    def pair_count(self) -> int:
        """Of `pairs`: 524,800 of them for a row of 524,288 tokens, of which no list is worth making."""
        return sum(i + 1 - self.first_key_block(i) for i in range(self.number))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(query block, key block), those of one query block in a row, the diagonal last."""
        return [(i, j) for i in range(self.number) for j in range(self.first_key_block(i), i + 1)]


def layout_of(tokens: int, window: int | None = None, block_tokens: int = BLOCK_TOKENS) -> Layout:
    """The fewest blocks of at most `block_tokens`, of nearly equal width."""
    number = -(-tokens // block_tokens)
    width = -(-tokens // number)
    return Layout(number, width, number * width - tokens, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def blockwise_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int32[Array, "B T"],
    scale: float,
    window: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> Float[Array, "B T N H"]:
    """softmax(scale q k^T) v over the earlier tokens of a token's own segment, itself included.

    Args:
        segment_ids_BT: tokens of segment 0 see each other.
        window: a token sees this many tokens at most, itself included.
        block_tokens: longest block.
    """
    return _named_forward(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, scale, window, block_tokens)[0]


def dense_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int32[Array, "B T"],
    scale: float,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """As `blockwise_attention`, by all scores at once: the tests' reference, unnamed."""
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    tokens = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
    ahead_TS = tokens[:, None] - tokens[None, :]
    allowed_TS = (ahead_TS >= 0) if window is None else (ahead_TS >= 0) & (ahead_TS < window)
    mask_B1TS = (same_BTS & allowed_TS)[:, None]
    return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, mask=mask_B1TS, scale=scale)


def cudnn_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int32[Array, "B T"],
    scale: float,
) -> Float[Array, "B T N H"]:
    """As `blockwise_attention`, by cuDNN's fused kernel; rows have to be one segment, then padding.

    What its backward pass needs of the forward pass has no name: it is always computed again.
    """
    return _fused(jax.nn.dot_product_attention, "cudnn", q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, scale)


def tokamax_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int32[Array, "B T"],
    scale: float,
) -> Float[Array, "B T N H"]:
    """As `cudnn_attention`, by tokamax's kernel for Mosaic GPU, which the extra `tokamax` installs."""

    def attend(*operands: Array, **options: object) -> Array:
        out: Array = importlib.import_module("tokamax").dot_product_attention(*operands, **options)
        return out

    return _fused(attend, "mosaic", q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, scale)


def _fused(
    attend: Callable[..., Array],
    implementation: str,
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segment_ids_BT: Array,
    scale: float,
) -> Array:
    """A library's kernel for rows of one segment, or what describes it."""
    if describes():
        out_BTNH = _described_attention(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, scale)
        return checkpoint_name(out_BTNH, "attention_out")
    lengths_B = jnp.sum(segment_ids_BT > 0, axis=1, dtype=jnp.int32)
    out_BTNH = attend(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        scale=scale,
        is_causal=True,
        query_seq_lengths=lengths_B,
        key_value_seq_lengths=lengths_B,
        implementation=implementation,
    )
    return checkpoint_name(out_BTNH, "attention_out")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _described_attention(q: Array, k: Array, v: Array, segment_ids_BT: Array, scale: float) -> Array:
    """The work of a fused kernel: the products of ours, and nothing in memory but operands and results."""
    return fused_attention_forward(q, k, v, segment_ids_BT, scale)[0]


def _described_forward(
    q: Array, k: Array, v: Array, segment_ids_BT: Array, scale: float
) -> tuple[Array, tuple[Array, ...]]:
    out, lse = fused_attention_forward(q, k, v, segment_ids_BT, scale)
    return out, (q, k, v, segment_ids_BT, out, lse)


def _described_backward(
    scale: float, saved: tuple[Array, ...], out_gradient: Array
) -> tuple[Array, Array, Array, None]:
    return (*fused_attention_backward(*saved, out_gradient, scale), None)


_described_attention.defvjp(_described_forward, _described_backward)


@functools.partial(jax.jit, static_argnums=4)
def fused_attention_forward(
    q: Array, k: Array, v: Array, segment_ids_BT: Array, scale: float
) -> tuple[Array, Array]:
    """Output and logarithms of the sums. By its name the cost model takes it for one kernel."""
    return _forward(q, k, v, segment_ids_BT, scale, None, BLOCK_TOKENS)


@functools.partial(jax.jit, static_argnums=7)
def fused_attention_backward(
    q: Array, k: Array, v: Array, segment_ids_BT: Array, out: Array, lse: Array, gradient: Array, scale: float
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values; as `fused_attention_forward`."""
    saved = (q, k, v, segment_ids_BT, out, lse)
    return _attention_backward(scale, None, BLOCK_TOKENS, saved, gradient)[:3]


def _named_dense(q: Array, k: Array, v: Array, segment_ids_BT: Array, scale: float) -> Array:
    return checkpoint_name(dense_attention(q, k, v, segment_ids_BT, scale), "attention_out")


#: Kernels of libraries, for rows of one segment on a GPU.
FUSED = ("cudnn", "tokamax")
#: By the names that templates and configurations use; all take (q, k, v, segment ids, scale).
ATTENTIONS: Mapping[str, Callable[..., Array]] = {
    "blockwise": blockwise_attention,
    "cudnn": cudnn_attention,
    "tokamax": tokamax_attention,
    "dense": _named_dense,
}


class _Blocks(NamedTuple):
    """Blocked arrays; heads before tokens, so that products need no transposed copies."""

    q_BIKGTH: Array
    k_BJKSH: Array
    v_BJKSH: Array
    segment_ids_BIT: Array


class _Running(NamedTuple):
    """Maximum, sum and weighted values of the keys that a block of queries has seen so far."""

    maximum_BKGT: Array
    sum_BKGT: Array
    values_BKGTH: Array


def _named_forward(*arguments: Any) -> tuple[Array, Array]:
    out_BTNH, lse_BTN = _forward(*arguments)
    return checkpoint_name(out_BTNH, "attention_out"), checkpoint_name(lse_BTN, "attention_lse")


def _forward(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segment_ids_BT: Array,
    scale: float,
    window: int | None,
    block_tokens: int,
) -> tuple[Array, Array]:
    layout = layout_of(q_BTNH.shape[1], window, block_tokens)
    blocks = _cut(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, layout)
    run = _forward_written_out if writes_out(layout, for_cpu=traces_for_cpu()) else _forward_loop
    out_BIKGTH, lse_BIKGT = run(blocks, layout, scale)
    out_BTNH = _join(out_BIKGTH, layout)
    return out_BTNH, _join(lse_BIKGT[..., None], layout)[..., 0]


def _attention_forward(*arguments: object) -> tuple[Array, tuple[Array, ...]]:
    q, k, v, segment_ids, *_ = arguments
    out, lse = _named_forward(*arguments)
    return out, (q, k, v, segment_ids, out, lse)  # type: ignore[return-value]


def _attention_backward(
    scale: float, window: int | None, block_tokens: int, saved: tuple[Array, ...], out_gradient_BTNH: Array
) -> tuple[Array, Array, Array, None]:
    q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, out_BTNH, lse_BTN = saved
    layout = layout_of(q_BTNH.shape[1], window, block_tokens)
    blocks = _cut(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, layout)
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]
    # What softmax takes off every gradient of a score: the sum over keys of p dp, in another order.
    shared_BTN = jnp.sum(
        out_BTNH.astype(jnp.float32) * out_gradient_BTNH.astype(jnp.float32), axis=-1, dtype=jnp.float32
    )
    given = (
        _split(out_gradient_BTNH, layout, groups),
        _split(lse_BTN[..., None], layout, groups)[..., 0],
        _split(shared_BTN[..., None], layout, groups)[..., 0],
    )
    run = _backward_written_out if writes_out(layout, for_cpu=traces_for_cpu()) else _backward_loop
    dq_BIKGTH, dk_BJKSH, dv_BJKSH = run(blocks, given, layout, scale)
    return (
        _join(dq_BIKGTH, layout).astype(q_BTNH.dtype),
        _join(dk_BJKSH[:, :, :, None], layout).astype(k_BTKH.dtype),
        _join(dv_BJKSH[:, :, :, None], layout).astype(v_BTKH.dtype),
        None,
    )


blockwise_attention.defvjp(_attention_forward, _attention_backward)


# One pair of blocks


def _scores(q: Array, k: Array, sees_BTS: Array, scale: float) -> Float32[Array, "B K G T S"]:
    scores = scale * jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
    return jnp.where(sees_BTS[:, None, None], scores, _MASKED)


def _visit(
    running: _Running, q: Array, k: Array, v: Array, sees_BTS: Bool[Array, "B T S"], scale: float
) -> _Running:
    scores = _scores(q, k, sees_BTS, scale)
    maximum = jnp.maximum(running.maximum_BKGT, jnp.max(scores, axis=-1))
    # Where all scores so far are masked, weights of 1 enter here; the first real score takes them to 0.
    weights = jnp.exp(scores - maximum[..., None])
    kept = jnp.exp(running.maximum_BKGT - maximum)
    values = jnp.einsum("bkgts,bksh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _Running(
        maximum,
        running.sum_BKGT * kept + jnp.sum(weights, axis=-1),
        running.values_BKGTH * kept[..., None] + values,
    )


def _visit_backward(
    q: Array, k: Array, v: Array, sees_BTS: Bool[Array, "B T S"], given: tuple[Array, ...], scale: float
) -> tuple[Array, Array, Array]:
    """Float32 gradients of one pair's queries, keys and values."""
    dout, lse, shared = given
    weights = jnp.exp(_scores(q, k, sees_BTS, scale) - lse[..., None])
    dv = jnp.einsum("bkgts,bkgth->bksh", weights.astype(v.dtype), dout, preferred_element_type=jnp.float32)
    dweights = jnp.einsum("bkgth,bksh->bkgts", dout, v, preferred_element_type=jnp.float32)
    dscores = (weights * (dweights - shared[..., None]) * scale).astype(q.dtype)
    dq = jnp.einsum("bkgts,bksh->bkgth", dscores, k, preferred_element_type=jnp.float32)
    dk = jnp.einsum("bkgts,bkgth->bksh", dscores, q, preferred_element_type=jnp.float32)
    return dq, dk, dv


def _sees(
    query_segments_BT: Array, key_segments_BS: Array, i: int | Array, j: int | Array, layout: Layout
) -> Bool[Array, "B T S"]:
    """Same segment, not later, within the window."""
    same_BTS = query_segments_BT[:, :, None] == key_segments_BS[:, None, :]
    within = jnp.arange(layout.width, dtype=jnp.int32)
    ahead_TS = (i - j) * layout.width + within[:, None] - within[None, :]
    allowed_TS = ahead_TS >= 0
    if layout.window is not None:
        allowed_TS &= ahead_TS < layout.window
    return same_BTS & allowed_TS


def _nothing_seen(q_BKGTH: Array) -> _Running:
    shape = q_BKGTH.shape
    return _Running(
        jnp.full(shape[:-1], _MASKED, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _finish(running: _Running, dtype: jnp.dtype) -> tuple[Array, Array]:
    out = running.values_BKGTH / running.sum_BKGT[..., None]
    return out.astype(dtype), running.maximum_BKGT + jnp.log(running.sum_BKGT)


# All pairs, written out


def _forward_written_out(blocks: _Blocks, layout: Layout, scale: float) -> tuple[Array, Array]:
    finished = []
    for i in range(layout.number):
        q = blocks.q_BIKGTH[:, i]
        running = _nothing_seen(q)
        for j in range(layout.first_key_block(i), i + 1):
            sees = _sees(blocks.segment_ids_BIT[:, i], blocks.segment_ids_BIT[:, j], i, j, layout)
            running = _visit(running, q, blocks.k_BJKSH[:, j], blocks.v_BJKSH[:, j], sees, scale)
        finished.append(_finish(running, blocks.v_BJKSH.dtype))
    out, lse = zip(*finished, strict=True)
    return jnp.stack(out, axis=1), jnp.stack(lse, axis=1)


def _backward_written_out(
    blocks: _Blocks, given: tuple[Array, ...], layout: Layout, scale: float
) -> tuple[Array, Array, Array]:
    dq: list[Array | float] = [0.0] * layout.number
    dk, dv = list(dq), list(dq)
    for i, j in layout.pairs:
        sees = _sees(blocks.segment_ids_BIT[:, i], blocks.segment_ids_BIT[:, j], i, j, layout)
        parts = _visit_backward(
            blocks.q_BIKGTH[:, i],
            blocks.k_BJKSH[:, j],
            blocks.v_BJKSH[:, j],
            sees,
            tuple(array[:, i] for array in given),
            scale,
        )
        dq[i] = dq[i] + parts[0]
        dk[j], dv[j] = dk[j] + parts[1], dv[j] + parts[2]
    stacked = [jnp.stack([jnp.asarray(part) for part in parts], axis=1) for parts in (dq, dk, dv)]
    return stacked[0], stacked[1], stacked[2]


# All pairs, by a loop


class _Step(NamedTuple):
    """One turn of the loop.

    Attributes:
        i, j: blocks of queries and keys.
        first: whether it is the first pair of its block of queries.
        meets: whether a segment of any row occurs in both blocks.
    """

    i: Array
    j: Array
    first: Array
    meets: Array


def _steps(blocks: _Blocks, layout: Layout) -> _Step:
    """The pairs as arrays. Computed, for constants would be handed to every layer's backward pass."""
    blocks_I = jnp.arange(layout.number, dtype=jnp.int32)
    first_I = jnp.zeros_like(blocks_I)
    if layout.window is not None:
        first_I = jnp.maximum(blocks_I * layout.width - layout.window + 1, 0) // layout.width
    counts_I = blocks_I - first_I + 1
    total = layout.pair_count
    i = jnp.repeat(blocks_I, counts_I, total_repeat_length=total)
    j = first_I[i] + jnp.arange(total, dtype=jnp.int32) - (jnp.cumsum(counts_I) - counts_I)[i]
    return _Step(i, j, j == first_I[i], _meet(_segment_ranges(blocks.segment_ids_BIT), i, j))


def _segment_ranges(segment_ids_BIT: Any) -> tuple[Any, Any]:
    """The lowest and the highest segment of every block; of JAX or NumPy arrays, as `_meet`."""
    return segment_ids_BIT.min(axis=-1), segment_ids_BIT.max(axis=-1)


def _meet(ranges_BI: tuple[Any, Any], i: Any, j: Any) -> Any:
    """Whether a segment of any row may occur both in blocks i and in blocks j.

    Segments ascend along a row, so that the ranges of two blocks tell.
    """
    low_BI, high_BI = ranges_BI
    return ((low_BI[:, i] <= high_BI[:, j]) & (low_BI[:, j] <= high_BI[:, i])).any(axis=0)


def visited_pairs(segment_ids_BT: Int32[np.ndarray, "B T"], layout: Layout) -> int:
    """How many of `layout.pairs` the loop visits for rows of these segments."""
    ranges = _segment_ranges(_blocked_segments(segment_ids_BT, layout, np))
    # One block of queries at a time: of long rows there are many pairs.
    return sum(
        int(_meet(ranges, np.asarray([i]), np.arange(layout.first_key_block(i), i + 1)).sum())
        for i in range(layout.number)
    )


def _at(array: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(array, index, axis=1, keepdims=False)


def _put(array: Array, value: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(array, value.astype(array.dtype), index, axis=1)


def _forward_loop(blocks: _Blocks, layout: Layout, scale: float) -> tuple[Array, Array]:
    def one(
        carry: tuple[Array, Array, _Running], step: _Step
    ) -> tuple[tuple[Array, Array, _Running], None]:
        out, lse, running = carry
        q = _at(blocks.q_BIKGTH, step.i)
        running = jax.tree.map(
            lambda fresh, old: jnp.where(step.first, fresh, old), _nothing_seen(q), running
        )

        def visit(running: _Running) -> _Running:
            segments = (_at(blocks.segment_ids_BIT, step.i), _at(blocks.segment_ids_BIT, step.j))
            k, v = _at(blocks.k_BJKSH, step.j), _at(blocks.v_BJKSH, step.j)
            return _visit(running, q, k, v, _sees(*segments, step.i, step.j, layout), scale)

        with jax.named_scope(SKIPPABLE):
            running = jax.lax.cond(step.meets, visit, lambda running: running, running)
        # Written at every turn, in place; the block's last turn is right: there its own tokens are seen.
        block_out, block_lse = _finish(running, out.dtype)
        return (_put(out, block_out, step.i), _put(lse, block_lse, step.i), running), None

    q = blocks.q_BIKGTH
    start = (
        jnp.zeros(q.shape, blocks.v_BJKSH.dtype),
        jnp.zeros(q.shape[:-1], jnp.float32),
        _nothing_seen(q[:, 0]),
    )
    (out, lse, _), _ = jax.lax.scan(one, start, _steps(blocks, layout))
    return out, lse


def _backward_loop(
    blocks: _Blocks, given: tuple[Array, ...], layout: Layout, scale: float
) -> tuple[Array, Array, Array]:
    def one(carry: tuple[Array, ...], step: _Step) -> tuple[tuple[Array, ...], None]:
        q, k, v = (_at(array, at) for array, at in zip(blocks[:3], (step.i, step.j, step.j), strict=True))

        def visit() -> tuple[Array, Array, Array]:
            segments = (_at(blocks.segment_ids_BIT, step.i), _at(blocks.segment_ids_BIT, step.j))
            sees = _sees(*segments, step.i, step.j, layout)
            return _visit_backward(q, k, v, sees, tuple(_at(array, step.i) for array in given), scale)

        def skip() -> tuple[Array, Array, Array]:
            zeros = [jnp.zeros(array.shape, jnp.float32) for array in (q, k, v)]
            return zeros[0], zeros[1], zeros[2]

        with jax.named_scope(SKIPPABLE):
            parts = jax.lax.cond(step.meets, visit, skip)
        places = (step.i, step.j, step.j)
        added = (
            _put(total, _at(total, at) + part, at)
            for total, part, at in zip(carry, parts, places, strict=True)
        )
        return tuple(added), None

    start = tuple(jnp.zeros(array.shape, jnp.float32) for array in blocks[:3])
    (dq, dk, dv), _ = jax.lax.scan(one, start, _steps(blocks, layout))
    return dq, dk, dv


# Cutting and joining


def writes_out(layout: Layout, *, for_cpu: bool) -> bool:
    """Whether all pairs are computed one by one, and none is skipped."""
    return for_cpu and layout.pair_count <= _UNROLLED_PAIRS


def _blocked_segments(segment_ids_BT: Any, layout: Layout, namespace: Any = jnp) -> Any:
    """[B, T] -> [B, I, T of a block], padding and filling told from segments; of JAX or NumPy arrays."""
    marked_BT = namespace.where(segment_ids_BT == 0, _PADDING_SEGMENT, segment_ids_BT)
    filled_BT = namespace.pad(marked_BT, ((0, 0), (0, layout.filling)), constant_values=_FILLING_SEGMENT)
    return filled_BT.reshape(filled_BT.shape[0], layout.number, layout.width)


def _cut(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, segment_ids_BT: Int32[Array, "B T"], layout: Layout
) -> _Blocks:
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]
    return _Blocks(
        _split(q_BTNH, layout, groups),
        _split(k_BTKH, layout, 1)[:, :, :, 0],
        _split(v_BTKH, layout, 1)[:, :, :, 0],
        _blocked_segments(segment_ids_BT, layout),
    )


def _split(x_BTNH: Array, layout: Layout, groups: int) -> Array:
    """[B, T, N, H] -> [B, I, K, G, T of a block, H]."""
    rows, _, heads, size = x_BTNH.shape
    x = jnp.pad(x_BTNH, ((0, 0), (0, layout.filling), (0, 0), (0, 0)))
    x = x.reshape(rows, layout.number, layout.width, heads // groups, groups, size)
    return jnp.transpose(x, (0, 1, 3, 4, 2, 5))


def _join(x_BIKGTH: Array, layout: Layout) -> Array:
    """The reverse of `_split`."""
    rows, blocks, key_heads, groups, width, size = x_BIKGTH.shape
    x = jnp.transpose(x_BIKGTH, (0, 1, 4, 2, 3, 5))
    x = x.reshape(rows, blocks * width, key_heads * groups, size)
    return x[:, : blocks * width - layout.filling]
