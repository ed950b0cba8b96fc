"""Conditions over 0/1 decisions, kept in a form in which every one of them is affine.

Decisions come in groups of which exactly one member is chosen (the segment that a layer belongs to, the
set of residuals that it keeps) and as flags. A condition is a sum of variables that exclude each other,
less variables that imply it: no condition needs a product, so whatever is multiplied by one, bytes or
seconds, stays linear.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64


class Condition(NamedTuple):
    """constant + sum of the variables in `plus` - sum of those in `minus`; 0 or 1 in every assignment."""

    constant: int
    plus: frozenset[int] = frozenset()
    minus: frozenset[int] = frozenset()

    def holds(self, values: Float64[np.ndarray, "variables"]) -> bool:
        """Whether it does in one assignment."""
        total = self.constant
        total += sum(values[variable] > 0.5 for variable in self.plus)
        total -= sum(values[variable] > 0.5 for variable in self.minus)
        assert total in (0, 1), self
        return bool(total)

    def value(self, values: Float64[np.ndarray, "... variables"]) -> Float64[np.ndarray, "..."]:
        """0 or 1 (between, for a relaxed assignment) of one assignment, or of many along leading axes."""
        total = np.full(values.shape[:-1], float(self.constant))
        if self.plus:
            total += values[..., list(self.plus)].sum(axis=-1)
        if self.minus:
            total -= values[..., list(self.minus)].sum(axis=-1)
        return total

    def either(self, other: Condition) -> Condition:
        """One of the two, which no assignment fulfils both."""
        return Condition(self.constant + other.constant, self.plus | other.plus, self.minus | other.minus)

    def unless(self, other: Condition) -> Condition:
        """The condition without `other`, which must imply it."""
        plus, minus = other.minus - self.minus, other.plus - self.plus
        return Condition(
            self.constant - other.constant,
            (self.plus - other.plus) | plus,
            (self.minus - other.minus) | minus,
        )

    def both(self, other: Condition) -> Condition:
        """Both conditions, which are about the same group of decisions."""
        match self.constant, other.constant:
            case 0, 0:
                return Condition(0, self.plus & other.plus)
            case 0, _:
                return Condition(0, self.plus - other.minus)
            case _, 0:
                return Condition(0, other.plus - self.minus)
            case _:
                return Condition(1, frozenset(), self.minus | other.minus)

    def implies(self, other: Condition) -> bool:
        """Whether `other` is seen to hold wherever this does."""
        if other == ALWAYS:
            return True
        plain = not any((self.constant, other.constant, self.minus, other.minus))
        return plain and self.plus <= other.plus

    def terms(self) -> dict[int, float]:
        """Coefficient per variable."""
        terms: dict[int, Any] = dict.fromkeys(self.plus, 1.0)
        return terms | dict.fromkeys(self.minus, -1.0)


def weakest(conditions: Iterable[Condition]) -> list[Condition]:
    """Those of the conditions that no other one follows from: one of them holds where any does."""
    kept: list[Condition] = []
    for condition in conditions:
        if not any(condition.implies(other) for other in kept):
            kept = [other for other in kept if not other.implies(condition)]
            kept.append(condition)
    return kept


ALWAYS = Condition(1)
NEVER = Condition(0)
