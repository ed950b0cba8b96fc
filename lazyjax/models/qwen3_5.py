"""The text model of Qwen3.5 and Qwen3.6: gated delta net blocks with gated full attention between.

Numerics follow `transformers.models.qwen3_5`: norms, gates and decays in float32, projections in the compute
dtype. So are products of the delta rule (`lazyjax.models.delta_net`), where the reference without kernels has
float32. Axes: see the legend in `lazyjax.models.layers`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from lazyjax.models.architecture import Qwen35Architecture
from lazyjax.models.chunks import balanced_chunks, join_tokens, map_modules, split_tokens
from lazyjax.models.decode import Span, continued_convolution
from lazyjax.models.delta_net import (
    causal_convolution,
    chunked_gated_delta_rule,
    continued_gated_delta_rule,
    gated_delta_rule_from,
)
from lazyjax.models.kinds import decoder_kind
from lazyjax.models.layers import (
    AttentionBlock,
    AttentionShape,
    Linear,
    RMSNorm,
    SwiGLU,
    mlp_in_chunks,
    normal,
    project_all,
    scaled,
)
from lazyjax.models.template import Context, LayerKind

#: Added to the squared length of queries and keys, as in the reference.
_UNIT_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class DeltaNetShape:
    """What a gated delta net layer looks like; E and F are the sizes of key and value heads."""

    hidden_size: int
    key_heads: int
    groups: int
    key_head_dim: int
    value_head_dim: int
    convolution_taps: int
    rms_norm_eps: float
    initializer_range: float


class GatedRMSNorm(nnx.Module):
    """silu(gate) * weight * x / rms(x) over the last axis."""

    def __init__(self, size: int, *, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(
        self, x: Float[Array, "... size"], gate: Float[Array, "... size"]
    ) -> Float[Array, "... size"]:
        """Normalises and gates in float32; dtype kept."""
        wide = x.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        weighted = scaled(unit.astype(x.dtype), self.weight[...])
        return (weighted * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


class ShortConvolution(nnx.Module):
    """Causal depthwise convolution; the kernel is [taps, channels], its last tap meets the token itself."""

    def __init__(self, taps: int, channels: int, *, stddev: float, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(normal(rngs, (taps, channels), stddev))

    def __call__(
        self, x_BTP: Float[Array, "B T P"], segment_ids_BT: Int32[Array, "B T"]
    ) -> Float[Array, "B T P"]:
        """Restarts at every segment."""
        return causal_convolution(x_BTP, self.kernel[...], segment_ids_BT)


class GatedDeltaNet(nnx.Module):
    """Linear attention by the gated delta rule, with a short convolution before and a gated norm after.

    Named: the two large projections, the states at the borders of chunks, and the rule's output.
    """

    def __init__(self, shape: DeltaNetShape, *, rngs: nnx.Rngs) -> None:
        size, stddev = shape.hidden_size, shape.initializer_range
        value_heads = shape.key_heads * shape.groups
        value_size = value_heads * shape.value_head_dim
        mixed_size = 2 * shape.key_heads * shape.key_head_dim + value_size
        self.shape = shape
        self.in_proj_qkv = Linear(size, mixed_size, stddev=stddev, rngs=rngs)
        self.in_proj_z = Linear(size, value_size, stddev=stddev, rngs=rngs)
        self.in_proj_b = Linear(size, value_heads, stddev=stddev, rngs=rngs)
        self.in_proj_a = Linear(size, value_heads, stddev=stddev, rngs=rngs)
        self.conv1d = ShortConvolution(shape.convolution_taps, mixed_size, stddev=stddev, rngs=rngs)
        self.dt_bias = nnx.Param(jnp.ones(value_heads, jnp.float32))
        self.A_log = nnx.Param(
            jnp.log(jax.random.uniform(rngs.params(), (value_heads,), jnp.float32, minval=0.01, maxval=16.0))
        )
        self.norm = GatedRMSNorm(shape.value_head_dim, eps=shape.rms_norm_eps)
        self.out_proj = Linear(value_size, size, stddev=stddev, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        """Mixes tokens; decays and write strengths in float32."""
        mixed_BTP, z_BTKGF, g_BTKG, beta_BTKG = self.project(x_BTD)
        q_BTKE, k_BTKE, v_BTKGF = self.split(self.conv1d(mixed_BTP, context.segment_ids_BT))
        out_BTKGF = chunked_gated_delta_rule(
            q_BTKE, k_BTKE, v_BTKGF, g_BTKG, beta_BTKG, context.segment_ids_BT
        )
        return self.output(out_BTKGF, z_BTKGF)

    def step(
        self, x_BTD: Float[Array, "B T D"], state: tuple[Array, ...], span: Span
    ) -> tuple[Float[Array, "B T D"], tuple[Array, ...]]:
        """As a call, after the tokens that `state` holds (see `models.decode`)."""
        taps_BUP, memory_BKGEF = state
        mixed_BTP, z_BTKGF, g_BTKG, beta_BTKG = self.project(x_BTD)
        mixed_BTP, taps_BUP = continued_convolution(mixed_BTP, self.conv1d.kernel[...], taps_BUP, span)
        q_BTKE, k_BTKE, v_BTKGF = self.split(mixed_BTP)
        # A token outside the span decays nothing and writes nothing.
        inside_BT11 = span.inside_BT(x_BTD.shape[1])[:, :, None, None]
        out_BTKGF, memory_BKGEF = continued_gated_delta_rule(
            q_BTKE,
            k_BTKE,
            v_BTKGF,
            jnp.where(inside_BT11, g_BTKG, 0.0),
            jnp.where(inside_BT11, beta_BTKG, 0.0),
            memory_BKGEF,
        )
        return self.output(out_BTKGF, z_BTKGF), (taps_BUP, memory_BKGEF)

    def state_shapes(self, rows: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The last inputs of the convolution, and the states of the rule."""
        shape = self.shape
        channels = self.conv1d.kernel.shape[-1]
        memory = (rows, shape.key_heads, shape.groups, shape.key_head_dim, shape.value_head_dim)
        return (
            jax.ShapeDtypeStruct((rows, shape.convolution_taps - 1, channels), jnp.dtype(dtype)),
            jax.ShapeDtypeStruct(memory, jnp.float32),
        )

    def project(
        self, x_BTD: Float[Array, "B T D"]
    ) -> tuple[
        Float[Array, "B T P"],
        Float[Array, "B T K G F"],
        Float32[Array, "B T K G"],
        Float32[Array, "B T K G"],
    ]:
        """Inputs of the convolution, gate of the output, log decays and write strengths."""
        shape = self.shape
        heads = (*x_BTD.shape[:2], shape.key_heads, shape.groups)
        mixed_BTP = checkpoint_name(self.in_proj_qkv(x_BTD), "delta_qkv")
        z_BTKGF = checkpoint_name(self.in_proj_z(x_BTD), "delta_z").reshape(*heads, shape.value_head_dim)
        beta_BTKG = jax.nn.sigmoid(self.in_proj_b(x_BTD).astype(jnp.float32)).reshape(heads)
        g_BTX = log_decay(self.in_proj_a(x_BTD), self.dt_bias[...], self.A_log[...])
        return mixed_BTP, z_BTKGF, g_BTX.reshape(heads), beta_BTKG

    def mix_in_chunks(
        self, projected: tuple[Array, ...], segment_ids_BT: Int32[Array, "B T"], width: int
    ) -> Float[Array, "B T K G F"]:
        """Convolution and rule over `width` tokens at a time.

        From chunk to chunk go the states of the rule and the last inputs of the convolution. The backward
        pass keeps these and computes each chunk again; gradients of the few parameters are summed in float32.

        Args:
            projected: what `in_proj_qkv`, `in_proj_a` and `in_proj_b` gave.
        """
        shape = self.shape
        earlier = shape.convolution_taps - 1
        chunks = balanced_chunks(1, projected[0].shape[1], width)
        graph, state = nnx.split((self.conv1d, self.dt_bias, self.A_log))
        leaves, structure = jax.tree.flatten(state)
        wide = tuple(leaf.astype(jnp.float32) for leaf in leaves)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def one(carry: tuple[Array, ...], chunk: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
            memory_BKGEF, last_B, inputs_BUP, segments_BU = carry
            mixed_BCP, a_BCX, b_BCX, segments_BC = chunk
            module = nnx.merge(graph, jax.tree.unflatten(structure, wide))
            conv1d, dt_bias, a_log = module
            continued_BP = jnp.concatenate([inputs_BUP, mixed_BCP], axis=1)
            continued_B = jnp.concatenate([segments_BU, segments_BC], axis=1)
            q, k, v = self.split(conv1d(continued_BP, continued_B)[:, earlier:])
            heads = (*a_BCX.shape[:2], shape.key_heads, shape.groups)
            g = log_decay(a_BCX, dt_bias[...], a_log[...]).reshape(heads)
            beta = jax.nn.sigmoid(b_BCX.astype(jnp.float32)).reshape(heads)
            same_B = last_B == segments_BC[:, 0]
            memory_BKGEF = jnp.where(same_B[:, None, None, None, None], memory_BKGEF, 0.0)
            out, memory_BKGEF = gated_delta_rule_from(q, k, v, g, beta, segments_BC, memory_BKGEF)
            kept = continued_B.shape[1] - earlier
            carried = (memory_BKGEF, segments_BC[:, -1], continued_BP[:, kept:], continued_B[:, kept:])
            return carried, out.astype(mixed_BCP.dtype)

        given = tuple(split_tokens(array, chunks) for array in (*projected, segment_ids_BT))
        _, out = jax.lax.scan(one, _before_any_token(shape, projected[0]), given)
        return join_tokens(out, chunks)

    def split(
        self, mixed_BTP: Float[Array, "B T P"]
    ) -> tuple[Float[Array, "B T K E"], Float[Array, "B T K E"], Float[Array, "B T K G F"]]:
        """Queries, keys and values from the convolution's output; queries and keys of unit length."""
        shape = self.shape
        heads = (*mixed_BTP.shape[:2], shape.key_heads)
        key_size = shape.key_heads * shape.key_head_dim
        mixed_BTP = jax.nn.silu(mixed_BTP)
        q_BTKE, k_BTKE, v_BTKGF = (
            part.reshape(*heads, *rest)
            for part, rest in zip(
                jnp.split(mixed_BTP, (key_size, 2 * key_size), axis=-1),
                ((shape.key_head_dim,), (shape.key_head_dim,), (shape.groups, shape.value_head_dim)),
                strict=True,
            )
        )
        return unit_vectors(q_BTKE, shape.key_head_dim**-0.5), unit_vectors(k_BTKE, 1.0), v_BTKGF

    def output(
        self, out_BTKGF: Float[Array, "B T K G F"], z_BTKGF: Float[Array, "B T K G F"]
    ) -> Float[Array, "B T D"]:
        """Normalises, gates and projects what the rule gave."""
        out_BTKGF = checkpoint_name(out_BTKGF.astype(z_BTKGF.dtype), "delta_out")
        return self.out_proj(self.norm(out_BTKGF, z_BTKGF).reshape(*z_BTKGF.shape[:2], -1))


def _before_any_token(shape: DeltaNetShape, mixed_BTP: Array) -> tuple[Array, Array, Array, Array]:
    """What a row's first chunk continues: no state, and no token of any segment."""
    rows, _, channels = mixed_BTP.shape
    earlier = shape.convolution_taps - 1
    memory = (rows, shape.key_heads, shape.groups, shape.key_head_dim, shape.value_head_dim)
    return (
        jnp.zeros(memory, jnp.float32),
        jnp.full((rows,), -1, jnp.int32),
        jnp.zeros((rows, earlier, channels), mixed_BTP.dtype),
        jnp.full((rows, earlier), -1, jnp.int32),
    )


def log_decay(
    a: Float[Array, "B T heads"], dt_bias: Float[Array, " heads"], a_log: Float[Array, " heads"]
) -> Float32[Array, "B T heads"]:
    """g = -exp(A_log) softplus(a + dt_bias), never positive."""
    a = a.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    return -jnp.exp(a_log.astype(jnp.float32)) * jax.nn.softplus(a)


def unit_vectors(x: Float[Array, "... size"], length: float) -> Float[Array, "... size"]:
    """Brought to this length, in float32; dtype kept."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + _UNIT_EPS)
    return (wide * scale * length).astype(x.dtype)


class DeltaNetBlock(nnx.Module):
    """A decoder block whose mixer is a gated delta net."""

    def __init__(self, shape: DeltaNetShape, inner_size: int, *, rngs: nnx.Rngs) -> None:
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps, zero_centered=True)
        self.linear_attn = GatedDeltaNet(shape, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, zero_centered=True)
        self.mlp = SwiGLU(size, inner_size, stddev=shape.initializer_range, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        """Names the residual stream between the two."""
        mixed_BTD = self.linear_attn(self.input_layernorm(x_BTD), context)
        return self.finish(x_BTD, mixed_BTD)

    def in_chunks(self, x_BTD: Float[Array, "B T D"], context: Context, width: int) -> Float[Array, "B T D"]:
        """As a call, `width` tokens of every row at a time."""
        mixer = self.linear_attn
        mixed_BTP, z, a, b = map_modules(
            lambda norm, qkv, z, a, b, x: project_all((qkv, z, a, b), norm(x)),
            (self.input_layernorm, mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_a, mixer.in_proj_b),
            (x_BTD,),
            width,
        )
        mixed_BTP, z = checkpoint_name(mixed_BTP, "delta_qkv"), checkpoint_name(z, "delta_z")
        out_BTKGF = mixer.mix_in_chunks((mixed_BTP, a, b), context.segment_ids_BT, width)
        out_BTKGF = checkpoint_name(out_BTKGF, "delta_out")
        x_BTD = map_modules(
            lambda norm, projection, x, out, z: x + projection(norm(out, z).reshape(*x.shape[:2], -1)),
            (mixer.norm, mixer.out_proj),
            (x_BTD, out_BTKGF, z.reshape(out_BTKGF.shape)),
            width,
        )
        return mlp_in_chunks(self.post_attention_layernorm, self.mlp, x_BTD, width)

    def step(
        self, x_BTD: Float[Array, "B T D"], state: tuple[Array, ...], span: Span
    ) -> tuple[Float[Array, "B T D"], tuple[Array, ...]]:
        """The block over the tokens of `span`, after those that `state` holds (see `models.decode`)."""
        mixed_BTD, state = self.linear_attn.step(self.input_layernorm(x_BTD), state, span)
        return self.finish(x_BTD, mixed_BTD), state

    def state_shapes(self, rows: int, tokens: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of `rows` rows; they do not grow with the tokens."""
        return self.linear_attn.state_shapes(rows, dtype)

    def finish(self, x_BTD: Float[Array, "B T D"], mixed_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What follows the mixer."""
        x_BTD = checkpoint_name(x_BTD + mixed_BTD, "post_mixer")
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


def block_kinds(config: Qwen35Architecture, attention: str = "blockwise") -> tuple[LayerKind, ...]:
    """The kinds of block that occur in `config.layer_types`."""
    shape = AttentionShape(
        hidden_size=config.hidden_size,
        query_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        rope=config.rope,
        rms_norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_range,
        qk_norm=True,
        output_gate=True,
        zero_centered=True,
        attention=attention,
    )
    delta_net = DeltaNetShape(
        hidden_size=config.hidden_size,
        key_heads=config.linear_num_key_heads,
        groups=config.linear_num_value_heads // config.linear_num_key_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        convolution_taps=config.linear_conv_kernel_dim,
        rms_norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_range,
    )
    builders = {
        "full_attention": lambda rngs: AttentionBlock(shape, config.intermediate_size, rngs=rngs),
        "linear_attention": lambda rngs: DeltaNetBlock(delta_net, config.intermediate_size, rngs=rngs),
    }
    used = sorted(set(config.layer_types))
    return tuple(decoder_kind(name, builders[name], config.hidden_size) for name in used)
