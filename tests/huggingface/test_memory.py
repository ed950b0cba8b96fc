"""Import holds one tensor beside the slabs, export less."""

import tracemalloc
from pathlib import Path

import numpy as np

from lazyjax.huggingface.checkpoint import load_into, open_checkpoint
from lazyjax.huggingface.export import export
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.storage.host import allocate_host_store

# A converted chunk is 2^20 elements; a handful of temporaries of it exist at a time.
_CHUNKS_BYTES = 24 * 2**20


def test_peak_memory_is_one_tensor(tmp_path: Path) -> None:
    # Slabs are anonymous mappings, which tracemalloc does not count: what it sees is what is extra.
    config = Qwen2Architecture(
        name="wide",
        vocab_size=60_000,
        hidden_size=512,
        intermediate_size=24_000,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope=Rope(theta=10_000.0),
        qkv_bias=False,
    )
    template = build_template(config)
    store = allocate_host_store(template.spec)
    for slabs in store.layers:
        slabs.hi[:] = np.arange(slabs.hi.size, dtype=np.uint16) & 0x3FFF
    largest_bytes = 2 * config.vocab_size * config.hidden_size
    assert 2 * template.spec.parameter_count > 4 * largest_bytes

    tracemalloc.start()
    try:
        export(tmp_path / "out", template, store, dtype="bfloat16")
        _, export_peak_bytes = tracemalloc.get_traced_memory()
        again = allocate_host_store(template.spec)
        tracemalloc.reset_peak()
        load_into(open_checkpoint(tmp_path / "out"), template, again)
        _, import_peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for slabs, others in zip(store.layers, again.layers, strict=True):
        for segment in slabs.layout.segments:
            part = slice(segment.offset, segment.offset + segment.elements)
            np.testing.assert_array_equal(slabs.hi[part], others.hi[part])
    assert export_peak_bytes < _CHUNKS_BYTES
    assert largest_bytes < import_peak_bytes < largest_bytes + _CHUNKS_BYTES
