"""Checkpoints of a training run: one folder each, complete or not there at all.

    step-00000020/
        manifest.json     what was saved, with a checksum of every array and of itself
        layers/0007/      one Orbax checkpoint per layer: hi, lo and the optimizer's arrays, as bytes

Of several processes each writes what it holds, as plain files in layers/0007/PROCESS/: Orbax would have them
compare their paths over the devices, in the middle of training. One after another their arrays are those that
one process would have written, so that any number of processes can read them.

A checkpoint is written under another name, layer by layer from the slabs where they lie; every file and
folder is synced before the rename that makes it one, and the parent after it. What is read is checked
against the manifest before a byte of it is used. Arrays are stored without the padding rules of a device
count: what is longer than the slab of this run has to be zero there.

The only importer of Orbax. When to save, in which thread, and what to keep is `saving`'s business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from lazyjax.distributed.channel import Channel, PeerError
from lazyjax.distributed.processes import alone
from lazyjax.optim.base import HostOptimizer, HostState
from lazyjax.specs import ModelSpec
from lazyjax.storage.host import LayerSlabs
from lazyjax.storage.memory import raw_bytes
from lazyjax.training.places import VERSION_ARRAY, DamagedCheckpointError, Place

#: Of manifest.json and of what lies beside it.
FORMAT = 1
#: The same, of several processes.
FORMAT_OF_PARTS = 2
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL, _DELETED = ".partial-", ".deleted-"

#: Gets a layer's index and gives its slabs and optimizer state, in use or copies, while it is open.
ReadLayer = Callable[[int], contextlib.AbstractContextManager[tuple[LayerSlabs, HostState]]]


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; those before it are as they were."""


class ResumeError(ValueError):
    """What is asked for cannot go on from what was saved; the message names the key."""


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """How far a run is; everything it needs beside the slabs, as plain JSON values.

    Attributes:
        step: steps of the loop, skipped ones included.
        applied_steps: those that updated the parameters (the optimizer's count).
        skipped_steps, skipped_in_a_row: those that did not, in all and last.
        learning_rate, schedule_steps: of that step, and the length of the schedule it comes from.
        data: the loader's position.
        seed: of initial weights and data order; nothing else is drawn.
        metrics: position in metrics.jsonl.
        evaluation_loss: the last one before the step.
    """

    step: int
    applied_steps: int
    skipped_steps: int
    skipped_in_a_row: int
    learning_rate: float
    schedule_steps: int
    data: Mapping[str, Any]
    seed: Mapping[str, int]
    metrics: Mapping[str, Any]
    evaluation_loss: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint belongs to; a run of another one cannot go on from it."""

    model: Mapping[str, Any]
    optimizer: str
    state_version: str


def identity_of(spec: ModelSpec, optimizer: HostOptimizer) -> Identity:
    """The identity of a run."""
    layers = [
        [layer.name, layer.kind, [[tensor.name, list(tensor.shape)] for tensor in layer.parameters]]
        for layer in spec.layers
    ]
    model = {"family": spec.family, "tied": spec.tied, "layers": layers}
    return Identity(model, optimizer.name, optimizer.state_version)


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its manifest is whole and all its files have their sizes."""

    path: pathlib.Path
    position: Position
    identity: Identity
    plan: Mapping[str, Any]
    attention: str
    layers: tuple[Mapping[str, Any], ...]
    devices: int | None = None

    def check_identity(self, mine: Identity) -> None:
        """ResumeError, naming what differs, if another model or optimizer is to be trained."""
        theirs = self.identity
        if theirs.model != mine.model:
            raise ResumeError(f"{self.path}: saved with another model: {_first_difference(theirs, mine)}")
        if theirs.optimizer != mine.optimizer:
            raise ResumeError(
                f"{self.path}: saved with optimizer.name {theirs.optimizer}, {mine.optimizer} is asked for; "
                "its state belongs to its optimizer"
            )
        if theirs.state_version != mine.state_version:
            raise ResumeError(
                f"{self.path}: optimizer state of version {theirs.state_version!r}, this configuration of "
                f"{mine.optimizer} has {mine.state_version!r}"
            )

    def restore_layer(
        self, index: int, slabs: LayerSlabs, state: HostState, place: Place | None = None
    ) -> None:
        """Reads one layer, or what is held here of it, into its slabs and its optimizer state, in place.

        Args:
            place: of what is held here; None: all of it.

        Raises:
            DamagedCheckpointError: naming the array; slabs and state may then hold a part of it.
        """
        targets = _arrays(slabs, state)
        place = place or Place(dict.fromkeys(targets, 0), last=True)
        saved = self._saved_parts(index)
        for recorded, folder, _ in saved:
            if recorded.keys() != targets.keys():
                raise DamagedCheckpointError(
                    f"{folder}: holds {', '.join(recorded)}; wanted {', '.join(targets)}"
                )
            for name, target in targets.items():
                if recorded[name]["dtype"] != str(target.dtype):
                    raise DamagedCheckpointError(
                        f"{folder}: {name} is {recorded[name]['dtype']}, not {target.dtype}"
                    )
        for name, target in targets.items():
            if name != VERSION_ARRAY:
                raw_bytes(target)[:] = 0
        begins = dict.fromkeys(targets, 0)
        for recorded, folder, load in saved:
            sizes = {name: recorded[name]["bytes"] for name in targets}
            if any(place.needs(name, begins[name], sizes[name], targets[name].nbytes) for name in targets):
                loaded = load(folder)
                for name, target in targets.items():
                    raw = _checked(loaded, recorded, name, folder)
                    place.copy_in(raw, begins[name], target, name, folder)
            begins = {name: begins[name] + sizes[name] for name in targets}

    def _saved_parts(self, index: int) -> list[_SavedPart]:
        folder, layer = self.path / "layers" / f"{index:04}", self.layers[index]
        if "parts" not in layer:
            return [_SavedPart(layer["arrays"], folder, _load)]
        return [
            _SavedPart(arrays, folder / str(process), _load_plain)
            for process, arrays in enumerate(layer["parts"])
        ]


class _SavedPart(NamedTuple):
    """What one process has saved of a layer: dtype, bytes and checksum by array, where, and its reader."""

    arrays: Mapping[str, Mapping[str, Any]]
    folder: pathlib.Path
    load: Callable[[pathlib.Path], dict[str, np.ndarray]]


def _checked(
    loaded: Mapping[str, np.ndarray], recorded: Mapping[str, Any], name: str, folder: pathlib.Path
) -> np.ndarray:
    """An array as it was saved."""
    raw = loaded[name] if name in loaded else np.empty(0, np.uint8)
    if raw.size != recorded[name]["bytes"]:
        raise DamagedCheckpointError(f"{folder}: {name} is incomplete")
    if zlib.crc32(raw) != recorded[name]["crc32"]:
        raise DamagedCheckpointError(f"{folder}: {name} has changed since it was saved (checksum)")
    return raw


def save(
    folder: pathlib.Path,
    spec: ModelSpec,
    read_layer: ReadLayer,
    position: Position,
    identity: Identity,
    *,
    plan: Mapping[str, Any],
    config: Mapping[str, Any],
    attention: str,
    devices: int | None = None,
    layer_saved: Callable[[int], None] = lambda layer: None,
    channel: Channel | None = None,
) -> pathlib.Path:
    """Writes a checkpoint of `position.step` into `folder`, which holds all of a run.

    Args:
        read_layer: opens a layer; what it owns must not change before `layer_saved` was called with it.
        channel: of the processes that write it together; the first one makes it a checkpoint.

    Raises:
        CheckpointWriteError: nothing of it is left, unless the drive refuses even that.
    """
    channel = channel or alone().main
    name = f"step-{position.step:08}"
    target, partial = folder / name, None
    try:
        partial = folder / channel.decide(lambda: _begin(folder, name))
        with channel.together():
            layers = _save_layers(partial, spec, read_layer, channel, layer_saved)
        parts = channel.exchange(layers)
        if channel.count > 1:
            layers = [
                {"name": layer.name, "parts": [part[index]["arrays"] for part in parts]}
                for index, layer in enumerate(spec.layers)
            ]
        manifest = {
            "format": FORMAT if channel.count == 1 else FORMAT_OF_PARTS,
            "lazyjax": importlib.metadata.version("lazyjax"),
            "position": dataclasses.asdict(position),
            "identity": dataclasses.asdict(identity),
            "plan": plan,
            "config": config,
            "attention": attention,
            "devices": devices,
            "layers": layers,
        }
        channel.decide(lambda: _commit(partial, target, manifest))
    except (OSError, PeerError) as error:
        if partial is not None and channel.leads:
            shutil.rmtree(partial, ignore_errors=True)
        code = error.errno if isinstance(error, OSError) else None
        raise CheckpointWriteError(
            code, f"the checkpoint of step {position.step} cannot be written ({error})"
        ) from error
    return target


def _begin(folder: pathlib.Path, name: str) -> str:
    """Makes the folder that is written into, under a name that is no checkpoint's."""
    partial = folder / f"{_PARTIAL}{name}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial.name


def _save_layers(
    partial: pathlib.Path,
    spec: ModelSpec,
    read_layer: ReadLayer,
    channel: Channel,
    layer_saved: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Writes what this process holds of every layer; gives what the manifest says of it."""
    layers = []
    for index, layer in enumerate(spec.layers):
        folder = partial / "layers" / f"{index:04}"
        with read_layer(index) as (slabs, state):
            arrays = _arrays(slabs, state)
            if channel.count == 1:
                _save_arrays(folder, arrays)
            else:
                _save_plain(folder / str(channel.index), arrays)
            recorded = {
                key: {"dtype": str(array.dtype), "bytes": array.nbytes, "crc32": zlib.crc32(raw_bytes(array))}
                for key, array in arrays.items()
            }
        layers.append({"name": layer.name, "arrays": recorded})
        layer_saved(index)
    return layers


def _commit(partial: pathlib.Path, target: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Makes what was written a checkpoint."""
    files = {str(path.relative_to(partial)): path.stat().st_size for path in _files(partial)}
    manifest = manifest | {"files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest | {"crc32": _checksum(manifest)}))
    _sync_tree(partial)
    if target.exists():
        # Saved before and found damaged: the run has come here again.
        _delete(target)
    os.rename(partial, target)
    _sync(target.parent)
    # The folder itself may be new.
    _sync(target.parent.parent)


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Reads and checks the manifest, and the sizes of all files.

    Raises:
        DamagedCheckpointError: not complete, damaged, or of another format.
    """
    manifest_path = path / MANIFEST
    try:
        manifest = json.loads(_read_own(manifest_path))
    except OSError as error:
        raise DamagedCheckpointError(f"{manifest_path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{manifest_path}: damaged ({error})") from error
    if not isinstance(manifest, dict) or "crc32" not in manifest or "format" not in manifest:
        raise DamagedCheckpointError(f"{manifest_path}: damaged (no manifest of a checkpoint)")
    if manifest["format"] not in (FORMAT, FORMAT_OF_PARTS):
        raise DamagedCheckpointError(f"{path}: format {manifest['format']}; this version reads {FORMAT}")
    if manifest.pop("crc32") != _checksum(manifest):
        raise DamagedCheckpointError(f"{manifest_path}: damaged (checksum)")
    for name, size in manifest["files"].items():
        file = path / name
        found = file.stat().st_size if file.is_file() and not file.is_symlink() else None
        if found != size:
            held = "is missing" if found is None else f"has {found} bytes"
            raise DamagedCheckpointError(f"{file}: {held}, {size} were saved")
    return Checkpoint(
        path,
        Position(**manifest["position"]),
        Identity(**manifest["identity"]),
        manifest["plan"],
        manifest["attention"],
        tuple(manifest["layers"]),
        # Earlier releases did not record it.
        manifest["devices"] if "devices" in manifest else None,
    )


def list_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders that are named like checkpoints, newest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: pathlib.Path) -> int:
    """The step that a checkpoint's name says."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def prune(folder: pathlib.Path, *, keep_last: int, keep_best: bool) -> None:
    """Deletes checkpoints beyond the last ones and the best, and what killed processes left.

    Damaged ones do not count and are left for whoever wants to look at them.
    """
    complete = []
    for path in list_checkpoints(folder):
        with contextlib.suppress(DamagedCheckpointError):
            complete.append(open_checkpoint(path))
    kept = {checkpoint.path for checkpoint in complete[:keep_last]}
    judged = [checkpoint for checkpoint in complete if checkpoint.position.evaluation_loss is not None]
    if keep_best and judged:
        kept.add(min(judged, key=lambda each: (each.position.evaluation_loss, -each.position.step)).path)
    for checkpoint in complete:
        if checkpoint.path not in kept:
            _delete(checkpoint.path)
    clean(folder)


def clean(folder: pathlib.Path) -> None:
    """Removes what interrupted saves and deletions left; nobody else may be saving there."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith((_PARTIAL, _DELETED)):
            shutil.rmtree(path, ignore_errors=True)


def _delete(path: pathlib.Path) -> None:
    """Deletes a checkpoint; first it loses its name, so that a part of it is never taken for one."""
    gone = path.with_name(f"{_DELETED}{path.name}-{os.getpid()}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    _sync(path.parent)
    shutil.rmtree(gone, ignore_errors=True)


# Arrays


def _arrays(slabs: LayerSlabs, state: HostState) -> dict[str, np.ndarray]:
    return {"hi": slabs.hi, "lo": slabs.lo} | {f"state.{name}": array for name, array in state.items()}


def _save_plain(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """One file for each array, on the drive when this returns."""
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        with (folder / name).open("xb") as file:
            file.write(raw_bytes(array))
            file.flush()
            os.fsync(file.fileno())


def _load_plain(folder: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        return {path.name: np.fromfile(path, np.uint8) for path in folder.iterdir()}
    except OSError as error:
        raise DamagedCheckpointError(f"{folder}: cannot be read ({error})") from error


@functools.cache
def _orbax() -> Any:
    """Imported when the first checkpoint is written or read: it takes a second."""
    import orbax.checkpoint.experimental.v1 as ocp

    # Every layer is a checkpoint without OCDBT, and Orbax says each time that this is unusual.
    logging.getLogger("absl").addFilter(
        lambda record: record.levelno > logging.WARNING or "orbax" not in record.pathname
    )
    return ocp


@contextlib.contextmanager
def _context() -> Iterator[Any]:
    ocp = _orbax()
    context = ocp.Context()
    saving = context.array.saving
    # One file per array, written from where it lies.
    saving.use_ocdbt = saving.use_compression = False
    saving.enable_write_sharding_file = False
    saving.array_metadata_store = None
    context.memory.deepcopy_host_arrays = False
    with context:
        yield ocp


def _save_arrays(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    try:
        with _context() as ocp:
            # It refuses empty arrays, which an optimizer may have for a layer.
            ocp.save(folder, {name: raw_bytes(array) for name, array in arrays.items() if array.size})
    except OSError:
        raise
    except Exception as error:  # of TensorStore: ValueError and others, with the drive's words in it
        raise CheckpointWriteError(f"{folder}: {error}") from error


def _load(folder: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        with _context() as ocp:
            return dict(ocp.load(folder))
    except Exception as error:  # whatever a damaged file makes of it
        raise DamagedCheckpointError(f"{folder}: cannot be read ({error})") from error


# Files


def _read_own(path: pathlib.Path) -> str:
    """A file's text; a link is not followed."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
        return file.read()


def _checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: pathlib.Path) -> None:
    """Files before the folders that name them."""
    for path in sorted(folder.rglob("*"), key=lambda path: len(path.parts), reverse=True):
        _sync(path)
    _sync(folder)


def _first_difference(theirs: Identity, mine: Identity) -> str:
    for key in ("family", "tied"):
        if theirs.model[key] != mine.model[key]:
            return f"{key} {theirs.model[key]}, now {mine.model[key]}"
    before, now = theirs.model["layers"], mine.model["layers"]
    if len(before) != len(now):
        return f"{len(before)} layers, now {len(now)}"
    one, other = next((one, other) for one, other in zip(before, now, strict=True) if one != other)
    return f"layer {one[0]} was {one[2]}, now {other[0]} is {other[2]}"
