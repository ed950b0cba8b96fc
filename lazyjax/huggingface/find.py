"""Which model a name means, and what to do where the name means none.

`lazyjax plan --model NAME` needs an architecture only: a folder, a config.json, a packaged name or the
hub's name for it. `lazyjax train --model NAME` needs weights, so a folder that is here; nothing is
downloaded unasked.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazyjax.huggingface.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    read_json_table,
)
from lazyjax.models.architecture import Architecture, ArchitectureError
from lazyjax.models.registry import architecture, architecture_names, parse_hf_config

#: Who publishes the packaged architectures' weights, by the beginning of the name.
_PUBLISHERS = {"Qwen": "Qwen", "SmolLM": "HuggingFaceTB", "Llama": "meta-llama"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: A model's page at the hub, also where a path has lost one of the slashes.
_ADDRESS = re.compile(r"^https?:/+(www\.)?(huggingface\.co|hf\.co)/")
#: Endings of the hub's names that say how the weights came about, not what the model is.
_TRAINING = re.compile(r"-(Instruct|Base|Chat|it|Thinking)(-\d+)?$")


def read_architecture(name: str) -> Architecture:
    """The architecture of a folder or config.json, or a packaged one by its own or the hub's name.

    Raises:
        ArchitectureError: no such name (with names that are near), or a file that describes no
            supported model.
        CheckpointError: a file that cannot be read.
    """
    path = Path(name)
    if path.is_dir():
        return _parsed(read_json_table(path / CONFIG_FILE), path / CONFIG_FILE, path.resolve().name)
    if path.is_file() or name.endswith(".json"):
        return _parsed(read_json_table(path), path, path.stem)
    packaged = _packaged(name)
    if packaged is not None:
        return architecture(packaged)
    raise ArchitectureError(
        f"model {name!r}: neither a folder nor the name of a packaged architecture{_near(name)}; "
        "a Hugging Face folder or its config.json will do as well "
        f"(packaged: {', '.join(architecture_names())})"
    )


def open_model(folder: Path) -> tuple[Architecture, Checkpoint]:
    """The architecture and the opened weights of a Hugging Face folder.

    Raises:
        CheckpointError: there is no such folder: says how to get one, or what is near; or the folder
            is damaged.
        ArchitectureError: its config.json describes no supported model.
    """
    if not folder.is_dir():
        raise CheckpointError(_how_to_get(folder))
    checkpoint = open_checkpoint(folder)
    return _parsed(checkpoint.config, folder / CONFIG_FILE, folder.resolve().name), checkpoint


def _parsed(config: Mapping[str, Any], path: Path, name: str) -> Architecture:
    try:
        return parse_hf_config(config, name=name)
    except ArchitectureError as error:
        raise ArchitectureError(f"{path}: {error}") from error


def _how_to_get(folder: Path) -> str:
    name = _ADDRESS.sub("", str(folder))
    if folder.is_file():
        if (folder.parent / CONFIG_FILE).is_file() and folder.name != CONFIG_FILE:
            return f"{name}: a file; a model is its folder: --model {folder.parent}"
        return (
            f"{name}: a file; weights come as a folder. To train this architecture from random weights, "
            "add --random-weights"
        )
    packaged = _packaged(name)
    # A folder beside others that are here is misspelt, not a name of the hub.
    hub_name = _HUB_NAME.fullmatch(name) and not folder.parent.is_dir()
    if packaged is not None or hub_name:
        at_hub = name
        if packaged is not None and "/" not in name:
            at_hub = f"{_publisher(packaged)}/{packaged}{name[len(packaged) :]}"
        target = at_hub.rpartition("/")[2]
        random = " To train it from random weights, add --random-weights." if packaged else ""
        return (
            f"{name}: no such folder, and nothing is downloaded unasked. Weights:  "
            f"hf download {at_hub} --local-dir {target}  then --model {target}.{random}"
        )
    return f"{name}: no such folder{_near(name)}"


def _packaged(name: str) -> str | None:
    """The packaged architecture that a name means, whoever published it and however it was trained."""
    words = name.rpartition("/")[2] if _HUB_NAME.fullmatch(name) else name
    known = {packaged.lower(): packaged for packaged in architecture_names()}
    candidates = (words.lower(), _TRAINING.sub("", words).lower())
    return next((known[candidate] for candidate in candidates if candidate in known), None)


def _publisher(name: str) -> str:
    return next((who for start, who in _PUBLISHERS.items() if name.startswith(start)), "OWNER")


def _near(name: str) -> str:
    """Packaged names, and folders beside the one that is not there, that are spelled alike."""
    path = Path(name)
    beside = {}
    if path.parent.is_dir():
        beside = {entry.name.lower(): str(path.parent / entry.name) for entry in path.parent.iterdir()}
    known = {packaged.lower(): packaged for packaged in architecture_names()} | beside
    close = difflib.get_close_matches(path.name.lower(), known, n=3)
    return f"; near: {', '.join(known[word] for word in close)}" if close else ""
