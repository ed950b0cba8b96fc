"""The tokenizer of a Hugging Face folder: never fetched from anywhere, and never code of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lazyjax.huggingface.tensor_files import CheckpointError

#: Sets of files, any of which holds a vocabulary. Of anything less Transformers makes an empty tokenizer
#: that knows special tokens only and encodes every text to nothing, without an error.
_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))


def load_tokenizer(folder: Path | str) -> Any:
    """The fast tokenizer (a transformers object) that the files in `folder` describe.

    Raises:
        CheckpointError: the folder is missing, holds no vocabulary, or a tokenizer that cannot be loaded,
            is not a fast one, or would run code of the folder.
    """
    import transformers

    folder = Path(folder)
    # AutoTokenizer would take a missing folder for the name of a model on the hub.
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such tokenizer folder")
    if not any(all((folder / name).is_file() for name in names) for names in _VOCABULARIES):
        known = ", ".join(" with ".join(names) for names in _VOCABULARIES)
        raise CheckpointError(
            f"{folder}: holds no tokenizer.json, so no tokenizer can be loaded from it (any of these would "
            f"do: {known}); copy the model's tokenizer files there, or name their folder as data.tokenizer"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # damaged files raise anything, tokenizers itself a bare Exception
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{folder}: its tokenizer is Python code in the folder (auto_map in tokenizer_config.json), "
                f"which is never run; use a folder with a tokenizer.json of a class that Transformers has"
            ) from error
        raise CheckpointError(
            f"{folder}: no tokenizer can be loaded from it: {' '.join(str(error).split())}"
        ) from error
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"{folder}: needs a fast tokenizer (tokenizer.json), found {type(tokenizer).__name__}"
        )
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise CheckpointError(
            f"{folder}: its tokenizer knows special tokens only, no word of any text; tokenizer.json is "
            f"empty or of another model"
        )
    return tokenizer
