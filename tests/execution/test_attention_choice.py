"""Which form of attention runs: asked for, or the fastest that gives the right numbers."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazyjax.execution import attention_choice
from lazyjax.execution.attention_choice import AttentionError, Shape, choose_attention, fastest_right
from lazyjax.models.attention import ATTENTIONS, dense_attention

SHAPE = Shape(rows=1, tokens=32, query_heads=2, key_value_heads=1, head_dim=8, dtype="float32")


def test_a_cpu_has_ours() -> None:
    choice = choose_attention("auto", SHAPE, packed=False, platform="cpu")
    assert choice.name == "blockwise"
    assert "cpu" in choice.reason
    assert choose_attention("dense", SHAPE, packed=True, platform="cpu").name == "dense"
    assert choose_attention("auto", SHAPE, packed=True, platform="gpu").name == "blockwise"


@pytest.mark.parametrize(
    ("platform", "packed", "words"), [("cpu", False, "needs a GPU"), ("gpu", True, "packs")]
)
def test_what_cannot_serve_is_refused(platform: str, packed: bool, words: str) -> None:
    for wanted in ("cudnn", "tokamax"):
        with pytest.raises(AttentionError, match=rf"model.attention is '{wanted}'.*{words}"):
            choose_attention(wanted, SHAPE, packed=packed, platform=platform)


@pytest.mark.skipif(importlib.util.find_spec("tokamax") is not None, reason="tokamax is installed")
def test_an_extra_that_is_missing_is_named() -> None:
    with pytest.raises(AttentionError, match=r"lazyjax\[tokamax\]"):
        choose_attention("tokamax", SHAPE, packed=False, platform="gpu")


class _Clock:
    """Time that passes only where something takes it, whatever else the machine does."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def pass_a_second(self) -> np.ndarray:
        self.now += 1.0
        return np.zeros((), np.float32)


def test_wrong_failing_and_slow_forms_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(attention_choice, "time", clock)

    def wrong(q, k, v, segments, scale):
        return 1.1 * dense_attention(q, k, v, segments, scale)

    def undefined(q, k, v, segments, scale):
        return jnp.full_like(dense_attention(q, k, v, segments, scale), jnp.nan)

    def failing(q, k, v, segments, scale):
        raise RuntimeError("no such library\nand more")

    def slow(q, k, v, segments, scale):
        # The result depends on it: when it is there, the time has passed.
        zero = jax.pure_callback(clock.pass_a_second, jax.ShapeDtypeStruct((), jnp.float32))
        return dense_attention(q + jax.lax.stop_gradient(zero), k, v, segments, scale)

    forms = {"wrong": wrong, "undefined": undefined, "failing": failing, "slow": slow}
    choice = fastest_right(SHAPE, forms)
    assert choice.name == "blockwise"
    assert choice.seconds == {"blockwise": 0.0, "slow": 1.0}
    for words in ("wrong is off by", "undefined is off by nan", "failing failed (RuntimeError: no such"):
        assert words in choice.reason


def test_cudnn_without_a_gpu_fails_by_itself() -> None:
    """What `auto` would meet on a GPU without the library: a reason, and ours."""
    choice = fastest_right(SHAPE, {"cudnn": ATTENTIONS["cudnn"]})
    assert choice.name == "blockwise"
    assert "cudnn failed" in choice.reason
