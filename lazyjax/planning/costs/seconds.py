"""Seconds and working sets of every operation of a schedule, for one microbatch size.

Work comes from the template (`lazyjax.planning.costs.layers`) or from a description of a model that
has none (`lazyjax.planning.costs.described`); rates come from a hardware profile. Measured seconds of
compiled kernels replace predicted ones where they are given. Links are taken to be busy in both
directions, so each runs at its rate times the profile's duplex factor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from lazyjax.hardware.profile import HardwareProfile
from lazyjax.models.attention import layout_of, writes_out
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.base import HostOptimizer, touched_bytes
from lazyjax.planning.costs.layers import (
    CallShape,
    SaveSet,
    backward_graph,
    forward_graph,
    loss_graph,
    save_sets,
)
from lazyjax.planning.costs.packing import Packing
from lazyjax.planning.costs.sizes import model_sizes
from lazyjax.planning.costs.trace import Kernel, Work, saved_in_order
from lazyjax.planning.program.contention import Contention
from lazyjax.planning.program.schedule import (
    COMPUTE_ACTIONS,
    Action,
    BufferRole,
    ModelSizes,
    Operation,
    Schedule,
)
from lazyjax.specs import ModelSpec, SlabLayout, item_bytes, slab_layout


class CostError(ValueError):
    """A profile lacks a figure that the plan needs; the message names it."""


class MeasuredKey(NamedTuple):
    """One compiled kernel.

    Attributes:
        kind: of the layer.
        phase: `FORWARD` (also for recomputed boundaries), `BACKWARD` or `LOSS`.
        saved: names it saves or reads, sorted.
        accumulates, last: as in `schedule.Operation`; False for forward calls.
        head_chunk: of a loss, tokens whose logits exist at once.
    """

    kind: str
    phase: Action
    saved: tuple[str, ...] = ()
    accumulates: bool = False
    last: bool = False
    head_chunk: int | None = None

    @property
    def without_gradient(self) -> tuple[str, Action, tuple[str, ...], int | None]:
        """The kernel, whatever it does with gradients."""
        return self.kind, self.phase, self.saved, self.head_chunk


@runtime_checkable
class WorkSource(Protocol):
    """Where the work of a layer kind's kernels comes from, for one microbatch on one device."""

    def work(self, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None = None) -> Work:
        """Kernels of a forward (also recompute), loss or backward call."""
        ...

    def working_bytes(
        self, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None = None
    ) -> int:
        """Device bytes besides operands and results."""
        ...

    def save_sets(self, kind: str, seconds: Callable[[Work], float]) -> tuple[SaveSet, ...]:
        """Sets of residuals worth keeping, the empty one first."""
        ...


@dataclasses.dataclass(frozen=True)
class TemplateWork:
    """Work read off a template's traced kernels."""

    template: ModelTemplate
    shape: CallShape
    device_rows: int

    def work(self, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None = None) -> Work:
        """See `WorkSource`."""
        return _work_of(self, kind, phase, saved, head_chunk)[0]

    def working_bytes(
        self, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None = None
    ) -> int:
        """Materialised intermediate values at their peak: the stated model, not XLA's own count."""
        return _work_of(self, kind, phase, saved, head_chunk)[1]

    def save_sets(self, kind: str, seconds: Callable[[Work], float]) -> tuple[SaveSet, ...]:
        """See `lazyjax.planning.costs.layers.save_sets`."""
        layer_kind = self.template.kinds[kind]
        if not layer_kind.residual_names:
            return (SaveSet((), 0, seconds(self.work(kind, Action.BACKWARD, ()))),)
        return save_sets(layer_kind, self.shape, self.device_rows, seconds)


@functools.lru_cache(maxsize=4096)
def _work_of(
    source: TemplateWork, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None
) -> tuple[Work, int]:
    layer_kind = source.template.kinds[kind]
    ordered = saved_in_order(layer_kind.residual_names, saved)
    match phase:
        case Action.FORWARD:
            graph = forward_graph(layer_kind, source.shape, source.device_rows, ordered)
        case Action.RECOMPUTE:
            graph = forward_graph(layer_kind, source.shape, source.device_rows)
        case Action.BACKWARD:
            graph = backward_graph(layer_kind, source.shape, source.device_rows, ordered)
        case Action.LOSS:
            assert head_chunk is not None
            graph = loss_graph(source.template, source.shape, source.device_rows, head_chunk)
        case _:
            raise ValueError(f"{phase.value} is no compute operation")
    return graph.work(), graph.peak_bytes()


@dataclasses.dataclass(frozen=True)
class Costs:
    """What every operation costs under one profile, for microbatches of one size.

    Attributes:
        spec: the model.
        profile: rates and capacities.
        optimizer: name of the host optimizer.
        update_bytes: that it reads and writes per parameter.
        microbatch_rows, sequence_length: of one microbatch, over all devices.
        sizes: bytes per device, optimizer state included.
        source: work of the compute operations.
        measured: seconds of kernels that were timed on the device in use.
        measured_working_bytes: what XLA's memory analysis says these kernels need.
    """

    spec: ModelSpec
    profile: HardwareProfile
    optimizer: str
    update_bytes: float
    microbatch_rows: int
    sequence_length: int
    sizes: ModelSizes
    source: WorkSource
    measured: Mapping[MeasuredKey, float] = dataclasses.field(default_factory=dict)
    measured_working_bytes: Mapping[MeasuredKey, int] = dataclasses.field(default_factory=dict)
    _known: dict[MeasuredKey, float] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    _known_sets: dict[str, Sequence[SaveSet]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def operation_seconds(self, operation: Operation) -> float:
        """Seconds of one operation of a schedule.

        Raises:
            CostError: the profile does not say how fast NVMe is.
        """
        profile = self.profile
        match operation.action:
            case Action.FETCH:
                return operation.bytes / profile.slab_rate()
            case Action.RELOAD:
                return operation.bytes / profile.h2d_rate()
            case Action.OFFLOAD | Action.GRADIENT_OUT:
                return operation.bytes / profile.d2h_rate()
            case Action.GATHER | Action.REDUCE_SCATTER:
                return profile.collective_seconds(operation.bytes)
            case Action.LOAD | Action.LOAD_STATE | Action.LOAD_PARAMETERS:
                # Of what an update reads, the gradient alone is not written back.
                spent = _gradient_bytes(operation)
                beside_writes = _nvme_seconds(profile, operation.bytes - spent, "read")
                return beside_writes + _nvme_seconds(profile, spent, "read", alone=True)
            case Action.SPILL | Action.SPILL_STATE | Action.SPILL_GRADIENT:
                return _nvme_seconds(profile, operation.bytes, "write")
            case Action.UPDATE:
                return self.update_seconds(operation.layer)
            case _:
                return self._compute_seconds(operation)

    @property
    def contention(self) -> Contention:
        """What resources lose to each other on this machine."""
        return _contention(self.profile)

    def update_seconds(self, layer: int) -> float:
        """Seconds of one layer's host update, the shards of all devices of a host."""
        elements = self.sizes.layers[layer].accumulator_bytes // 4 * self.profile.devices_per_host
        return elements / self.profile.update_parameters_per_second(self.optimizer, self.update_bytes)

    def save_sets(self, kind: str) -> Sequence[SaveSet]:
        """Sets of residuals worth keeping in layers of `kind`, the empty one first."""
        if kind not in self._known_sets:
            self._known_sets[kind] = self.source.save_sets(
                kind, functools.partial(_work_seconds, self.profile)
            )
        return self._known_sets[kind]

    def working_bytes(
        self, action: Action, layer: int, saved: tuple[str, ...], head_chunk: int | None = None
    ) -> int:
        """Device bytes that a compute operation needs besides its operands and results."""
        name, names = self.spec.layers[layer].kind, tuple(sorted(saved))
        phase = Action.FORWARD if action is Action.RECOMPUTE else action
        wanted = (name, phase, names, head_chunk)
        known = [size for key, size in self.measured_working_bytes.items() if key.without_gradient == wanted]
        return max(known) if known else self.source.working_bytes(name, action, names, head_chunk)

    def operation_flops(self, operation: Operation) -> int:
        """Matrix FLOPs of one operation, all devices together; 0 for what is no compute."""
        if operation.action not in COMPUTE_ACTIONS:
            return 0
        kind = self.spec.layers[operation.layer].kind
        work = self.source.work(kind, operation.action, operation.saved, operation.head_chunk)
        return work.flops * self.profile.devices

    def executed_flops(self, schedule: Schedule) -> int:
        """Matrix FLOPs of a step as executed: with attention and with what is recomputed."""
        return sum(self.operation_flops(operation) for operation in schedule.operations)

    def with_measured(
        self, seconds: Mapping[MeasuredKey, float], working_bytes: Mapping[MeasuredKey, int] | None = None
    ) -> Costs:
        """These costs with measured seconds per call, and working sets, in place of predicted ones.

        A kernel that was not timed takes its prediction times the mean ratio of measured to
        predicted seconds of the timed kernels of the same kind and phase.
        """
        return dataclasses.replace(
            self,
            measured={**self.measured, **_sorted_names(seconds)},
            measured_working_bytes={**self.measured_working_bytes, **_sorted_names(working_bytes or {})},
            _known={},
            _known_sets={},
        )

    def with_profile(self, profile: HardwareProfile) -> Costs:
        """The same work on other hardware; measured seconds are dropped."""
        return dataclasses.replace(
            self, profile=profile, measured={}, measured_working_bytes={}, _known={}, _known_sets={}
        )

    def _compute_seconds(self, operation: Operation) -> float:
        key = measured_key(operation, self.spec)
        if key not in self._known:
            self._known[key] = self._measured_or_predicted(key, operation.layer)
        return self._known[key]

    def _measured_or_predicted(self, key: MeasuredKey, layer: int) -> float:
        if key in self.measured:
            return self.measured[key]
        predicted = self._predicted(key, layer)
        alike = [other for other in self.measured if (other.kind, other.phase) == (key.kind, key.phase)]
        nearest = [other for other in alike if other.head_chunk == key.head_chunk] or alike
        ratios = [self.measured[other] / self._predicted(other, layer) for other in nearest]
        return predicted * sum(ratios) / len(ratios) if ratios else predicted

    def _predicted(self, key: MeasuredKey, layer: int) -> float:
        """From work and rates. Gradients: reading the accumulator; rounding it and taking its norm."""
        moved = 0
        if key.phase in (Action.BACKWARD, Action.LOSS):
            own = self.sizes.layers[layer]
            tied = key.phase is Action.LOSS and self.sizes.tied
            table_bytes = self.sizes.layers[0].accumulator_bytes if tied else 0
            moved = (own.accumulator_bytes + table_bytes) * key.accumulates
            moved += 2 * own.gradient_bytes * key.last
            if self.sizes.shared:
                # The gradient of the whole layer is written for the sum over devices.
                moved = (own.accumulator_bytes + table_bytes) * self.sizes.devices
        gradients = _work_seconds(self.profile, Work({Kernel(0, moved): 1}))
        work = self.source.work(key.kind, key.phase, key.saved, key.head_chunk)
        return _work_seconds(self.profile, work) + gradients


def _contention(profile: HardwareProfile) -> Contention:
    if profile.devices == 1:
        return Contention(profile.update_contention, profile.copy_contention)
    others = (profile.devices_per_host - 1) / profile.host_bandwidth_bytes_per_second
    return Contention(
        profile.update_contention,
        profile.copy_contention,
        profile.collective_contention,
        updates_to_h2d=others * profile.h2d_rate(),
        updates_to_d2h=others * profile.d2h_rate(),
    )


def _work_seconds(profile: HardwareProfile, work: Work) -> float:
    return work.seconds(
        profile.matmul_flops_per_second,
        profile.device_bandwidth_bytes_per_second,
        profile.kernel_launch_seconds,
    )


def _gradient_bytes(operation: Operation) -> int:
    """Of what an operation brings up."""
    brought = operation.allocates
    return sum(one.bytes for one in brought if one.place.buffer.role is BufferRole.GRADIENT)


def _nvme_seconds(
    profile: HardwareProfile, device_bytes: int, direction: Literal["read", "write"], *, alone: bool = False
) -> float:
    """Seconds for the shards of a host's devices, while as much goes the other way, or nothing (`alone`)."""
    figure = f"nvme_{direction}_bytes_per_second"
    rate: float | None = getattr(profile, figure)
    if rate is None:
        raise CostError(f"profile {profile.name}: the plan uses NVMe, {figure} is missing")
    if profile.nvme_shared_bytes_per_second is not None and not alone:
        rate = min(rate, profile.nvme_shared_bytes_per_second / 2)
    return device_bytes * profile.devices_per_host / rate


def measured_key(operation: Operation, spec: ModelSpec) -> MeasuredKey:
    """The compiled kernel that a compute operation calls."""
    kind = spec.layers[operation.layer].kind
    names = tuple(sorted(operation.saved))
    if operation.action in (Action.FORWARD, Action.RECOMPUTE):
        return MeasuredKey(kind, Action.FORWARD, names)
    return MeasuredKey(
        kind, operation.action, names, operation.accumulates, operation.last, operation.head_chunk
    )


def _sorted_names[Value](measured: Mapping[MeasuredKey, Value]) -> dict[MeasuredKey, Value]:
    return {key._replace(saved=tuple(sorted(key.saved))): value for key, value in measured.items()}


def template_costs(
    template: ModelTemplate,
    profile: HardwareProfile,
    *,
    microbatch_rows: int,
    sequence_length: int,
    optimizer: HostOptimizer,
    compute_dtype: str = "bfloat16",
    gradient_dtype: str = "bfloat16",
    packing: Packing | None = None,
) -> Costs:
    """Costs of microbatches of `microbatch_rows` (over all devices) x `sequence_length` tokens.

    Args:
        packing: of rows with several segments, to each of which attention is confined; None: rows are one.
    """
    devices = profile.devices
    sizes = model_sizes(
        template,
        microbatch_rows=microbatch_rows,
        sequence_length=sequence_length,
        compute_dtype=compute_dtype,
        gradient_dtype=gradient_dtype,
        devices=devices,
    )
    shape = CallShape(template.spec.hidden_size, sequence_length, compute_dtype)
    if packing is not None and not writes_out(layout_of(sequence_length), for_cpu=profile.platform == "cpu"):
        shape = shape._replace(visits=packing.visits(sequence_length, microbatch_rows, devices))
    return Costs(
        spec=template.spec,
        profile=profile,
        optimizer=optimizer.name,
        update_bytes=touched_bytes(optimizer, gradient_dtype),
        microbatch_rows=microbatch_rows,
        sequence_length=sequence_length,
        sizes=with_state_bytes(sizes, template.spec, optimizer, devices=devices),
        source=TemplateWork(template, shape, microbatch_rows // devices),
    )


def with_state_bytes(
    sizes: ModelSizes, spec: ModelSpec, optimizer: HostOptimizer, *, devices: int = 1
) -> ModelSizes:
    """The sizes with each layer's optimizer state: a device's share."""
    layers = tuple(
        dataclasses.replace(layer, state_bytes=_state_bytes(layout, optimizer) // devices)
        for layer, layout in zip(sizes.layers, _layouts(spec, devices), strict=True)
    )
    return dataclasses.replace(sizes, layers=layers)


def static_host_bytes(spec: ModelSpec, *, gradient_dtype: str = "bfloat16", devices: int = 1) -> int:
    """Host bytes of the split master weights and the gradient slabs, without optimizer state."""
    per_element = 4 + item_bytes(gradient_dtype)
    return sum(layout.length * per_element for layout in _layouts(spec, devices))


def model_flops(spec: ModelSpec, batch_rows: int, sequence_length: int) -> int:
    """6 N tokens: the convention of MegaTrain and LazyTrain (padding counts, attention does not)."""
    return 6 * spec.parameter_count * batch_rows * sequence_length


def _layouts(spec: ModelSpec, devices: int) -> list[SlabLayout]:
    return [slab_layout(layer.parameters, devices=devices) for layer in spec.layers]


def _state_bytes(layout: SlabLayout, optimizer: HostOptimizer) -> int:
    described = optimizer.describe_state(layout).values()
    return sum(item_bytes(dtype) * functools.reduce(int.__mul__, shape, 1) for shape, dtype in described)
