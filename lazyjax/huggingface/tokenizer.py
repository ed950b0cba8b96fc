"""The tokenizer of a Hugging Face folder, never fetched from anywhere."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lazyjax.huggingface.tensor_files import CheckpointError


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer that the files in `folder` describe, with its chat template.

    Raises:
        CheckpointError: the folder is missing, holds no tokenizer, or one that cannot be loaded.
    """
    folder = Path(folder)
    # AutoTokenizer would take a missing folder for the name of a model on the hub.
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in known):
        raise CheckpointError(f"{folder}: holds no tokenizer (none of {', '.join(known)})")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: {error}") from error
    return tokenizer
