"""Hugging Face folders: opened and checked from their headers, then read straight into slabs.

Nothing is read but headers until the whole folder is known to fit the model. Then one tensor at a
time is read and split into its layer's slabs: beside the slabs, host memory holds one tensor in
its stored type.

Released multimodal checkpoints hold more than the text model. What is left beside it is
remembered by key and file, so that `lazyjax.huggingface.export` can copy it through unchanged.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lazyjax.huggingface.key_maps import (
    Entry,
    detect_prefix,
    is_rest,
    key_map,
    output_table_key,
    to_parameter,
)
from lazyjax.huggingface.tensor_files import (
    FLOAT_DTYPES,
    CheckpointError,
    StoredTensor,
    read_header,
    read_pieces,
    read_tensor,
)
from lazyjax.models.template import ModelTemplate

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LISTED = 20

#: Called with (key, bytes of it done since the last call, bytes of the whole job).
Progress = Callable[[str, int, int], None]


@runtime_checkable
class LayerParameters(Protocol):
    """One layer's master weights, e.g. `lazyjax.storage.host.LayerSlabs`."""

    def set_master(self, segment_name: str, value: np.ndarray) -> None:
        """Stores one parameter as fp32, without a copy of the whole."""
        ...

    def master_pieces(
        self, segment_name: str, arrange: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """The fp32 values of one parameter as `arrange` orders them, some rows at a time."""
        ...


@runtime_checkable
class ParameterStore(Protocol):
    """A model's master weights by layer, e.g. `lazyjax.storage.host.HostStore`."""

    @property
    def layers(self) -> Sequence[LayerParameters]:
        """In the order of `ModelSpec.layers`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened folder: its config and where every tensor lies."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """A checkpoint that fits a model.

    Attributes:
        prefix: of the text model's keys.
        entries: every parameter of the model; their keys are all in the checkpoint.
        rest: tensors beside the text model, e.g. a vision tower.
        repeated_table: a stored output table of a tied model, which must equal the embedding.
    """

    prefix: str
    entries: tuple[Entry, ...]
    rest: tuple[StoredTensor, ...]
    repeated_table: StoredTensor | None


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Opens a folder with config.json and model.safetensors, or with shards and their index.

    Raises:
        CheckpointError: naming the file that is missing, truncated, damaged or contradicts the
            index.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = read_json_table(folder / CONFIG_FILE)
    index_path = folder / INDEX_FILE
    if index_path.is_file():
        return Checkpoint(folder, config, _sharded_tensors(index_path))
    if not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(
            f"{folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there; only safetensors are read"
        )
    return Checkpoint(folder, config, read_header(folder / WEIGHTS_FILE))


def read_json_table(path: Path) -> dict[str, Any]:
    """A JSON file that holds a table.

    Raises:
        CheckpointError: naming the file, when it is missing or is something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON table")
    return value


def _sharded_tensors(index_path: Path) -> dict[str, StoredTensor]:
    index = read_json_table(index_path)
    if "weight_map" not in index or not isinstance(index["weight_map"], dict):
        raise CheckpointError(f"{index_path}: has no weight_map")
    weight_map: dict[str, str] = index["weight_map"]
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index_path}: {name!r} is not a file of the folder")
        held = read_header(index_path.parent / name)
        expected = {key for key, file in weight_map.items() if file == name}
        if held.keys() != expected:
            difference = _list(held.keys() ^ expected)
            raise CheckpointError(
                f"{index_path.parent / name}: its header and the index differ in {difference}"
            )
        tensors.update(held)
    return tensors


def bind(checkpoint: Checkpoint, template: ModelTemplate) -> Binding:
    """Pairs the model's parameters with the checkpoint's tensors, from headers alone.

    Raises:
        CheckpointError: listing every missing, surplus, mis-shaped and mis-typed tensor.
    """
    tensors, family = checkpoint.tensors, template.spec.family
    prefix = detect_prefix(tensors.keys())
    if prefix is None:
        raise CheckpointError(
            f"{checkpoint.folder}: holds no text model: neither model.embed_tokens.weight nor "
            "model.language_model.embed_tokens.weight is among its tensors"
        )
    entries = key_map(template, prefix)
    wanted = {entry.key: entry for entry in entries}
    repeated = [output_table_key()] if template.spec.tied and output_table_key() in tensors else []
    others = [key for key in tensors if key not in wanted and key not in repeated]
    problems = {
        "missing": [key for key in wanted if key not in tensors],
        "surplus": [key for key in others if not is_rest(family, key)],
        "wrong shape": [
            f"{key} {tensors[key].shape}, expected {entry.stored_shape}"
            for key, entry in wanted.items()
            if key in tensors and tensors[key].shape != entry.stored_shape
        ],
        f"type not among {', '.join(FLOAT_DTYPES)}": [
            f"{key} {tensors[key].dtype}"
            for key in wanted
            if key in tensors and tensors[key].dtype not in FLOAT_DTYPES
        ],
    }
    if any(problems.values()):
        lines = [f"  {len(keys)} {what}: {_list(keys)}" for what, keys in problems.items() if keys]
        raise CheckpointError(
            "\n".join([f"{checkpoint.folder} does not hold {template.spec.name} ({family}):", *lines])
        )
    return Binding(
        prefix=prefix,
        entries=entries,
        rest=tuple(tensors[key] for key in others),
        repeated_table=tensors[repeated[0]] if repeated else None,
    )


def _list(keys: Any) -> str:
    ordered = sorted(keys)
    more = f", and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more


def load_into(
    checkpoint: Checkpoint, template: ModelTemplate, store: ParameterStore, progress: Progress | None = None
) -> Binding:
    """Reads the model's parameters into the store's master weights, one tensor at a time.

    Returns:
        What was read from where, and what the checkpoint holds beside it.

    Raises:
        CheckpointError: the checkpoint does not fit the model (see `bind`), or the model is tied
            and the checkpoint holds two different tables; no slab was touched then. Also when a
            file shrinks while it is read.
    """
    binding = bind(checkpoint, template)
    if binding.repeated_table is not None:
        _check_repeated(checkpoint, binding.repeated_table, template, binding)
    total = sum(checkpoint.tensors[entry.key].bytes for entry in binding.entries)
    for entry in binding.entries:
        tensor = checkpoint.tensors[entry.key]
        value = to_parameter(entry.transform, read_tensor(tensor))
        store.layers[entry.layer_index].set_master(entry.parameter, value)
        # Else it would live on beside the next tensor.
        del value
        if progress is not None:
            progress(entry.key, tensor.bytes, total)
    return binding


def _check_repeated(
    checkpoint: Checkpoint, repeated: StoredTensor, template: ModelTemplate, binding: Binding
) -> None:
    names = [tensor.name for tensor in template.spec.layers[template.table.layer_index].parameters]
    place = (template.table.layer_index, names[template.table.parameter_index])
    (table_key,) = [e.key for e in binding.entries if (e.layer_index, e.parameter) == place]
    table = checkpoint.tensors[table_key]
    equal = (
        repeated.dtype == table.dtype
        and repeated.shape == table.shape
        and all(a == b for a, b in zip(read_pieces(repeated), read_pieces(table), strict=True))
    )
    if not equal:
        raise CheckpointError(
            f"{checkpoint.folder}: the config ties the output table to the embedding, but "
            f"{repeated.key} and {table_key} differ; set tie_word_embeddings to false in "
            f"{CONFIG_FILE} to train both"
        )
