"""The operations of a schedule, the buffers they handle and the bytes those take, as plain data.

Memory is counted in list order. What a compute operation frees is free for the operations after
it (the device reuses memory in stream order). What a transfer frees counts until some later
operation waits for that transfer, because only then is it known to be finished.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from lazyjax.planning.plan.document import Plan
from lazyjax.specs import Part, Tier
from lazyjax.timeline import Resource


class Action(enum.StrEnum):
    """What an operation does."""

    FETCH = "fetch"
    FORWARD = "forward"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OFFLOAD = "offload"
    RELOAD = "reload"
    SPILL = "spill"
    LOAD = "load"
    GRADIENT_OUT = "gradient_out"
    UPDATE = "update"
    LOAD_STATE = "load_state"
    SPILL_STATE = "spill_state"
    SPILL_GRADIENT = "spill_gradient"
    LOAD_PARAMETERS = "load_parameters"
    GATHER = "gather"
    REDUCE_SCATTER = "reduce_scatter"


COMPUTE_ACTIONS = frozenset({Action.FORWARD, Action.LOSS, Action.RECOMPUTE, Action.BACKWARD})

RESOURCE_OF = {
    Action.FETCH: Resource.H2D,
    Action.RELOAD: Resource.H2D,
    Action.OFFLOAD: Resource.D2H,
    Action.GRADIENT_OUT: Resource.D2H,
    Action.UPDATE: Resource.CPU,
    Action.LOAD: Resource.NVME_READ,
    Action.LOAD_STATE: Resource.NVME_READ,
    Action.SPILL: Resource.NVME_WRITE,
    Action.LOAD_PARAMETERS: Resource.NVME_READ,
    Action.SPILL_STATE: Resource.NVME_WRITE,
    Action.SPILL_GRADIENT: Resource.NVME_WRITE,
    Action.FORWARD: Resource.COMPUTE,
    Action.LOSS: Resource.COMPUTE,
    Action.RECOMPUTE: Resource.COMPUTE,
    Action.BACKWARD: Resource.COMPUTE,
    Action.GATHER: Resource.INTERCONNECT,
    Action.REDUCE_SCATTER: Resource.INTERCONNECT,
}


class Link(NamedTuple):
    """Moves between a tier and the next one below.

    Attributes:
        down, up: what moving activations over it is called.
        state_down, state_up: the same for optimizer state; None where state never takes that way.
    """

    upper: Tier
    lower: Tier
    down: Action
    up: Action
    state_down: Action | None = None
    state_up: Action | None = None


#: From the device down. A new tier is a member of `Tier`, `Boundary` and `Resource`, and here its operations,
#: their queues and its link.
LINKS: tuple[Link, ...] = (
    Link(Tier.DEVICE, Tier.HOST, Action.OFFLOAD, Action.RELOAD),
    Link(Tier.HOST, Tier.NVME, Action.SPILL, Action.LOAD, Action.SPILL_STATE, Action.LOAD_STATE),
)

#: Updates and the moves of optimizer state.
STATE_ACTIONS = frozenset(
    action
    for action in (Action.UPDATE, *(way for link in LINKS for way in (link.state_down, link.state_up)))
    if action is not None
)

#: Device bytes that an operation needs besides its operands, by action, layer, saved names and head chunk.
WorkingBytes = Callable[[Action, int, tuple[str, ...], int | None], int]


def no_working_bytes(
    action: Action, layer: int, saved: tuple[str, ...], head_chunk: int | None = None
) -> int:
    """Operations that need nothing besides their operands."""
    del action, layer, saved, head_chunk
    return 0


class BufferRole(enum.StrEnum):
    """Roles of buffers."""

    BATCH = "batch"
    PARAMETERS = "parameters"
    INPUT = "input"
    INPUT_GRADIENT = "input_gradient"
    RESIDUAL = "residual"
    ACCUMULATOR = "accumulator"
    GRADIENT = "gradient"
    STATE = "state"
    LO = "lo"
    HI = "hi"
    WHOLE = "whole"
    PARTIAL = "partial"


#: What a layer owns, as a buffer; on the device only the gradient is one of these.
ROLE_OF = {
    Part.STATE: BufferRole.STATE,
    Part.LO: BufferRole.LO,
    Part.GRADIENT: BufferRole.GRADIENT,
    Part.HI: BufferRole.HI,
}


class Buffer(NamedTuple):
    """A tensor (or slab) by role; `microbatch` is -1 where it belongs to the whole batch."""

    role: BufferRole
    layer: int
    microbatch: int = -1
    name: str = ""


class Place(NamedTuple):
    """A buffer on a tier."""

    buffer: Buffer
    tier: Tier


class Allocation(NamedTuple):
    """A buffer that comes into being on a tier."""

    place: Place
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes per device of what one layer handles; activations are those of one microbatch.

    Attributes:
        parameter_bytes: the streamed slab.
        accumulator_bytes: the fp32 gradient accumulator.
        gradient_bytes: the gradient slab that leaves the device.
        input_bytes: the layer's input (0 for the embedding, whose input is the batch).
        residual_bytes: by name.
        state_bytes: optimizer state on the host or NVMe.
        half_bytes: of each half of the master weights there.
    """

    parameter_bytes: int
    accumulator_bytes: int
    gradient_bytes: int
    input_bytes: int
    residual_bytes: Mapping[str, int]
    state_bytes: int = 0
    half_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of all layers and of one microbatch of the batch arrays.

    Attributes:
        tied: whether head and embedding share a table.
        both_halves: whether a fetch takes both halves of the master weights (float32 compute).
        devices: that share every slab. Where there are several, kernels take parameters that were gathered
            from all of them (`BufferRole.WHOLE`), and leave gradients of their own rows of a whole layer
            (`BufferRole.PARTIAL`), which are summed and scattered.
    """

    layers: tuple[LayerSizes, ...]
    batch_bytes: int
    tied: bool
    both_halves: bool = False
    devices: int = 1

    @property
    def shared(self) -> bool:
        """Whether a device holds only a part of every slab."""
        return self.devices > 1

    @property
    def kernel_parameters(self) -> BufferRole:
        """What kernels take as the parameters of a layer."""
        return BufferRole.WHOLE if self.shared else BufferRole.PARAMETERS

    @property
    def fetched(self) -> tuple[Part, ...]:
        """The parts that a fetch reads."""
        return (Part.HI, Part.LO) if self.both_halves else (Part.HI,)

    def owned_bytes(self, layer: int, part: Part) -> int:
        """Bytes of what a layer owns."""
        return self.of(Buffer(ROLE_OF[part], layer))

    def of(self, buffer: Buffer) -> int:
        """Bytes of `buffer`."""
        layer = self.layers[buffer.layer]
        match buffer.role:
            case BufferRole.BATCH:
                return self.batch_bytes
            case BufferRole.PARAMETERS:
                return layer.parameter_bytes
            case BufferRole.INPUT | BufferRole.INPUT_GRADIENT:
                return layer.input_bytes
            case BufferRole.RESIDUAL:
                return layer.residual_bytes[buffer.name]
            case BufferRole.ACCUMULATOR:
                return layer.accumulator_bytes
            case BufferRole.GRADIENT:
                return layer.gradient_bytes
            case BufferRole.STATE:
                return layer.state_bytes
            case BufferRole.LO | BufferRole.HI:
                return layer.half_bytes
            case BufferRole.WHOLE:
                return self.devices * layer.parameter_bytes
            case BufferRole.PARTIAL:
                return self.devices * layer.accumulator_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One entry of the schedule.

    Attributes:
        index: position in the list.
        window: the window that the operation serves.
        waits: operations of this step that must be finished before this one starts.
        waits_previous: the same, of the step before.
        reads: device buffers used.
        allocates, frees: see the module's docstring.
        bytes: moved, for transfers; of collectives those of whole layers, of which a device has its part.
        saved: names of the residuals that a forward writes or a backward reads.
        head_chunk: of a loss: tokens whose logits exist at once.
        accumulates: adds to an existing gradient accumulator.
        last: the layer's last microbatch in this direction; a backward then emits the gradient.
    """

    index: int
    action: Action
    resource: Resource
    layer: int
    microbatch: int | None
    window: int
    waits: tuple[int, ...] = ()
    waits_previous: tuple[int, ...] = ()
    reads: tuple[Buffer, ...] = ()
    allocates: tuple[Allocation, ...] = ()
    frees: tuple[Place, ...] = ()
    bytes: int = 0
    saved: tuple[str, ...] = ()
    accumulates: bool = False
    last: bool = False
    head_chunk: int | None = None


def shows_free(waiting: Action, waited: Action) -> bool:
    """Whether memory counts as free when an operation has waited for the one that gives it up.

    What moves between a layer's home and the host is counted by the operation that the bound on copies
    under way holds up: others wait for the same move under conditions that no sum over decisions can weigh.
    """
    match waited:
        case Action.SPILL_STATE:
            return waiting is Action.LOAD_STATE
        case Action.SPILL_GRADIENT:
            return waiting is Action.GRADIENT_OUT
        case Action.GRADIENT_OUT:
            return waiting is not Action.SPILL_GRADIENT
        case Action.REDUCE_SCATTER:
            return waiting in COMPUTE_ACTIONS
        case _:
            return True


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The operations of one steady-state step of `plan`."""

    plan: Plan
    sizes: ModelSizes
    operations: tuple[Operation, ...]

    def live_bytes(self) -> Iterator[tuple[int, dict[Tier, int]]]:
        """Per operation: its index and the bytes live on each tier right after it was issued."""
        live: Counter[Tier] = Counter()
        pending: dict[int, tuple[Place, ...]] = {}
        for operation in self.operations:
            for waited in operation.waits:
                if shows_free(operation.action, self.operations[waited].action):
                    for place in pending.pop(waited, ()):
                        live[place.tier] -= self.sizes.of(place.buffer)
            for allocation in operation.allocates:
                live[allocation.place.tier] += allocation.bytes
            yield operation.index, {tier: live[tier] for tier in Tier}
            if operation.resource is Resource.COMPUTE:
                for place in operation.frees:
                    live[place.tier] -= self.sizes.of(place.buffer)
            elif operation.frees:
                pending[operation.index] = operation.frees

    def peak_bytes(self) -> dict[Tier, int]:
        """The most bytes live at once on each tier (activations, slabs on the device)."""
        peak = dict.fromkeys(Tier, 0)
        for _, live in self.live_bytes():
            peak = {tier: max(peak[tier], live[tier]) for tier in Tier}
        return peak
