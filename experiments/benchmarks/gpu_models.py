"""Sizes, models and batches of the device check."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import numpy as np

from lazyjax.batch import Batch
from lazyjax.models.architecture import Qwen2Architecture, Qwen3Architecture, Qwen35Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.storage.host import HostStore, allocate_host_store

Rows = list[dict[str, Any]]
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the checks are on the device at hand.

    Attributes:
        models: names and numbers of blocks (None: all) of the models whose steps are timed.
        deadline: of `time.monotonic`; sections that repeat themselves stop there.
    """

    transfer_bytes: int
    overlap_layers: int
    step_rows: int
    step_tokens: int
    step_microbatches: int
    repeats: int
    families: tuple[str, ...]
    attention_tokens: tuple[int, ...] = (64,)
    models: tuple[tuple[str, int | None], ...] = (("shrunk", None),)
    deadline: float = math.inf

    def over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.deadline


def sizes(deadline: float = math.inf) -> Sizes:
    """Full on an accelerator, shrunk on a CPU."""
    if jax.default_backend() == "cpu":
        return Sizes(16 * MIB, 4, 8, 64, 2, 3, ("qwen2",), deadline=deadline)
    return Sizes(
        512 * MIB, 12, 32, 1024, 4, 3, ("qwen2", "qwen3", "qwen3_5"), (1024, 8192, 32768),
        # Eight blocks of the 27B: six with delta nets, two with full attention.
        (("Qwen2.5-7B", None), ("Qwen3.6-27B", 8)), deadline,
    )  # fmt: skip


def random_batch(rows: int, tokens: int, vocabulary: int) -> Batch:
    """Full rows of random tokens, every one a target."""
    rng = np.random.default_rng(0)
    shape = (rows, tokens)
    return Batch(
        tokens_BT=rng.integers(0, vocabulary, shape, dtype=np.int32),
        targets_BT=rng.integers(0, vocabulary, shape, dtype=np.int32),
        loss_mask_BT=np.ones(shape, np.bool_),
        segment_ids_BT=np.ones(shape, np.int32),
        positions_BT=np.tile(np.arange(tokens, dtype=np.int32), (rows, 1)),
    )


def random_store(template: ModelTemplate, *, gradient_dtype: str = "bfloat16") -> HostStore:
    """Host slabs with initial values, equal for all layers of a kind, so that 7B is filled quickly."""
    store = allocate_host_store(template.spec, gradient_dtype=gradient_dtype)
    filled: dict[str, int] = {}
    for index, (slabs, layer) in enumerate(zip(store.layers, template.spec.layers, strict=True)):
        if layer.kind in filled:
            first = store.layers[filled[layer.kind]]
            slabs.hi[:], slabs.lo[:] = first.hi, first.lo
            continue
        filled[layer.kind] = index
        for spec, value in zip(
            layer.parameters, template.kind(index).initialize(jax.random.key(index)), strict=True
        ):
            slabs.set_master(spec.name, np.asarray(value))
    return store


def shrunk_7b() -> Qwen2Architecture:
    """Qwen2.5-7B with an eighth of its width, a seventh of its depth and few words."""
    return Qwen2Architecture(
        name="Qwen2.5-7B-shrunk", vocab_size=8192, hidden_size=448, intermediate_size=2368,
        num_hidden_layers=4, num_attention_heads=7, num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-6,
        tie_word_embeddings=False, rope=Rope(theta=1e6), qkv_bias=True,
    )  # fmt: skip


def tiny_template(family: str, blocks: int = 4) -> ModelTemplate:
    """A narrow model; of a hybrid's blocks the last of every four has full attention."""
    common: dict[str, Any] = dict(
        name=f"gpu-check-{family}", vocab_size=128, hidden_size=64, intermediate_size=96,
        num_hidden_layers=blocks, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        rms_norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    match family:
        case "qwen2":
            return build_template(Qwen2Architecture(**common, rope=Rope(theta=1e4), qkv_bias=True))
        case "qwen3":
            return build_template(Qwen3Architecture(**common, rope=Rope(theta=1e4)))
        case _:
            return build_template(
                Qwen35Architecture(
                    **common,
                    rope=Rope(theta=1e4, partial_rotary_factor=0.5),
                    layer_types=((("linear_attention",) * 3 + ("full_attention",)) * blocks)[:blocks],
                    linear_conv_kernel_dim=4,
                    linear_num_key_heads=2,
                    linear_num_value_heads=4,
                    linear_key_head_dim=16,
                    linear_value_head_dim=16,
                )
            )
