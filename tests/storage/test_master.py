"""The split master loses nothing, whatever the bits."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.storage.master import join_master, split_master


def round_trip(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hi, lo = np.empty(bits.size, np.uint16), np.empty(bits.size, np.int16)
    split_master(bits.view(np.float32), hi, lo)
    return hi, join_master(hi, lo).view(np.uint32)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_every_bit_comes_back(bits):
    given_bits = np.array(bits, np.uint32)
    np.testing.assert_array_equal(round_trip(given_bits)[1], given_bits)


def test_nan_payloads_infinities_and_denormals_come_back():
    """Quiet and signalling NaNs with any payload, where rounding carries into sign and exponent too."""
    payloads = np.concatenate(
        [np.arange(1, 2**16, 7), 2**22 + np.arange(0, 2**16, 7), 2**23 - 1 - np.arange(9)]
    )
    nans = (0x7F800000 | payloads).astype(np.uint32)
    others = np.array(
        [0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x7F7FFFFF], np.uint32
    )
    bits = np.concatenate([nans, nans | np.uint32(0x80000000), others])
    assert np.isnan(nans.view(np.float32)).all()
    np.testing.assert_array_equal(round_trip(bits)[1], bits)


def test_the_upper_half_is_the_nearest_bfloat16():
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    hi, _ = round_trip(values.view(np.uint32))
    upper = (hi.astype(np.uint32) << 16).view(np.float32)
    step = np.abs(np.nextafter(values, np.inf) - values) * 2**16
    assert (np.abs(upper - values) <= step / 2).all()
