"""A family registered from outside the package: read, mapped, trained like the oracle."""

from __future__ import annotations

import pathlib

import pytest

from examples import own_family
from lazyjax.huggingface.configs import to_hf_config
from lazyjax.huggingface.key_maps import key_map
from lazyjax.models import register
from lazyjax.models.architecture import ArchitectureError, Rope
from lazyjax.models.hf_config import parse_hf_config
from lazyjax.models.registry import build_template
from tests import tiny
from tests.execution.test_oracle import check_against_oracle, mixed_plan

CONFIG = own_family.ParallelArchitecture(
    name="tiny-parallel",
    vocab_size=tiny.VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope=Rope(theta=1e4),
)


@pytest.fixture(autouse=True)
def known() -> None:
    register(own_family.FAMILY)
    register(own_family.FAMILY)


def test_its_config_and_its_keys_are_read() -> None:
    assert parse_hf_config(to_hf_config(CONFIG), name=CONFIG.name) == CONFIG
    keys = {entry.key for entry in key_map(build_template(CONFIG))}
    assert {"model.embed_tokens.weight", "model.layers.4.attention.q_proj.weight", "lm_head.weight"} <= keys
    assert len(keys) == 5 * 8 + 3


def test_a_streamed_step_equals_the_oracle(tmp_path: pathlib.Path) -> None:
    template = build_template(CONFIG)
    check_against_oracle(template, mixed_plan(template, 1), tmp_path)


def test_the_example_trains(tmp_path: pathlib.Path) -> None:
    summary = own_family.main(tmp_path)
    assert (summary["status"], summary["steps"]) == ("finished", 3)


def test_names_that_are_taken_are_refused() -> None:
    for taken in ("qwen3", "llama", "parallel"):
        with pytest.raises(ArchitectureError, match=f"'{taken}' is taken"):
            register(own_family.FAMILY._replace(name="other", model_types=(taken,)))


def test_an_unknown_family_is_refused_by_name() -> None:
    class Unknown(own_family.ParallelArchitecture):
        family: str = "unknown"  # type: ignore[assignment]

    with pytest.raises(ArchitectureError, match="no family 'unknown'"):
        build_template(Unknown(**CONFIG.model_dump(exclude={"family"})))
