"""Writing a model as a Hugging Face folder, tensor by tensor.

The folder is written under another name and renamed when it is complete, and an existing one is
never touched. Slabs are converted a few megabytes at a time, so the size of the model does not
matter. What a source checkpoint held beside the text model goes through unchanged, and so do its
config and generation settings, except for what training has changed: the element type, the tokenizer
that the rows were written with, and the token that ends a turn.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lazyjax.huggingface.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    Checkpoint,
    Progress,
    bind,
    read_json_table,
)
from lazyjax.huggingface.configs import to_hf_config
from lazyjax.huggingface.key_maps import Entry, key_map, to_stored
from lazyjax.huggingface.parameters import ReadableLayer, ReadableStore
from lazyjax.huggingface.tensor_files import (
    FLOAT_DTYPES,
    CheckpointError,
    OutgoingTensor,
    read_chunks,
    write_file,
)
from lazyjax.models.template import ModelTemplate

ExportDtype = Literal["bfloat16", "float32"]
_STORED_DTYPES: dict[ExportDtype, str] = {"bfloat16": "BF16", "float32": "F32"}

#: Files that make a tokenizer, with its chat template.
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates",
)
#: Files copied from the source: generation and processor settings, terms.
_COPIED = (
    "generation_config.json",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
)
#: Goes before a template in tokenizer_config.json.
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"


def export(
    folder: Path | str,
    template: ModelTemplate,
    store: ReadableStore,
    source: Checkpoint | None = None,
    *,
    tokenizer_folder: Path | None = None,
    chat_template: str | None = None,
    stop_token_ids: Sequence[int] = (),
    dtype: ExportDtype = "bfloat16",
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Path:
    """Writes the store's master weights as a Hugging Face folder that Transformers loads.

    A tied table is stored once, as Transformers does.

    Args:
        folder: must not exist; its parents are made.
        source: the checkpoint that training started from. Without one the config is written from
            the template.
        tokenizer_folder: whose tokenizer was trained with; by default the source's.
        chat_template: what the rows were written with, where it is not the tokenizer's own.
        stop_token_ids: what training taught the model to end with, e.g. the chat template's end of turn;
            generation then stops there too.
        dtype: of the text model's tensors; bfloat16 rounds the fp32 masters to nearest even. The
            rest of a source keeps its own types.
        max_shard_bytes: a file holds at most this much, unless one tensor is larger.

    Returns:
        The folder.

    Raises:
        CheckpointError: `folder` exists, the source does not fit the template, or the disk has
            too little room. Nothing is left behind.
    """
    folder = Path(folder)
    if folder.exists() or folder.is_symlink():
        raise CheckpointError(f"{folder} exists; export never overwrites, name another folder")
    tensors = _all_outgoing(template, store, source, _STORED_DTYPES[dtype])
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_room(folder, sum(tensor.bytes for tensor in tensors))
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        config = to_hf_config(template.config) if source is None else dict(source.config)
        _write_json(partial / CONFIG_FILE, _with_dtype(config, dtype))
        _copy_texts(partial, source, tokenizer_folder, chat_template)
        _add_stop_tokens(partial, config, stop_token_ids)
        _write_weights(partial, tensors, max_shard_bytes, progress)
        partial.chmod(0o755)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _all_outgoing(
    template: ModelTemplate, store: ReadableStore, source: Checkpoint | None, stored_dtype: str
) -> list[OutgoingTensor]:
    """The store's tensors, then those of the source that are not of the text model."""
    if source is None:
        return [_outgoing(entry, store, stored_dtype) for entry in key_map(template)]
    binding = bind(source, template)
    tensors = [_outgoing(entry, store, stored_dtype) for entry in binding.entries]
    tensors += [
        OutgoingTensor(tensor.key, tensor.dtype, tensor.shape, functools.partial(read_chunks, tensor))
        for tensor in binding.rest
    ]
    return tensors


def _copy_texts(
    partial: Path, source: Checkpoint | None, tokenizer_folder: Path | None, chat_template: str | None
) -> None:
    """The source's own files, the tokenizer, and the chat template where it is another."""
    if source is not None:
        _copy_files(source.folder, partial, _COPIED)
    tokenizer_source = tokenizer_folder or (source.folder if source is not None else None)
    if tokenizer_source is not None:
        _copy_files(tokenizer_source, partial, _TOKENIZER_FILES)
    if chat_template is not None:
        (partial / CHAT_TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def check_room(folder: Path, needed_bytes: int) -> None:
    """Whether so much can be written beside `folder`, a folder or file that is not there yet.

    Raises CheckpointError with both amounts.
    """
    free_bytes = _free_bytes(folder.parent)
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{folder}: {needed_bytes / 1e9:.2f} GB to write, {free_bytes / 1e9:.2f} GB free there; "
            "free some room or name a folder on another disk"
        )


def _outgoing(entry: Entry, store: ReadableStore, stored_dtype: str) -> OutgoingTensor:
    chunks = functools.partial(_chunks, store.layers[entry.layer_index], entry, stored_dtype)
    return OutgoingTensor(entry.key, stored_dtype, entry.stored_shape, chunks)


def _chunks(layer: ReadableLayer, entry: Entry, stored_dtype: str) -> Iterator[memoryview]:
    for master in layer.master_chunks(entry.parameter, functools.partial(to_stored, entry.transform)):
        # ml_dtypes rounds to nearest even, as Transformers and the reference checkpoints do.
        yield memoryview(master.astype(FLOAT_DTYPES[stored_dtype]).reshape(-1).view(np.uint8))


def _shards(tensors: Sequence[OutgoingTensor], max_shard_bytes: int) -> list[list[OutgoingTensor]]:
    shards: list[list[OutgoingTensor]] = [[]]
    used_bytes = 0
    for tensor in tensors:
        if shards[-1] and used_bytes + tensor.bytes > max_shard_bytes:
            shards.append([])
            used_bytes = 0
        shards[-1].append(tensor)
        used_bytes += tensor.bytes
    return shards


def _write_weights(
    folder: Path, tensors: Sequence[OutgoingTensor], max_shard_bytes: int, progress: Progress | None
) -> None:
    total = sum(tensor.bytes for tensor in tensors)

    def report(key: str, chunk_bytes: int) -> None:
        if progress is not None:
            progress(key, chunk_bytes, total)

    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_file(folder / WEIGHTS_FILE, shards[0], report)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / name, shard, report)
        weight_map.update({tensor.key: name for tensor in shard})
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _with_dtype(config: dict[str, Any], dtype: ExportDtype) -> dict[str, Any]:
    """The config with the exported element type, also for the text model inside a multimodal one.

    Old and new name of the key may both be there; Transformers then goes by the new one.
    """
    names = [name for name in ("torch_dtype", "dtype") if name in config] or ["dtype"]
    config = config | dict.fromkeys(names, dtype)
    if "text_config" in config:
        config["text_config"] = _with_dtype(config["text_config"], dtype)
    return config


def _copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, target / path.name)


def _add_stop_tokens(folder: Path, config: dict[str, Any], stop_token_ids: Sequence[int]) -> None:
    """Adds tokens to those at which generation stops, in generation_config.json."""
    path = folder / GENERATION_FILE
    text = config["text_config"] if "text_config" in config else config
    if path.exists():
        settings = read_json_table(path)
    else:
        # Without the file Transformers takes these from the config; with it, only from there.
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        settings = {name: text[name] for name in names if name in text and text[name] is not None}
    known = settings["eos_token_id"] if "eos_token_id" in settings else None
    stops = [] if known is None else list(known) if isinstance(known, list) else [known]
    new = [token for token in stop_token_ids if token not in stops]
    if new:
        stops += new
        _write_json(path, settings | {"eos_token_id": stops[0] if len(stops) == 1 else stops})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
