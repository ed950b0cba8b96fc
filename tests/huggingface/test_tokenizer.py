"""Tokenizers come from a folder or not at all."""

import io
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.huggingface.tokenizer import load_tokenizer


def test_a_folder_s_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "two": 1, "words": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}'
    )
    assert load_tokenizer(tmp_path)("two words more")["input_ids"] == [1, 2, 0]


def test_a_missing_folder_is_not_looked_for_elsewhere() -> None:
    with pytest.raises(CheckpointError, match="no such tokenizer folder"):
        load_tokenizer("gpt2")


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)
    # Settings alone, or a model's config, are no vocabulary: Transformers would make an empty tokenizer.
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_of_special_tokens_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match="knows special tokens only"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["code.Mine", None]}, ["code.Mine", None]])
def test_code_of_a_folder_is_never_run(
    tmp_path: Path, auto_map: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Mine", "auto_map": auto_map})
    )
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Mine: pass\n")
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("asked"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(CheckpointError, match="Python code in the folder") as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "trust_remote_code" not in str(error.value)
    assert not ran.exists()


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)
