"""Layers that the model families share, as Flax NNX modules and pure functions.

Parameters arrive in the compute dtype (bfloat16 or float32) and matrix products run in it, with
float32 accumulation; norms, rotary angles and softmax run in float32, as in the Transformers
implementations that the parity tests compare with. Linear kernels are [in, out].

Tensors whose saving spares a matrix product in the backward pass carry
`jax.ad_checkpoint.checkpoint_name`. What follows elementwise from a named tensor is not named: it
is recomputed at the price of reading it.

LEGEND of axes, here and in all of `lazyjax.models`:
    B rows          T tokens (S: tokens attended to)   D hidden      V vocabulary   M MLP inner
    N query heads   K key/value heads                  H head size   R rotated part of a head
    In the delta net: K key heads, G value heads per key head, E key head size, F value head size,
    C chunks, L tokens of a chunk, W taps of the convolution, P its channels.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from lazyjax.models.architecture import Rope
from lazyjax.models.attention import ATTENTIONS
from lazyjax.models.backend import traces_for_cpu
from lazyjax.models.chunks import map_modules
from lazyjax.models.decode import Span, cached_attention
from lazyjax.models.rope import depends_on_length, rotary_angles, rotate, segment_lengths
from lazyjax.models.template import Context


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float) -> Float[Array, "..."]:
    """A float32 parameter drawn from N(0, stddev^2)."""
    return stddev * jax.random.normal(rngs.params(), shape, jnp.float32)


def scaled(x: Float[Array, "*batch size"], weight: Float[Array, " size"]) -> Float[Array, "*batch size"]:
    """x * weight over the last axis, in float32; dtype of x kept.

    A vector that meets every token has a gradient that is a sum over every token. The transpose of a
    product sums in the dtype of the product: in bfloat16 such a sum stops growing after a few hundred
    equal terms. Hence vectors enter products and sums in float32, here and in `shifted`.
    """
    return (x.astype(jnp.float32) * weight.astype(jnp.float32)).astype(x.dtype)


def shifted(x: Float[Array, "*batch size"], bias: Float[Array, " size"]) -> Float[Array, "*batch size"]:
    """x + bias over the last axis, in float32; dtype of x kept. See `scaled`."""
    return (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


@jax.custom_vjp
def project(x: Float[Array, "*batch in"], kernel: Float[Array, "in out"]) -> Float[Array, "*batch out"]:
    """x @ kernel in their dtype. The kernel's gradient is summed over all tokens in float32.

    Accelerators do so by themselves. Some bfloat16 products of XLA:CPU round their partial sums: at 16k
    tokens gradients were off by 4 %. There a float32 product is asked for, and rounded once.
    """
    return x @ kernel


def _project_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _project_backward(saved: tuple[Array, Array], y_gradient: Array) -> tuple[Array, Array]:
    x, kernel = saved
    batch = tuple(range(x.ndim - 1))
    kernel_gradient = jax.lax.dot_general(
        x,
        y_gradient,
        ((batch, batch), ((), ())),
        preferred_element_type=jnp.float32 if traces_for_cpu() else x.dtype,
    )
    return y_gradient @ kernel.T, kernel_gradient.astype(kernel.dtype)


project.defvjp(_project_forward, _project_backward)


class Linear(nnx.Module):
    """y = x @ kernel (+ bias), kernel [in, out]."""

    def __init__(
        self, in_size: int, out_size: int, *, stddev: float, rngs: nnx.Rngs, bias: bool = False
    ) -> None:
        self.kernel = nnx.Param(normal(rngs, (in_size, out_size), stddev))
        self.bias = nnx.Param(jnp.zeros(out_size, jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        """Runs in the dtype of x and kernel."""
        y = project(x, self.kernel[...])
        return y if self.bias is None else shifted(y, self.bias[...])


def project_all(projections: tuple[Linear, ...], x: Float[Array, "*batch in"]) -> tuple[Array, ...]:
    """What each projection makes of x."""
    return tuple(projection(x) for projection in projections)


class RMSNorm(nnx.Module):
    """x / rms(x), scaled by the weight over the last axis.

    With `zero_centered` the scale is 1 + weight and is applied in float32 (Qwen3.5); otherwise the
    normalised value is rounded to the dtype of x first (Llama, Qwen2, Qwen3).
    """

    def __init__(self, size: int, *, eps: float, zero_centered: bool) -> None:
        self.weight = nnx.Param(jnp.full(size, 0.0 if zero_centered else 1.0, jnp.float32))
        self.eps = eps
        self.zero_centered = zero_centered

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        """Normalises in float32; dtype kept."""
        wide = x.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.zero_centered:
            return (unit * (1.0 + self.weight[...].astype(jnp.float32))).astype(x.dtype)
        return scaled(unit.astype(x.dtype), self.weight[...])


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """What an attention layer looks like.

    Attributes:
        qkv_bias: whether the query, key and value projections have a bias.
        qk_norm: whether every query and key head is normalised before rotation.
        output_gate: whether the query projection also yields a gate per head element, whose
            sigmoid scales the attention output.
        zero_centered: form of the query and key norms, see `RMSNorm`.
        attention: a key of `lazyjax.models.attention.ATTENTIONS`.
    """

    hidden_size: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope: Rope
    rms_norm_eps: float
    initializer_range: float
    qkv_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    zero_centered: bool = False
    attention: str = "blockwise"


class Attention(nnx.Module):
    """Causal self-attention inside segments, with grouped key/value heads.

    Query, key and value are named as they leave their projections: norm and rotation follow
    elementwise, and their own backward passes need the values before them.
    """

    def __init__(self, shape: AttentionShape, *, rngs: nnx.Rngs) -> None:
        size, stddev, bias = shape.hidden_size, shape.initializer_range, shape.qkv_bias
        query_size = shape.query_heads * shape.head_dim
        key_size = shape.key_value_heads * shape.head_dim
        gated_size = query_size * (2 if shape.output_gate else 1)
        self.shape = shape
        self.q_proj = Linear(size, gated_size, stddev=stddev, bias=bias, rngs=rngs)
        self.k_proj = Linear(size, key_size, stddev=stddev, bias=bias, rngs=rngs)
        self.v_proj = Linear(size, key_size, stddev=stddev, bias=bias, rngs=rngs)
        self.o_proj = Linear(query_size, size, stddev=stddev, rngs=rngs)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps, zero_centered=shape.zero_centered)
            self.k_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps, zero_centered=shape.zero_centered)

    def __call__(self, x_BTD: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        """Attends; scores and softmax in float32."""
        projected = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        out_BTNH, gate_BTNH = self.attend(projected, context)
        return self.output(out_BTNH, gate_BTNH)

    def attend(
        self,
        projected: tuple[Float[Array, "B T _"], Float[Array, "B T _"], Float[Array, "B T _"]],
        context: Context,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N H"] | None]:
        """What every token finds among the earlier ones, and the gate of it where there is one."""
        lengths_BT = segment_lengths(context) if depends_on_length(self.shape.rope) else None
        q_BTNH, k_BTKH, v_BTKH, gate_BTNH = self.heads(projected, context.positions_BT, lengths_BT)
        attention = ATTENTIONS[self.shape.attention]
        scale = self.shape.head_dim**-0.5
        return attention(q_BTNH, k_BTKH, v_BTKH, context.segment_ids_BT, scale), gate_BTNH

    def project(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int32[Array, "B T"],
        lengths_BT: Int32[Array, "B T"] | None,
    ) -> tuple[
        Float[Array, "B T N H"],
        Float[Array, "B T K H"],
        Float[Array, "B T K H"],
        Float[Array, "B T N H"] | None,
    ]:
        """Rotated queries and keys, values, and the gate of the output where there is one.

        `lengths_BT` are those of the tokens' segments, where the rotation depends on them.
        """
        projected = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        return self.heads(projected, positions_BT, lengths_BT)

    def heads(
        self,
        projected: tuple[Float[Array, "B T _"], Float[Array, "B T _"], Float[Array, "B T _"]],
        positions_BT: Int32[Array, "B T"],
        lengths_BT: Int32[Array, "B T"] | None,
    ) -> tuple[
        Float[Array, "B T N H"],
        Float[Array, "B T K H"],
        Float[Array, "B T K H"],
        Float[Array, "B T N H"] | None,
    ]:
        """As `project`, from what the three projections gave."""
        shape = self.shape
        query, key, value = projected
        heads = (*query.shape[:2], -1, shape.head_dim)
        query = checkpoint_name(query, "query")
        k_BTKH = checkpoint_name(key, "key").reshape(heads)
        v_BTKH = checkpoint_name(value, "value").reshape(heads)
        gate_BTNH = None
        if shape.output_gate:
            q_BTNH, gate_BTNH = jnp.split(query.reshape(*heads[:2], -1, 2 * shape.head_dim), 2, axis=-1)
        else:
            q_BTNH = query.reshape(heads)
        if shape.qk_norm:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        cosine, sine = rotary_angles(positions_BT, lengths_BT, shape.rope, shape.rotary_dim)
        return rotate(q_BTNH, cosine, sine), rotate(k_BTKH, cosine, sine), v_BTKH, gate_BTNH

    def output(
        self, out_BTNH: Float[Array, "B T N H"], gate_BTNH: Float[Array, "B T N H"] | None
    ) -> Float[Array, "B T D"]:
        """Gates and projects what was attended to."""
        return _gated_projection(self.o_proj, out_BTNH, gate_BTNH)


def _gated_projection(
    projection: Linear, out_BTNH: Float[Array, "B T N H"], gate_BTNH: Float[Array, "B T N H"] | None
) -> Float[Array, "B T D"]:
    if gate_BTNH is not None:
        out_BTNH = out_BTNH * jax.nn.sigmoid(gate_BTNH)
    return projection(out_BTNH.reshape(*out_BTNH.shape[:2], -1))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, inner_size: int, *, stddev: float, rngs: nnx.Rngs) -> None:
        self.gate_proj = Linear(hidden_size, inner_size, stddev=stddev, rngs=rngs)
        self.up_proj = Linear(hidden_size, inner_size, stddev=stddev, rngs=rngs)
        self.down_proj = Linear(inner_size, hidden_size, stddev=stddev, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Names both inner projections."""
        gate_BTM = checkpoint_name(self.gate_proj(x_BTD), "gate")
        up_BTM = checkpoint_name(self.up_proj(x_BTD), "up")
        return self.down_proj(jax.nn.silu(gate_BTM) * up_BTM)


class AttentionBlock(nnx.Module):
    """A decoder block: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, shape: AttentionShape, inner_size: int, *, rngs: nnx.Rngs) -> None:
        size, eps, zero_centered = shape.hidden_size, shape.rms_norm_eps, shape.zero_centered
        self.input_layernorm = RMSNorm(size, eps=eps, zero_centered=zero_centered)
        self.self_attn = Attention(shape, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, zero_centered=zero_centered)
        self.mlp = SwiGLU(size, inner_size, stddev=shape.initializer_range, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        """Names the residual stream between the two."""
        mixed_BTD = self.self_attn(self.input_layernorm(x_BTD), context)
        return self.finish(x_BTD, mixed_BTD)

    def in_chunks(
        self, x_BTD: Float[Array, "B T D"], context: Context, width: int
    ) -> Float[Array, "B T D"]:
        """As a call, `width` tokens of every row at a time but for the attention itself."""
        attention = self.self_attn
        projected = map_modules(
            lambda norm, q, k, v, x: project_all((q, k, v), norm(x)),
            (self.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj),
            (x_BTD,),
            width,
        )
        out_BTNH, gate_BTNH = attention.attend(projected, context)
        gate = () if gate_BTNH is None else (gate_BTNH,)
        x_BTD = map_modules(
            lambda projection, x, out, gate=None: x + _gated_projection(projection, out, gate),
            (attention.o_proj,),
            (x_BTD, out_BTNH, *gate),
            width,
        )
        return mlp_in_chunks(self.post_attention_layernorm, self.mlp, x_BTD, width)

    def step(
        self, x_BTD: Float[Array, "B T D"], state: tuple[Array, ...], span: Span
    ) -> tuple[Float[Array, "B T D"], tuple[Array, ...]]:
        """The block over the tokens of `span`, after those that `state` holds (see `models.decode`)."""
        shape = self.self_attn.shape
        positions_BT = span.positions_BT(x_BTD.shape[1])
        # Known so far; keys that are cached keep the rotation of their time, as in Transformers.
        lengths_BT = jnp.broadcast_to((span.starts_B + span.counts_B)[:, None], positions_BT.shape)
        q_BTNH, k_BTKH, v_BTKH, gate_BTNH = self.self_attn.project(
            self.input_layernorm(x_BTD), positions_BT, lengths_BT
        )
        out_BTNH, state = cached_attention(q_BTNH, k_BTKH, v_BTKH, state, span, shape.head_dim**-0.5)
        return self.finish(x_BTD, self.self_attn.output(out_BTNH, gate_BTNH)), state

    def state_shapes(self, rows: int, tokens: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Keys and values of `rows` x `tokens` tokens."""
        shape = self.self_attn.shape
        cache = (rows, shape.key_value_heads, tokens, shape.head_dim)
        return (jax.ShapeDtypeStruct(cache, jnp.dtype(dtype)),) * 2

    def finish(
        self, x_BTD: Float[Array, "B T D"], mixed_BTD: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """What follows the mixer."""
        x_BTD = checkpoint_name(x_BTD + mixed_BTD, "post_mixer")
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


def mlp_in_chunks(
    norm: RMSNorm, mlp: SwiGLU, x_BTD: Float[Array, "B T D"], width: int
) -> Float[Array, "B T D"]:
    """The second half of a block, `width` tokens at a time; names the residual stream before it."""
    x_BTD = checkpoint_name(x_BTD, "post_mixer")
    return map_modules(lambda norm, mlp, x: x + mlp(norm(x)), (norm, mlp), (x_BTD,), width)


@jax.custom_vjp
def look_up(table_VD: Float[Array, "V D"], tokens_BT: Int32[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of the table. Its gradient is summed in float32, whatever the dtype of the table.

    A plain gather's transpose would add thousands of occurrences of a frequent token in bfloat16,
    where the sum stops growing after a few hundred.
    """
    return table_VD[tokens_BT]


def _look_up_forward(
    table_VD: Float[Array, "V D"], tokens_BT: Int32[Array, "B T"]
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "V D"], Int32[Array, "B T"]]]:
    return table_VD[tokens_BT], (table_VD, tokens_BT)


def _look_up_backward(
    saved: tuple[Float[Array, "V D"], Int32[Array, "B T"]], gradient_BTD: Float[Array, "B T D"]
) -> tuple[Float[Array, "V D"], None]:
    table_VD, tokens_BT = saved
    rows_U, sums_UD = sums_by_token(tokens_BT, gradient_BTD, table_VD.shape[0])
    sums_UD = sums_UD.astype(table_VD.dtype)
    return jnp.zeros_like(table_VD).at[rows_U].set(sums_UD, mode="drop", unique_indices=True), None


def sums_by_token(
    tokens_BT: Int32[Array, "B T"], gradient_BTD: Float[Array, "B T D"], vocabulary_size: int
) -> tuple[Int32[Array, " U"], Float32[Array, "U D"]]:
    """Rows of the table that occur, each once, and the float32 sums of their gradients; U = B T.

    Float32 is then needed for B T rows and not for the whole table. There are fewer rows than places: the
    places left over point behind the table, each to another row, and have sums of zero.
    """
    tokens = tokens_BT.reshape(-1)
    order = jnp.argsort(tokens)
    ordered = tokens[order]
    first = jnp.concatenate([jnp.ones(1, jnp.bool_), ordered[1:] != ordered[:-1]])
    group = jnp.cumsum(first) - 1
    gradients = gradient_BTD.reshape(tokens.size, -1)[order].astype(jnp.float32)
    sums_UD = jnp.zeros(gradients.shape, jnp.float32).at[group].add(gradients, indices_are_sorted=True)
    behind_U = vocabulary_size + jnp.arange(tokens.size, dtype=tokens.dtype)
    return behind_U.at[group].set(ordered, indices_are_sorted=True), sums_UD


look_up.defvjp(_look_up_forward, _look_up_backward)


class Embed(nnx.Module):
    """Token embedding: the first streamed layer."""

    def __init__(self, vocabulary_size: int, hidden_size: int, *, stddev: float, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(normal(rngs, (vocabulary_size, hidden_size), stddev))

    def __call__(self, tokens_BT: Int32[Array, "B T"], context: Context) -> Float[Array, "B T D"]:
        """Looks the tokens up; the context has no say."""
        return look_up(self.table[...], tokens_BT)


class Head(nnx.Module):
    """The last streamed layer: final norm, and the output table unless it is tied.

    Only the norm is applied here: logits of a whole sequence never exist, so the product with the
    table belongs to the loss.
    """

    def __init__(
        self,
        vocabulary_size: int,
        hidden_size: int,
        *,
        eps: float,
        zero_centered: bool,
        tied: bool,
        stddev: float,
        rngs: nnx.Rngs,
    ) -> None:
        self.final_norm = RMSNorm(hidden_size, eps=eps, zero_centered=zero_centered)
        self.lm_head = None if tied else nnx.Param(normal(rngs, (vocabulary_size, hidden_size), stddev))

    def __call__(self, x_BTD: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        """Applies the final norm; the context has no say."""
        return self.final_norm(x_BTD)
