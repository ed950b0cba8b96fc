"""Slabs with random contents for optimizer tests."""

import numpy as np

from lazyjax.optim.native.library import library_file, load_library
from lazyjax.specs import SlabLayout, TensorSpec, slab_layout
from lazyjax.storage.host import LayerSlabs, aligned_zeros

#: A coded matrix with a partly filled last block, a small matrix, a coded vector, two small vectors.
TENSORS = (
    TensorSpec("matrix", (131, 257), "float32"),
    TensorSpec("norm", (40,), "float32"),
    TensorSpec("small", (30, 7), "float32"),
    TensorSpec("vector", (5000,), "float32"),
    TensorSpec("bias", (256,), "float32"),
)
LAYOUT = slab_layout(TENSORS)


def available_paths() -> tuple[str, ...]:
    if library_file() is None:
        return ("pure",)
    library = load_library()
    assert library is not None
    return ("pure", *library.paths)


def make_slabs(layout: SlabLayout = LAYOUT, gradient_dtype: str = "bfloat16", seed: int = 0) -> LayerSlabs:
    rng = np.random.default_rng(seed)
    slabs = LayerSlabs(
        layout,
        aligned_zeros(layout.length, "uint16", purpose="test"),
        aligned_zeros(layout.length, "int16", purpose="test"),
        aligned_zeros(layout.length, gradient_dtype, purpose="test"),
    )
    for segment in layout.segments:
        slabs.set_master(segment.name, rng.normal(size=segment.shape).astype(np.float32))
    return slabs


def fill_gradient(slabs: LayerSlabs, rng: np.random.Generator, spread: float = 1.0) -> dict[str, np.ndarray]:
    """Writes a gradient of mixed scales; returns it per tensor, as rounded to the slab's dtype."""
    for segment in slabs.layout.segments:
        sizes = 1e-2 * np.exp(spread * rng.normal(size=segment.elements))
        part = slice(segment.offset, segment.offset + segment.elements)
        slabs.gradient[part] = (sizes * rng.normal(size=segment.elements)).astype(slabs.gradient.dtype)
    return gradient_of(slabs)


def gradient_of(slabs: LayerSlabs) -> dict[str, np.ndarray]:
    return {
        s.name: slabs.gradient[s.offset : s.offset + s.elements].astype(np.float32).reshape(s.shape)
        for s in slabs.layout.segments
    }


def masters(slabs: LayerSlabs) -> dict[str, np.ndarray]:
    return {segment.name: slabs.master(segment.name) for segment in slabs.layout.segments}


def all_bytes(slabs: LayerSlabs, state: dict[str, np.ndarray]) -> dict[str, bytes]:
    arrays = {"hi": slabs.hi, "lo": slabs.lo, "gradient": slabs.gradient, **state}
    return {name: array.tobytes() for name, array in arrays.items()}
