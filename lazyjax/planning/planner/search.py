"""The outer search: microbatches, prefetch windows, interlayer home and update around the program.

For every setting the linear relaxation bounds what it can reach, and descent from it finds a plan
close to that. Branch and bound then closes what gap is left, setting by setting. The fields that
only the microbatch schedule feels (`reload_ahead`, one slab more or less in flight) are tuned by
replaying it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from lazyjax.planning.plan.document import Plan, PlanError, Prediction
from lazyjax.planning.planner.decisions.decision import Binaries
from lazyjax.planning.planner.divide import divide
from lazyjax.planning.planner.feasibility import finest_miss, nearest_miss
from lazyjax.planning.planner.leanest import leanest_plan
from lazyjax.planning.planner.milp import Program
from lazyjax.planning.planner.necessary import necessary_shortfall
from lazyjax.planning.planner.question import Request, looser_settings, problem_of, settings_of
from lazyjax.planning.planner.solver import shared_process
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.planning.program.simulate import simulate
from lazyjax.planning.program.verify import (
    PERIOD_TOLERANCE,
    VerificationError,
    owned_bytes_per_tier,
    used_bytes,
)
from lazyjax.specs import Tier

#: Reload distances worth replaying: further ahead hides a parameter slab on the same link.
_RELOAD_AHEAD = (1, 2, 3, 4, 6)
#: Gap between period and proven bound at which a search ends.
RELATIVE_GAP = 0.01
#: A bound so much above the lowest: still finer microbatches are left out.
_TOO_FINE = 1.002
#: Settings, the most promising ones, that are descended on before any is branched on.
_DESCENTS = 2
#: Seconds for coming to a first plan, whatever the time limit.
_FIRST_SECONDS = 10.0
#: Seconds that branching on one setting gets at least.
_LEAST_SECONDS = 1.0
#: Seconds for replaying neighbours of the plan found, whatever the time limit.
_TUNE_SECONDS = 5.0
#: Seconds for looking for a plan as fast that moves less.
_TIDY_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One setting: its bound and, where it was solved, its period at layer granularity."""

    settings: Plan
    bound_seconds: float
    period_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Outcome of a search.

    Attributes:
        plan: the best plan with its prediction; None where nothing fits.
        attempts: the settings that were looked at.
        layer_period_seconds: the plan's period at layer granularity, which the bound refers to.
        bound_seconds: no plan of any setting looked at has a smaller period at layer granularity.
        shortfall_bytes: where nothing fits, what the nearest miss lacks per tier.
        seconds: spent.
        failures: of the solver; the plan and the bound are then what can be had without it.
    """

    plan: Plan | None
    attempts: tuple[Attempt, ...]
    layer_period_seconds: float
    bound_seconds: float
    shortfall_bytes: Mapping[Tier, int]
    seconds: float
    failures: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """(period - bound) / period at layer granularity."""
        if not math.isfinite(self.layer_period_seconds):
            return math.inf
        return max(0.0, 1.0 - self.bound_seconds / self.layer_period_seconds)


@dataclasses.dataclass
class _Candidate:
    """A setting with its program, and what is known of it so far: `tries` of branching, times in cases."""

    settings: Plan
    program: Program
    bound_seconds: float
    period_seconds: float | None = None
    tries: int = 0
    divisions: int = 0

    def attempt(self) -> Attempt:
        return Attempt(self.settings, self.bound_seconds, self.period_seconds)


class _Search:
    """The best assignment so far, among all candidates."""

    def __init__(self, relative_gap: float) -> None:
        self.candidates: list[_Candidate] = []
        self.relative_gap = relative_gap
        self.period_seconds = math.inf
        self.best: tuple[_Candidate, Binaries] | None = None

    @property
    def bound_seconds(self) -> float:
        """No plan of any candidate is faster."""
        return min([self.period_seconds, *(candidate.bound_seconds for candidate in self.candidates)])

    @property
    def failures(self) -> tuple[str, ...]:
        """Of the solver, in any candidate's program."""
        return tuple(failure for candidate in self.candidates for failure in candidate.program.failures)

    @property
    def target_seconds(self) -> float:
        """Periods from here on are close enough to the best."""
        return self.period_seconds * (1 - self.relative_gap)

    def add(self, candidates: Iterable[_Candidate]) -> None:
        """Takes candidates up."""
        self.candidates += candidates

    def deadline(self, deadline: float) -> float:
        """`deadline`, but later where there is no plan yet: a plan is wanted before anything else."""
        return deadline if self.best is not None else max(deadline, time.monotonic() + _FIRST_SECONDS)

    def open_candidates(self) -> list[_Candidate]:
        """Those that may have a plan better by more than the gap; least tried and most promising first."""
        open_ = [c for c in self.candidates if c.bound_seconds < self.target_seconds]
        return sorted(open_, key=lambda candidate: (candidate.tries, candidate.bound_seconds))

    def offer(self, candidate: _Candidate, values: Binaries) -> None:
        """Takes an assignment if it is the best so far."""
        period = candidate.program.model.period(values)
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


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """Spares the garbage collector what is there already, JAX above all: 1 to 2 s of a long search."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@_frozen_heap()
def find_plan(
    request: Request,
    *,
    time_limit_seconds: float = 20.0,
    relative_gap: float = RELATIVE_GAP,
    warm_starts: Sequence[Plan] = (),
    solver: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> SearchResult:
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
    search = _Search(relative_gap)
    if missing := necessary_shortfall(request):
        # Of device memory the conditions tell that it is too little, not by how much.
        short = finest_miss(request) if set(missing) == {Tier.DEVICE} else missing
        return SearchResult(None, (), math.inf, math.inf, short, time.monotonic() - begun)
    shared_process().begin()
    shared_process(1).begin(start=False)
    # What the first look leaves out is looked at where nothing else has a plan.
    for everything in (False, True):
        added = _relaxed_candidates(request, search.candidates, everything, solver, progress)
        search.add(added)
        _descend(request, search, added, warm_starts, deadline, solver, progress)
        if search.best is None:
            _start_lean(request, search, added)
        while time.monotonic() < deadline and (open_ := search.open_candidates()):
            share = (deadline - time.monotonic()) / len(open_)
            until = time.monotonic() + max(_LEAST_SECONDS, share)
            if open_[0].divisions < 2:
                _divide(search, open_[0], until, progress)
            else:
                _branch(search, open_[0], until, progress)
        if search.best is not None:
            return _found(request, search, begun, deadline)
    attempts = tuple(candidate.attempt() for candidate in search.candidates)
    shortfall = nearest_miss([problem_of(request, attempt.settings, lean=True) for attempt in attempts])
    elapsed = time.monotonic() - begun
    return SearchResult(None, attempts, math.inf, search.bound_seconds, shortfall, elapsed, search.failures)


def _relaxed_candidates(
    request: Request,
    known: Sequence[_Candidate],
    everything: bool,
    solver: str | None,
    progress: Callable[[str], None],
) -> list[_Candidate]:
    """Settings not yet known, relaxed; unless `everything` is asked for, without those that are
    pointless if others have plans."""
    candidates: list[_Candidate] = []
    for settings in settings_of(request):
        if settings in [candidate.settings for candidate in known]:
            continue
        if necessary_shortfall(request.at(settings), settings.microbatch_rows):
            continue
        # What fits without the detour of activations through the host does not need it.
        detour = settings.interlayer_home == "host" and request.interlayer_home is None
        pointless = detour and any(math.isfinite(candidate.bound_seconds) for candidate in candidates)
        pointless = pointless or _deeper_one_fits(settings, candidates)
        if not everything and (pointless or _coarser_one_is_better(settings, candidates)):
            continue
        program = Program(problem_of(request, settings), solver)
        candidate = _Candidate(settings, program, program.relax())
        candidates.append(candidate)
        bound = candidate.bound_seconds
        fits = math.isfinite(bound)
        for failure in program.failures:
            progress(f"{failure}; going on without it")
        progress(f"{_name(settings)}: " + (f"at least {bound:.3f} s" if fits else "too large"))
    return sorted(candidates, key=lambda candidate: candidate.bound_seconds)


def _descend(
    request: Request,
    search: _Search,
    candidates: Sequence[_Candidate],
    warm_starts: Sequence[Plan],
    deadline: float,
    solver: str | None,
    progress: Callable[[str], None],
) -> None:
    """Descent on the most promising candidates, and with looser settings; on more while there is no plan."""
    for rank, candidate in enumerate(candidates):
        over = search.best is not None and (rank >= _DESCENTS or time.monotonic() >= deadline)
        if over or candidate.bound_seconds >= search.target_seconds:
            break
        _divide(search, candidate, deadline, progress)
        if candidate.bound_seconds >= search.target_seconds:
            continue
        starts = search.starts(candidate, warm_starts)
        enough = search.bound_seconds / (1 - search.relative_gap)
        values = candidate.program.descend(starts, search.deadline(deadline), enough)
        if values is not None:
            search.offer(candidate, values)
            progress(f"{_name(candidate.settings)}: {candidate.period_seconds:.3f} s")
            if search.best is not None and search.best[0] is candidate:
                _loosen(request, candidate, search, deadline, solver, progress)


def _loosen(
    request: Request,
    close: _Candidate,
    search: _Search,
    deadline: float,
    solver: str | None,
    progress: Callable[[str], None],
) -> None:
    """Descent on settings looser than that of the best plan, while its own bound is not reached.

    From the relaxation, for the best plan may not fit there: what is copied takes memory for longer. Where
    that does not come close enough either, from the best plan.
    """
    for settings in looser_settings(request, close.settings):
        if close.bound_seconds >= search.target_seconds or time.monotonic() >= deadline:
            return
        program = Program(problem_of(request, settings), solver)
        candidate = _Candidate(settings, program, program.relax())
        if not math.isfinite(candidate.bound_seconds):
            continue
        search.add([candidate])
        enough, starts = search.bound_seconds / (1 - search.relative_gap), search.starts(candidate, ())
        values = program.descend((), deadline, enough)
        if values is not None:
            search.offer(candidate, values)
        for start in filter(program.fits, starts):
            if close.bound_seconds < search.target_seconds and time.monotonic() < deadline:
                search.offer(candidate, program.descend_from(start, deadline, enough))
        if candidate.period_seconds is not None:
            progress(f"{_name(settings)}: {candidate.period_seconds:.3f} s")


def _start_lean(request: Request, search: _Search, candidates: Sequence[_Candidate]) -> None:
    """Descent from a plan that needs the least memory, where descent from the relaxation found none."""
    for candidate in candidates:
        if not math.isfinite(candidate.bound_seconds):
            continue
        leanest = leanest_plan(problem_of(request, candidate.settings, lean=True))
        if leanest is not None:
            start = candidate.program.model.choices.encode(leanest)
            values = candidate.program.descend([start], time.monotonic() + _FIRST_SECONDS)
            search.offer(candidate, start if values is None else values)
            return


def _divide(search: _Search, candidate: _Candidate, deadline: float, progress: Callable[[str], None]) -> None:
    """Cases of one candidate, where it may have a plan better by more than the gap."""
    if candidate.divisions > 1:
        return
    had_plan = search.best is not None
    if candidate.bound_seconds < search.target_seconds and time.monotonic() < deadline:
        _prove(search, candidate, functools.partial(divide, candidate.program), deadline, progress)
        # Without a plan that was all about finding one: with a target it is worth another time.
        candidate.divisions += 2 if had_plan else 1


def _branch(search: _Search, candidate: _Candidate, deadline: float, progress: Callable[[str], None]) -> None:
    """Branch and bound on one candidate, until it is better, closed or out of time."""
    candidate.tries += 1
    _prove(search, candidate, candidate.program.branch, deadline, progress)


def _prove(
    search: _Search,
    candidate: _Candidate,
    solve: Callable[..., tuple[Binaries | None, float]],
    deadline: float,
    progress: Callable[[str], None],
) -> None:
    """Takes up the better plan and the bound that one of the program's ways of solving comes to."""
    own = search.best is not None and search.best[0] is candidate
    assert search.best is None or math.isfinite(search.period_seconds)
    start = search.best[1] if own and search.best is not None else None
    known_failures = len(candidate.program.failures)
    values, bound = solve(
        start,
        # Elsewhere only what is better by more than the gap is of interest.
        cutoff_seconds=math.inf if own or search.best is None else search.target_seconds,
        deadline=deadline,
        relative_gap=search.relative_gap,
    )
    candidate.bound_seconds = max(candidate.bound_seconds, bound)
    for failure in candidate.program.failures[known_failures:]:
        progress(f"{failure}; going on without it")
    if values is not None:
        search.offer(candidate, values)
    best = f"{search.period_seconds:.3f} s" if search.best is not None else "no plan yet"
    proven = f"at least {candidate.bound_seconds:.3f} s" if math.isfinite(bound) else "no plan fits"
    progress(f"{_name(candidate.settings)}: {proven}; best {best}")


def _found(request: Request, search: _Search, begun: float, deadline: float) -> SearchResult:
    assert search.best is not None
    candidate, values = search.best
    values = candidate.program.reduce_traffic(values, time.monotonic() + _TIDY_SECONDS)
    period, objective = candidate.program.model.period(values), candidate.program.objective(values)
    # Where the solver gives up on a fixed assignment (infinite), the replay stands alone.
    if math.isfinite(objective) and abs(objective - period) > PERIOD_TOLERANCE * period:
        raise VerificationError(f"the program's objective is {objective} s, the replay takes {period} s")
    decided = candidate.program.model.choices.decode(values, "milp")
    plan = tune(request, decided, max(deadline, time.monotonic() + _TUNE_SECONDS))
    elapsed = time.monotonic() - begun
    attempts = tuple(candidate.attempt() for candidate in search.candidates)
    failures = search.failures
    found = SearchResult(plan, attempts, period, min(period, search.bound_seconds), {}, elapsed, failures)
    assert plan.prediction is not None
    prediction = plan.prediction.model_copy(
        update={"bound_seconds": found.bound_seconds, "gap": found.gap, "solve_seconds": elapsed}
    )
    return dataclasses.replace(found, plan=plan.model_copy(update={"prediction": prediction}))


def predict(request: Request, plan: Plan) -> Prediction:
    """Period and peaks of a plan at microbatch granularity."""
    request = request.at(plan)
    costs, sizes = request.costs(plan.microbatch_rows), request.sizes(plan.microbatch_rows)
    schedule = build_schedule(plan, sizes)
    period = simulate(schedule, costs.operation_seconds, costs.contention).period_seconds
    peak = used_bytes(schedule, costs.working_bytes)
    static = owned_bytes_per_tier(plan, sizes)
    static[Tier.HOST] += request.static_host_bytes
    return Prediction(
        period_seconds=period, peak_bytes={tier.value: peak[tier] + static[tier] for tier in Tier}
    )


def tune(request: Request, plan: Plan, deadline: float = math.inf) -> Plan:
    """The fields only the microbatch schedule feels, by replay: the fastest that fits.

    Args:
        deadline: of `time.monotonic`; no further replay is begun after it.
    """
    best = plan.model_copy(update={"prediction": predict(request, plan)})
    changes: list[dict[str, int]] = [{"reload_ahead": ahead} for ahead in _RELOAD_AHEAD]
    changes += [{"backward_prefetch": plan.backward_prefetch + 1}, {"prefetch": plan.prefetch + 1}]
    for change in changes:
        field = next(iter(change))
        if field != "reload_ahead" and getattr(request, field) is not None:
            continue
        if time.monotonic() >= deadline:
            break
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


def _coarser_one_is_better(settings: Plan, candidates: Sequence[_Candidate]) -> bool:
    """Whether fewer microbatches, or longer chunks, fit, and their bound already rises with their number."""
    finite = [c for c in candidates if math.isfinite(c.bound_seconds)]
    lowest = min((c.bound_seconds for c in finite), default=math.inf)
    rising = [_fineness(c.settings) for c in finite if c.bound_seconds > _TOO_FINE * lowest]
    return any(fineness < _fineness(settings) for fineness in rising)


def _fineness(settings: Plan) -> int:
    """Parts of the batch that a layer computes one after another."""
    chunks = 1 if settings.token_chunk is None else -(-settings.sequence_length // settings.token_chunk)
    return settings.microbatches * chunks


def _deeper_one_fits(settings: Plan, candidates: Sequence[_Candidate]) -> bool:
    """Whether the same setting with more slabs ahead has already been found feasible."""
    return any(
        math.isfinite(candidate.bound_seconds)
        and (candidate.settings.interlayer_home, _fineness(candidate.settings))
        == (settings.interlayer_home, _fineness(settings))
        and candidate.settings.prefetch >= settings.prefetch
        for candidate in candidates
    )


def _name(settings: Plan) -> str:
    chunk = "" if settings.token_chunk is None else f"{settings.token_chunk} tokens at a time, "
    return (
        f"{settings.microbatches} microbatches, {chunk}"
        f"prefetch {settings.prefetch}/{settings.backward_prefetch}, "
        f"offload_window {settings.offload_window}, interlayer_home {settings.interlayer_home}"
    )
