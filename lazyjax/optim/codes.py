"""8-bit codes for AdamW's moments: one byte per element, one fp32 scale per block.

A block's scale is the largest magnitude in it. A code stores an element's size relative to the scale
as a power law: code = largest * (size / scale)^(1 / 2^r), with r = 2 (m, sign and 127 levels) or
r = 3 (v, 255 levels). The power is taken of the bit pattern: the bits of a positive float, read as
an integer, are a piecewise linear logarithm of it, so that dividing a difference of bits by 2^r is
a root that costs one shift, is exactly invertible, and cannot overflow for any scale:

    bits(position) = bits(largest) + (bits(size) - bits(scale)) >> r,   code = floor(position + offset)
    bits(size)     = bits(scale) + (bits(code) - bits(largest)) << r    (at least the smallest normal)

Zero has code 0 and only zero: a non-zero v is rounded up to code 1, or an unlucky coordinate would be
divided by eps. m is rounded to the nearest value: offset 1/2, less for the smallest codes (1/4 + position
/ 64), where levels are factors apart and the middle between two codes is far below that between their
values. v changes by a fraction of a level per step, and to nearest it would stick where it is; its
offset runs through [0, 1) evenly over the steps instead, by an additive recurrence in position and
step (M. Roberts' R2 sequence), which costs no random bits.

The C++ kernels compute the same codes (`native/kernel.h`). The measurements behind these choices are
printed by `experiments/benchmarks/update_error.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int8, Int32, UInt8

#: Format of codes and scales; states of another version are refused. Names code and rounding.
CODES_VERSION = "m4-nearest-value,v8-r2"

M_LARGEST, M_ROOT = 127, 2
V_LARGEST, V_ROOT = 255, 3

_MAGNITUDE_MASK = 0x7FFFFFFF
_MIN_NORMAL_BITS = 0x00800000
#: Blocks whose largest m is below 2^-96 (1.3e-29) store zeros: what they do to an update vanishes beside
#: eps, all codes of other blocks are normal numbers, and zero rounds to code 0 by itself.
_SMALLEST_SCALE_M_BITS = 0x0F800000
_LARGEST_BITS = 0x7F7FFFFF


class CodedMoment(NamedTuple):
    """Codes of consecutive blocks of S elements, and each block's largest magnitude."""

    codes_KS: Int8[Array, "K S"] | UInt8[Array, "K S"]
    scale_K: Float32[Array, "K"]


def _bits(x: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest_bits(largest: int) -> Int32[Array, ""]:
    return _bits(jnp.float32(largest))


def _position(
    magnitude_KS: Int32[Array, "K S"], scale_bits_K: Int32[Array, "K"], largest: int, root: int
) -> Float32[Array, "K S"]:
    relative_KS = (magnitude_KS - scale_bits_K[:, None]) >> root
    return _float(relative_KS + _largest_bits(largest))


def _round(
    position_KS: Float32[Array, "K S"], offset: Float32[Array, "..."], magnitude_KS: Int32[Array, "K S"]
) -> Int32[Array, "K S"]:
    return jnp.where(magnitude_KS == 0, 0, (position_KS + offset).astype(jnp.int32))


def _decode(
    code_KS: Int32[Array, "K S"], scale_K: Float32[Array, "K"], largest: int, root: int
) -> Int32[Array, "K S"]:
    relative_KS = (_bits(code_KS.astype(jnp.float32)) - _largest_bits(largest)) << root
    bits_KS = jnp.maximum(relative_KS + _bits(scale_K)[:, None], _MIN_NORMAL_BITS)
    return jnp.where(code_KS == 0, 0, bits_KS)


def encode_m(m_KS: Float32[Array, "K S"]) -> CodedMoment:
    """Codes of a signed, finite moment, -127 to 127."""
    bits_KS = _bits(m_KS)
    magnitude_KS = bits_KS & _MAGNITUDE_MASK
    largest_K = magnitude_KS.max(axis=1)
    counts_K = largest_K >= _SMALLEST_SCALE_M_BITS
    # Relative to the largest number there is, no m of a block that does not count reaches code 1.
    reference_K = jnp.where(counts_K, largest_K, _LARGEST_BITS)
    position_KS = _position(magnitude_KS, reference_K, M_LARGEST, M_ROOT)
    # The product is exact, so that it does not matter whether XLA fuses it with the sum.
    offset_KS = jnp.minimum(0.5, position_KS * 0.015625 + 0.25)
    code_KS = (position_KS + offset_KS).astype(jnp.int32)
    code_KS = jnp.where(bits_KS < 0, -code_KS, code_KS)
    return CodedMoment(code_KS.astype(jnp.int8), _float(jnp.where(counts_K, largest_K, 0)))


def decode_m(coded: CodedMoment) -> Float32[Array, "K S"]:
    """The values that `encode_m` stored."""
    code_KS = coded.codes_KS.astype(jnp.int32)
    magnitude_KS = _decode(jnp.abs(code_KS), coded.scale_K, M_LARGEST, M_ROOT)
    return _float(magnitude_KS | jnp.where(code_KS < 0, jnp.int32(-(2**31)), 0))


def encode_v(v_KS: Float32[Array, "K S"], count: Int32[Array, ""]) -> CodedMoment:
    """Codes of a non-negative, finite moment, rounded with the offsets of step `count`."""
    bits_KS = _bits(v_KS)
    scale_bits_K = bits_KS.max(axis=1)
    position_KS = _position(bits_KS, scale_bits_K, V_LARGEST, V_ROOT)
    code_KS = _round(position_KS, rounding_offsets(count, v_KS.shape[1]), bits_KS)
    code_KS = jnp.where(bits_KS == 0, 0, jnp.maximum(code_KS, 1))
    return CodedMoment(code_KS.astype(jnp.uint8), _float(scale_bits_K))


def decode_v(coded: CodedMoment) -> Float32[Array, "K S"]:
    """The values that `encode_v` stored."""
    return _float(_decode(coded.codes_KS.astype(jnp.int32), coded.scale_K, V_LARGEST, V_ROOT))


def rounding_offsets(count: Int32[Array, ""], block_size: int) -> Float32[Array, "S"]:
    """What is added to the positions of a block before rounding down at step `count`, in [0, 1)."""
    position_S = jnp.arange(block_size, dtype=jnp.uint32)
    word_S = position_S * jnp.uint32(0xC13FA9A9) + count.astype(jnp.uint32) * jnp.uint32(0x91E10DA5)
    return (word_S >> 16).astype(jnp.float32) * jnp.float32(2.0**-16)
