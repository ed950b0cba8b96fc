"""Checks that every plan passes before it runs, and the bounds it is measured against.

Errors raise; what a verification returns can be printed beside the plan. The checks replay the
schedule with the same code that the executor's order comes from, and count memory as the
executor will.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from lazyjax.planning.plan.document import Plan
from lazyjax.planning.program.contention import NO_CONTENTION, Contention
from lazyjax.planning.program.operations import ROLE_OF, Buffer, WorkingBytes, no_working_bytes
from lazyjax.planning.program.schedule import (
    COMPUTE_ACTIONS,
    Action,
    BufferRole,
    ModelSizes,
    Operation,
    Place,
    Schedule,
    build_schedule,
)
from lazyjax.planning.program.simulate import OperationSeconds, Simulation, simulate
from lazyjax.planning.program.tiers import DOWN, LINKS, STATE_DOWN, STATE_UP, UP
from lazyjax.specs import Part, Tier
from lazyjax.timeline import Resource

#: Relative difference that a predicted period may have from its replay.
PERIOD_TOLERANCE = 1e-6


class VerificationError(ValueError):
    """A plan that must not run; the message says which check failed and where."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """What was checked.

    Attributes:
        period_seconds: of the replay in the steady state.
        bounds_seconds: for each resource, what all its operations take: no period is shorter.
        peak_bytes: per tier, with working sets and optimizer state.
        live_bytes: per tier, what the schedule counts at its peak: activations, slabs, gradients.
        simulation: the replay.
    """

    period_seconds: float
    bounds_seconds: Mapping[Resource, float]
    peak_bytes: Mapping[Tier, int]
    live_bytes: Mapping[Tier, int]
    simulation: Simulation

    @property
    def bottleneck(self) -> Resource:
        """The resource with the largest bound."""
        return max(self.bounds_seconds, key=lambda resource: self.bounds_seconds[resource])


def verify(
    plan: Plan,
    sizes: ModelSizes,
    seconds: OperationSeconds,
    *,
    capacity: Mapping[Tier, int] | None = None,
    static_host_bytes: int = 0,
    working_bytes: WorkingBytes = no_working_bytes,
    contention: Contention = NO_CONTENTION,
) -> Verification:
    """Replays `plan` and checks it.

    Args:
        static_host_bytes: of all master weights and gradients, and what else is there all the time.

    Raises:
        VerificationError: an operation waits for a later one, or not for what it needs, a buffer is
            freed that is not there or never freed, an operation starts before what it waits for has
            ended, a peak exceeds its capacity, the period undercuts a bound, or differs from the
            plan's prediction.
    """
    schedule = build_schedule(plan, sizes)
    check_order(schedule)
    check_buffers(schedule)
    check_data_flow(schedule)
    simulation = simulate(schedule, seconds, contention)
    check_precedence(schedule, simulation)
    peak = used_bytes(schedule, working_bytes)
    static = owned_bytes_per_tier(plan, sizes)
    static[Tier.HOST] += static_host_bytes
    total = {tier: peak[tier] + static[tier] for tier in Tier}
    if capacity is not None:
        for tier in Tier:
            if total[tier] > capacity[tier]:
                raise VerificationError(
                    f"{tier.value} memory: the plan needs {total[tier]} bytes, "
                    f"{total[tier] - capacity[tier]} more than there are ({capacity[tier]})"
                )
    bounds = {resource: simulation.busy_seconds.get(resource, 0.0) for resource in Resource}
    for resource, bound in bounds.items():
        if bound > simulation.period_seconds * (1 + PERIOD_TOLERANCE):
            raise VerificationError(
                f"period: {simulation.period_seconds} s, but {resource.value} alone takes {bound} s"
            )
    if plan.prediction is not None:
        predicted = plan.prediction.period_seconds
        if not abs(predicted - simulation.period_seconds) <= PERIOD_TOLERANCE * simulation.period_seconds:
            raise VerificationError(
                f"prediction.period_seconds: {predicted} s, the replay takes {simulation.period_seconds} s; "
                "the plan was made for other costs"
            )
    live = schedule.peak_bytes()
    return Verification(simulation.period_seconds, bounds, total, live, simulation)


def check_order(schedule: Schedule) -> None:
    """Waits within a step point backwards, and nothing waits for itself."""
    for operation in schedule.operations:
        late = [wait for wait in operation.waits if not 0 <= wait < operation.index]
        if late:
            raise VerificationError(f"operation {operation.index} waits for operation {late[0]}")
        count = len(schedule.operations)
        unknown = [wait for wait in operation.waits_previous if not 0 <= wait < count]
        if unknown:
            raise VerificationError(f"operation {operation.index} waits for unknown operation {unknown[0]}")


def check_buffers(schedule: Schedule) -> None:
    """Every buffer is allocated before it is freed, once at a time, and gone at the end of the step."""
    live: dict[Place, int] = {}
    for operation in schedule.operations:
        for allocation in operation.allocates:
            if allocation.place in live:
                raise VerificationError(f"operation {operation.index} allocates {allocation.place} again")
            live[allocation.place] = operation.index
        for place in operation.frees:
            if place not in live:
                raise VerificationError(f"operation {operation.index} frees {place}, which is not there")
            del live[place]
    if live:
        place, index = next(iter(live.items()))
        raise VerificationError(f"{place}, allocated by operation {index}, is never freed")


def check_data_flow(schedule: Schedule) -> None:
    """Whatever reads a copy waits for what made it, parameters for their update, updates for gradients.

    Fetches are issued as early as the prefetch depth says, and every layer is updated once.
    """
    operations, plan = schedule.operations, schedule.plan
    made: dict[Place, int] = {}
    by_action: dict[Action, dict[int, int]] = {action: {} for action in Action}
    for operation in operations:
        for place in _sources(operation):
            if place in made and made[place] not in operation.waits:
                raise VerificationError(
                    f"operation {operation.index} ({operation.action.value}) does not wait for {place}, "
                    f"which operation {made[place]} makes"
                )
        if operation.action is Action.FETCH:
            depth = plan.prefetch if operation.window < len(plan.layers) else plan.backward_prefetch
            late = [
                wait
                for wait in operation.waits
                if operations[wait].action in COMPUTE_ACTIONS
                and operations[wait].window > operation.window - depth
            ]
            if late:
                raise VerificationError(
                    f"operation {operation.index} fetches layer {operation.layer} only after "
                    f"operation {late[0]}"
                )
        if operation.action is Action.FETCH:
            _check_parameters(schedule, operation, made, by_action)
        for allocation in operation.allocates:
            made[allocation.place] = operation.index
        if operation.action is Action.UPDATE and operation.layer in by_action[Action.UPDATE]:
            raise VerificationError(f"layer {operation.layer} is updated twice")
        by_action[operation.action][operation.layer] = operation.index
    for layer in range(len(plan.layers)):
        if layer not in by_action[Action.UPDATE] or layer not in by_action[Action.GRADIENT_OUT]:
            raise VerificationError(f"layer {layer} is not updated")
    _check_updates(schedule, by_action)
    if schedule.sizes.shared:
        _check_collectives(schedule)


def _check_parameters(
    schedule: Schedule,
    operation: Operation,
    made: Mapping[Place, int],
    by_action: Mapping[Action, Mapping[int, int]],
) -> None:
    """What a fetch reads is on the host: it waits for the read, or for the update that waited for it."""
    layer = operation.layer
    for part in schedule.sizes.fetched:
        if part not in schedule.plan.layers[layer].on_nvme:
            continue
        place = Place(Buffer(ROLE_OF[part], layer), Tier.HOST)
        waits = set(operation.waits)
        if layer in by_action[Action.UPDATE] and by_action[Action.UPDATE][layer] in waits:
            waits |= set(schedule.operations[by_action[Action.UPDATE][layer]].waits)
        if place not in made or made[place] not in waits:
            raise VerificationError(
                f"operation {operation.index} fetches {place} but does not wait until it is there"
            )


def _sources(operation: Operation) -> list[Place]:
    """The copies that an operation reads."""
    allocated = [allocation.place.buffer for allocation in operation.allocates]
    match operation.action:
        case Action.RELOAD:
            return [
                Place(buffer, Tier.HOST) for buffer in operation.reads if buffer.role is not BufferRole.BATCH
            ]
        case action if action in DOWN:
            return [Place(buffer, DOWN[action].upper) for buffer in allocated]
        case action if action in UP:
            return [Place(buffer, UP[action].lower) for buffer in allocated]
        case _:
            return [Place(buffer, Tier.DEVICE) for buffer in operation.reads]


def _check_updates(schedule: Schedule, by_action: Mapping[Action, Mapping[int, int]]) -> None:
    operations, plan = schedule.operations, schedule.plan
    updates, gradients = by_action[Action.UPDATE], by_action[Action.GRADIENT_OUT]
    deferred = plan.update == "deferred"

    def require(operation: Operation, waits: Iterable[int], *, previous: bool) -> None:
        missing = set(waits) - set(operation.waits_previous if previous else operation.waits)
        if missing:
            where = " of the step before" if previous else ""
            raise VerificationError(
                f"operation {operation.index} ({operation.action.value}) does not wait for operation "
                f"{min(missing)}{where}"
            )

    finishing = frozenset({Action.REDUCE_SCATTER}) if schedule.sizes.shared else COMPUTE_ACTIONS
    last_norm = max(o.index for o in operations if o.action in finishing)
    for operation in operations:
        layer = operation.layer
        match operation.action:
            case Action.FETCH if deferred:
                require(operation, [updates[layer]], previous=False)
            case Action.FETCH:
                require(operation, [max(updates.values())], previous=True)
            case Action.UPDATE:
                # The clip factor needs the gradients of all layers.
                needed = [gradients[layer], last_norm] if deferred else gradients.values()
                require(operation, needed, previous=deferred)
                if plan.layers[layer].on_nvme:
                    above = LINKS[1].state_up
                    assert above is not None
                    require(operation, [by_action[above][layer]], previous=False)
            case action if action in STATE_DOWN:
                upper = LINKS[LINKS.index(STATE_DOWN[action]) - 1].state_down
                waited = updates if upper is None else by_action[upper]
                require(operation, [waited[layer]], previous=False)
            case action if action in STATE_UP:
                down = STATE_UP[action].state_down
                assert down is not None
                require(operation, [max(by_action[down].values())], previous=True)
                if Part.GRADIENT in plan.layers[layer].on_nvme:
                    written = by_action[Action.SPILL_GRADIENT][layer]
                    require(operation, [written], previous=deferred)
            case Action.SPILL_GRADIENT:
                require(operation, [gradients[layer]], previous=False)
            case Action.LOAD_PARAMETERS:
                written = by_action[Action.SPILL_STATE][layer]
                require(operation, [written], previous=not deferred)


def _check_collectives(schedule: Schedule) -> None:
    """Kernels take what was gathered since it was last given up, and leave gradients that are summed.

    That kernels wait for what they read, and what sums a gradient for its kernel, was checked for all reads.
    """
    scattered = {Action.BACKWARD, Action.LOSS}
    partials: dict[Place, int] = {}
    for operation in schedule.operations:
        roles = {buffer.role for buffer in operation.reads}
        if operation.action in COMPUTE_ACTIONS and BufferRole.PARAMETERS in roles:
            raise VerificationError(
                f"operation {operation.index} ({operation.action.value}) takes one device's part of "
                f"layer {operation.layer}"
            )
        made = [a.place for a in operation.allocates if a.place.buffer.role is BufferRole.PARTIAL]
        if operation.action in scattered and not made:
            raise VerificationError(f"operation {operation.index} leaves no gradient to be summed")
        partials |= dict.fromkeys(made, operation.index)
        for place in operation.frees:
            if place.buffer.role is not BufferRole.PARTIAL:
                continue
            if operation.action is not Action.REDUCE_SCATTER or partials[place] not in operation.waits:
                raise VerificationError(
                    f"operation {operation.index} gives up the gradient of operation {partials[place]}, "
                    "which is not summed over the devices"
                )


def check_precedence(schedule: Schedule, simulation: Simulation) -> None:
    """In the replay nothing starts before what it waits for has ended, and no queue overtakes."""
    events = sorted(simulation.timeline.events, key=lambda event: event.operation)
    slack = 1e-9 * max(simulation.period_seconds, 1e-30)
    busy_until: dict[Resource, float] = {}
    for operation, event in zip(schedule.operations, events, strict=True):
        for wait in operation.waits:
            if events[wait].end_seconds > event.start_seconds + slack:
                raise VerificationError(f"operation {operation.index} starts before operation {wait} ends")
        if operation.resource in busy_until and busy_until[operation.resource] > event.start_seconds + slack:
            raise VerificationError(f"operation {operation.index} overtakes on {operation.resource.value}")
        busy_until[operation.resource] = event.end_seconds


def used_bytes(schedule: Schedule, working_bytes: WorkingBytes = no_working_bytes) -> dict[Tier, int]:
    """Peak bytes per tier as the schedule counts them, plus each operation's working set."""
    peak = dict.fromkeys(Tier, 0)
    known: dict[tuple[Action, int, tuple[str, ...], int | None], int] = {}
    for index, live in schedule.live_bytes():
        operation = schedule.operations[index]
        for tier in Tier:
            peak[tier] = max(peak[tier], live[tier])
        if operation.action in COMPUTE_ACTIONS:
            key = (operation.action, operation.layer, operation.saved, operation.head_chunk)
            if key not in known:
                known[key] = working_bytes(*key)
            peak[Tier.DEVICE] = max(peak[Tier.DEVICE], live[Tier.DEVICE] + known[key])
    return peak


def owned_bytes_per_tier(plan: Plan, sizes: ModelSizes) -> dict[Tier, int]:
    """Where the plan puts what layers own, beside a host that holds all master weights and gradients.

    Those count as static (`static_host_bytes`), so that what lives on NVMe is taken off the host here.
    Copies on their way are in the schedule.
    """
    total = dict.fromkeys(Tier, 0)
    for index, decided in enumerate(plan.layers):
        for part in Part:
            size = sizes.owned_bytes(index, part)
            total[decided.owned_home(part)] += size
            if part is not Part.STATE:
                total[Tier.HOST] -= size
    return total
