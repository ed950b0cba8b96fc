"""Means over seeds, paired differences with their interval, and agreement of two orders."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import scipy.stats


@dataclasses.dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds and its standard error (NaN for one seed)."""

    count: int
    mean: float
    standard_error: float


@dataclasses.dataclass(frozen=True, slots=True)
class Paired:
    """Mean of the differences between pairs, with a two-sided interval by Student's t (NaN for one pair)."""

    count: int
    mean: float
    low: float
    high: float


def mean(values: Sequence[float]) -> Mean:
    """Mean and standard error.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values")
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(len(values), statistics.fmean(values), error)


def paired(
    values: Mapping[int, float], baseline: Mapping[int, float], *, confidence: float = 0.95
) -> Paired | None:
    """Differences between values of the same seed; None where no seed is in both."""
    differences = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    if not differences:
        return None
    centre = statistics.fmean(differences)
    if len(differences) == 1:
        return Paired(1, centre, math.nan, math.nan)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = float(scipy.stats.t.ppf(0.5 + confidence / 2, len(differences) - 1)) * error
    return Paired(len(differences), centre, centre - half, centre + half)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b of two equally long sequences (NaN for fewer than two values)."""
    if len(first) < 2:
        return math.nan
    return float(scipy.stats.kendalltau(first, second).statistic)
