"""Tokenizers come from a folder or not at all."""

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
    with pytest.raises(CheckpointError, match="no such folder"):
        load_tokenizer("gpt2")


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
