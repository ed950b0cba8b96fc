"""The picture of a step shows every tier over the whole step, with its limit."""

import pytest
from matplotlib.figure import Figure

from lazyjax.planning.commands import plot
from lazyjax.planning.commands.plot import memory_steps, plot_timeline
from lazyjax.specs import Tier
from lazyjax.timeline import Event, MemorySample, Resource, Timeline

TIMELINE = Timeline(
    "simulated",
    (
        Event(1, 0, "forward", Resource.COMPUTE, 0, 0, 0.0, 4.0),
        Event(1, 1, "offload", Resource.D2H, 0, 0, 4.0, 5.0),
        Event(1, 2, "backward", Resource.COMPUTE, 0, 0, 5.0, 10.0),
    ),
    (
        MemorySample(0.0, "device", 10**9),
        MemorySample(4.0, "host", 2 * 10**9),
        MemorySample(6.0, "host", 0),
        MemorySample(9.0, "device", 0),
    ),
)
FIXED = {Tier.DEVICE: 0, Tier.HOST: 30 * 10**9, Tier.NVME: 0}


def test_memory_is_known_from_the_first_moment_to_the_last():
    assert memory_steps(TIMELINE, Tier.HOST, FIXED) == ([0.0, 4.0, 6.0, 10.0], [30.0, 32.0, 30.0, 30.0])
    assert memory_steps(TIMELINE, Tier.NVME, FIXED) is None
    # State that never moves is memory, too.
    assert memory_steps(Timeline("simulated", TIMELINE.events), Tier.HOST, FIXED) == (
        [0.0, 10.0],
        [30.0, 30.0],
    )


def test_every_limit_is_drawn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: drawn.append(self))
    capacity = {Tier.DEVICE: 24 * 10**9, Tier.HOST: 1100 * 10**9, Tier.NVME: 0}
    plot_timeline(TIMELINE, tmp_path / "a.png", title="t", capacity=capacity, fixed=FIXED)
    lanes, device, host = drawn[0].axes
    assert lanes.get_title() == "t"
    for axis, limit in ((device, 24.0), (host, 1100.0)):
        assert limit in [line.get_ydata()[0] for line in axis.lines]
        assert axis.get_ylim()[1] > limit
        assert [text.get_text() for text in axis.texts] == [f"limit {limit:,.1f} GB"]


def test_a_picture_is_written(tmp_path):
    plot_timeline(TIMELINE, tmp_path / "a.png", title="t")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("action", ["forward", "gradient_out", "update"])
def test_actions_have_colours(action):
    assert action in plot.COLOURS
