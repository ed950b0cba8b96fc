"""Which plan a run starts with, and when it is given up for a better one.

Every plan is verified before it runs. With `plan.hardware` set to `calibrate` the machine is
measured first and kernels are timed on it, of the smallest and the largest microbatches; those
between follow (`lazyjax.training.timed_costs`). With `plan.replan_after_steps` the times of the first
steps replace the predicted ones and the plan is solved again for the same microbatches, because
only for those are there times.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rich.console import Console

from lazyjax.config import Config
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.measure import MeasureOptions, measure_profile
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning import cache
from lazyjax.planning.baselines import BASELINES, without_nvme
from lazyjax.planning.command import solve_cached, verify_for
from lazyjax.planning.costs import Costs, MeasuredKey, measured_key, template_costs
from lazyjax.planning.machine import block_shapes, update_probe
from lazyjax.planning.plan import Plan, PlanError, load_plan, validate_plan
from lazyjax.planning.question import CostModel, Request
from lazyjax.planning.request import build_request
from lazyjax.planning.schedule import COMPUTE_KINDS, Kind, Schedule
from lazyjax.planning.search import find_plan, predict
from lazyjax.planning.sizes import model_sizes
from lazyjax.planning.verify import VerificationError, verify
from lazyjax.timeline import Event, Timeline
from lazyjax.training.status import say, stage
from lazyjax.training.timed_costs import time_kernels, timed_costs, timed_rows

#: Value of `plan.hardware` that stands for measuring the machine when training starts.
CALIBRATE = "calibrate"
#: The same, where timing the model's kernels takes seconds only.
AUTO = "auto"
#: The last steps before planning again whose operations are timed; the first steps compile.
_TIMED_STEPS = 3
_FROM_HOST = (Kind.FETCH, Kind.RELOAD)
_TO_HOST = (Kind.OFFLOAD, Kind.GRADIENT_OUT)


def choose_plan(config: Config, template: ModelTemplate) -> Plan:
    """The plan that a configuration asks for, checked and verified.

    Raises:
        PlanError: a plan file of another model, batch or version.
        VerificationError: a schedule that must not run.
        InfeasibleError: the planner finds no plan that fits the machine.
    """
    return choose(config, template).plan


class Choice(NamedTuple):
    """The plan to start with, and the question it answers; None where none was asked."""

    plan: Plan
    request: Request | None


def choose(
    config: Config, template: ModelTemplate, kernels: Kernels | None = None, console: Console | None = None
) -> Choice:
    """`choose_plan`, with what is needed to plan again.

    Args:
        kernels: those of the run, so that a calibration compiles nothing twice.
        console: shows what is measured and solved; None: nothing is shown.
    """
    names = [template.kind(index).residual_names for index in range(len(template.spec.layers))]
    batch = {"rows": config.data.rows, "sequence_length": config.data.sequence_length}
    keys = ("microbatches", "prefetch", "backward_prefetch", "update", "handoff")
    given = {key: getattr(config.plan, key) for key in keys if getattr(config.plan, key) is not None}
    milp = config.plan.planner == "milp" and config.plan.file is None
    if milp:
        request = make_request(config, template, kernels, console, microbatches=config.plan.microbatches)
        plan = _solve(config, dataclasses.replace(request, **given), console)
        _check_runs(plan, config, template, names)
        return Choice(plan, request)
    if config.plan.file is not None:
        plan = load_plan(config.plan.file)
        for key, value in batch.items():
            if getattr(plan, key) != value:
                raise PlanError(
                    f"{config.plan.file}: {key} is {getattr(plan, key)}, but data.{key} is {value}"
                )
    else:
        plan = BASELINES[config.plan.planner](template.spec, names, **batch, **given)
        if config.plan.nvme_folder is None:
            plan = without_nvme(plan)
    _check_runs(plan, config, template, names)
    _verify_structure(plan, config, template)
    if config.plan.replan_after_steps is None:
        return Choice(plan, None)
    return Choice(plan, make_request(config, template, kernels, console, microbatches=plan.microbatches))


def _check_runs(plan: Plan, config: Config, template: ModelTemplate, names: Sequence[Sequence[str]]) -> None:
    """Whether the plan is one of this model and has the drive and the devices that it needs."""
    validate_plan(plan, template.spec, names)
    if plan != without_nvme(plan) and config.plan.nvme_folder is None:
        raise PlanError(f"{config.plan.file}: the plan uses NVMe; set plan.nvme_folder to a folder there")
    rows, devices = plan.microbatch_rows, config.plan.devices
    if rows % devices:
        raise PlanError(f"plan.devices ({devices}) does not divide the {rows} rows of a microbatch")


def _solve(config: Config, request: Request, console: Console | None) -> Plan:
    """The planner's plan, or the one it found before; either fits and takes as long as it says."""
    seconds = config.plan.time_limit_seconds
    # Times that were just measured never come back exactly: there is nothing to find again.
    folder = None if config.plan.hardware in (CALIBRATE, AUTO) else cache.default_folder()
    say(console, f"planning: looking for the fastest plan, for {seconds:g} s or a little longer")
    plan, found = solve_cached(request, folder, time_limit_seconds=seconds, console=console)
    try:
        verify_for(request, plan)
    except VerificationError:
        if found is not None:
            raise
        plan, _ = solve_cached(request, None, time_limit_seconds=seconds, console=console)
        verify_for(request, plan)
    return plan


def _verify_structure(plan: Plan, config: Config, template: ModelTemplate) -> None:
    """Order, buffers and precedence; without a machine there are no times or capacities to check."""
    sizes = model_sizes(
        template,
        rows=plan.microbatch_rows,
        sequence_length=plan.sequence_length,
        compute_dtype=config.model.compute_dtype,
        gradient_dtype=config.optimizer.gradient_dtype,
        devices=config.plan.devices,
    )
    verify(plan.model_copy(update={"prediction": None}), sizes, lambda operation: 1.0)


def make_request(
    config: Config,
    template: ModelTemplate,
    kernels: Kernels | None = None,
    console: Console | None = None,
    *,
    microbatches: int | None = None,
) -> Request:
    """The planner's question, for the machine in `plan.hardware`.

    To calibrate, rates are measured and kernels are timed here: those of the microbatches that
    `microbatches` gives, or else of the smallest and the largest that the planner considers. Costs
    of other sizes follow from these (`lazyjax.training.timed_costs`).

    Args:
        microbatches: parts of the batch, where their number is decided.

    Raises:
        ProfileError: there is no such profile.
    """
    hardware = config.plan.hardware
    measured = hardware in (CALIBRATE, AUTO)
    profile = _measured_profile(config, template, console) if measured else load_profile(hardware)
    if profile.devices != config.plan.devices:
        sources = {**profile.sources, "devices": "plan.devices of the configuration"}
        profile = profile.model_copy(update={"devices": config.plan.devices, "sources": sources})
    request = build_request(
        template,
        profile,
        rows=config.data.rows,
        sequence_length=config.data.sequence_length,
        optimizer=config.optimizer.name,
        compute_dtype=config.model.compute_dtype,
        gradient_dtype=config.optimizer.gradient_dtype,
        device_bytes=config.plan.device_bytes,
        host_bytes=config.plan.host_bytes,
        nvme_bytes=None if config.plan.nvme_folder is not None else 0,
        identity=CALIBRATE if measured else "",
    )
    request = dataclasses.replace(request, microbatches=microbatches)
    if not measured:
        return request
    # The request has checked that the batch can be split at all: now there are sizes to time.
    costs = _timed_costs(config, template, profile, kernels, console, microbatches)
    return dataclasses.replace(request, costs=costs)


def _measured_profile(config: Config, template: ModelTemplate, console: Console | None) -> HardwareProfile:
    options = MeasureOptions(
        shapes=block_shapes(template, config.data.rows * config.data.sequence_length),
        compute_dtype=config.model.compute_dtype,
        transfer_bytes=2**24,
        update_elements=2**22,
        nvme_folder=config.plan.nvme_folder,
        repeats=3,
    )
    optimizer: str = config.optimizer.name
    with stage(console, "calibrating: measuring the rates of this machine") as advance:
        probes = {optimizer: update_probe(optimizer)}
        return measure_profile(CALIBRATE, options, probes, progress=advance)


def _profile_costs(config: Config, template: ModelTemplate, profile: HardwareProfile, rows: int) -> Costs:
    return template_costs(
        template,
        profile,
        rows=rows,
        sequence_length=config.data.sequence_length,
        optimizer=make_host_optimizer(config.optimizer.name, threads=1, path="pure"),
        compute_dtype=config.model.compute_dtype,
        gradient_dtype=config.optimizer.gradient_dtype,
    )


def _timed_costs(
    config: Config,
    template: ModelTemplate,
    profile: HardwareProfile,
    kernels: Kernels | None,
    console: Console | None,
    microbatches: int | None,
) -> Callable[[int], Costs]:
    """Rows of a microbatch -> costs; kernels are timed at once, of one size or two."""
    predicted = functools.cache(functools.partial(_profile_costs, config, template, profile))
    kernels = kernels or Kernels(
        template,
        data_mesh(),
        compute_dtype=config.model.compute_dtype,
        gradient_dtype=config.optimizer.gradient_dtype,
    )
    rows = config.data.rows
    sizes = timed_rows(rows, microbatches=microbatches, devices=config.plan.devices)
    words = " and ".join(map(str, sizes))
    with stage(console, f"calibrating: timing kernels of microbatches of {words} rows") as advance:
        timed = time_kernels(predicted, kernels, sizes, rows=rows, advance=advance)

    @functools.cache
    def costs(microbatch_rows: int) -> Costs:
        return timed_costs(predicted, timed, rows=microbatch_rows)

    return costs


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
        share = padded_tokens / (executor.plan.rows * executor.plan.sequence_length)
        self._timed.append(TimedStep(executor.timeline().events, share))
        if step < self._after:
            return None
        costs = measured_costs(self._costs, executor.schedule, self._timed)
        limit = self._time_limit_seconds
        say(f"planning again after step {step} from measured times, for about {limit:g} s at most")
        try:
            outcome = replan(self._request, costs, executor, step=step, time_limit_seconds=limit, say=say)
        except VerificationError as error:
            # The running plan was verified; a run does not end for want of a better one.
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
            if operation.kind in COMPUTE_KINDS:
                kernels[measured_key(operation, costs.spec)].append(seconds / step.token_share)
            elif operation.kind in _FROM_HOST:
                rates["h2d_bytes_per_second"].append(event.bytes / seconds)
            elif operation.kind in _TO_HOST:
                rates["d2h_bytes_per_second"].append(event.bytes / seconds)
            elif operation.kind is Kind.UPDATE:
                rates["update"].append(costs.update_seconds(operation.layer) / seconds)
    return costs.with_profile(_with_rates(costs, rates)).with_measured(
        {key: statistics.median(seconds) for key, seconds in kernels.items()}, costs.measured_working_bytes
    )


def _with_rates(costs: Costs, rates: Mapping[str, Sequence[float]]) -> HardwareProfile:
    """The profile with measured rates; a link's already holds what the other direction took."""
    profile, changed = costs.profile, dict[str, Any]()
    for figure in ("h2d_bytes_per_second", "d2h_bytes_per_second"):
        if figure in rates:
            changed[figure] = statistics.median(rates[figure]) / profile.duplex_factor
    if "update" in rates:
        known = profile.host_update_parameters_per_second
        faster = statistics.median(rates["update"])
        changed["host_update_parameters_per_second"] = {
            **known, costs.optimizer: known[costs.optimizer] * faster
        }  # fmt: skip
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

    def costs_of(rows: int) -> CostModel:
        return costs if rows == costs.rows else request.costs(rows)

    same = dataclasses.replace(
        request, costs=costs_of, microbatches=running.microbatches, handoff=running.handoff
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
