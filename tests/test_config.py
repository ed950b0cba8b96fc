"""A configuration is either right or refused with the key's path and what it may be."""

import pathlib

import pydantic
import pytest

from lazyjax.config import (
    Config,
    ConfigError,
    dump_config,
    load_command_line,
    load_config,
    with_absolute_paths,
)

MINIMAL = "model: {architecture: Qwen2.5-0.5B}\n"


@pytest.fixture
def write(tmp_path):
    def write_text(text: str) -> pathlib.Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write_text


def test_the_last_of_two_equal_options_counts():
    """So that a script's own options can follow a set of usual ones."""
    config = load_config(None, ["--model", "m", "--data.rows", "4", "--data.rows=8"])
    assert config.data.rows == 8


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
        ("model: [\n", ["not YAML: line 2: "]),
        ("data: {rows: 1}\n", ["model", "folder", "architecture"]),
        ("model: {}\n", ["model:", "exactly one of folder"]),
        ("model: {folder: a, architecture: b}\n", ["model:", "exactly one of folder"]),
        ("model: 3\n", ["model:", "folder", "it is '3'"]),
        (MINIMAL + MINIMAL, ["key 'model' stands twice"]),
        (MINIMAL + "lr: 1e-5\n", ["lr: unknown key; did you mean optimizer.learning_rate?"]),
        (MINIMAL + "data: {max_length: 4}\n", ["did you mean data.sequence_length?"]),
        (MINIMAL + "optimiser: {}\n", ["optimiser: unknown key; did you mean optimizer?"]),
        (MINIMAL + "data: {row: 4}\n", ["data.row: unknown key; did you mean data.rows?"]),
        (MINIMAL + "learning_rate: 1\n", ["did you mean optimizer.learning_rate?"]),
        (MINIMAL + "optimizer: {epsilon: 1.0e-39}\n", ["optimizer.epsilon:", "1.175"]),
        (MINIMAL + "optimizer: {name: adam}\n", ["optimizer.name:", "'hybrid8bit'", "it is 'adam'"]),
        (MINIMAL + "optimizer: {learning_rate: fast}\n", ["optimizer.learning_rate:", "number", "'fast'"]),
        (
            MINIMAL + "optimizer: {learning_rate: yes}\n",
            ["optimizer.learning_rate:", "must be a number", "'yes'"],
        ),
        (MINIMAL + "optimizer: {learning_rate: .nan}\n", ["optimizer.learning_rate:"]),
        (MINIMAL + "optimizer: {beta2: 1.0}\n", ["optimizer.beta2:", "less than 1"]),
        (MINIMAL + "data: {rows: 0}\n", ["data.rows:", "greater than 0"]),
        (MINIMAL + "data: {rows: 2.5}\n", ["data.rows:", "whole number", "2.5"]),
        (MINIMAL + "data: {rows: 5}\nplan: {microbatches: 4}\n", ["data.rows (5)", "plan.microbatches (4)"]),
        (MINIMAL + "training: {steps: 2, epochs: 1}\n", ["training:", "steps and epochs"]),
        (MINIMAL + "training: {steps: 2}\noptimizer: {warmup_steps: 2}\n", ["optimizer.warmup_steps (2)"]),
        (MINIMAL + "plan: {planner: megatrain, device_bytes: 1e9}\n", ["plan:", "device_bytes", "milp"]),
        (MINIMAL + "run: {name: a/b}\n", ["run.name:", "letters, digits", "'a/b'"]),
        (MINIMAL + "run: {name: ..}\n", ["run.name:", "one folder name", "'..'"]),
        (MINIMAL + "? [a]\n: 1\n", ["not YAML", "a key must be one word"]),
        ("model: {folder: ''}\n", ["model.folder:", "must not be empty"]),
        ("model: {folder: ~nobody-at-all/x}\n", ["model.folder:", "home folder", "~nobody-at-all"]),
        (MINIMAL + "data: {source: $NOT_SET_AT_ALL/x}\n", ["data.source:", "NOT_SET_AT_ALL is not set"]),
        (MINIMAL + "run: {save_model: maybe}\n", ["run.save_model:", "true or false", "'maybe'"]),
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
        (["--optimizer.learning-rate"], ["--optimizer.learning-rate needs a value"]),
        (["--run.name", "--data.rows", "4"], ["--run.name needs a value"]),
        (["--model"], ["--model needs a value"]),
        (["--model", "a", "--model", "b"], ["--model is given twice (a, b)"]),
        (["--model", "a", "--model.folder", "b"], ["--model and --model.folder exclude each other"]),
        (["--random-weights"], ["--random-weights needs --model NAME"]),
        (["--optimizer.learning-rate", "1", "surplus"], ["'surplus'"]),
        (["--data.batching", "sorted"], ["data.batching:", "'bucketed'", "it is 'sorted'"]),
    ],
)
def test_refused_overrides(write, overrides, words):
    with pytest.raises(ConfigError) as raised:
        load_config(write(MINIMAL), overrides)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("name", ["5", "007", "12:30", "on", "null-hypothesis", "1e3", "2026-11-30"])
def test_names_are_text_wherever_they_are_written(write, name):
    assert load_config(None, ["--model", "m", "--run.name", name]).run.name == name
    config = load_config(write(MINIMAL + f"run: {{name: {name}}}\n"))
    assert config.run.name == name
    assert load_config(write(dump_config(config))) == config


@pytest.mark.parametrize(
    ("text", "value"), [("8", 8), ("8.0", 8), ("1e1", 10), ("0x10", None), ("1e-1", None), ("true", None)]
)
def test_whole_numbers_may_be_written_as_such(write, text, value):
    if value is None:
        with pytest.raises(ConfigError, match="must be a whole number"):
            load_config(write(MINIMAL + f"data: {{rows: {text}}}\n"))
    else:
        assert load_config(write(MINIMAL + f"data: {{rows: {text}}}\n")).data.rows == value
        assert load_config(None, ["--model", "m", "--data.rows", text]).data.rows == value


def test_paths_expand_as_in_a_shell(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("DATA", "/data")
    config = load_config(
        write("model: {folder: ~/m}\ndata: {source: $DATA/rows.json, cache_folder: '${DATA}/c'}\n")
    )
    assert config.model.folder == pathlib.Path("/home/someone/m")
    assert (config.data.source, config.data.cache_folder) == ("/data/rows.json", pathlib.Path("/data/c"))
    assert load_config(None, ["--model", "~/m"]).model.folder == pathlib.Path("/home/someone/m")


def test_a_record_means_the_same_from_everywhere(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "problems").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["--data", "rows.jsonl", "--plan.hardware", "h200", "--run.folder", "out"]
    config = with_absolute_paths(load_config(None, ["--model", "m", *words]))
    assert config.model.folder == tmp_path / "m"
    assert config.data.source == str(tmp_path / "rows.jsonl")
    assert (config.plan.hardware, config.run.folder) == ("h200", tmp_path / "out")
    assert with_absolute_paths(load_config(None, ["--model", "m"])).data.source == "problems"


def test_random_weights_only_when_asked():
    config = load_config(None, ["--model", "Qwen2.5-0.5B"])
    assert (config.model.folder, config.model.architecture) == (pathlib.Path("Qwen2.5-0.5B"), None)
    config = load_config(None, ["--model", "Qwen2.5-0.5B", "--random-weights"])
    assert (config.model.folder, config.model.architecture) == (None, "Qwen2.5-0.5B")


def test_the_file_may_stand_after_the_options(write):
    path = write(MINIMAL)
    assert load_command_line(["--data.rows", "3", str(path)]).data.rows == 3
    assert load_command_line([str(path), "--data.rows", "3"]).data.rows == 3
    with pytest.raises(ConfigError, match=r"'b\.yaml' belongs to no option"):
        load_command_line(["a.yaml", "--data.rows", "3", "b.yaml"])


def test_a_group_without_keys_is_its_defaults(write):
    assert load_config(write(MINIMAL + "training:\n  # steps: 3\n")).training.epochs == 1.0


def test_a_mistake_is_blamed_on_where_it_was_written(write):
    path = write(MINIMAL + "data: {rows: none}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["--training.steps", "many"])
    lines = sorted(line.strip() for line in str(raised.value).splitlines())
    assert lines[0].startswith(f"{path}: data.rows: must be a whole number, it is 'none'")
    assert lines[1].startswith("command line: training.steps: must be a whole number, it is 'many'")


def test_a_folder_in_the_place_of_the_file_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="is a folder, not a configuration file; a model is --model FOLDER"):
        load_command_line([str(tmp_path)])


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


@pytest.mark.parametrize("text", ['{"query": "a"}\n{"query": "b"}\n', '[{"query": "a"}]\n', "some text\n"])
def test_rows_given_as_the_configuration_are_told_where_they_go(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"rows to train on are --data {path}$"):
        load_config(path)


def test_what_other_tools_call_a_key_names_a_key_that_exists():
    from lazyjax.config.reading import _ELSEWHERE, _group

    for name, key in _ELSEWHERE.items():
        group, _, word = key.partition(".")
        assert word in _group(group), name
