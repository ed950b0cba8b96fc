"""Parts of slabs: one after another they are the whole, for slabs, tensors and optimizer state."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.optim.base import VERSION
from lazyjax.optim.make import OPTIMIZERS, make_host_optimizer
from lazyjax.specs import BLOCK_ELEMENTS, LayerSpec, ModelSpec, Share, slab_layout, slab_part
from lazyjax.storage.host import LayerSlabs, aligned_zeros, allocate_host_store
from tests.optim.slabs import LAYOUT, TENSORS, fill_gradient, make_slabs

BLOCKS = LAYOUT.length // BLOCK_ELEMENTS


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Parts of a slab that follow one another, some of them empty."""
    inner = draw(st.lists(st.integers(0, BLOCKS), max_size=5))
    borders = [0, *sorted(inner), BLOCKS]
    return [(a * BLOCK_ELEMENTS, b * BLOCK_ELEMENTS) for a, b in itertools.pairwise(borders)]


def part_of(whole: LayerSlabs, start: int, stop: int) -> LayerSlabs:
    """A copy of a part, in memory of its own."""
    made = []
    for array in (whole.hi, whole.lo, whole.gradient):
        held = aligned_zeros(stop - start, array.dtype.name, purpose="test")
        held[:] = array[start:stop]
        made.append(held)
    return LayerSlabs(slab_part(whole.layout, start, stop), *made)


@given(cuts())
def test_segments_of_parts_cover_every_tensor_once(parts: list[tuple[int, int]]) -> None:
    found: dict[str, list[int]] = {tensor.name: [] for tensor in TENSORS}
    for start, stop in parts:
        layout = slab_part(LAYOUT, start, stop)
        assert layout.length == stop - start
        for segment in layout.segments:
            whole = next(one for one in LAYOUT.segments if one.name == segment.name)
            assert segment.tensor_shape == whole.shape
            assert segment.decay == whole.decay
            assert start + segment.offset == whole.offset + segment.first
            found[segment.name] += range(segment.first, segment.first + segment.elements)
    assert found == {tensor.name: list(range(tensor.elements)) for tensor in TENSORS}


@pytest.mark.parametrize("borders", [(0, 100), (1, 256), (256, 0), (0, LAYOUT.length + 256)])
def test_parts_that_are_no_whole_blocks_are_refused(borders: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no whole blocks"):
        slab_part(LAYOUT, *borders)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@given(parts=cuts(), steps=st.integers(1, 3))
def test_updates_of_parts_are_the_update_of_the_whole_bit_for_bit(
    name: str, parts: list[tuple[int, int]], steps: int
) -> None:
    optimizer = make_host_optimizer(name, threads=1)
    whole = make_slabs()
    state = optimizer.create_state(LAYOUT)
    held = [part_of(whole, *part) for part in parts]
    states = [optimizer.create_state(slabs.layout) for slabs in held]
    rng = np.random.default_rng(0)
    for count in range(1, steps + 1):
        fill_gradient(whole, rng)
        scalars = {"learning_rate": 1e-2, "count": count, "scale": 0.5}
        optimizer.update(whole, state, **scalars)
        for (start, stop), slabs, own in zip(parts, held, states, strict=True):
            slabs.gradient[:] = whole.gradient[start:stop]
            optimizer.update(slabs, own, **scalars)
    for array in ("hi", "lo"):
        joined = np.concatenate([getattr(slabs, array) for slabs in held])
        np.testing.assert_array_equal(joined, getattr(whole, array))
    for key in state.keys() - {VERSION}:
        np.testing.assert_array_equal(np.concatenate([own[key] for own in states]), state[key])


@given(cuts())
def test_tensors_are_stored_by_parts(parts: list[tuple[int, int]]) -> None:
    whole = make_slabs()
    values = {segment.name: whole.master(segment.name) for segment in LAYOUT.segments}
    for start, stop in parts:
        expected = part_of(whole, start, stop)
        for given_whole in (True, False):
            made = part_of(make_slabs(seed=1), start, stop)
            for tensor in TENSORS:
                elements = made.range_of(tensor.name)
                if not elements:
                    continue
                if given_whole:
                    made.set_master(tensor.name, values[tensor.name])
                else:
                    flat = values[tensor.name].reshape(-1)
                    made.set_elements(tensor.name, flat[elements.start : elements.stop], elements.start)
                got = made.layout.segments[[s.name for s in made.layout.segments].index(tensor.name)]
                place = slice(got.offset, got.offset + got.elements)
                np.testing.assert_array_equal(made.hi[place], expected.hi[place])
                np.testing.assert_array_equal(made.lo[place], expected.lo[place])


def test_a_transposed_view_is_stored_from_the_row_in_which_a_part_begins() -> None:
    whole = make_slabs()
    start, stop = 40 * BLOCK_ELEMENTS, 60 * BLOCK_ELEMENTS
    made, expected = part_of(make_slabs(seed=1), start, stop), part_of(whole, start, stop)
    elements = made.range_of("matrix")
    columns = TENSORS[0].shape[1]
    first, last = elements.start // columns, -(-elements.stop // columns)
    stored = np.ascontiguousarray(whole.master("matrix").T)[:, first:last]
    made.set_elements("matrix", stored.T, first * columns)
    np.testing.assert_array_equal(made.hi, expected.hi)
    np.testing.assert_array_equal(made.lo, expected.lo)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_shares_hold_equal_numbers_of_pages(devices: int) -> None:
    spec = ModelSpec("model", "qwen2", 8, 8, False, (LayerSpec("layer", "kind", TENSORS),))
    whole = slab_layout(TENSORS, devices=devices)
    stores = [
        allocate_host_store(spec, devices=devices, share=Share(device, device + 1, devices))
        for device in range(devices)
    ]
    assert {store.layouts[0].length for store in stores} == {whole.length // devices}
    assert all(2 * store.layouts[0].length % 4096 == 0 for store in stores)
    assert [store.slabs(0).hi.size for store in stores] == [whole.length // devices] * devices
