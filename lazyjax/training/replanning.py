"""When the plan that a run started with is given up for a better one.

With `plan.replan_after_steps` the times of the first steps replace the predicted ones and the plan is
solved again for the same microbatches, because only for those are there times.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lazyjax.config import Config
from lazyjax.hardware.profile import HardwareProfile
from lazyjax.models.template import ModelTemplate
from lazyjax.planning.costs.seconds import Costs, MeasuredKey, measured_key
from lazyjax.planning.plan import cache
from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.question import CostModel, Request
from lazyjax.planning.planner.search import find_plan, predict
from lazyjax.planning.planner.service import verify_for
from lazyjax.planning.program.schedule import COMPUTE_ACTIONS, Action, Schedule
from lazyjax.timeline import Event, Timeline
from lazyjax.training.start_plan import Choice

#: The last steps before planning again whose operations are timed; the first steps compile.
_TIMED_STEPS = 3
#: The figure of a profile that is the rate of a copy.
_RATES = {
    Action.FETCH: "slab_bytes_per_second",
    Action.RELOAD: "h2d_bytes_per_second",
    Action.OFFLOAD: "d2h_bytes_per_second",
    Action.GRADIENT_OUT: "d2h_bytes_per_second",
}


@runtime_checkable
class SwappableExecutor(Protocol):
    """What planning again needs of `lazyjax.execution.executor.Executor`."""

    plan: Plan
    schedule: Schedule

    def set_plan(self, plan: Plan) -> None:
        """Uses another plan from the next step on; applies pending updates first."""
        ...

    def timeline(self) -> Timeline:
        """Events of the last step."""
        ...


class Replan(NamedTuple):
    """What came of planning again.

    Attributes:
        step: after which it was done.
        running_seconds, candidate_seconds: periods of the running and of the re-solved plan, both
            replayed with measured times.
        plan: the re-solved one.
        swapped: whether it runs from the next step on.
    """

    step: int
    running_seconds: float
    candidate_seconds: float
    plan: Plan
    swapped: bool


class Replanner:
    """Times the steps before step `after_steps` and then, once, plans again.

    Args:
        request: the question that the running plan answers, or would have answered.
        costs: of the running plan's microbatches, from the profile.
        after_steps: steps of this run after which to plan.
    """

    def __init__(
        self, request: Request, costs: Costs, *, after_steps: int, time_limit_seconds: float = 20.0
    ) -> None:
        self._request, self._costs = request, costs
        self._after, self._time_limit_seconds = after_steps, time_limit_seconds
        self._timed: list[TimedStep] = []

    def after_step(
        self,
        step: int,
        executor: SwappableExecutor,
        padded_tokens: int,
        say: Callable[[str], None] = lambda text: None,
    ) -> Replan | None:
        """To be called after every step; answers at the one that was asked for.

        Args:
            say: told that it plans, and why there is no answer.
        """
        if not self._after - _TIMED_STEPS < step <= self._after:
            return None
        share = padded_tokens / (executor.plan.batch_rows * executor.plan.sequence_length)
        self._timed.append(TimedStep(executor.timeline().events, share))
        if step < self._after:
            return None
        costs = measured_costs(self._costs, executor.schedule, self._timed)
        limit = self._time_limit_seconds
        say(f"planning again after step {step} from measured times, for about {limit:g} s at most")
        try:
            outcome = replan(self._request, costs, executor, step=step, time_limit_seconds=limit, say=say)
        except (ValueError, OSError, MemoryError) as error:
            # The running plan was verified; a run does not end for want of a better one, nor of the
            # drive or the memory that the better one needs.
            say(f"planning again failed ({error}); the plan stays")
            return None
        if outcome is None:
            say("planning again found no plan that fits; the plan stays")
        return outcome


class TimedStep(NamedTuple):
    """Events of one step, and its share of the tokens that the plan is for."""

    events: Sequence[Event]
    token_share: float


def measured_costs(costs: Costs, schedule: Schedule, steps: Sequence[TimedStep]) -> Costs:
    """`costs` with the medians of what was measured while training, so with all interference.

    Compute of a step with fewer tokens is scaled up by them (attention grows faster, which this
    leaves out); transfers and updates give rates. What did not happen keeps its prediction.
    """
    kernels: dict[MeasuredKey, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        ends = {event.operation: event.end_seconds for event in step.events}
        for event in step.events:
            operation = schedule.operations[event.operation]
            # What was issued early is recorded from its issue on, although it waited for its operands.
            ready = max((ends[wait] for wait in operation.waits if wait in ends), default=0.0)
            seconds = event.end_seconds - max(event.start_seconds, ready)
            if seconds <= 0:
                continue
            if operation.action in COMPUTE_ACTIONS:
                kernels[measured_key(operation, costs.spec)].append(seconds / step.token_share)
            elif operation.action in _RATES:
                rates[_RATES[operation.action]].append(event.bytes / seconds)
            elif operation.action is Action.UPDATE:
                rates["update"].append(costs.update_seconds(operation.layer) / seconds)
    return costs.with_profile(_with_rates(costs, rates)).with_measured(
        {key: statistics.median(seconds) for key, seconds in kernels.items()}, costs.measured_working_bytes
    )


def _with_rates(costs: Costs, rates: Mapping[str, Sequence[float]]) -> HardwareProfile:
    """The profile with measured rates; a link's already holds what the other direction took."""
    # What kernels took while copies and updates ran beside them holds what they lost to these.
    profile, changed = costs.profile, dict[str, Any](update_contention=0.0, copy_contention=0.0)
    for figure in dict.fromkeys(_RATES.values()):
        if figure in rates:
            changed[figure] = statistics.median(rates[figure]) / profile.duplex_factor
    if "update" in rates:
        known = profile.update_parameters_per_second(costs.optimizer, costs.update_bytes)
        changed["host_update_parameters_per_second"] = {
            **profile.host_update_parameters_per_second,
            costs.optimizer: known * statistics.median(rates["update"]),
        }
    sources = {**profile.sources, **dict.fromkeys(changed, "measured while training")}
    sources |= {f"host_update_parameters_per_second.{costs.optimizer}": "measured while training"}
    return profile.model_copy(update={**changed, "sources": sources})


def replan(
    request: Request,
    costs: Costs,
    executor: SwappableExecutor,
    *,
    step: int,
    time_limit_seconds: float = 20.0,
    say: Callable[[str], None] = lambda text: None,
) -> Replan | None:
    """Solves again under `costs`; a plan that is better by more than 3 % replaces the running one.

    Args:
        costs: measured, of microbatches as in the running plan.
        say: told how the solver failed, where it did.

    Returns:
        What was found; None where no plan fits what the request allows.
    """
    running = executor.plan

    def costs_of(microbatch_rows: int) -> CostModel:
        return costs if microbatch_rows == costs.microbatch_rows else request.costs(microbatch_rows)

    # The head was timed with one chunk.
    same = dataclasses.replace(
        request,
        costs=costs_of,
        microbatches=running.microbatches,
        interlayer_home=running.interlayer_home,
        head_chunks=(running.head_chunk,),
    )
    found = find_plan(same, time_limit_seconds=time_limit_seconds, warm_starts=[running])
    for failure in dict.fromkeys(found.failures):
        say(f"{failure}; planned without it")
    if found.plan is None or found.plan.prediction is None:
        return None
    running_seconds = predict(same, running).period_seconds
    candidate_seconds = found.plan.prediction.period_seconds
    swapped = cache.worth_swapping(running_seconds, candidate_seconds)
    if swapped:
        verify_for(same, found.plan)
        executor.set_plan(found.plan)
    return Replan(step, running_seconds, candidate_seconds, found.plan, swapped)


def make_replanner(config: Config, template: ModelTemplate, choice: Choice) -> Replanner | None:
    """What `plan.replan_after_steps` asks for; None where it asks for nothing."""
    after_steps = config.plan.replan_after_steps
    if after_steps is None:
        return None
    assert choice.request is not None
    costs = choice.request.costs(choice.plan.microbatch_rows)
    assert isinstance(costs, Costs)
    return Replanner(
        choice.request, costs, after_steps=after_steps, time_limit_seconds=config.plan.time_limit_seconds
    )
