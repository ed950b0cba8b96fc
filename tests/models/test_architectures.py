"""Released sizes, and config.json files that are read or refused."""

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from lazyjax.huggingface.configs import to_hf_config
from lazyjax.models.architecture import ArchitectureError
from lazyjax.models.hf_config import parse_hf_config
from lazyjax.models.registry import architecture, architecture_names, build_template

#: Parameters as stated by the released checkpoints (a tied table counts once).
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "SmolLM2-135M": 134_515_008,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_released_models_have_their_published_size(name, parameters):
    assert build_template(architecture(name)).spec.parameter_count == parameters


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3.6-27B"])
def test_hybrid_models_are_as_the_paper_states(name):
    spec = build_template(architecture(name)).spec
    assert round(spec.parameter_count / 1e9, 1) == 26.9
    kinds = [layer.kind for layer in spec.layers[1:-1]]
    assert len(kinds) == 64
    assert kinds[3::4] == ["full_attention"] * 16
    assert kinds.count("linear_attention") == 48


@pytest.mark.parametrize("name", architecture_names())
def test_an_exported_config_reads_back(name):
    config = architecture(name)
    assert parse_hf_config(to_hf_config(config), name=name) == config


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ArchitectureError, match=r"did you mean Qwen2\.5-7B\?.*SmolLM2-135M"):
        architecture("Qwen2.5-7b")


def llama(**keys):
    return to_hf_config(architecture("SmolLM2-135M")) | keys


def qwen3(**keys):
    return to_hf_config(architecture("Qwen3-0.6B")) | keys


def without(table, key):
    return {name: value for name, value in table.items() if name != key}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (llama(model_type="gpt2"), "model_type 'gpt2' is not supported"),
        (without(llama(), "model_type"), "no model_type"),
        (llama(hidden_size=None), "no hidden_size"),
        (llama(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (llama(attention_bias=True), "attention_bias = True"),
        (llama(mlp_bias=True), "mlp_bias = True"),
        (qwen3(use_sliding_window=True), "use_sliding_window = True"),
        (qwen3(attention_bias=True), "attention_bias = True"),
        (llama(layer_types=["sliding_attention"] * 30), "'sliding_attention'"),
        (llama(quantization_config={"bits": 4}), "quantization_config"),
        (llama(rope_parameters={"rope_type": "su", "rope_theta": 1e4}), "RoPE of type 'su'"),
        (llama(num_key_value_heads=2), "num_key_value_heads (2) must divide"),
        (llama(num_hidden_layers="many"), "num_hidden_layers"),
        (without(llama(hidden_size="wide"), "head_dim"), "hidden_size ('wide')"),
        ({"model_type": "qwen3_5"}, "no text_config"),
    ],
)
def test_what_is_not_implemented_is_refused_by_key(document, words):
    with pytest.raises(ArchitectureError) as raised:
        parse_hf_config(document)
    assert words in str(raised.value)


def test_both_spellings_of_rope():
    base = without(without(llama(), "rope_parameters"), "rope_theta")
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = parse_hf_config(base | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    new = parse_hf_config(base | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old == new
    assert old.rope.scaling.factor == 8.0


def test_a_multimodal_config_gives_its_text_model():
    config = architecture("Qwen3.6-27B")
    text = without(to_hf_config(config), "tie_word_embeddings")
    document = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 27},
        "tie_word_embeddings": False,
    }
    assert parse_hf_config(document, name=config.name) == config


def test_layer_types_follow_from_the_interval():
    text = to_hf_config(architecture("Qwen3.6-27B"))
    shorter = without(text, "layer_types") | {"full_attention_interval": 4}
    assert parse_hf_config(shorter) == parse_hf_config(text)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen3.6-27B"])
def test_keys_left_out_are_what_transformers_takes(name):
    whole = to_hf_config(architecture(name))
    cls = transformers.CONFIG_MAPPING[whole["model_type"]]
    #: The default of the first contradicts this model's value of the others.
    together = {
        "num_attention_heads": ("num_key_value_heads",),
        "num_hidden_layers": ("layer_types",),
        "rope_theta": ("rope_parameters",),
    }
    for left_out in sorted(whole.keys() - {"model_type"}):
        keys = (left_out, *(together[left_out] if left_out in together else ()))
        document = {key: value for key, value in whole.items() if key not in keys}
        try:
            theirs = cls(**document)
            possible = theirs.num_attention_heads % theirs.num_key_value_heads == 0
        except StrictDataclassError:
            possible = False
        if not possible:
            with pytest.raises(ArchitectureError):
                parse_hf_config(document)
            continue
        ours = parse_hf_config(document)
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"):
            assert getattr(ours, key) == getattr(theirs, key), left_out
        for key in ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings", "initializer_range"):
            assert getattr(ours, key) == getattr(theirs, key), left_out
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"], left_out
        if hasattr(theirs, "head_dim"):
            assert ours.head_dim == theirs.head_dim, left_out
        if ours.family == "qwen3_5":
            assert list(ours.layer_types) == theirs.layer_types, left_out
            assert ours.linear_num_value_heads == theirs.linear_num_value_heads, left_out


def test_a_key_that_the_family_does_not_read_says_nothing():
    document = to_hf_config(architecture("Qwen2.5-0.5B"))
    silent = {"attention_bias": True, "mlp_bias": True, "attn_output_gate": False}
    assert parse_hf_config(document | silent) == parse_hf_config(document)
