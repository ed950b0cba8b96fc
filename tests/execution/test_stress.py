"""Whatever comes late, the bits stay the same; whatever fails, nothing is lost or left behind."""

from __future__ import annotations

import functools
import pathlib

import pytest

from experiments.benchmarks import stress
from lazyjax.execution.kernels import Kernels


@functools.cache
def kernels() -> Kernels:
    return stress.stress_kernels()


@pytest.mark.parametrize("seed", range(6))
def test_late_drives_copies_and_updates_change_no_bit(seed: int, tmp_path: pathlib.Path) -> None:
    """Two random plans in turn: homes, depths, updates and the place of the state change between steps."""
    assert stress.same_bits(kernels(), seed, tmp_path)
    assert not list(tmp_path.iterdir())
