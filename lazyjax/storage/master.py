"""Split master weights: one fp32 value as two 16-bit halves.

`hi` is the value rounded half up (in magnitude) to bfloat16: what is streamed to the device.
`lo` is the signed rest, `bits(master) - (hi << 16)` modulo 2^32, so that joining the halves
restores every bit of every fp32 value, NaN payloads and infinities included.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int16, UInt16


def split_master(
    master: Float32[np.ndarray, "*n"],
    hi: UInt16[np.ndarray, "*n"],
    lo: Int16[np.ndarray, "*n"],
) -> None:
    """Writes the halves of `master` (N elements) into `hi` and `lo`, in place."""
    bits = np.ascontiguousarray(master).view(np.uint32)
    np.right_shift(bits + np.uint32(0x8000), np.uint32(16), out=hi, casting="unsafe")
    np.subtract(
        bits.view(np.int32), (hi.astype(np.uint32) << np.uint32(16)).view(np.int32), out=lo, casting="unsafe"
    )


def join_master(hi: UInt16[np.ndarray, "*n"], lo: Int16[np.ndarray, "*n"]) -> Float32[np.ndarray, "*n"]:
    """The fp32 master weights whose halves are `hi` and `lo`."""
    bits = (hi.astype(np.uint32) << np.uint32(16)) + lo.astype(np.int32).view(np.uint32)
    return bits.view(np.float32)
