"""The tiers of memory from the device down, and the links between neighbours.

Everything that moves between tiers moves over these links, one after another: what an operation is
called, which queue serves it, and how far ahead it is issued follow from this table. A new tier is a
member of `Tier` and a link here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lazyjax.planning.program.operations import Action
from lazyjax.specs import Tier


class Link(NamedTuple):
    """Moves between a tier and the next one below.

    Attributes:
        down, up: what moving activations over it is called.
        state_down, state_up: the same for optimizer state; None where state never takes that way.
    """

    upper: Tier
    lower: Tier
    down: Action
    up: Action
    state_down: Action | None = None
    state_up: Action | None = None


#: From the device down.
LINKS: tuple[Link, ...] = (
    Link(Tier.DEVICE, Tier.HOST, Action.OFFLOAD, Action.RELOAD),
    Link(Tier.HOST, Tier.NVME, Action.SPILL, Action.LOAD, Action.SPILL_STATE, Action.LOAD_STATE),
)


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
