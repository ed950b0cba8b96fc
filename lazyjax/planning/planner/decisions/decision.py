"""What every kind of decision has in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.affine import Affine
from lazyjax.planning.planner.linear import Sense

#: Values of the decision variables alone.
Binaries = Float64[np.ndarray, "binaries"]
#: The same for many assignments.
ManyBinaries = Float64[np.ndarray, "batch binaries"]


class Change(NamedTuple):
    """Decisions, by number, that are taken back and taken instead."""

    off: tuple[int, ...]
    on: tuple[int, ...]


class Row(NamedTuple):
    """`terms (sense) right`."""

    terms: Affine
    sense: Sense
    right: float


@runtime_checkable
class Decision(Protocol):
    """One kind of decision about the layers: its 0/1 variables, and how they are read, written and varied.

    Attributes:
        count: how many variables it has; their numbers follow one another from the one that it was made
            with.
    """

    count: int

    def rows(self) -> Sequence[Row]:
        """What every assignment fulfils."""
        ...

    def groups(self) -> Sequence[frozenset[int]]:
        """Sets of variables of which exactly one is on."""
        ...

    def encode(self, plan: Plan) -> Iterator[int]:
        """The numbers that are on in `plan`.

        Raises:
            PlanError: the plan decides what is not open.
        """
        ...

    def decode(self, values: Binaries, layers: Sequence[dict[str, Any]]) -> None:
        """Writes what is decided into the fields of each layer."""
        ...

    def round(self, relaxed: Binaries) -> Iterator[int]:
        """The numbers to be on so that running sums over the layers stay close to the relaxed ones."""
        ...

    def repair(self, values: ManyBinaries) -> None:
        """Makes assignments keep this decision's rows, in place, whatever others decide."""
        ...

    def changes(self, values: Binaries) -> Iterator[Change]:
        """Single changes that a local search may try, and exchanges between layers."""
        ...

    def alternatives(self) -> Sequence[Sequence[tuple[int, ...]]]:
        """The decision taken apart into independent ones: the numbers on in each case of each."""
        ...


def different(decided: dict[int, Any]) -> Iterator[tuple[int, int]]:
    """Pairs of layers that decide differently: each with the nearest and the furthest such."""
    layers = sorted(decided)
    seen: set[tuple[int, int]] = set()
    for position, one in enumerate(layers):
        later = layers[position + 1 :]
        for order in (later, later[::-1]):
            other = next((layer for layer in order if decided[layer] != decided[one]), None)
            if other is not None and (one, other) not in seen:
                seen.add((one, other))
                yield one, other
