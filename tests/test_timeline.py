"""Timelines, whoever made them."""

import itertools

import pytest

from lazyjax.timeline import Event, Resource, covered_seconds


def _event(start: float, end: float) -> Event:
    return Event(
        step=0, operation=0, action="forward", resource=Resource.COMPUTE, layer=0, microbatch=0,
        start_seconds=start, end_seconds=end, bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0.0),
        ([(-2.0, -1.0)], 1.0),
        ([(0.0, 3.0), (1.0, 2.0)], 3.0),
        ([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)], 4.0),
    ],
)
def test_what_runs_side_by_side_is_covered_once(spans: list[tuple[float, float]], expected: float) -> None:
    for order in itertools.permutations(spans):
        assert covered_seconds(_event(*span) for span in order) == expected
