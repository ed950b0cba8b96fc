"""Kernels of two sizes are timed; those of the others follow from how far predictions were off."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest

from lazyjax.execution import calibrate as calibrate_module
from lazyjax.execution.calibrate import Calibration
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.profile import load_profile
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.packing import packing_of
from lazyjax.planning.costs.seconds import Costs, template_costs
from lazyjax.planning.planner.question import HEAD_CHUNKS
from lazyjax.planning.program.schedule import Action, Operation
from lazyjax.timeline import Resource
from lazyjax.training import timed_costs as module
from lazyjax.training.timed_costs import (
    TimedSize,
    time_kernels,
    timed_costs,
    timed_head_chunks,
    timed_rows,
)
from tests import tiny

BATCH, TOKENS = 8, 12
TEMPLATE = tiny.template("qwen2", tied=True, blocks=2)


@functools.cache
def predicted(rows: int, tokens: int = TOKENS) -> Costs:
    return template_costs(
        TEMPLATE, load_profile("h800-paper"), microbatch_rows=rows, sequence_length=tokens,
        optimizer=make_host_optimizer("fp32_adamw"), compute_dtype="float32", gradient_dtype="float32",
    )  # fmt: skip


@pytest.fixture
def timed(monkeypatch):
    """Both ends, on a device that takes 2 + 3 / microbatch_rows times the prediction and twice the bytes."""

    def calibrate(kernels, keys, *, microbatch_rows, sequence_length, progress, **options):
        seconds, working_bytes = {}, {}
        costs = predicted(microbatch_rows, sequence_length)
        for key in keys:
            progress(key)
            layer = [layer.kind for layer in TEMPLATE.spec.layers].index(key.kind)
            operation = Operation(
                0, key.phase, Resource.COMPUTE, layer, 0, 0,
                saved=key.saved, accumulates=key.accumulates, last=key.last, head_chunk=key.head_chunk,
            )  # fmt: skip
            seconds[key] = (2 + 3 / microbatch_rows) * costs.operation_seconds(operation)
            place = (operation.action, operation.layer, operation.saved, operation.head_chunk)
            guess = costs.working_bytes(*place)
            working_bytes[key] = 2 * max(1, guess)
        return Calibration(seconds, working_bytes)

    monkeypatch.setattr(module, "calibrate", calibrate)

    def make(sizes, costs=predicted, **options) -> tuple[TimedSize, ...]:
        kernels = Kernels(TEMPLATE, data_mesh(), "float32", "float32")
        return time_kernels(costs, kernels, sizes, batch_rows=BATCH, **options)

    return make


def test_the_smallest_and_the_largest_are_timed_or_the_only_one() -> None:
    assert timed_rows(72) == (1, 72)
    assert timed_rows(8, devices=2) == (2, 8)
    assert timed_rows(8, microbatches=2) == (4,)
    assert timed_rows(1) == (1,)


def test_kernels_of_packed_rows_are_timed_on_rows_like_these(monkeypatch) -> None:
    """Segments of a microbatch in the sample, with positions of their own, are what a kernel gets."""
    given = {}

    class Calls(calibrate_module._Calls):
        def __init__(self, kernels, segment_ids_BT):
            super().__init__(kernels, segment_ids_BT)
            given[len(segment_ids_BT)] = self.batch

    monkeypatch.setattr(calibrate_module, "_Calls", Calls)
    monkeypatch.setattr(calibrate_module, "_median_seconds", lambda *arguments: 1e-3)
    kernels = Kernels(TEMPLATE, data_mesh(), "float32", "float32")
    rows = [[5, 3, 4], [6, 5], [12], [1, 2, 3]]
    packing = packing_of([rows, rows])
    time_kernels(predicted, kernels, (1, 4), batch_rows=4, packing=packing)
    segment_ids_BT = np.asarray(given[4].segment_ids_BT)
    assert segment_ids_BT.tolist() == [
        [1] * 5 + [2] * 3 + [3] * 4, [1] * 6 + [2] * 5 + [0], [1] * 12, [1, 2, 2, 3, 3, 3] + [0] * 6,
    ]  # fmt: skip
    assert np.asarray(given[4].positions_BT)[0].tolist() == [*range(5), *range(3), *range(4)]
    assert np.asarray(given[1].segment_ids_BT).tolist() == segment_ids_BT[:1].tolist()
    time_kernels(predicted, kernels, (1,), batch_rows=1)
    assert np.asarray(given[1].segment_ids_BT).tolist() == [[1] * TOKENS]


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_other_sizes_follow_in_proportion(timed, rows: int) -> None:
    ends = timed((1, 8))
    costs = timed_costs(predicted, ends, microbatch_rows=rows)
    for operation in ends[0].operations.values():
        expected = (2 + 3 / rows) * predicted(rows).operation_seconds(operation)
        assert costs.operation_seconds(operation) == pytest.approx(expected)
        place = (operation.action, operation.layer, operation.saved, operation.head_chunk)
        assert costs.working_bytes(*place) == math.ceil(2 * max(1, predicted(rows).working_bytes(*place)))


def test_one_timed_size_scales_all_others_alike(timed) -> None:
    ends = timed((4,))
    costs = timed_costs(predicted, ends, microbatch_rows=2)
    for operation in ends[0].operations.values():
        expected = (2 + 3 / 4) * predicted(2).operation_seconds(operation)
        assert costs.operation_seconds(operation) == pytest.approx(expected)


def test_progress_names_the_size_and_counts_all_kernels(timed) -> None:
    seen = []
    ends = timed((1, 8), advance=lambda what, done, total: seen.append((what, done, total)))
    # At the small end two kernels are not timed: they accumulate and read residuals.
    total = sum(len(size.operations) for size in ends) - 2
    assert [(done, of) for _, done, of in seen] == [(done, total) for done in range(total)]
    assert seen[0][0] == "timing kernels of microbatches of 1 rows"
    assert seen[-1][0] == "timing kernels of microbatches of 8 rows"


def test_chunks_of_the_head_are_timed_where_they_differ(timed) -> None:
    """1 to 8 rows of 512 tokens: only those of the largest microbatches are more than 1024."""
    long = functools.partial(predicted, tokens=512)
    assert timed_head_chunks(long, HEAD_CHUNKS, 10**12, 1) == (1024,)
    assert timed_head_chunks(long, HEAD_CHUNKS, 10**12, 8) == (1024, 4096)
    assert timed_head_chunks(long, HEAD_CHUNKS, 0, 8) == (1024,)
    assert timed_head_chunks(long, (300,), 10**12, 8) == (300,)
    ends = timed((1, 8), long, head_chunks=functools.partial(timed_head_chunks, long, HEAD_CHUNKS, 10**12))
    chunks = [[key.head_chunk for key in end.operations if key.phase is Action.LOSS] for end in ends]
    assert [set(own) for own in chunks] == [{1024}, {1024, 4096}]
    costs = timed_costs(long, ends, microbatch_rows=4)
    for tokens, ratio in ((1024, 2 + 3 / 4), (4096, 2 + 3 / 8)):
        loss = next(o for o in ends[0].operations.values() if o.action is Action.LOSS and o.accumulates)
        loss = dataclasses.replace(loss, head_chunk=tokens)
        assert costs.operation_seconds(loss) == pytest.approx(ratio * long(4).operation_seconds(loss))
        place = (Action.LOSS, loss.layer, (), tokens)
        assert costs.working_bytes(*place) == 2 * long(4).working_bytes(*place)
