"""Sums of variables with coefficients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64

from lazyjax.planning.program.conditions import Condition

Number = float | int


class Affine:
    """constant + sum of coefficient * variable, by variable number."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: Number = 0.0, terms: Mapping[int, Number] | None = None) -> None:
        self.constant = float(constant)
        self.terms: dict[int, Number] = dict(terms) if terms else {}

    @staticmethod
    def of(condition: Condition, weight: Number = 1.0) -> Affine:
        """`weight` where the condition holds, else 0."""
        return Affine().add(condition, weight)

    def add(self, condition: Condition, weight: Number) -> Affine:
        """Adds `weight` where the condition holds; in place."""
        self.constant += weight * condition.constant
        for sign, variables in ((weight, condition.plus), (-weight, condition.minus)):
            for variable in variables:
                self.terms[variable] = self.terms[variable] + sign if variable in self.terms else sign
        return self

    def __add__(self, other: Affine | Number) -> Affine:
        total = Affine(self.constant, self.terms)
        if isinstance(other, Affine):
            total.constant += other.constant
            for variable, coefficient in other.terms.items():
                total.terms[variable] = (
                    total.terms[variable] + coefficient if variable in total.terms else coefficient
                )
        else:
            total.constant += other
        return total

    __radd__ = __add__

    def __sub__(self, other: Affine | Number) -> Affine:
        return self + other * -1.0

    def __rsub__(self, other: Number) -> Affine:
        return self * -1.0 + other

    def __mul__(self, factor: Number) -> Affine:
        return Affine(
            self.constant * factor, {v: c * factor for v, c in self.terms.items()} if factor else {}
        )

    __rmul__ = __mul__

    def value(self, values: Float64[np.ndarray, "... variables"]) -> Float64[np.ndarray, "..."]:
        """Evaluates for one assignment, or for many along the leading axes."""
        total = np.full(values.shape[:-1], self.constant)
        for variable, coefficient in self.terms.items():
            total += coefficient * values[..., variable]
        return total
