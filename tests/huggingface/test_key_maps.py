"""Key tables: every template's parameters and the keys of its checkpoint, one to one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.huggingface.key_maps import (
    BLOCK_RULES,
    Transform,
    detect_prefix,
    is_rest,
    key_map,
    stored_shape,
    to_parameter,
    to_stored,
)
from lazyjax.models.registry import architecture, architecture_names, build_template
from tests.huggingface.architectures import SMALL


@pytest.mark.parametrize("name", [*SMALL, *architecture_names()])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_the_map_is_a_bijection_onto_all_parameters(name: str, prefix: str) -> None:
    template = build_template(SMALL[name] if name in SMALL else architecture(name))
    entries = key_map(template, prefix)
    places = [(entry.layer_index, entry.parameter) for entry in entries]
    assert places == [
        (index, tensor.name)
        for index, layer in enumerate(template.spec.layers)
        for tensor in layer.parameters
    ]
    keys = {entry.key for entry in entries}
    assert len(keys) == len(entries)
    assert sum(int(np.prod(entry.stored_shape)) for entry in entries) == template.spec.parameter_count
    assert ("lm_head.weight" in keys) == (not template.spec.tied)
    assert detect_prefix(keys) == prefix
    assert not any(is_rest(template.spec.family, key) for key in keys)


@pytest.mark.parametrize("family", BLOCK_RULES)
def test_tables_are_invertible(family: str) -> None:
    rules = BLOCK_RULES[family]
    assert len({rule.parameter for rule in rules}) == len({rule.key for rule in rules}) == len(rules)


@given(
    transform=st.sampled_from(Transform),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_transforms_undo_each_other(transform: Transform, sizes: tuple[int, int]) -> None:
    parameter = np.arange(sizes[0] * sizes[1], dtype=np.float32).reshape(sizes)
    stored = to_stored(transform, parameter)
    assert stored.shape == stored_shape(transform, parameter.shape)
    np.testing.assert_array_equal(to_parameter(transform, stored), parameter)
    assert np.shares_memory(stored, parameter)


def test_a_checkpoint_without_text_model_has_no_prefix() -> None:
    assert detect_prefix({"model.visual.pos_embed.weight", "encoder.embed_tokens.weight"}) is None
