"""A configuration is either right or refused with the key's path and what it may be."""

import pathlib

import pydantic
import pytest

from lazyjax.config import Config, ConfigError, dump_config, load_config

MINIMAL = "model: {architecture: Qwen2.5-0.5B}\n"


@pytest.fixture
def write(tmp_path):
    def write_text(text: str) -> pathlib.Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write_text


def test_defaults_are_complete_and_one_epoch(write):
    config = load_config(write(MINIMAL))
    assert config.training.epochs == 1.0
    assert config.training.steps is None
    assert config.data.source == "problems"


def test_overrides_win_over_the_file(write):
    path = write(MINIMAL + "optimizer: {learning_rate: 1e-4, beta1: 0.8}\n")
    config = load_config(path, ["--optimizer.learning-rate", "3e-5", "--training.steps=7"])
    assert config.optimizer.learning_rate == 3e-5
    assert config.optimizer.beta1 == 0.8
    assert (config.training.steps, config.training.epochs) == (7, None)


def test_shorthands_need_no_file():
    config = load_config(None, ["--model", "some/folder", "--data", "rows.jsonl"])
    assert config.model.folder == pathlib.Path("some/folder")
    assert config.data.source == "rows.jsonl"


def test_null_unsets_a_key(write):
    path = write(MINIMAL + "training: {epochs: 2}\n")
    config = load_config(path, ["--training.epochs", "null", "--training.steps", "5"])
    assert (config.training.steps, config.training.epochs) == (5, None)


def test_dump_reproduces_the_configuration(write):
    overrides = ["--plan.planner", "milp", "--plan.hardware", "h800-paper", "--plan.device-bytes", "70e9"]
    config = load_config(write(MINIMAL), overrides)
    assert config.plan.device_bytes == 70_000_000_000
    assert load_config(write(dump_config(config))) == config


def test_frozen(write):
    config = load_config(write(MINIMAL))
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.model.compute_dtype = "float32"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["expected the groups model, data"]),
        ("- a\n", ["expected the groups model, data"]),
        ("model: [\n", ["not YAML"]),
        ("data: {rows: 1}\n", ["model", "folder", "architecture"]),
        ("model: {}\n", ["model:", "exactly one of folder"]),
        ("model: {folder: a, architecture: b}\n", ["model:", "exactly one of folder"]),
        ("model: 3\n", ["model:", "folder", "it is 3"]),
        (MINIMAL + MINIMAL, ["key 'model' stands twice"]),
        (MINIMAL + "optimiser: {}\n", ["optimiser: unknown key; did you mean optimizer?"]),
        (MINIMAL + "data: {row: 4}\n", ["data.row: unknown key; did you mean data.rows?"]),
        (MINIMAL + "learning_rate: 1\n", ["did you mean optimizer.learning_rate?"]),
        (MINIMAL + "optimizer: {name: adam}\n", ["optimizer.name:", "'hybrid8bit'", "it is 'adam'"]),
        (MINIMAL + "optimizer: {learning_rate: fast}\n", ["optimizer.learning_rate:", "number", "'fast'"]),
        (MINIMAL + "optimizer: {learning_rate: yes}\n", ["optimizer.learning_rate:", "truth value"]),
        (MINIMAL + "optimizer: {learning_rate: .nan}\n", ["optimizer.learning_rate:"]),
        (MINIMAL + "optimizer: {beta2: 1.0}\n", ["optimizer.beta2:", "less than 1"]),
        (MINIMAL + "data: {rows: 0}\n", ["data.rows:", "greater than 0"]),
        (MINIMAL + "data: {rows: 2.5}\n", ["data.rows:", "integer", "2.5"]),
        (MINIMAL + "data: {rows: 5}\nplan: {microbatches: 2}\n", ["data.rows (5)", "plan.microbatches (2)"]),
        (MINIMAL + "training: {steps: 2, epochs: 1}\n", ["training:", "steps and epochs"]),
        (MINIMAL + "training: {steps: 2}\noptimizer: {warmup_steps: 2}\n", ["optimizer.warmup_steps (2)"]),
        (MINIMAL + "plan: {planner: milp}\n", ["plan:", "hardware"]),
        (MINIMAL + "plan: {device_bytes: 1e9}\n", ["plan:", "device_bytes", "milp"]),
        (MINIMAL + "run: {name: a/b}\n", ["run.name:", "pattern"]),
    ],
)
def test_refusals_name_the_key(write, text, words):
    with pytest.raises(ConfigError) as raised:
        load_config(write(text))
    for word in words:
        assert word in str(raised.value)


def test_every_mistake_of_a_file_is_listed(write):
    with pytest.raises(ConfigError) as raised:
        load_config(write(MINIMAL + "data: {rows: -1, seed: x}\n"))
    assert "data.rows" in str(raised.value)
    assert "data.seed" in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--optimizer.lerning-rate", "1"], ["command line", "did you mean optimizer.learning_rate?"]),
        (["--batching", "packed"], ["did you mean data.batching?"]),
        (["--optimizer.learning-rate"], ["Missing value", "--optimizer.learning-rate"]),
        (["--optimizer.learning-rate", "1", "surplus"], ["'surplus'"]),
        (["--data.batching", "sorted"], ["data.batching:", "'bucketed'", "it is 'sorted'"]),
    ],
)
def test_refused_overrides(write, overrides, words):
    with pytest.raises(ConfigError) as raised:
        load_config(write(MINIMAL), overrides)
    for word in words:
        assert word in str(raised.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load_config(tmp_path / "absent.yaml")


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as exit_:
        load_config(None, ["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for group, field in Config.model_fields.items():
        for key in field.annotation.model_fields:
            assert f"--{group}.{key}".replace("_", "-") in text
