"""The tokenizer of a GGUF file: byte-level BPE, with llama.cpp's name for how it splits a text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazyjax.huggingface.tensor_files import CheckpointError

#: Splitting rules of byte-level BPE tokenizers by their regular expression, under llama.cpp's names.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_RULES = {
    _LETTERS + r"\p{N}" + _REST: "qwen2",
    _LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    (_LETTERS + r"\p{N}" + _REST).replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
        r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
    ): "qwen35",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id with llama.cpp's types, merges in order, and the name of the splitting rule."""

    rule: str
    tokens: list[str]
    types: list[int]
    merges: list[str]


def read_vocabulary(tokenizer: Any, folder: Path, size: int, rule: str | None) -> Vocabulary:
    """The tokenizer's tables, padded to `size`, the model's vocabulary.

    Args:
        rule: llama.cpp's name of the splitting rule; None finds it.

    Raises CheckpointError for a tokenizer other than byte-level BPE, has more tokens than the model, or
    splits by a rule whose name is not known.
    """
    import gguf

    document = json.loads(tokenizer.backend_tokenizer.to_str())
    if document["model"]["type"] != "BPE" or not _is_byte_level(document):
        raise CheckpointError(
            f"{folder}: GGUF export writes byte-level BPE tokenizers only, this one is "
            f"{document['model']['type']}"
        )
    types = gguf.TokenType
    tokens = [f"[PAD{index}]" for index in range(size)]
    kinds = [int(types.UNUSED)] * size
    for token, index in tokenizer.get_vocab().items():
        if index >= size:
            raise CheckpointError(f"{folder}: token {token!r} has id {index}, the model knows {size}")
        tokens[index], kinds[index] = token, int(types.NORMAL)
    for index, added in tokenizer.added_tokens_decoder.items():
        kinds[index] = int(types.CONTROL if added.special else types.USER_DEFINED)
    merges = [one if isinstance(one, str) else " ".join(one) for one in document["model"]["merges"]]
    return Vocabulary(rule or _find_rule(document, folder), tokens, kinds, merges)


def _parts(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The pre-tokenizers of a tokenizer.json, in order."""
    first = document["pre_tokenizer"]
    if first is None:
        return []
    return list(first["pretokenizers"]) if first["type"] == "Sequence" else [first]


def _is_byte_level(document: Mapping[str, Any]) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(document))


def _find_rule(document: Mapping[str, Any], folder: Path) -> str:
    """llama.cpp's name of how a tokenizer splits a text before it merges."""
    parts = _parts(document)
    kinds = [part["type"] for part in parts]
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    pattern = parts[0]["pattern"]["Regex"] if kinds == ["Split", "ByteLevel"] else None
    if pattern in _RULES:
        return _RULES[pattern]
    known = ", ".join(("smollm", "gpt-2", *_RULES.values()))
    raise CheckpointError(
        f"{folder}: llama.cpp's name of this tokenizer's splitting rule ({', '.join(kinds)}"
        f"{f': {pattern}' if pattern else ''}) is not known; name it with --rule (known: {known})"
    )


def add_vocabulary(
    writer: Any,
    vocabulary: Vocabulary,
    tokenizer: Any,
    stop_token_ids: tuple[int, ...],
    chat_template: str | None = None,
) -> None:
    """Writes the tables, the special tokens and the chat template into a `gguf.GGUFWriter`.

    Args: see `lazyjax.huggingface.gguf_file.write_gguf`.
    """
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.rule)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    for add, token_id in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_eot_token_id, next((t for t in stop_token_ids if t != tokenizer.eos_token_id), None)),
    ):
        if token_id is not None:
            add(token_id)
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and begins)
    template = chat_template or tokenizer.chat_template
    if isinstance(template, str):
        writer.add_chat_template(template)
    elif template:
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
