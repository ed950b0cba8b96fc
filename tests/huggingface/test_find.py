"""What a model's name means, and what is said where it means nothing."""

import json
import shutil
from pathlib import Path

import pytest

from lazyjax.huggingface.checkpoint import CheckpointError
from lazyjax.huggingface.find import open_model, read_architecture
from lazyjax.models.architecture import ArchitectureError
from lazyjax.models.registry import architecture


@pytest.mark.parametrize(
    "name", ["Qwen2.5-0.5B", "qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"]
)
def test_packaged_names_and_the_hubs_names_for_them(name):
    assert read_architecture(name) == architecture("Qwen2.5-0.5B")


def test_a_folder_and_a_config_will_do(tmp_path):
    from lazyjax.huggingface.configs import to_hf_config

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf_config(architecture("Qwen3-0.6B"))))
    assert read_architecture(str(folder)).name == "mine"
    shutil.copy(folder / "config.json", tmp_path / "other.json")
    assert read_architecture(str(tmp_path / "other.json")).name == "other"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen2.5-8B", ["near: ", "Qwen2.5-7B", "config.json will do"]),
        ("qwen2.5-8b", ["near: ", "Qwen2.5-7B"]),
        ("gpt2", ["neither a folder nor", "config.json will do"]),
        ("mistralai/Mistral-7B-v0.1", ["neither a folder nor", "config.json will do"]),
    ],
)
def test_unknown_names_list_what_is_near(name, words):
    with pytest.raises(ArchitectureError) as raised:
        read_architecture(name)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen2.5-0.5B", ["hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B", "--random-weights"]),
        (
            "Qwen/Qwen3-8B-Base",
            ["hf download Qwen/Qwen3-8B-Base --local-dir Qwen3-8B-Base", "--random-weights"],
        ),
        ("qwen2.5-7b", ["hf download Qwen/Qwen2.5-7B --local-dir Qwen2.5-7B", "--random-weights"]),
        ("SmolLM2-135M", ["hf download HuggingFaceTB/SmolLM2-135M", "--random-weights"]),
        ("https://huggingface.co/Qwen/Qwen3-4B", ["hf download Qwen/Qwen3-4B", "--random-weights"]),
        ("someone/model-1B", ["hf download someone/model-1B --local-dir model-1B"]),
        ("no/such/folder", ["no/such/folder: no such folder"]),
    ],
)
def test_weights_that_are_not_here_come_with_the_command_that_gets_them(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        open_model(Path(name))
    for word in words:
        assert word in str(raised.value)
    assert ("--random-weights" in str(raised.value)) == ("--random-weights" in words)


def test_a_misspelt_folder_shows_its_neighbours(tmp_path):
    (tmp_path / "smollm2-135m").mkdir()
    with pytest.raises(CheckpointError, match=r"near: .*smollm2-135m"):
        open_model(tmp_path / "smolm2-135m")


def test_a_folder_that_is_not_among_those_here_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen2").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"^models/qwen3: no such folder; near: models/qwen2"):
        open_model(Path("models/qwen3"))


def test_a_file_of_a_model_names_its_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="add --random-weights"):
        open_model(tmp_path / "model.safetensors")
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=f"a model is its folder: --model {tmp_path}$"):
        open_model(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="add --random-weights"):
        open_model(tmp_path / "config.json")


def test_a_model_that_is_not_supported_is_named_with_its_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ArchitectureError, match=r"config\.json: model_type 'gpt2'"):
        read_architecture(str(tmp_path / "config.json"))
