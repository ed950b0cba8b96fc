"""Plans of this library on a machine, asked for exactly as `lazyjax plan` asks for them."""

from __future__ import annotations

from typing import Any, NamedTuple

from experiments import published
from experiments.systems import template_of
from lazyjax.config import DEFAULT_OPTIMIZER
from lazyjax.hardware.profile import HardwareProfile
from lazyjax.planning.plan import cache
from lazyjax.planning.plan.document import Plan, Prediction
from lazyjax.planning.planner.question import Request
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.search import predict
from lazyjax.planning.planner.service import InfeasibleError, solve_cached

#: Seconds for a search; most end far sooner, at the planner's own gap.
TIME_LIMIT_SECONDS = 60.0


class Ours(NamedTuple):
    """A plan and what it is expected to do."""

    plan: Plan
    prediction: Prediction

    @property
    def tokens_per_second(self) -> float:
        """Padding counted."""
        return self.plan.batch_rows * self.plan.sequence_length / self.prediction.period_seconds


def request_for(model: str, profile: HardwareProfile, rows: int, **options: Any) -> Request:
    """The planner's question; no activations on NVMe.

    Args:
        options: of `build_request`, such as other capacities.
    """
    return build_request(
        template_of(model),
        profile,
        batch_rows=rows,
        sequence_length=published.SEQUENCE_LENGTH,
        optimizer=DEFAULT_OPTIMIZER,
        nvme_bytes=0,
        **options,
    )


def planned(model: str, profile: HardwareProfile, rows: int, **options: Any) -> Ours | None:
    """The plan, solved once; None where nothing fits."""
    request = request_for(model, profile, rows, **options)
    try:
        plan, _ = solve_cached(request, cache.default_folder(), time_limit_seconds=TIME_LIMIT_SECONDS)
    except InfeasibleError:
        return None
    assert plan.prediction is not None
    return Ours(plan, plan.prediction)


def replayed(request: Request, plan: Plan) -> Ours:
    """A plan that was changed by hand, with the prediction of its own replay."""
    return Ours(plan, predict(request, plan))
