"""Presets load, and the smoke model is the full model in small."""

import json
import pathlib

import pytest
import yaml

from experiments import smollm2
from experiments.prediction import difference_sentence
from experiments.qwen27b import _INTRODUCTION, CONFIGS, PRESETS, choose_preset
from lazyjax.config import ConfigError, load_config
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning.costs.sizes import model_sizes
from lazyjax.planning.plan.baselines import keep_all, megatrain
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.specs import Tier
from lazyjax.training.inputs import read_architecture


@pytest.mark.parametrize(
    ("arguments", "platform", "preset", "rest"),
    [
        ([], "cpu", "smoke", []),
        ([], "gpu", "smoke", []),
        (["--model", "m"], "gpu", "full", ["--model", "m"]),
        (["--model=m"], "gpu", "full", ["--model=m"]),
        (["--model", "m"], "cpu", "smoke", ["--model", "m"]),
        (["full", "--model", "m"], "cpu", "full", ["--model", "m"]),
        (["smoke", "--training.steps", "3"], "gpu", "smoke", ["--training.steps", "3"]),
    ],
)
def test_choice_of_preset(arguments, platform, preset, rest):
    chosen, reason, left = choose_preset(arguments, platform)
    assert (chosen, list(left)) == (preset, rest)
    assert preset in reason
    if platform == "cpu" and arguments == []:
        assert reason.startswith("No accelerator found")


def test_full_is_the_setup_of_the_paper():
    config = load_config(PRESETS["full"], ["--model", "folder"])
    assert (config.data.rows, config.data.sequence_length, config.data.train_fraction) == (72, 1024, 0.7)
    keys = config.optimizer
    assert (keys.learning_rate, keys.beta1, keys.beta2, keys.epsilon) == (1e-5, 0.9, 0.999, 1e-8)
    assert (keys.weight_decay, keys.clip_norm, config.data.seed) == (0.01, 1.0, 42)
    with pytest.raises(ConfigError, match="model"):
        load_config(PRESETS["full"])


def test_smoke_has_the_proportions_of_the_full_model():
    config = load_config(PRESETS["smoke"])
    small = read_architecture(config)[0]
    full = architecture("Qwen3.6-27B")
    assert small.family == full.family
    assert small.layer_types == full.layer_types[: len(small.layer_types)]
    for one in (small, full):
        assert one.linear_num_value_heads == 3 * one.linear_num_key_heads
        assert one.num_attention_heads == 6 * one.num_key_value_heads
    assert small.rope == full.rope
    assert small.tie_word_embeddings == full.tie_word_embeddings
    assert small.rms_norm_eps == full.rms_norm_eps


def test_the_small_run_trains_under_the_planners_plan_and_leaves_it_something_to_choose():
    config = load_config(PRESETS["smoke"])
    assert (config.plan.planner, config.plan.hardware) == ("milp", "calibrate")
    template = build_template(read_architecture(config)[0])
    names = [template.kind(index).residual_names for index in range(len(template.spec.layers))]
    sizes = model_sizes(template, microbatch_rows=4, sequence_length=128)
    batch = {"batch_rows": 8, "sequence_length": 128, "microbatches": 2}
    peaks = [
        build_schedule(rule(template.spec, names, **batch), sizes).peak_bytes()[Tier.DEVICE]
        for rule in (megatrain, keep_all)
    ]
    assert config.plan.device_bytes is not None
    assert peaks[0] < config.plan.device_bytes < peaks[1]


def test_the_first_screen_fits_80_columns():
    assert max(map(len, _INTRODUCTION.splitlines())) <= 80
    assert "device may use\n     45 MB" in _INTRODUCTION
    assert load_config(PRESETS["smoke"]).plan.device_bytes == 45_000_000


def test_the_difference_from_the_paper_is_said():
    sentence = difference_sentence({"megatrain": 198.2, "lazytrain": 262.7})
    assert "MegaTrain 176.9 (simulated here 198.2, +12%)" in sentence
    assert "simulated here 262.7, +19%" in sentence


def test_configs_are_read_by_someone():
    models = {"qwen27b_smoke_model.json", "optimizers_model.json"}
    sweeps = {
        pathlib.Path(yaml.safe_load(path.read_text())["base"]).name
        for path in (CONFIGS.parent / "sweeps").glob("*.yaml")
    }
    known = {path.name for path in PRESETS.values()} | {smollm2.CONFIG.name} | models | sweeps
    assert {path.name for path in CONFIGS.iterdir()} == known
    json.loads((CONFIGS / "qwen27b_smoke_model.json").read_text())
    assert load_config(smollm2.CONFIG).training.steps == 72
