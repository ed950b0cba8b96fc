"""AdamW with 8-bit state as an optax transform: pure JAX, any backend, and the kernels' reference.

The arithmetic is that of `native/kernel.h`, operation by operation. XLA may contract a product and a
sum into one fused operation; the moments' products are kept apart (`_product`), so that codes and
scales equal the kernels' bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Float32, Int32

from lazyjax.optim.base import check_epsilon
from lazyjax.optim.clipping import clip_factor
from lazyjax.optim.codes import CodedMoment, decode_m, decode_v, encode_m, encode_v
from lazyjax.specs import BLOCK_ELEMENTS

#: Tensors with fewer elements keep fp32 state: they are few bytes and often matter most.
MIN_8BIT_SIZE = 4096


class TensorMoments(NamedTuple):
    """m and v of one tensor, flattened: the first K blocks of S elements as codes, the rest in fp32.

    The last coded block may reach beyond the tensor; what is there is zero.
    """

    m: CodedMoment
    v: CodedMoment
    m_rest_R: Float32[Array, "R"]
    v_rest_R: Float32[Array, "R"]


class Hybrid8bitState(NamedTuple):
    """State of `hybrid8bit_adamw`: completed steps and, in the params' structure, `TensorMoments`."""

    count: Int32[Array, ""]  # type: ignore[assignment]  # optax's name, though tuples have a method count
    moments: Any


class AdamScalars(NamedTuple):
    """What one step multiplies by; see `lazyjax.optim.native.library.StepScalars`."""

    b1: Float32[Array, ""]
    b2: Float32[Array, ""]
    m_share: Float32[Array, ""]
    step: Float32[Array, ""]
    root_scale: Float32[Array, ""]
    eps: Float32[Array, ""]
    decay_step: Float32[Array, ""]
    gradient_scale: Float32[Array, ""]
    step_number: Int32[Array, ""]


def eight_bit_blocks(elements: int, block_size: int, min_8bit_size: int, eight_bit_fraction: float) -> int:
    """How many leading blocks of a tensor are stored as codes.

    All of them (the last one perhaps partly filled) for a fraction of 1; else the given share of the
    tensor's whole blocks; none for tensors with fewer than `min_8bit_size` elements.
    """
    if elements < min_8bit_size:
        return 0
    if eight_bit_fraction == 1:
        return -(-elements // block_size)
    return math.floor(eight_bit_fraction * (elements // block_size))


def adam_scalars(
    *,
    learning_rate: float | Array,
    b1: float | Array,
    b2: float | Array,
    eps: float | Array,
    weight_decay: float | Array,
    gradient_scale: float | Array,
    count: Int32[Array, ""],
) -> AdamScalars:
    """Scalars of step `count` (from 1); 1 - b^count is exact to fp32 rounding for small counts too."""
    f32 = jnp.float32
    steps = count.astype(f32)
    m_correction = -jnp.expm1(steps * jnp.log(f32(b1)))
    v_correction = -jnp.expm1(steps * _log(b2))
    root = (1 - b2) ** 0.5
    return AdamScalars(
        b1=f32(b1),
        b2=f32(b2),
        m_share=f32((1 - b1) / root),
        step=f32(learning_rate) / m_correction,
        root_scale=1 / jnp.sqrt(v_correction),
        eps=f32(eps),
        decay_step=f32(learning_rate * weight_decay),
        gradient_scale=f32(gradient_scale) * f32(root),
        step_number=count,
    )


def _log(decay: float | Array) -> float | Array:
    return jnp.log(decay) if isinstance(decay, jax.Array) else math.log(decay) if decay > 0 else -math.inf


def _product(
    a: Float32[Array, "..."], b: Float32[Array, "..."], zero: Int32[Array, ""]
) -> Float32[Array, "..."]:
    """a * b rounded by itself: an integer operation that XLA cannot remove follows it."""
    bits = jax.lax.bitcast_convert_type(a * b, jnp.int32)
    return jax.lax.bitcast_convert_type(bits | zero, jnp.float32)


def adam_step(
    gradient: Float32[Array, "*n"],
    parameter: Float32[Array, "*n"],
    m: Float32[Array, "*n"],
    v: Float32[Array, "*n"],
    scalars: AdamScalars,
    decay_step: Float32[Array, ""],
) -> tuple[Float32[Array, "*n"], Float32[Array, "*n"], Float32[Array, "*n"]]:
    """One AdamW step (Loshchilov and Hutter 2019, algorithm 2).

    Returns:
        What is to be subtracted from the parameter, the new m and the new v.
    """
    s = scalars
    zero = jax.lax.shift_right_logical(s.step_number, 31)  # counts are positive, which XLA does not know
    gradient = gradient * s.gradient_scale
    m = _product(s.b1, m, zero) + _product(s.m_share, gradient, zero)
    v = _product(s.b2, v, zero) + _product(gradient, gradient, zero)
    root = _product(jnp.sqrt(v), s.root_scale, zero) + s.eps
    return m * s.step / root + _product(decay_step, parameter, zero), m, v


class _Stepped(NamedTuple):
    update: Float[Array, "..."]
    moments: TensorMoments


def _is_stepped(node: Any) -> bool:
    return isinstance(node, _Stepped)


def _tensor_step(
    gradient: Float[Array, "..."],
    parameter: Float[Array, "..."],
    moments: TensorMoments,
    scalars: AdamScalars,
    decay_step: Float32[Array, ""],
) -> _Stepped:
    blocks, block_size = moments.m.codes_KS.shape
    coded = min(blocks * block_size, parameter.size)
    flat_gradient = gradient.reshape(-1).astype(jnp.float32)
    flat_parameter = parameter.reshape(-1).astype(jnp.float32)
    padding = (0, blocks * block_size - coded)

    step_KS, m_KS, v_KS = adam_step(
        jnp.pad(flat_gradient[:coded], padding).reshape(blocks, block_size),
        jnp.pad(flat_parameter[:coded], padding).reshape(blocks, block_size),
        decode_m(moments.m),
        decode_v(moments.v),
        scalars,
        decay_step,
    )
    step_R, m_rest_R, v_rest_R = adam_step(
        flat_gradient[coded:],
        flat_parameter[coded:],
        moments.m_rest_R,
        moments.v_rest_R,
        scalars,
        decay_step,
    )
    step = jnp.concatenate([step_KS.reshape(-1)[:coded], step_R]).reshape(parameter.shape)
    m, v = (encode_m(m_KS), encode_v(v_KS, scalars.step_number)) if blocks else (moments.m, moments.v)
    return _Stepped(-step.astype(parameter.dtype), TensorMoments(m, v, m_rest_R, v_rest_R))


def hybrid8bit_adamw(
    learning_rate: float | Array | Callable[[Array], Array],
    b1: float | Array = 0.9,
    b2: float | Array = 0.999,
    eps: float | Array = 1e-8,
    weight_decay: float | Array = 1e-2,
    mask: Any | Callable[[Any], Any] | None = None,
    clip_norm: float | Array | None = None,
    block_size: int = BLOCK_ELEMENTS,
    min_8bit_size: int = MIN_8BIT_SIZE,
    eight_bit_fraction: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW whose moments are stored in 8 bits (`lazyjax.optim.codes`).

    Args:
        learning_rate: a number or an optax schedule (called with the completed steps).
        weight_decay: decoupled, times the learning rate.
        mask: pytree of booleans, or a function from params to one: where weight decay applies.
        clip_norm: the gradients' global norm is cut to this first (as `optax.clip_by_global_norm`).
        block_size: elements that share a scale.
        min_8bit_size: tensors with fewer elements keep fp32 state.
        eight_bit_fraction: share of every other tensor's blocks that is stored as codes; 0.02 with
            block_size 4096 is LazyTrain's setting.

    Raises:
        ValueError: an argument out of its range, or `update` without params.
    """
    _check_coding(block_size, min_8bit_size, eight_bit_fraction)
    if isinstance(eps, float | int):
        check_epsilon(eps)

    def init_tensor(parameter: Array) -> TensorMoments:
        blocks = eight_bit_blocks(parameter.size, block_size, min_8bit_size, eight_bit_fraction)
        return _zero_moments(parameter.size, blocks, block_size)

    def init(params: optax.Params) -> Hybrid8bitState:
        return Hybrid8bitState(jnp.zeros((), jnp.int32), jax.tree.map(init_tensor, params))

    def update(
        updates: optax.Updates, state: Hybrid8bitState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Hybrid8bitState]:
        if params is None:
            raise ValueError("hybrid8bit_adamw needs the params that it updates")
        count = optax.safe_increment(state.count)
        scale = 1.0 if clip_norm is None else clip_factor(_squared_norm(updates), clip_norm)
        scalars = adam_scalars(
            learning_rate=learning_rate(state.count) if callable(learning_rate) else learning_rate,
            b1=b1,
            b2=b2,
            eps=eps,
            weight_decay=weight_decay,
            gradient_scale=scale,
            count=count,
        )
        decays = mask(params) if callable(mask) else mask
        new_updates, new_moments = _all_steps(updates, params, state.moments, scalars, decays)
        return new_updates, Hybrid8bitState(count, new_moments)

    return optax.GradientTransformation(init, update)


def _all_steps(
    updates: optax.Updates, params: optax.Params, moments: Any, scalars: AdamScalars, decays: Any
) -> tuple[optax.Updates, Any]:
    """Updates and new moments of all tensors; `decays` says where weight decay applies, None: everywhere."""
    if decays is None:
        decays = jax.tree.map(lambda _: True, params)

    def step(parameter: Array, gradient: Array, own: TensorMoments, decay: bool | Array) -> _Stepped:
        decay_step = jnp.where(decay, scalars.decay_step, 0.0)
        return _tensor_step(gradient, parameter, own, scalars, decay_step)

    stepped = jax.tree.map(step, params, updates, moments, decays)
    return (
        jax.tree.map(lambda tensor: tensor.update, stepped, is_leaf=_is_stepped),
        jax.tree.map(lambda tensor: tensor.moments, stepped, is_leaf=_is_stepped),
    )


def _check_coding(block_size: int, min_8bit_size: int, eight_bit_fraction: float) -> None:
    if block_size < 1 or min_8bit_size < 0:
        raise ValueError(f"block_size {block_size} and min_8bit_size {min_8bit_size} have to be positive")
    if not 0 <= eight_bit_fraction <= 1:
        raise ValueError(f"eight_bit_fraction is {eight_bit_fraction}, not within [0, 1]")


def _zero_moments(elements: int, blocks: int, block_size: int) -> TensorMoments:
    """Both moments of a tensor: codes of its first `blocks` blocks, the rest in float32."""

    def zero_codes(dtype: jnp.dtype) -> CodedMoment:
        return CodedMoment(jnp.zeros((blocks, block_size), dtype), jnp.zeros(blocks, jnp.float32))

    zeros_R = jnp.zeros(max(elements - blocks * block_size, 0), jnp.float32)
    return TensorMoments(zero_codes(jnp.dtype(jnp.int8)), zero_codes(jnp.dtype(jnp.uint8)), zeros_R, zeros_R)


def _squared_norm(updates: optax.Updates) -> Float32[Array, ""]:
    return sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(updates)), jnp.float32(0))
