"""Configs that are written are read back as the same architecture."""

import pytest

from lazyjax.huggingface.configs import to_hf_config
from lazyjax.models.architecture import Llama3Scaling, Rope
from lazyjax.models.hf_config import parse_hf_config
from lazyjax.models.registry import architecture, architecture_names
from tests.huggingface.architectures import SMALL

_SCALED = Rope(
    theta=500_000.0,
    scaling=Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
)


@pytest.mark.parametrize("name", [*SMALL, *architecture_names()])
def test_reading_undoes_writing(name: str) -> None:
    config = SMALL[name] if name in SMALL else architecture(name)
    assert parse_hf_config(to_hf_config(config), name=name) == config
    other = config.model_copy(update={"rope": _SCALED, "initializer_range": 0.01})
    assert parse_hf_config(to_hf_config(other), name=name) == other


@pytest.mark.parametrize("tied", [True, False])
def test_the_outer_tie_of_a_multimodal_config_counts(tied: bool) -> None:
    # As Transformers saves it: the text model's own flag keeps its default.
    config = SMALL["qwen3_5"]
    document = {
        "model_type": "qwen3_5",
        "text_config": to_hf_config(config) | {"tie_word_embeddings": not tied},
        "tie_word_embeddings": tied,
    }
    assert parse_hf_config(document, name="qwen3_5") == config.model_copy(
        update={"tie_word_embeddings": tied}
    )
