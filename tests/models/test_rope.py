"""Rotary frequencies equal those of Transformers; lengths are those of segments.

`experiments/record_rope.py` made the file and says what it holds.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lazyjax.huggingface.configs import to_hf_config
from lazyjax.models.architecture import ArchitectureError, YarnScaling
from lazyjax.models.hf_config import parse_hf_config
from lazyjax.models.rope import attention_factor, rotary_angles, segment_lengths
from lazyjax.models.template import Context

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "rope.json").read_text())


def _name(case) -> str:
    return case["config"]["rope_parameters"]["rope_type"]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=_name)
def test_angles_equal_those_of_transformers(case) -> None:
    config = parse_hf_config(case["config"])
    assert parse_hf_config(to_hf_config(config), name=config.name) == config
    lengths_BT = jnp.full((1, 2), case["length"], jnp.int32)
    positions_BT = jnp.array([[0, 1]], jnp.int32)
    cosine, sine = rotary_angles(positions_BT, lengths_BT, config.rope, config.rotary_dim)
    frequencies, factor = np.array(case["frequencies"]), case["attention_factor"]
    assert attention_factor(config.rope) == pytest.approx(factor, rel=1e-6)
    np.testing.assert_allclose(sine[0, 1, 0], factor * np.sin(frequencies), rtol=2e-6, atol=1e-9)
    np.testing.assert_allclose(cosine[0, 1, 0], factor * np.cos(frequencies), rtol=2e-6)
    np.testing.assert_allclose(cosine[0, 0, 0], factor, rtol=1e-6)


def test_lengths_are_those_of_segments() -> None:
    segments_BT = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 0, 0, 0]], jnp.int32)
    positions_BT = jnp.array([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]], jnp.int32)
    lengths_BT = np.asarray(segment_lengths(Context(positions_BT, segments_BT)))
    np.testing.assert_array_equal(lengths_BT[:, :5], [[3, 3, 3, 2, 2], [4, 4, 4, 4, 7]])


def _document(**rope):
    return GOLDEN["cases"][0]["config"] | {"rope_parameters": {"rope_theta": 1e4, **rope}}


def test_lengths_left_out_are_the_models_own() -> None:
    config = parse_hf_config(_document(rope_type="yarn", factor=2.0))
    assert config.rope.scaling == YarnScaling(factor=2.0, original_max_position_embeddings=4096)
    config = parse_hf_config(_document(rope_type="yarn", original_max_position_embeddings=1024))
    assert config.rope.scaling == YarnScaling(factor=4.0, original_max_position_embeddings=1024)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "longrope"}, "RoPE of type 'longrope' is not implemented"),
        ({"rope_type": "linear"}, "no factor"),
        ({"rope_type": "dynamic", "factor": 0.5}, "factor"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(rope, words) -> None:
    with pytest.raises(ArchitectureError, match=words):
        parse_hf_config(_document(**rope))
