"""Whether anything fits, what is missing where nothing does, and what would help."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lazyjax.planning.planner.leanest import memory_shortfall, nearest, some_plan_fits
from lazyjax.planning.planner.necessary import necessary_shortfall
from lazyjax.planning.planner.problem import Problem
from lazyjax.planning.planner.question import Request, microbatch_counts, problem_of, settings_of
from lazyjax.specs import Tier

#: Seconds for the nearest miss of one setting.
_MISS_SECONDS = 3.0


def feasible(request: Request) -> bool:
    """Whether some plan fits: with the microbatches asked for, else with the finest."""
    if necessary_shortfall(request):
        return False
    return any(some_plan_fits(problem) for problem in _finest_problems(request))


def finest_miss(request: Request) -> dict[Tier, int]:
    """Bytes missing per tier in the nearest miss of the finest microbatches; empty if they fit."""
    return nearest_miss(_finest_problems(request))


def _finest_problems(request: Request) -> list[Problem]:
    finest = request.microbatches or request.batch_rows // request.devices
    settings = settings_of(dataclasses.replace(request, microbatches=finest))
    return [problem_of(request, setting, lean=True) for setting in settings]


def largest_batch(request: Request, *, below: int, most_probes: int = 24) -> int:
    """The largest batch under `below` for which some plan fits; 0 if none does.

    Only memory decides; feasibility is taken to fall with the batch. Batches are multiples of the
    devices, and of the microbatches where their number is fixed.
    """
    unit = request.devices * (request.microbatches or 1)
    low, high = 0, -(-below // unit)
    for _ in range(most_probes):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        if feasible(dataclasses.replace(request, batch_rows=middle * unit)):
            low = middle
        else:
            high = middle
    return low * unit


def nearest_miss(problems: Sequence[Problem]) -> dict[Tier, int]:
    """Bytes missing per tier under the setting that comes closest; empty if one of them fits."""
    return nearest(memory_shortfall(problem, time_limit_seconds=_MISS_SECONDS) for problem in problems)


def nearest_changes(
    request: Request, shortfall: Mapping[Tier, int], offers: Mapping[str, Request]
) -> list[str]:
    """What would help, each by itself: every one was tried.

    Args:
        offers: other questions about the same model and batch, by what they change.
    """
    changes = []
    if request.microbatches is not None:
        for count in microbatch_counts(request.batch_rows, request.devices):
            if feasible(dataclasses.replace(request, microbatches=count)):
                changes.append(f"{count} microbatches")
                break
    changes += [name for name, offer in offers.items() if feasible(offer)]
    batch_rows = largest_batch(request, below=request.batch_rows)
    if batch_rows:
        changes.append(f"batch {batch_rows}")
    missing = " and ".join(
        f"{_amount(request.in_one_place(tier, size))} more {tier.value} memory"
        for tier, size in shortfall.items()
    )
    return [*changes, missing] if missing else changes


def _amount(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.3f} MB"
