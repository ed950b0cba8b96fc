"""Answers to a request: a plan from the cache or the search, verified, and the baselines beside it."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from lazyjax.planning.plan import cache
from lazyjax.planning.plan.baselines import BASELINES, without_nvme
from lazyjax.planning.plan.document import Plan, PlanError, validate_plan
from lazyjax.planning.planner.feasibility import nearest_changes
from lazyjax.planning.planner.question import Request
from lazyjax.planning.planner.request import request_key
from lazyjax.planning.planner.search import RELATIVE_GAP, SearchResult, find_plan
from lazyjax.planning.program.verify import Verification, VerificationError, verify
from lazyjax.specs import Tier


class InfeasibleError(ValueError):
    """No plan fits; the message names the tier, the shortfall and the nearest change."""


def solve_cached(
    request: Request,
    folder: pathlib.Path | None,
    *,
    time_limit_seconds: float,
    relative_gap: float = RELATIVE_GAP,
    console: Console | None = None,
    offers: Mapping[str, Request] | None = None,
) -> tuple[Plan, SearchResult | None]:
    """A plan from the cache, or solved and put there.

    A cached plan that was not proven close to the best is solved again where there is more time.

    Args:
        relative_gap: between period and proven bound at which the search ends.
        offers: what else could be asked, for the message where nothing fits.

    Raises:
        InfeasibleError: nothing fits.
    """
    key = request_key(request)
    known = None if folder is None else cache.find(folder, key)
    if known is not None and not _usable(request, known):
        known = None
    if known is not None and known.prediction is not None:
        spent, gap = known.prediction.solve_seconds, known.prediction.gap
        sure = gap is not None and gap <= relative_gap
        if sure or (spent is not None and time_limit_seconds <= 1.5 * spent):
            return known, None

    starts = list(baseline_plans(request).values())
    with _progress(console) as show:
        found = find_plan(
            request,
            time_limit_seconds=time_limit_seconds,
            relative_gap=relative_gap,
            warm_starts=starts if known is None else [known, *starts],
            progress=show,
        )
    if found.plan is None:
        raise InfeasibleError(infeasible_message(request, found, offers or {}))
    if folder is not None:
        cache.store(folder, key, found.plan)
    return found.plan, found


@contextlib.contextmanager
def _progress(console: Console | None) -> Iterator[Callable[[str], None]]:
    """On a terminal the setting that is being looked at, while it is; elsewhere nothing."""
    if console is None or not console.is_terminal:
        yield lambda line: None
        return
    with console.status("planning") as status:
        yield lambda line: status.update(Text(f"planning: {line}", overflow="ellipsis", no_wrap=True))


def _usable(request: Request, plan: Plan) -> bool:
    """Whether a cached plan is what was stored; files get damaged."""
    prediction = plan.prediction
    if prediction is None or prediction.gap is None or not 0 <= prediction.gap <= 1:
        return False
    try:
        validate_plan(plan, request.spec, residual_names(request.at(plan)))
        check_batch(plan, request, "cache")
        verify_for(request, plan)
    except (PlanError, VerificationError):
        return False
    return True


def residual_names(request: Request) -> list[list[str]]:
    """The tensors that each layer can save, in layer order."""
    return [list(layer.residual_bytes) for layer in request.sizes(request.devices).layers]


def check_batch(plan: Plan, request: Request, name: str) -> None:
    """Checks that `plan` is one for the batch asked for.

    Raises:
        PlanError: naming the plan, `name`, and the key that differs.
    """
    for key in ("batch_rows", "sequence_length"):
        if getattr(plan, key) != getattr(request, key):
            raise PlanError(
                f"{name}: {key} is {getattr(plan, key)}, but {getattr(request, key)} is asked for"
            )


def infeasible_message(request: Request, found: SearchResult, offers: Mapping[str, Request]) -> str:
    """Which sum fails, by how much, and what would help: one line."""
    if not found.shortfall_bytes:
        return f"no plan was found for {request.batch_rows} rows, though some may fit; give it more time"
    return refusal(request, found.shortfall_bytes, offers)


def refusal(request: Request, shortfall: Mapping[Tier, int], offers: Mapping[str, Request]) -> str:
    """The same for a shortfall that is known: bytes missing per tier."""
    missing = " and ".join(_sum_that_fails(request, tier, size) for tier, size in shortfall.items())
    helpful = nearest_changes(request, shortfall, offers)
    return f"no plan fits {request.batch_rows} rows: {missing}; it fits with {', or '.join(helpful)}"


def _sum_that_fails(request: Request, tier: Tier, shortfall_bytes: int) -> str:
    shortfall_bytes = request.in_one_place(tier, shortfall_bytes)
    capacity = request.in_one_place(tier, request.capacity[tier])
    needed = capacity + shortfall_bytes
    unit, divisor, places = ("GB", 1e9, 1) if needed >= 1e10 else ("GB", 1e9, 2)
    if needed < 1e8:
        unit, divisor, places = "bytes", 1.0, 0

    def amount(size: int) -> str:
        return f"{size / divisor:,.{places}f}"

    parts = ""
    if tier is Tier.HOST and not request.capacity[Tier.NVME]:
        state = sum(layer.state_bytes for layer in request.sizes(request.devices).layers)
        state, static = (request.in_one_place(tier, size) for size in (state, request.static_host_bytes))
        rest = max(0, needed - static - state)
        parts = (
            f"weights and gradients {amount(static)} + optimizer state {amount(state)} + "
            f"activations {amount(rest)} = "
        )
    return (
        f"{tier.value} memory: {parts}{amount(needed)} {unit} at least, "
        f"{amount(capacity)} may be used, {amount(shortfall_bytes)} short"
    )


def verify_for(request: Request, plan: Plan) -> Verification:
    """`verify` with what the request knows."""
    request = request.at(plan)
    costs = request.costs(plan.microbatch_rows)
    return verify(
        plan,
        request.sizes(plan.microbatch_rows),
        costs.operation_seconds,
        capacity=request.capacity,
        static_host_bytes=request.static_host_bytes,
        working_bytes=costs.working_bytes,
        contention=costs.contention,
    )


def baseline_plans(request: Request) -> dict[str, Plan]:
    """Every baseline for the request's batch, whole batch at once."""
    names = residual_names(request)
    batch: dict[str, Any] = {"batch_rows": request.batch_rows, "sequence_length": request.sequence_length}
    batch |= request.made_for
    plans = {name: baseline(request.spec, names, **batch) for name, baseline in BASELINES.items()}
    if not request.capacity[Tier.NVME]:
        plans = {name: without_nvme(plan) for name, plan in plans.items()}
    return plans
