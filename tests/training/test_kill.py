"""Killed at any moment, a run goes on to the same end."""

from __future__ import annotations

import pytest

from experiments.benchmarks.kill_resume import POINTS, compare, draw_moments


def test_moments_are_of_every_kind_and_drawn_by_the_seed():
    moments = draw_moments(50, 0)
    assert moments == draw_moments(50, 0) != draw_moments(50, 1)
    assert {moment.point for moment in moments} == set(POINTS)


@pytest.mark.slow
def test_a_kill_at_every_kind_of_moment_changes_nothing(tmp_path):
    """`python -m experiments.benchmarks.kill_resume` does it fifty times."""
    moments = draw_moments(len(POINTS), 0)
    assert {moment.point for moment in moments} == set(POINTS)
    equal, killed = compare(tmp_path, moments, steps=24)
    assert sum("exit -9" in line for line in killed.log) == len(POINTS), killed.log
    assert equal, killed.log
