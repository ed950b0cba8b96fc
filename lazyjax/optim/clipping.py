"""Gradient clipping without a pass over gradients.

The squared norm of every layer's gradient is summed on the device where it is made; from these
few numbers follows one factor per layer, which the host update multiplies into the gradient as it
loads it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float32

ClipMode = Literal["global_norm", "none", "per_layer"]


@dataclasses.dataclass(frozen=True, slots=True)
class ClipRule:
    """How gradients are clipped.

    Attributes:
        mode: `global_norm` scales all gradients by one factor so that their joint norm is at most
            `max_norm` (as `optax.clip_by_global_norm`); `none` leaves them; `per_layer` clips every
            layer's norm on its own, which is a different method with different results.
        max_norm: positive.

    Raises:
        ValueError: `max_norm` is not a positive finite number.
    """

    mode: ClipMode = "global_norm"
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.mode != "none" and not (math.isfinite(self.max_norm) and self.max_norm > 0):
            raise ValueError(f"max_norm is {self.max_norm}; it has to be positive and finite")

    def scales(self, squared_norms: Sequence[float]) -> tuple[float, ...]:
        """One factor per layer, from the layers' squared gradient norms (finite)."""
        match self.mode:
            case "none":
                return (1.0,) * len(squared_norms)
            case "global_norm":
                return (self._factor(global_norm(squared_norms)),) * len(squared_norms)
            case "per_layer":
                return tuple(self._factor(math.sqrt(squared)) for squared in squared_norms)

    def _factor(self, norm: float) -> float:
        return 1.0 if norm < self.max_norm else self.max_norm / norm


def global_norm(squared_norms: Sequence[float]) -> float:
    """The norm over all layers: sqrt of the sum of squared norms; NaN if any is not finite."""
    if not all(map(math.isfinite, squared_norms)):
        return math.nan
    return math.sqrt(math.fsum(squared_norms))


def clip_factor(squared_norm: Float32[Array, ""], max_norm: float | Array) -> Float32[Array, ""]:
    """The factor of mode `global_norm`, traceable; NaN for a non-finite norm."""
    norm = jnp.sqrt(squared_norm)
    factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
    return jnp.where(jnp.isfinite(norm), factor, jnp.nan).astype(jnp.float32)
