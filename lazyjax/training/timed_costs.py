"""Costs of every microbatch size from kernels that are timed on the device for one or two of them.

Compiling is what takes long, so not every size is timed. Kernels of other sizes take their
prediction times the ratio of measured to predicted seconds at the timed sizes. Between two timed
sizes that ratio is linear in 1 / microbatch_rows: a fixed part of every call (launches, small arrays) weighs
less the more rows there are. Working sets, where the device tells them, follow in the same way.
Nor is every kernel of a timed size: what accumulating a gradient adds to a backward call is timed
where nothing was saved, and holds where everything was.

It knows no configuration and decides no plan.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax

from lazyjax.execution.calibrate import Calibration, calibrate
from lazyjax.execution.kernels import Kernels
from lazyjax.models.template import ModelTemplate
from lazyjax.planning.costs.packing import Packing
from lazyjax.planning.costs.seconds import Costs, MeasuredKey, measured_key
from lazyjax.planning.plan.baselines import keep_all, recompute_all
from lazyjax.planning.plan.document import HEAD_CHUNK, Plan
from lazyjax.planning.planner.question import distinct_head_chunks, microbatch_counts
from lazyjax.planning.program.schedule import COMPUTE_ACTIONS, Action, Operation, build_schedule
from lazyjax.training.status import Advance

#: A kernel whatever it does with gradients: layer kind, phase, saved names, head chunk.
_Group = tuple[str, Action, tuple[str, ...], int | None]


#: Calls of a kernel while it is timed: one that compiles, three repeats of two.
_CALLS = 7
#: Seconds for compiling one kernel, roughly.
_COMPILE_SECONDS = 1.5


def timed_rows(
    batch_rows: int,
    *,
    microbatches: int | None = None,
    devices: int = 1,
    fits: Callable[[int], bool] = lambda size: True,
) -> tuple[int, ...]:
    """Microbatch sizes to time for a batch of `batch_rows`: the only one, or the smallest and the largest.

    Args:
        fits: whether the kernels of microbatches of a size can be called at all; larger ones than that
            cannot be in a plan either.
    """
    if microbatches is not None:
        return (-(-batch_rows // microbatches),)
    sizes = sorted({-(-batch_rows // count) for count in microbatch_counts(batch_rows, devices)})
    largest = next((size for size in reversed(sizes) if fits(size)), sizes[0])
    return tuple(sorted({sizes[0], largest}))


def kernel_bytes(costs: Costs, head_chunk: int = HEAD_CHUNK) -> int:
    """Device bytes of the largest kernel call that is timed, with operands and results."""
    layers = costs.sizes.layers
    most = 0
    for index, layer in enumerate(layers):
        is_head, names = index == len(layers) - 1, tuple(layer.residual_bytes)
        action, tokens = (Action.LOSS, head_chunk) if is_head else (Action.BACKWARD, None)
        operands = layer.parameter_bytes + layer.accumulator_bytes + layer.gradient_bytes
        if costs.sizes.shared:
            # The whole layer, and the gradient of a device's own rows.
            operands = costs.sizes.devices * (layer.parameter_bytes + layer.accumulator_bytes)
        activations = 4 * max(size.input_bytes for size in layers) + sum(layer.residual_bytes.values())
        most = max(most, operands + activations + costs.working_bytes(action, index, names, tokens))
    return most


#: Rows of a microbatch -> tokens whose logits may exist at once.
HeadChunks = Callable[[int], Sequence[int]]


def usual_head_chunk(microbatch_rows: int) -> tuple[int]:
    """That of plans that rules make."""
    del microbatch_rows
    return (HEAD_CHUNK,)


def timed_head_chunks(
    predicted: Callable[[int], Costs], allowed: Sequence[int], device_bytes: int, microbatch_rows: int
) -> tuple[int, ...]:
    """The head's chunks worth timing: the usual one, and larger ones whose kernels fit the device."""
    costs = predicted(microbatch_rows)
    distinct = distinct_head_chunks(
        allowed,
        costs,
        head=len(costs.spec.layers) - 1,
        device_rows=microbatch_rows // costs.profile.devices,
        sequence_length=costs.sequence_length,
    )
    first, *more = [tokens for tokens in distinct if len(allowed) == 1 or tokens >= HEAD_CHUNK]
    return (first, *(tokens for tokens in more if kernel_bytes(costs, tokens) <= device_bytes))


def timing_seconds(
    predicted: Callable[[int], Costs],
    template: ModelTemplate,
    sizes: Sequence[int],
    *,
    batch_rows: int,
    head_chunks: HeadChunks = usual_head_chunk,
) -> float:
    """About how long `time_kernels` takes: compiling, and calls as long as the rates say."""
    return sum(
        _COMPILE_SECONDS + _CALLS * predicted(size).operation_seconds(operation)
        for size, by_key in _operations(predicted, template, sizes, batch_rows, head_chunks).items()
        for key, operation in by_key.items()
        if not _follows(key)
    )


def _operations(
    predicted: Callable[[int], Costs],
    template: ModelTemplate,
    sizes: Sequence[int],
    batch_rows: int,
    head_chunks: HeadChunks,
) -> dict[int, dict[MeasuredKey, Operation]]:
    """Rows of a microbatch -> kernel -> an operation that calls it, of two opposite plans a head chunk."""
    names = [template.kind(index).residual_names for index in range(len(template.spec.layers))]
    operations: dict[int, dict[MeasuredKey, Operation]] = {}
    for size in sizes:
        costs = predicted(size)
        batch = {
            "batch_rows": batch_rows,
            "sequence_length": costs.sequence_length,
            "microbatches": -(-batch_rows // size),
        }
        operations[size] = {
            measured_key(operation, template.spec): operation
            for tokens, planner in itertools.product(head_chunks(size), (recompute_all, keep_all))
            for operation in _schedule(planner(template.spec, names, **batch, head_chunk=tokens), costs)
            if operation.action in COMPUTE_ACTIONS
        }
    return operations


def _schedule(plan: Plan, costs: Costs) -> tuple[Operation, ...]:
    return build_schedule(plan, costs.sizes).operations


@dataclasses.dataclass(frozen=True)
class TimedSize:
    """What was measured of microbatches of one size, and the operation that each kernel was timed for."""

    microbatch_rows: int
    operations: Mapping[MeasuredKey, Operation]
    found: Calibration


def time_kernels(
    predicted: Callable[[int], Costs],
    kernels: Kernels,
    sizes: Sequence[int],
    *,
    batch_rows: int,
    packing: Packing | None = None,
    head_chunks: HeadChunks = usual_head_chunk,
    advance: Advance = lambda what, done, total: None,
) -> tuple[TimedSize, ...]:
    """Times the kernels that two opposite plans call, one that recomputes all and one that keeps all.

    Args:
        predicted: microbatch_rows -> costs from rates.
        sizes: rows of the microbatches to time.
        batch_rows: of the batch.
        packing: of its rows, where they are packed.
        head_chunks: of the losses to time.
    """
    operations = _operations(predicted, kernels.template, sizes, batch_rows, head_chunks)
    total, done = sum(not _follows(key) for by_key in operations.values() for key in by_key), 0
    timed = []
    for size, by_key in operations.items():

        def progress(key: MeasuredKey, size: int = size) -> None:
            nonlocal done
            advance(f"timing kernels of microbatches of {size} rows", done, total)
            done += 1

        tokens = predicted(size).sequence_length
        segments = None if packing is None else packing.representative(tokens, size, kernels.devices)
        found = calibrate(
            kernels,
            [key for key in by_key if not _follows(key)],
            microbatch_rows=size,
            sequence_length=tokens,
            segment_ids_BT=segments,
            repeats=3,
            microbatches=-(-batch_rows // size),
            # A CPU's device memory is the host's: its scratch is not worth compiling everything twice.
            working_sets=jax.default_backend() != "cpu",
            progress=progress,
        )
        timed.append(TimedSize(size, by_key, _completed(found, by_key)))
    return tuple(timed)


def _follows(key: MeasuredKey) -> bool:
    """Whether a kernel is not timed: it accumulates and reads residuals."""
    return key.accumulates and bool(key.saved)


def _completed(found: Calibration, keys: Iterable[MeasuredKey]) -> Calibration:
    """With the kernels that follow: what accumulating adds to a call without residuals is added."""
    seconds, working_bytes = dict(found.seconds), dict(found.working_bytes)
    for key in filter(_follows, keys):
        first = key._replace(accumulates=False, last=False)
        with_gradient, plain = key._replace(saved=()), first._replace(saved=())
        added = found.seconds[with_gradient] - found.seconds[plain]
        seconds[key] = found.seconds[first] + max(0.0, added)
        if first in found.working_bytes:
            more = found.working_bytes[with_gradient] - found.working_bytes[plain]
            working_bytes[key] = found.working_bytes[first] + max(0, more)
    return Calibration(seconds, working_bytes)


def timed_costs(
    predicted: Callable[[int], Costs], timed: Sequence[TimedSize], *, microbatch_rows: int
) -> Costs:
    """Costs of microbatches of `microbatch_rows`: as measured where they were timed, or else in proportion.

    Sets of residuals between nothing and everything take their prediction, scaled as those two
    were (`Costs.with_measured`).

    Args:
        predicted: microbatch_rows -> costs from rates.
        timed: what `time_kernels` gives; at least one size, in ascending order.
    """
    costs = predicted(microbatch_rows)
    for size in timed:
        if size.microbatch_rows == microbatch_rows:
            return costs.with_measured(size.found.seconds, size.found.working_bytes)
    low, high = timed[0], timed[-1]
    small, large = (
        _ratios(predicted(low.microbatch_rows), low),
        _ratios(predicted(high.microbatch_rows), high),
    )
    share = (
        1.0
        if low is high
        else (1 / microbatch_rows - 1 / high.microbatch_rows)
        / (1 / low.microbatch_rows - 1 / high.microbatch_rows)
    )
    share = min(1.0, max(0.0, share))
    seconds, working_bytes = dict[MeasuredKey, float](), dict[MeasuredKey, int]()
    # The smallest microbatches call every kernel; the largest may be the only one of a batch, which
    # accumulates nothing. Head chunks that only the largest has (the smallest has no more tokens) follow it.
    for key, operation in _with_head_chunks(low.operations, high.operations).items():
        group = key.without_gradient
        ratio = _between(small.seconds, large.seconds, group, share)
        seconds[key] = ratio * costs.operation_seconds(operation)
        if group in large.working_bytes:
            ratio = _between(small.working_bytes, large.working_bytes, group, share)
            working_bytes[key] = math.ceil(ratio * max(1, _guessed_bytes(costs, operation)))
    return costs.with_measured(seconds, working_bytes)


class _Ratios(NamedTuple):
    """Measured over predicted figures by group of kernels: the mean of seconds, the largest of bytes."""

    seconds: Mapping[_Group, float]
    working_bytes: Mapping[_Group, float]


def _ratios(costs: Costs, size: TimedSize) -> _Ratios:
    seconds, working_bytes = collections.defaultdict(list), collections.defaultdict(list)
    for key, operation in size.operations.items():
        seconds[key.without_gradient].append(size.found.seconds[key] / costs.operation_seconds(operation))
        if key in size.found.working_bytes:
            guess = _guessed_bytes(costs, operation)
            working_bytes[key.without_gradient].append(size.found.working_bytes[key] / max(1, guess))
    return _Ratios(
        {group: statistics.mean(found) for group, found in seconds.items()},
        {group: max(found) for group, found in working_bytes.items()},
    )


def _guessed_bytes(costs: Costs, operation: Operation) -> int:
    return costs.working_bytes(operation.action, operation.layer, operation.saved, operation.head_chunk)


def _with_head_chunks(
    operations: Mapping[MeasuredKey, Operation], others: Mapping[MeasuredKey, Operation]
) -> dict[MeasuredKey, Operation]:
    """The operations, and their losses with the head chunks of the others as well."""
    chunks = {key.head_chunk for key in others if key.head_chunk is not None}
    return dict(operations) | {
        key._replace(head_chunk=tokens): dataclasses.replace(operation, head_chunk=tokens)
        for key, operation in operations.items()
        for tokens in chunks
        if key.phase is Action.LOSS
    }


def _between(
    small: Mapping[_Group, float], large: Mapping[_Group, float], group: _Group, share: float
) -> float:
    """The ratio of a group, of which `share` is the small end's where that has it."""
    if group not in small or group not in large:
        return (small if group in small else large)[group]
    return share * small[group] + (1 - share) * large[group]
