"""Architecture configs: what a model is, as validated, frozen data.

Field names follow the Hugging Face `config.json`, which is also the format of the packaged files
in `architectures/`, so that one reader serves both. This module knows no array and no Flax.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

LayerType = Literal["full_attention", "linear_attention"]


class ArchitectureError(ValueError):
    """A model that is unknown, incomplete, impossible or not implemented; the message says why."""


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class Llama3Scaling(_Frozen):
    """Frequency scaling of Llama 3.1 and later.

    Wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched by
    `factor`, those below `... / high_freq_factor` are kept, those between are interpolated.
    """

    rope_type: Literal["llama3"] = "llama3"
    factor: float = pydantic.Field(gt=0)
    low_freq_factor: float = pydantic.Field(gt=0)
    high_freq_factor: float = pydantic.Field(gt=0)
    original_max_position_embeddings: int = pydantic.Field(gt=0)

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Llama3Scaling:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor must be below high_freq_factor")
        return self


class LinearScaling(_Frozen):
    """Position interpolation: every wavelength is stretched by `factor`."""

    rope_type: Literal["linear"] = "linear"
    factor: float = pydantic.Field(gt=0)


class DynamicScaling(_Frozen):
    """Dynamic NTK: beyond `max_position_embeddings` tokens the base grows with the length of the text."""

    rope_type: Literal["dynamic"] = "dynamic"
    factor: float = pydantic.Field(ge=1)
    max_position_embeddings: int = pydantic.Field(gt=0)


class YarnScaling(_Frozen):
    """YaRN (Peng et al. 2023): long wavelengths are stretched by `factor`, short ones kept, a ramp between.

    The ramp runs between the elements that turn `beta_slow` and `beta_fast` times within the original
    context; with `truncate` its ends are whole elements. Cosines and sines are multiplied by
    `attention_factor`, which by default follows from `factor`, `mscale` and `mscale_all_dim`.
    """

    rope_type: Literal["yarn"] = "yarn"
    factor: float = pydantic.Field(gt=0)
    original_max_position_embeddings: int = pydantic.Field(gt=0)
    attention_factor: float | None = pydantic.Field(default=None, gt=0)
    beta_fast: float = pydantic.Field(default=32.0, gt=0)
    beta_slow: float = pydantic.Field(default=1.0, gt=0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


RopeScaling = Annotated[
    Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling, pydantic.Field(discriminator="rope_type")
]


class Rope(_Frozen):
    """Rotary position embedding: the first `partial_rotary_factor` of every head is rotated."""

    theta: float = pydantic.Field(gt=0)
    partial_rotary_factor: float = pydantic.Field(default=1.0, gt=0, le=1)
    scaling: RopeScaling | None = None


class Architecture(_Frozen):
    """What all families share; each is a subclass with a `family` of its own."""

    family: str

    name: str = pydantic.Field(min_length=1)
    vocab_size: int = pydantic.Field(gt=0)
    hidden_size: int = pydantic.Field(gt=0)
    intermediate_size: int = pydantic.Field(gt=0)
    num_hidden_layers: int = pydantic.Field(gt=0)
    num_attention_heads: int = pydantic.Field(gt=0)
    num_key_value_heads: int = pydantic.Field(gt=0)
    head_dim: int = pydantic.Field(gt=0)
    rms_norm_eps: float = pydantic.Field(gt=0)
    initializer_range: float = pydantic.Field(default=0.02, gt=0)
    tie_word_embeddings: bool
    rope: Rope

    @property
    def rotary_dim(self) -> int:
        """Rotated elements of a head."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @pydantic.model_validator(mode="after")
    def _heads_fit(self) -> Architecture:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must divide "
                f"num_attention_heads ({self.num_attention_heads})"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}) times partial_rotary_factor "
                f"({self.rope.partial_rotary_factor}) must be a positive even number"
            )
        return self


class Qwen2Architecture(Architecture):
    """Qwen2, Qwen2.5 (`qkv_bias`) and Llama-type models such as SmolLM2 (no bias)."""

    family: Literal["qwen2"] = "qwen2"
    qkv_bias: bool


class Qwen3Architecture(Architecture):
    """Qwen3: RMSNorm on every query and key head, no bias, explicit head size."""

    family: Literal["qwen3"] = "qwen3"


class Qwen35Architecture(Architecture):
    """The text model of Qwen3.5 and Qwen3.6: gated delta net and gated full attention, mixed.

    `layer_types` names the mixer of every block. The linear layers have
    `linear_num_value_heads` states of [linear_key_head_dim, linear_value_head_dim]; each key head
    serves `linear_num_value_heads / linear_num_key_heads` consecutive ones.
    """

    family: Literal["qwen3_5"] = "qwen3_5"
    layer_types: tuple[LayerType, ...]
    linear_conv_kernel_dim: int = pydantic.Field(gt=0)
    linear_num_key_heads: int = pydantic.Field(gt=0)
    linear_num_value_heads: int = pydantic.Field(gt=0)
    linear_key_head_dim: int = pydantic.Field(gt=0)
    linear_value_head_dim: int = pydantic.Field(gt=0)

    @pydantic.model_validator(mode="after")
    def _layers_fit(self) -> Qwen35Architecture:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_key_heads ({self.linear_num_key_heads}) must divide "
                f"linear_num_value_heads ({self.linear_num_value_heads})"
            )
        return self
