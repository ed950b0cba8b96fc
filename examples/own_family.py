"""A model family of one's own: blocks whose attention and MLP run beside each other, trained by streaming.

    python examples/own_family.py

registers the family, writes a config.json that names it, and trains it for three steps from random weights on
the word problems of the package. What the package has to know is in `FAMILY`; see `lazyjax.models.Family`.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
from flax import nnx
from rich.console import Console

from lazyjax.config import load_config
from lazyjax.models import Family, register
from lazyjax.models.architecture import Architecture, Rope
from lazyjax.models.kinds import block_kind
from lazyjax.models.layers import Attention, AttentionShape, RMSNorm, SwiGLU
from lazyjax.models.template import Context, LayerKind
from lazyjax.training.setup import train


class ParallelArchitecture(Architecture):
    """Nothing beyond what all families share."""

    family: Literal["parallel"] = "parallel"


class ParallelBlock(nnx.Module):
    """x + attention(norm(x)) + mlp(norm(x)). Its inner layers name what a plan may keep."""

    def __init__(self, config: ParallelArchitecture, attention: str, *, rngs: nnx.Rngs) -> None:
        size, stddev = config.hidden_size, config.initializer_range
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rotary_dim)
        shape = AttentionShape(size, *heads, config.rope, config.rms_norm_eps, stddev, attention=attention)
        self.norm = RMSNorm(size, eps=config.rms_norm_eps, zero_centered=False)
        self.attention = Attention(shape, rngs=rngs)
        self.mlp = SwiGLU(size, config.intermediate_size, stddev=stddev, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        """The context holds the positions of the tokens and their segments."""
        normed_BTD = self.norm(x_BTD)
        return x_BTD + self.attention(normed_BTD, context) + self.mlp(normed_BTD)


def _blocks(config: ParallelArchitecture, attention: str) -> tuple[tuple[LayerKind, ...], tuple[str, ...]]:
    def build(rngs: nnx.Rngs) -> ParallelBlock:
        return ParallelBlock(config, attention, rngs=rngs)

    kind = block_kind("parallel", build, config.hidden_size)
    return (kind,), ("parallel",) * config.num_hidden_layers


def _read(document: Mapping[str, Any], name: str) -> ParallelArchitecture:
    fields = {key: value for key, value in document.items() if key != "model_type"}
    return ParallelArchitecture.model_validate(fields | {"name": name})


def _write(config: ParallelArchitecture) -> dict[str, Any]:
    return {"model_type": "parallel", **config.model_dump(mode="json", exclude={"family", "name"})}


_LINEARS = (
    *(f"attention.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
FAMILY = Family(
    name="parallel",
    model_types=("parallel",),
    read_config=_read,
    write_config=_write,
    blocks=_blocks,
    keys={
        "norm.weight": ("norm.weight", "identity"),
        **{f"{name}.kernel": (f"{name}.weight", "transpose") for name in _LINEARS},
    },
)


def main(folder: pathlib.Path) -> dict[str, Any]:
    """Trains in `folder`; gives the summary of the run."""
    register(FAMILY)
    config = ParallelArchitecture(
        name="parallel-small", vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope=Rope(theta=10_000.0),
    )  # fmt: skip
    file = folder / "config.json"
    file.write_text(json.dumps(FAMILY.write_config(config)))
    words = ["--model.architecture", str(file), "--run.folder", str(folder / "runs"), "--training.steps", "3"]
    words += ["--data.rows", "4", "--data.sequence-length", "128", "--training.evaluate-rows", "4"]
    words += ["--data.take", "100"]
    return train(load_config(None, [*words, "--plan.planner", "recompute_all"]), Console())


if __name__ == "__main__":
    print(main(pathlib.Path.cwd())["last_loss"])
