"""The way between tiers of memory, link by link from the device down.

Everything that moves between tiers moves over the links of `lazyjax.planning.program.operations`, one
after another: what an operation is called, which queue serves it, and how far ahead it is issued follow
from that table.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazyjax.planning.program.operations import LINKS, Link
from lazyjax.specs import Tier

__all__ = ["DOWN", "LINKS", "STATE_DOWN", "STATE_UP", "UP", "Link", "depth_of", "path_to"]


def path_to(home: Tier) -> Sequence[Link]:
    """The links between the device and `home`, in the order in which a tensor leaves the device."""
    path: list[Link] = []
    for link in LINKS:
        if (path[-1].lower if path else Tier.DEVICE) is home:
            break
        path.append(link)
    return path


def depth_of(tier: Tier) -> int:
    """How many links lie between the device and the tier."""
    return len(path_to(tier))


#: The link over which an operation moves something up or down.
UP = {link.up: link for link in LINKS}
DOWN = {link.down: link for link in LINKS}
STATE_UP = {link.state_up: link for link in LINKS if link.state_up is not None}
STATE_DOWN = {link.state_down: link for link in LINKS if link.state_down is not None}
