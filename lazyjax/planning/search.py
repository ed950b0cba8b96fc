"""The outer search: microbatches, prefetch windows, handoff and update around the program.

For every setting the linear relaxation bounds what it can reach, and descent from it finds a plan
close to that. Branch and bound then closes what gap is left, setting by setting. The fields that
only the microbatch schedule feels (`reload_ahead`, one slab more or less in flight) are tuned by
replaying it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from lazyjax.planning.layer_work import SaveSet
from lazyjax.planning.milp import Program, leanest_plan, memory_shortfall, window_period
from lazyjax.planning.plan import LayerPlan, Plan, PlanError, Prediction
from lazyjax.planning.problem import Problem, save_options
from lazyjax.planning.rounding import Binaries
from lazyjax.planning.schedule import Kind, ModelSizes, Operation, build_schedule
from lazyjax.planning.simulate import simulate
from lazyjax.planning.verify import PERIOD_TOLERANCE, VerificationError, state_bytes_per_tier, used_bytes
from lazyjax.specs import ModelSpec, Tier

Handoff = Literal["device", "host"]
Update = Literal["deferred", "immediate"]

#: Reload distances worth replaying: further ahead hides a parameter slab on the same link.
_RELOAD_AHEAD = (1, 2, 3, 4, 6)
#: Tokens of the microbatch for which sets of residuals are weighed.
_USUAL_TOKENS = 8192
#: Settings, the most promising ones, that are descended on before any is branched on.
_DESCENTS = 2
#: Seconds for coming to a first plan, whatever the time limit.
_FIRST_SECONDS = 10.0
#: Seconds that branching on one setting gets at least.
_LEAST_SECONDS = 1.0
#: Seconds for looking for a plan as fast that moves less.
_TIDY_SECONDS = 2.0
#: Layers per segment that the search considers.
LONGEST_SEGMENT = 4


@runtime_checkable
class CostModel(Protocol):
    """Seconds and working sets for microbatches of one size (see `lazyjax.planning.costs`)."""

    def operation_seconds(self, operation: Operation) -> float:
        """Seconds of one operation."""
        ...

    def save_sets(self, kind: str) -> Sequence[SaveSet]:
        """Sets of residuals worth keeping in layers of a kind, the empty one first."""
        ...

    def working_bytes(self, kind: Kind, layer: int, saved: tuple[str, ...]) -> int:
        """Device bytes that a compute operation needs besides its operands."""
        ...

    def operation_flops(self, operation: Operation) -> int:
        """Matrix FLOPs of one operation, all devices together; 0 for what is no compute."""
        ...


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        spec: the model.
        rows, sequence_length: the batch.
        sizes: rows of a microbatch -> bytes, including optimizer state.
        costs: rows of a microbatch -> costs.
        capacity: bytes that may be used per tier; an NVMe capacity of 0 closes that tier.
        static_host_bytes: masters and gradients.
        microbatches, prefetch, backward_prefetch, handoff, update: fixed where given.
        devices: that share every batch and slab; sizes are those of one.
        identity: digest of model and costs, for the cache.
    """

    spec: ModelSpec
    rows: int
    sequence_length: int
    sizes: Callable[[int], ModelSizes]
    costs: Callable[[int], CostModel]
    capacity: Mapping[Tier, int]
    static_host_bytes: int
    microbatches: int | None = None
    prefetch: int | None = None
    backward_prefetch: int | None = None
    handoff: Handoff | None = None
    update: Update | None = None
    devices: int = 1
    identity: str = ""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One setting: its bound and, where it was solved, its period at layer granularity."""

    settings: Plan
    bound_seconds: float
    period_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """Outcome of a search.

    Attributes:
        plan: the best plan with its prediction; None where nothing fits.
        attempts: the settings that were looked at.
        layer_period_seconds: the plan's period at layer granularity, which the bound refers to.
        bound_seconds: no plan of any setting looked at has a smaller period at layer granularity.
        shortfall_bytes: where nothing fits, what the nearest miss lacks per tier.
        seconds: spent.
    """

    plan: Plan | None
    attempts: tuple[Attempt, ...]
    layer_period_seconds: float
    bound_seconds: float
    shortfall_bytes: Mapping[Tier, int]
    seconds: float

    @property
    def gap(self) -> float:
        """(period - bound) / period at layer granularity."""
        if not math.isfinite(self.layer_period_seconds):
            return math.inf
        return max(0.0, 1.0 - self.bound_seconds / self.layer_period_seconds)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def microbatch_counts(rows: int, devices: int = 1) -> tuple[int, ...]:
    """Divisors of `rows` in steps of at least 1.5, so that neighbours differ."""
    chosen: list[int] = []
    for count in divisors(rows // devices):
        if not chosen or count >= 1.5 * chosen[-1]:
            chosen.append(count)
    return tuple(chosen)


def settings_of(request: Request) -> list[Plan]:
    """The settings to consider, plainest first; layers are placeholders."""
    counts = (
        (request.microbatches,) if request.microbatches else microbatch_counts(request.rows, request.devices)
    )
    handoffs: tuple[Handoff, ...] = (request.handoff,) if request.handoff else ("device", "host")
    prefetches = [
        (request.prefetch or forward, request.backward_prefetch or backward)
        for forward, backward in ((2, 2), (1, 1))
    ]
    # The deferred update waits for less than the immediate one, whatever else is decided.
    update: Update = request.update or "deferred"
    layers = tuple(LayerPlan() for _ in request.spec.layers)
    return [
        Plan(
            model=request.spec.name, planner="milp", rows=request.rows,
            sequence_length=request.sequence_length, microbatches=count, prefetch=forward,
            backward_prefetch=backward, reload_ahead=min(2, count), handoff=handoff, update=update,
            layers=layers,
        )
        for handoff, count, (forward, backward) in itertools.product(
            handoffs, counts, dict.fromkeys(prefetches)
        )
        if not (handoff == "host" and count == 1)
    ]  # fmt: skip


def problem_of(request: Request, settings: Plan) -> Problem:
    """The layer decisions that are open under `settings`."""
    rows = settings.microbatch_rows
    costs, sizes = request.costs(rows), request.sizes(rows)
    # The same sets for every microbatch size: which are worth keeping hardly depends on it.
    usual = request.costs(max(1, _USUAL_TOKENS // request.sequence_length) * request.devices)
    kinds = dict.fromkeys(layer.kind for layer in request.spec.layers[1:-1])
    sets = {kind: [found.names for found in usual.save_sets(kind)] for kind in kinds}
    nvme = request.capacity[Tier.NVME] > 0
    tiers = (Tier.DEVICE, Tier.HOST)
    saves = [save_options(sets[layer.kind], tiers) for layer in request.spec.layers[1:-1]]
    return Problem(
        settings=settings,
        sizes=sizes,
        seconds=costs.operation_seconds,
        saves=(({},), *saves, ({},)),
        capacity=request.capacity,
        static_host_bytes=request.static_host_bytes,
        working_bytes=costs.working_bytes,
        longest_segment=LONGEST_SEGMENT,
        nvme_boundaries=nvme,
        nvme_states=nvme and any(layer.state_bytes for layer in sizes.layers),
    )


def lean_problem(request: Request, settings: Plan) -> Problem:
    """The same with nothing kept inside layers and no residents: what matters to whether it fits."""
    rows = settings.microbatch_rows
    nvme = request.capacity[Tier.NVME] > 0
    sizes = request.sizes(rows)
    return Problem(
        settings=settings,
        sizes=sizes,
        seconds=request.costs(rows).operation_seconds,
        saves=(({},),) * len(request.spec.layers),
        capacity=request.capacity,
        static_host_bytes=request.static_host_bytes,
        working_bytes=request.costs(rows).working_bytes,
        longest_segment=LONGEST_SEGMENT,
        nvme_boundaries=nvme,
        nvme_states=nvme and any(layer.state_bytes for layer in sizes.layers),
        residents=False,
    )


@dataclasses.dataclass
class _Candidate:
    """A setting with its program, and what is known of it so far; `tries` of branching."""

    settings: Plan
    program: Program
    bound_seconds: float
    period_seconds: float | None = None
    tries: int = 0

    def attempt(self) -> Attempt:
        return Attempt(self.settings, self.bound_seconds, self.period_seconds)


class _Search:
    """The best assignment so far, among all candidates."""

    def __init__(self, candidates: Sequence[_Candidate], relative_gap: float) -> None:
        self.candidates = sorted(candidates, key=lambda candidate: candidate.bound_seconds)
        self.relative_gap = relative_gap
        self.period_seconds = math.inf
        self.best: tuple[_Candidate, Binaries] | None = None

    @property
    def bound_seconds(self) -> float:
        """No plan of any candidate is faster."""
        return min(self.period_seconds, *(candidate.bound_seconds for candidate in self.candidates), math.inf)

    @property
    def target_seconds(self) -> float:
        """Periods from here on are close enough to the best."""
        return self.period_seconds * (1 - self.relative_gap)

    def deadline(self, deadline: float) -> float:
        """`deadline`, but later where there is no plan yet: a plan is wanted before anything else."""
        return deadline if self.best is not None else max(deadline, time.monotonic() + _FIRST_SECONDS)

    def open_candidates(self) -> list[_Candidate]:
        """Those that may have a plan better by more than the gap; least tried and most promising first."""
        open_ = [c for c in self.candidates if c.bound_seconds < self.target_seconds]
        return sorted(open_, key=lambda candidate: (candidate.tries, candidate.bound_seconds))

    def offer(self, candidate: _Candidate, values: Binaries) -> None:
        """Takes an assignment if it is the best so far."""
        period = window_period(candidate.program.model, values)
        if candidate.period_seconds is None or period < candidate.period_seconds:
            candidate.period_seconds = period
        if period < self.period_seconds:
            self.period_seconds, self.best = period, (candidate, values)

    def starts(self, candidate: _Candidate, plans: Iterable[Plan]) -> list[Binaries]:
        """Those of `plans`, and the best one so far, that are plans of the candidate's problem."""
        choices = candidate.program.model.choices
        if self.best is not None:
            found, values = self.best
            plans = [*plans, found.program.model.choices.decode(values, "milp")]
        starts = []
        for plan in plans:
            with contextlib.suppress(PlanError):
                starts.append(choices.encode(plan))
        return starts


def find_plan(
    request: Request,
    *,
    time_limit_seconds: float = 20.0,
    relative_gap: float = 0.005,
    warm_starts: Sequence[Plan] = (),
    solver: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Found:
    """The plan with the shortest period over all settings and layer decisions.

    First every setting's relaxation is solved, for a bound and for a plan by descent; then settings
    whose bound leaves room for a better plan are branched on, the most promising one first, until
    the gap or the time is reached.

    Args:
        time_limit_seconds: for all of it; coming to a first plan may take longer.
        relative_gap: between period and proven bound at which the search ends.
        warm_starts: plans to start from, where they are within a problem's decisions.
        progress: gets one line per setting.
    """
    begun = time.monotonic()
    deadline = begun + time_limit_seconds
    candidates = _relaxed_candidates(request, solver, progress)
    search = _Search(candidates, relative_gap)
    for rank, candidate in enumerate(search.candidates):
        enough = search.best is not None and (rank >= _DESCENTS or time.monotonic() >= deadline)
        if enough or candidate.bound_seconds >= search.target_seconds:
            break
        values = candidate.program.descend(
            search.starts(candidate, warm_starts), search.deadline(deadline)
        )
        if values is not None:
            search.offer(candidate, values)
            progress(f"{_name(candidate.settings)}: {candidate.period_seconds:.3f} s")
    if search.best is None:
        _start_lean(request, search, search.deadline(deadline))
    while time.monotonic() < deadline and (open_ := search.open_candidates()):
        share = (deadline - time.monotonic()) / len(open_)
        _branch(search, open_[0], time.monotonic() + max(_LEAST_SECONDS, share), progress)
    if search.best is None:
        lean = [lean_problem(request, candidate.settings) for candidate in candidates]
        attempts = tuple(candidate.attempt() for candidate in candidates)
        shortfall = nearest_miss(lean)
        elapsed = time.monotonic() - begun
        return Found(None, attempts, math.inf, search.bound_seconds, shortfall, elapsed)
    return _found(request, search, begun)


def _relaxed_candidates(
    request: Request, solver: str | None, progress: Callable[[str], None]
) -> list[_Candidate]:
    candidates: list[_Candidate] = []
    for settings in settings_of(request):
        # What fits without the detour of activations through the host does not need it.
        detour = settings.handoff == "host" and request.handoff is None
        if detour and any(math.isfinite(candidate.bound_seconds) for candidate in candidates):
            continue
        if _deeper_one_fits(settings, candidates):
            continue
        program = Program(problem_of(request, settings), solver)
        candidate = _Candidate(settings, program, program.relax())
        candidates.append(candidate)
        bound = candidate.bound_seconds
        fits = math.isfinite(bound)
        progress(f"{_name(settings)}: " + (f"at least {bound:.3f} s" if fits else "too large"))
    return candidates


def _start_lean(request: Request, search: _Search, deadline: float) -> None:
    """Descent from plans that need the least memory, where descent from the relaxation found none."""
    for candidate in search.candidates:
        if not math.isfinite(candidate.bound_seconds) or time.monotonic() >= deadline:
            continue
        leanest = leanest_plan(lean_problem(request, candidate.settings))
        if leanest is not None:
            start = candidate.program.model.choices.encode(leanest)
            values = candidate.program.descend([start], deadline)
            search.offer(candidate, start if values is None else values)
            return


def _branch(
    search: _Search, candidate: _Candidate, deadline: float, progress: Callable[[str], None]
) -> None:
    """Branch and bound on one candidate, until it is better, closed or out of time."""
    own = search.best is not None and search.best[0] is candidate
    assert search.best is None or math.isfinite(search.period_seconds)
    start = search.best[1] if own and search.best is not None else None
    values, bound = candidate.program.branch(
        start,
        # Elsewhere only what is better by more than the gap is of interest.
        cutoff_seconds=math.inf if own or search.best is None else search.target_seconds,
        deadline=deadline,
        relative_gap=search.relative_gap,
    )
    candidate.bound_seconds = max(candidate.bound_seconds, bound)
    candidate.tries += 1
    if values is not None:
        search.offer(candidate, values)
    progress(f"{_name(candidate.settings)}: {search.period_seconds:.3f} s, bound {bound:.3f} s")


def _found(request: Request, search: _Search, begun: float) -> Found:
    assert search.best is not None
    candidate, values = search.best
    values = candidate.program.tidy(values, time.monotonic() + _TIDY_SECONDS)
    period, objective = window_period(candidate.program.model, values), candidate.program.objective(values)
    if abs(objective - period) > PERIOD_TOLERANCE * period:
        raise VerificationError(f"the program's objective is {objective} s, the replay takes {period} s")
    plan = tune(request, candidate.program.model.choices.decode(values, "milp"))
    elapsed = time.monotonic() - begun
    attempts = tuple(candidate.attempt() for candidate in search.candidates)
    found = Found(plan, attempts, period, min(period, search.bound_seconds), {}, elapsed)
    assert plan.prediction is not None
    prediction = plan.prediction.model_copy(
        update={"bound_seconds": found.bound_seconds, "gap": found.gap, "solve_seconds": elapsed}
    )
    return dataclasses.replace(found, plan=plan.model_copy(update={"prediction": prediction}))


def predict(request: Request, plan: Plan) -> Prediction:
    """Period and peaks of a plan at microbatch granularity."""
    rows = plan.microbatch_rows
    costs, sizes = request.costs(rows), request.sizes(rows)
    schedule = build_schedule(plan, sizes)
    period = simulate(schedule, costs.operation_seconds).period_seconds
    peak = used_bytes(schedule, costs.working_bytes)
    static = state_bytes_per_tier(plan, sizes)
    static[Tier.HOST] += request.static_host_bytes
    return Prediction(
        period_seconds=period, peak_bytes={tier.value: peak[tier] + static[tier] for tier in Tier}
    )


def tune(request: Request, plan: Plan) -> Plan:
    """The fields only the microbatch schedule feels, by replay: the fastest that fits."""
    best = plan.model_copy(update={"prediction": predict(request, plan)})
    changes: list[dict[str, int]] = [{"reload_ahead": ahead} for ahead in _RELOAD_AHEAD]
    changes += [{"backward_prefetch": plan.backward_prefetch + 1}, {"prefetch": plan.prefetch + 1}]
    for change in changes:
        field = next(iter(change))
        if field != "reload_ahead" and getattr(request, field) is not None:
            continue
        candidate = best.model_copy(update=change)
        prediction = predict(request, candidate)
        assert best.prediction is not None
        gain = best.prediction.period_seconds - prediction.period_seconds
        if gain > 1e-4 * prediction.period_seconds and fits(request, prediction):
            best = candidate.model_copy(update={"prediction": prediction})
    return best


def fits(request: Request, prediction: Prediction) -> bool:
    """Whether all peaks are within the capacities."""
    return all(prediction.peak_bytes[tier.value] <= request.capacity[tier] for tier in Tier)


def nearest_miss(problems: Sequence[Problem]) -> dict[Tier, int]:
    """Bytes missing per tier under the setting that comes closest."""
    misses = [memory_shortfall(problem) for problem in problems]

    def share(miss: Mapping[Tier, int], problem: Problem) -> float:
        return float(sum(size / max(1, problem.capacity[tier]) for tier, size in miss.items()))

    pairs = list(zip(misses, problems, strict=True))
    return dict(min(pairs, key=lambda pair: share(*pair))[0]) if pairs else {}


def nearest_change(request: Request, shortfall: Mapping[Tier, int]) -> str:
    """One sentence: what to change so that a plan fits."""
    rows = largest_batch(request, below=request.rows)
    parts = []
    if rows:
        parts.append(f"batch {rows} fits")
    if Tier.HOST in shortfall:
        state_bytes = sum(layer.state_bytes for layer in request.sizes(1).layers)
        if request.capacity[Tier.NVME] == 0 and shortfall[Tier.HOST] < state_bytes:
            parts.append(f"or an NVMe drive for optimizer state ({state_bytes / 1e9:.1f} GB in all)")
        parts.append(f"or {shortfall[Tier.HOST] / 1e9:.2f} GB more host memory")
        if not rows:
            parts.append("or 8-bit optimizer state, if the optimizer keeps 32-bit state now")
    if Tier.DEVICE in shortfall:
        parts.append(f"or {shortfall[Tier.DEVICE] / 1e9:.2f} GB more device memory")
    return ", ".join(parts).removeprefix("or ")


def largest_batch(request: Request, *, below: int, most_probes: int = 20) -> int:
    """The largest batch under `below` for which some plan fits; 0 if none does.

    Only memory decides, at the finest microbatches; feasibility is taken to fall with the batch.
    """
    low, high = 0, below
    for _ in range(most_probes):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        if feasible(dataclasses.replace(request, rows=middle, microbatches=None)):
            low = middle
        else:
            high = middle
    return low


def feasible(request: Request) -> bool:
    """Whether some plan fits."""
    finest = request.rows // request.devices
    handoffs: tuple[Handoff, ...] = (request.handoff,) if request.handoff else ("device", "host")
    candidates = [
        settings
        for settings in settings_of(dataclasses.replace(request, microbatches=request.microbatches or finest))
        if settings.handoff in handoffs
    ]
    return any(not memory_shortfall(lean_problem(request, settings)) for settings in candidates)


def _deeper_one_fits(settings: Plan, candidates: Sequence[_Candidate]) -> bool:
    """Whether the same setting with more slabs ahead has already been found feasible."""
    return any(
        math.isfinite(candidate.bound_seconds)
        and (candidate.settings.handoff, candidate.settings.microbatches)
        == (settings.handoff, settings.microbatches)
        and candidate.settings.prefetch >= settings.prefetch
        for candidate in candidates
    )


def _name(settings: Plan) -> str:
    return (
        f"{settings.microbatches} microbatches, prefetch {settings.prefetch}/{settings.backward_prefetch}, "
        f"handoff {settings.handoff}"
    )
