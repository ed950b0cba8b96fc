"""Which form of attention a run uses: the fastest that the device in use has, and gets right.

A CPU has ours only. On a GPU every other form is tried once on rows of the run's own shape: one that fails,
or whose output or gradients are not those of the blockwise form, is left out, with the reason.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lazyjax.models.architecture import Architecture
from lazyjax.models.attention import ATTENTIONS, FUSED

OURS = "blockwise"
#: All that `model.attention` may name.
FORMS_TO_TRY = tuple(ATTENTIONS)
#: Largest relative error of outputs and gradients, in bfloat16, that passes for rounding.
_BFLOAT16_ERROR = 0.02
_FLOAT32_ERROR = 1e-3
_REPEATS = 5

Form = Callable[..., Array]


class AttentionError(ValueError):
    """A form of attention that was asked for and cannot serve this run; the message names the key."""


@dataclasses.dataclass(frozen=True)
class AttentionChoice:
    """The form in use.

    Attributes:
        name: a key of `lazyjax.models.attention.ATTENTIONS`.
        reason: one sentence for the records.
        seconds: of forward and backward on the run's shape, of the forms that were tried.
    """

    name: str
    reason: str
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is tried: rows x tokens, and the heads of a model."""

    rows: int
    tokens: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, config: Architecture, rows: int, tokens: int, dtype: str) -> Shape:
        """Of a model's attention layers."""
        heads = (config.num_attention_heads, config.num_key_value_heads)
        return cls(rows, tokens, *heads, config.head_dim, dtype)


def choose_attention(wanted: str, shape: Shape, *, packed: bool, platform: str) -> AttentionChoice:
    """The form that `model.attention` asks for; `auto` takes the fastest one that is right.

    Args:
        packed: rows may hold several segments.
        platform: of the device, as JAX names it.

    Raises:
        AttentionError: a form was asked for that this run or device cannot have.
    """
    if wanted in FUSED and platform != "gpu":
        raise AttentionError(f"model.attention is '{wanted}', but the device is a {platform}; it needs a GPU")
    if wanted in FUSED and packed:
        raise AttentionError(
            f"model.attention is '{wanted}', which sees one segment a row, and data.batching packs several; "
            "take 'blockwise' or another batching"
        )
    if wanted == "tokamax" and not _has_tokamax():
        raise AttentionError(
            "model.attention is 'tokamax', which is not installed: pip install 'lazyjax[tokamax]'"
        )
    if wanted != "auto":
        return AttentionChoice(wanted, "asked for by model.attention")
    if platform != "gpu":
        return AttentionChoice(OURS, f"a {platform} has no other")
    if packed:
        return AttentionChoice(OURS, "rows are packed, which the fused kernels do not see")
    names = [name for name in FUSED if name != "tokamax" or _has_tokamax()]
    return fastest_right(shape, {name: ATTENTIONS[name] for name in names})


def _has_tokamax() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def fastest_right(shape: Shape, candidates: Mapping[str, Form]) -> AttentionChoice:
    """The fastest of ours and the candidates that agree with it on random rows of `shape`."""
    arguments = _inputs(shape)
    expected, ours_seconds = _run(ATTENTIONS[OURS], shape, arguments)
    seconds, refused = {OURS: ours_seconds}, []
    for name, form in candidates.items():
        try:
            found, taken = _run(form, shape, arguments)
        except Exception as error:  # a missing library, or a shape that is not supported
            refused.append(f"{name} failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
            continue
        off = max(_error(one, other) for one, other in zip(found, expected, strict=True))
        # NaN compares as wrong.
        if not off <= (_BFLOAT16_ERROR if shape.dtype == "bfloat16" else _FLOAT32_ERROR):
            refused.append(f"{name} is off by {off:.2g}")
            continue
        seconds[name] = taken
    best = min(seconds, key=lambda name: seconds[name])
    reason = "; ".join([f"the fastest of {', '.join(seconds)}", *refused])
    return AttentionChoice(best, reason, seconds)


def timed_form(name: str, shape: Shape) -> tuple[float, int]:
    """Seconds of forward and backward of one form, and bytes of its program's temporary buffers.

    Raises:
        Exception: whatever a form that is missing here raises.
    """
    arguments = _inputs(shape)
    _, seconds = _run(ATTENTIONS[name], shape, arguments)
    analysis = _both(ATTENTIONS[name], shape).lower(*arguments).compile().memory_analysis()
    return seconds, int(analysis.temp_size_in_bytes) if analysis is not None else 0


def _inputs(shape: Shape) -> tuple[Array, ...]:
    heads = (shape.query_heads, shape.key_value_heads, shape.key_value_heads, shape.query_heads)
    return tuple(
        jax.random.normal(key, (shape.rows, shape.tokens, count, shape.head_dim), jnp.dtype(shape.dtype))
        for key, count in zip(jax.random.split(jax.random.key(0), 4), heads, strict=True)
    )


def _real_tokens(shape: Shape) -> int:
    """The last eighth of every row is padding, which no form has to get right."""
    return shape.tokens - shape.tokens // 8


def _both(form: Form, shape: Shape) -> Any:
    """Both passes, compiled at the first call."""
    real = _real_tokens(shape)
    segments_BT = jnp.broadcast_to(
        (jnp.arange(shape.tokens) < real).astype(jnp.int32), (shape.rows, shape.tokens)
    )

    @jax.jit
    def both(q: Array, k: Array, v: Array, gradient: Array) -> tuple[Array, ...]:
        scale = shape.head_dim**-0.5
        out, pullback = jax.vjp(lambda q, k, v: form(q, k, v, segments_BT, scale), q, k, v)
        return out[:, :real], *(part[:, :real] for part in pullback(gradient))

    return both


def _run(form: Form, shape: Shape, arguments: tuple[Array, ...]) -> tuple[tuple[Array, ...], float]:
    """Output and gradients, and the seconds that they take."""
    both = _both(form, shape)
    q, k, v, gradient = arguments
    gradient = gradient.at[:, _real_tokens(shape) :].set(0)
    found = jax.block_until_ready(both(q, k, v, gradient))
    start = time.perf_counter()
    for _ in range(_REPEATS):
        jax.block_until_ready(both(q, k, v, gradient))
    return found, (time.perf_counter() - start) / _REPEATS


def _error(actual: Array, expected: Array) -> float:
    difference = jnp.linalg.norm((actual.astype(jnp.float32) - expected.astype(jnp.float32)).ravel())
    return float(difference / jnp.linalg.norm(expected.astype(jnp.float32).ravel()))
