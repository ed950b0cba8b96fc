"""Stores with random parameters and the folders made from them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from lazyjax.huggingface.export import export
from lazyjax.huggingface.key_maps import key_map, to_stored
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.storage.host import HostStore, allocate_host_store
from tests.huggingface.architectures import SMALL


def empty_store(name: str) -> tuple[ModelTemplate, HostStore]:
    template = build_template(SMALL[name])
    return template, allocate_host_store(template.spec)


def random_store(name: str) -> tuple[ModelTemplate, HostStore]:
    """Masters that use all 32 bits, so that no shorter type holds them."""
    template, store = empty_store(name)
    random = np.random.default_rng(0)
    for layer, slabs in zip(template.spec.layers, store.layers, strict=True):
        for tensor in layer.parameters:
            slabs.set_master(tensor.name, random.standard_normal(tensor.shape).astype(np.float32))
    return template, store


def masters(store: HostStore) -> dict[tuple[int, str], np.ndarray]:
    return {
        (index, segment.name): slabs.master(segment.name)
        for index, slabs in enumerate(store.layers)
        for segment in slabs.layout.segments
    }


def plain_folder(folder: Path, name: str) -> tuple[ModelTemplate, HostStore]:
    """A single-file fp32 folder of a random model."""
    template, store = random_store(name)
    export(folder, template, store, dtype="float32")
    return template, store


def read_all(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, read by the safetensors library."""
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def multimodal_folder(folder: Path, name: str) -> tuple[ModelTemplate, HostStore]:
    """The layout of released Qwen3.5 models: text model under a prefix, other weights beside it, shards."""
    template, store = random_store(name)
    values = masters(store)
    text = {
        entry.key: np.ascontiguousarray(
            to_stored(entry.transform, values[entry.layer_index, entry.parameter])
        )
        for entry in key_map(template, "model.language_model.")
    }
    random = np.random.default_rng(1)
    rest = {
        "model.visual.patch_embed.proj.weight": random.standard_normal((4, 3, 2)).astype(np.float16),
        "model.visual.blocks.0.attn.qkv.bias": random.standard_normal(5).astype(np.float32),
        "mtp.fc.weight": random.integers(0, 255, 7).astype(np.uint8),
    }
    keys = [*text, *rest]
    shards = {
        "model-00001-of-00002.safetensors": keys[::2],
        "model-00002-of-00002.safetensors": keys[1::2],
    }
    folder.mkdir()
    for file, held in shards.items():
        save_file({key: (text | rest)[key] for key in held}, folder / file, metadata={"format": "pt"})
    weight_map = {key: file for file, held in shards.items() for key in held}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    config = {"dtype": "float32", "text_config": {"dtype": "float32"}, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "preprocessor_config.json").write_text("{}")
    return template, store
