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
from typing import Any

import numpy as np

from lazyjax.huggingface.finite import NonFinite, count_nonfinite
from lazyjax.huggingface.key_maps import (
    Entry,
    detect_prefix,
    is_rest,
    key_map,
    output_table_key,
)
from lazyjax.huggingface.parameters import ParameterStore
from lazyjax.huggingface.partial import read_elements
from lazyjax.huggingface.tensor_files import (
    CHUNK_BYTES,
    ELEMENT_BYTES,
    FLOAT_DTYPES,
    CheckpointError,
    StoredTensor,
    read_chunks,
    read_header,
)
from lazyjax.models.template import ModelTemplate

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LISTED = 20

#: Called with (key, bytes of it done since the last call, bytes of the whole job).
Progress = Callable[[str, int, int], None]


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
        entries: every parameter of the model, under the key that it is exported with.
        stored: key of an entry -> the tensor that holds it. They differ in name only for a tied model
            whose checkpoint has the output table and no embedding.
        rest: tensors beside the text model, e.g. a vision tower.
        repeated_table: a stored output table of a tied model, which must equal the embedding.
    """

    prefix: str
    entries: tuple[Entry, ...]
    stored: Mapping[str, StoredTensor]
    rest: tuple[StoredTensor, ...]
    repeated_table: StoredTensor | None


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Opens a folder with config.json and model.safetensors, or with shards and their index.

    Where both are there, the single file is read and the index is not, as in Transformers.

    Raises:
        CheckpointError: naming the file that is missing, truncated, damaged or contradicts the
            index.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = read_json_table(folder / CONFIG_FILE)
    if (folder / WEIGHTS_FILE).is_file():
        return Checkpoint(folder, config, read_header(folder / WEIGHTS_FILE))
    if (folder / INDEX_FILE).is_file():
        return Checkpoint(folder, config, _sharded_tensors(folder / INDEX_FILE))
    raise CheckpointError(
        f"{folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there; only safetensors are read"
    )


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
    sources = {entry.key: entry.key for entry in entries}
    repeated = template.spec.tied and output_table_key() in tensors
    if repeated and _table_key(template, entries) not in tensors:
        # Whoever saves shared tensors once may keep either name.
        sources[_table_key(template, entries)] = output_table_key()
        repeated = False
    used = {*sources.values(), *([output_table_key()] if repeated else [])}
    others = [key for key in tensors if key not in used]
    shapes = {sources[entry.key]: entry.stored_shape for entry in entries}
    problems = {
        "missing": [key for key in shapes if key not in tensors],
        "surplus": [key for key in others if not is_rest(family, key)],
        "wrong shape": [
            f"{key} {tensors[key].shape}, expected {shape}"
            for key, shape in shapes.items()
            if key in tensors and tensors[key].shape != shape
        ],
        f"type not among {', '.join(FLOAT_DTYPES)}": [
            f"{key} {tensors[key].dtype}"
            for key in shapes
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
        stored={key: tensors[source] for key, source in sources.items()},
        rest=tuple(tensors[key] for key in others),
        repeated_table=tensors[output_table_key()] if repeated else None,
    )


def _table_key(template: ModelTemplate, entries: Sequence[Entry]) -> str:
    """The key of the table that logits are taken with."""
    index = template.table.layer_index
    name = template.spec.layers[index].parameters[template.table.parameter_index].name
    (key,) = [entry.key for entry in entries if (entry.layer_index, entry.parameter) == (index, name)]
    return key


def _list(keys: Any) -> str:
    ordered = sorted(keys)
    more = f", and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more


def load_into(
    checkpoint: Checkpoint, template: ModelTemplate, store: ParameterStore, progress: Progress | None = None
) -> Binding:
    """Reads the model's parameters into the store's master weights, one tensor at a time.

    Of a tensor of which the store holds a part, that part is read.

    Returns:
        What was read from where, and what the checkpoint holds beside it.

    Raises:
        CheckpointError: the checkpoint does not fit the model (see `bind`), or the model is tied
            and the checkpoint holds two different tables; no slab was touched then. Also when a
            file shrinks while it is read, and naming every tensor with values that are not finite.
    """
    binding = bind(checkpoint, template)
    if binding.repeated_table is not None:
        table_key = _table_key(template, binding.entries)
        _check_repeated(checkpoint.folder, binding.repeated_table, binding.stored[table_key])
    total = sum(tensor.bytes for tensor in binding.stored.values())
    not_finite: list[NonFinite] = []
    for entry in binding.entries:
        tensor, layer = binding.stored[entry.key], store.layers[entry.layer_index]
        held = layer.range_of(entry.parameter)
        if held:
            elements = read_elements(tensor, entry.transform, held)
            found = count_nonfinite(elements.stored)
            if found:
                not_finite.append(NonFinite(tensor.key, *found))
            layer.set_elements(entry.parameter, elements.parameter, elements.first)
            # Else it would live on beside the next tensor.
            del elements
        if progress is not None:
            progress(entry.key, tensor.bytes, total)
    if not_finite:
        raise CheckpointError(
            f"{checkpoint.folder}: {len(not_finite)} tensor(s) hold values that are not finite, nothing can "
            f"be learned from them: {_list(map(str, not_finite))}"
        )
    return binding


def _check_repeated(folder: Path, repeated: StoredTensor, table: StoredTensor) -> None:
    """Two copies of a tied table must be equal, in the narrower of their types."""
    equal = (
        repeated.dtype in FLOAT_DTYPES
        and repeated.shape == table.shape
        and all(a == b for a, b in zip(*_in_common_type(repeated, table), strict=True))
    )
    if not equal:
        raise CheckpointError(
            f"{folder}: the config ties the output table to the embedding, but {repeated.key} and "
            f"{table.key} differ; set tie_word_embeddings to false in {CONFIG_FILE} to train both"
        )


def _in_common_type(*tensors: StoredTensor) -> list[Iterator[bytes]]:
    """The tensors' bytes in chunks of equally many elements, rounded to the narrowest of their types."""
    narrowest = FLOAT_DTYPES[min((tensor.dtype for tensor in tensors), key=lambda name: ELEMENT_BYTES[name])]
    elements = CHUNK_BYTES // 4

    def chunks(tensor: StoredTensor) -> Iterator[bytes]:
        stored_type = FLOAT_DTYPES[tensor.dtype]
        for chunk in read_chunks(tensor, elements * stored_type.itemsize):
            if stored_type == narrowest:
                yield chunk
            else:
                with np.errstate(over="ignore"):  # infinities are equal to no finite value
                    yield np.frombuffer(chunk, stored_type).astype(narrowest).tobytes()

    return [chunks(tensor) for tensor in tensors]
