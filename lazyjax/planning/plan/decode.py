"""How a model is decoded: how many rows at once, and which layers stay on the device."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a model is decoded.

    Attributes:
        batch_rows: rows decoded together over all devices; each has a slot on the device.
        tokens: prompt and answer of a row together are at most so long.
        resident: layers that stay on the device, numbered as in `ModelSpec.layers`.
        prefetch: slabs of streamed layers that are on their way or waiting.
    """

    batch_rows: int
    tokens: int
    resident: tuple[int, ...] = ()
    prefetch: int = 2
