"""What is to be planned, and the settings under which layer decisions are weighed.

A `Request` is the question: model, batch, bytes, seconds, capacities. A setting is a choice of the
global fields of a plan (microbatches, prefetch, interlayer_home, update); under each of them the layer
decisions are a `Problem` of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from lazyjax.models.chunks import balanced_chunks
from lazyjax.planning.costs.layers import SaveSet
from lazyjax.planning.plan.document import HEAD_CHUNK, LayerPlan, Plan, PlanError, leaves_one_empty
from lazyjax.planning.planner.problem import Problem, save_options
from lazyjax.planning.program.contention import Contention
from lazyjax.planning.program.schedule import STATE_WINDOW, Action, ModelSizes, Operation
from lazyjax.planning.program.tiers import LINKS
from lazyjax.specs import ModelSpec, Part, Tier
from lazyjax.timeline import Resource

InterlayerHome = Literal["device", "host"]
Update = Literal["deferred", "immediate"]

#: Tokens of the microbatch for which sets of residuals are weighed.
_USUAL_TOKENS = 8192
#: Rows of padding per row that microbatches of an awkward batch may need.
_MOST_PADDING = 1 / 8
#: Chunks of a row's tokens that are considered where a microbatch is one row of more tokens than the first.
_TOKEN_CHUNKS = (32768, 8192, 2048)
#: Tokens whose logits may exist at once.
HEAD_CHUNKS = (256, HEAD_CHUNK, 4096, 16384)
#: Most microbatches for which `looser_settings` lengthens offloads, and their window then.
_COARSE, _LONG_OFFLOADS = 2, 4
#: Share of the host's memory that what layers own may fill without being a burden.
_PLENTY = 0.5
#: Layers per segment that the search considers.
LONGEST_SEGMENT = 4


@runtime_checkable
class CostModel(Protocol):
    """Seconds and working sets for microbatches of one size (see `lazyjax.planning.costs.seconds`)."""

    @property
    def contention(self) -> Contention:
        """What compute loses to copies and updates."""
        ...

    def operation_seconds(self, operation: Operation) -> float:
        """Seconds of one operation."""
        ...

    def save_sets(self, kind: str) -> Sequence[SaveSet]:
        """Sets of residuals worth keeping in layers of a kind, the empty one first."""
        ...

    def working_bytes(
        self, action: Action, layer: int, saved: tuple[str, ...], head_chunk: int | None = None
    ) -> int:
        """Device bytes that a compute operation needs besides its operands."""
        ...

    def operation_flops(self, operation: Operation) -> int:
        """Matrix FLOPs of one operation, all devices together; 0 for what is no compute."""
        ...


class Tables(NamedTuple):
    """Bytes per device and costs by the rows of a microbatch, as in `Request`."""

    sizes: Callable[[int], ModelSizes]
    costs: Callable[[int], CostModel]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        spec: the model.
        batch_rows, sequence_length: the batch, over all devices.
        sizes: microbatch_rows -> bytes per device, including optimizer state.
        costs: microbatch_rows -> costs.
        capacity: bytes that may be used per tier; an NVMe capacity of 0 closes that tier.
        static_host_bytes: of all masters and gradients, and what else is there whatever is planned.
        microbatches, prefetch, backward_prefetch, interlayer_home, update: fixed where given.
        token_chunk: tokens of a row that blocks compute at a time, in `sizes` and `costs`; None: all of them.
        chunked: for the search to decide that: other chunks -> sizes and costs. None: it is fixed.
        head_chunks: tokens whose logits may exist at once, ascending; one where that is fixed.
        on_nvme: what of every layer lives on NVMe, where that is fixed.
        devices, hosts: devices that share every batch and slab, and the hosts that they are in. Sizes and
            capacities are those of one device, which of its host's memory has its share.
        identity: digest of model and costs, for the cache.
        made_for: what a plan records of all this (see `Plan`).
    """

    spec: ModelSpec
    batch_rows: int
    sequence_length: int
    sizes: Callable[[int], ModelSizes]
    costs: Callable[[int], CostModel]
    capacity: Mapping[Tier, int]
    static_host_bytes: int
    microbatches: int | None = None
    prefetch: int | None = None
    backward_prefetch: int | None = None
    interlayer_home: InterlayerHome | None = None
    update: Update | None = None
    token_chunk: int | None = None
    chunked: Callable[[int], Tables] | None = None
    head_chunks: tuple[int, ...] = HEAD_CHUNKS
    on_nvme: frozenset[Part] | None = None
    devices: int = 1
    hosts: int = 1
    identity: str = ""
    made_for: Mapping[str, str | int | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the batch.

        Raises:
            PlanError: rows or tokens below 1, rows that devices do not divide, or microbatches that rows
                do not fill or devices do not divide.
        """
        for name in ("batch_rows", "sequence_length"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}: must be at least 1, it is {getattr(self, name)}")
        if self.batch_rows % self.devices:
            raise PlanError(f"batch_rows: {self.batch_rows} cannot be split over {self.devices} devices")
        count = self.microbatches
        if count is not None and (count < 1 or leaves_one_empty(self.batch_rows, count)):
            raise PlanError(f"microbatches: {count} cannot be made of {self.batch_rows} rows")
        if count is not None and (each := -(-self.batch_rows // count)) % self.devices:
            raise PlanError(
                f"microbatches: {count} have {each} rows each, "
                f"which {self.devices} devices cannot share equally"
            )

    def in_one_place(self, tier: Tier, device_bytes: int) -> int:
        """Bytes on one device, or on one host for all of its devices, from those of one device."""
        return device_bytes * (1 if tier is Tier.DEVICE else self.devices // self.hosts)

    def at(self, plan: Plan) -> Request:
        """The question with the plan's token chunk fixed."""
        if self.chunked is None:
            return self
        if plan.token_chunk is None or plan.token_chunk == self.token_chunk:
            return dataclasses.replace(self, chunked=None)
        sizes, costs = self.chunked(plan.token_chunk)
        made_for = {**self.made_for, "token_chunk": plan.token_chunk}
        return dataclasses.replace(
            self, sizes=sizes, costs=costs, token_chunk=plan.token_chunk, chunked=None, made_for=made_for
        )

    def token_chunks(self, microbatch_rows: int) -> tuple[int | None, ...]:
        """Chunks to consider, whole rows first: rows that can be cut into microbatches need none."""
        if self.chunked is None or microbatch_rows > self.devices:
            return (self.token_chunk,)
        shorter = [width for width in _TOKEN_CHUNKS if width < self.sequence_length]
        return (None, *shorter) if self.sequence_length > _TOKEN_CHUNKS[1] else (None,)


def microbatch_counts(batch_rows: int, devices: int = 1) -> tuple[int, ...]:
    """Numbers of microbatches in steps of 1.5 to 2, of those the ones that need least padding.

    Where none up to twice the last needs as little as `_MOST_PADDING`, the next that does.
    """
    chosen = [1]
    while chosen[-1] * devices < batch_rows:
        least = math.ceil(1.5 * chosen[-1])
        wanted = range(least, 2 * chosen[-1] + 1)
        found = min((padding_share(batch_rows, count, devices), count) for count in wanted)
        if found[0] > _MOST_PADDING:
            later = range(2 * chosen[-1] + 1, batch_rows // devices + 1)
            found = next((0.0, c) for c in later if padding_share(batch_rows, c, devices) <= _MOST_PADDING)
        chosen.append(found[1])
    return tuple(chosen)


def padding_share(batch_rows: int, microbatches: int, devices: int = 1) -> float:
    """Rows of padding per row of the batch; infinite for microbatches that cannot be made."""
    each = -(-batch_rows // microbatches)
    if each % devices or leaves_one_empty(batch_rows, microbatches):
        return math.inf
    return microbatches * each / batch_rows - 1


def settings_of(request: Request) -> list[Plan]:
    """The settings to consider, plainest first; layers are placeholders."""
    counts = microbatch_counts(request.batch_rows, request.devices)
    if request.microbatches:
        counts = (request.microbatches,)
    interlayer_homes: tuple[InterlayerHome, ...] = (
        (request.interlayer_home,) if request.interlayer_home else ("device", "host")
    )
    prefetches = [
        (request.prefetch or forward, request.backward_prefetch or backward)
        for forward, backward in ((2, 2), (1, 1))
    ]
    # The deferred update waits for less than the immediate one, whatever else is decided.
    update: Update = request.update or "deferred"
    layers = tuple(LayerPlan() for _ in request.spec.layers)
    return [
        Plan(
            model=request.spec.name, architecture=request.spec.architecture,
            **{**request.made_for, "token_chunk": width},
            planner="milp", batch_rows=request.batch_rows,
            sequence_length=request.sequence_length, microbatches=count, prefetch=forward,
            backward_prefetch=backward, reload_ahead=min(2, count), interlayer_home=interlayer_home,
            update=update, layers=layers,
        )
        for interlayer_home, count in itertools.product(interlayer_homes, counts)
        if not (interlayer_home == "host" and count == 1)
        for width in request.token_chunks(-(-request.batch_rows // count))
        for forward, backward in dict.fromkeys(prefetches)
    ]  # fmt: skip


def looser_settings(request: Request, settings: Plan) -> list[Plan]:
    """The same setting with more time for what is copied, for more memory; the loosest first.

    With one more slab on the device, layers that bring much back and layers that bring little back share the
    link. Where a microbatch is a large part of the batch, what one layer sends may take a link longer than
    the next layers compute, too: by layer, offloads make a difference there only.
    """
    depths = ("prefetch", "backward_prefetch")
    deeper = {key: getattr(settings, key) + 1 for key in depths if getattr(request, key) is None}
    longer = dict[str, int]()
    if settings.microbatches <= _COARSE and settings.offload_window < _LONG_OFFLOADS:
        longer["offload_window"] = _LONG_OFFLOADS
    changes = [deeper | longer, *([longer] if deeper and longer else [])]
    return [settings.model_copy(update=change) for change in changes if change]


def problem_of(request: Request, settings: Plan, *, lean: bool = False) -> Problem:
    """The layer decisions that are open under `settings`.

    Args:
        lean: nothing is kept inside layers and no slab stays: what matters to whether anything fits.
    """
    request = request.at(settings)
    costs, sizes = request.costs(settings.microbatch_rows), request.sizes(settings.microbatch_rows)
    below = [link.lower for link in LINKS[1:] if request.capacity[link.lower] > 0]
    return Problem(
        settings=settings,
        sizes=sizes,
        seconds=costs.operation_seconds,
        saves=(({},),) * len(request.spec.layers) if lean else _saves(request),
        capacity=request.capacity,
        static_host_bytes=request.static_host_bytes,
        working_bytes=costs.working_bytes,
        contention=costs.contention,
        longest_segment=LONGEST_SEGMENT,
        boundary_homes=(Tier.DEVICE, Tier.HOST, *below),
        state_home=below[-1] if below else Tier.HOST,
        owned_sets=_owned_sets(request, sizes),
        residents=not lean,
        head_chunks=distinct_head_chunks(
            request.head_chunks,
            costs,
            head=len(request.spec.layers) - 1,
            device_rows=settings.microbatch_rows // request.devices,
            sequence_length=request.sequence_length,
        ),
        kinds=tuple(layer.kind for layer in request.spec.layers),
    )


def distinct_head_chunks(
    allowed: Sequence[int], costs: CostModel, *, head: int, device_rows: int, sequence_length: int
) -> tuple[int, ...]:
    """Of these numbers those that differ: with less memory below the usual one, and faster above it.

    The usual one is what plans of rules have; where it is allowed, it stays open, to start from.

    Args:
        head: number of the last layer.
        device_rows, sequence_length: of a microbatch, on one device.
    """

    def chunks(tokens: int) -> int:
        return balanced_chunks(device_rows, sequence_length, tokens).number

    def seconds(tokens: int) -> float:
        return costs.operation_seconds(
            Operation(0, Action.LOSS, Resource.COMPUTE, head, 0, 0, accumulates=True, head_chunk=tokens)
        )

    usual = HEAD_CHUNK if HEAD_CHUNK in allowed else allowed[0]
    kept = [usual]
    for tokens in sorted(allowed):
        if tokens > usual and chunks(tokens) < chunks(kept[-1]) and seconds(tokens) < seconds(kept[-1]):
            kept.append(tokens)
    needed = functools.partial(costs.working_bytes, Action.LOSS, head, ())
    for tokens in sorted(allowed, reverse=True):
        if tokens < usual and chunks(tokens) > chunks(kept[0]) and needed(tokens) < needed(kept[0]):
            kept.insert(0, tokens)
    return tuple(kept)


def _owned_sets(request: Request, sizes: ModelSizes) -> tuple[frozenset[Part], ...]:
    """What of a layer may live on a drive together, from what moves least for the room it makes.

    State, the low half and the gradient go down and up once a step; the high half comes up again for the
    backward pass. What the host has plenty of room for stays there: it would only slow the search down.
    """
    if request.on_nvme is not None:
        return (request.on_nvme,)
    layers, capacity = range(len(sizes.layers)), request.capacity[Tier.HOST]
    total = {part: sum(sizes.owned_bytes(layer, part) for layer in layers) for part in Part}
    if not total[Part.STATE] and sum(total.values()) <= _PLENTY * capacity:
        return (frozenset(),)
    sets = [frozenset[Part](), frozenset([Part.STATE])]
    if sum(total.values()) > _PLENTY * capacity:
        sets += [sets[-1] | {Part.LO}, sets[-1] | {Part.LO, Part.GRADIENT}]
        most = max(sum(sizes.owned_bytes(layer, part) for part in Part) for layer in layers)
        if total[Part.HI] + STATE_WINDOW * most > _PLENTY * capacity:
            sets.append(frozenset(Part))
    return tuple(sets)


def _saves(request: Request) -> tuple[tuple[Mapping[str, Tier], ...], ...]:
    """Ways to keep residuals, the same for every microbatch size: which pay hardly depends on it."""
    usual = request.costs(max(1, _USUAL_TOKENS // request.sequence_length) * request.devices)
    kinds = dict.fromkeys(layer.kind for layer in request.spec.layers[1:-1])
    sets = {kind: [found.names for found in usual.save_sets(kind)] for kind in kinds}
    tiers = (Tier.DEVICE, Tier.HOST)
    blocks = [save_options(sets[layer.kind], tiers) for layer in request.spec.layers[1:-1]]
    return (({},), *blocks, ({},))
