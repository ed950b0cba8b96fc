"""Calibration times exactly the kernels that a step calls, and its figures take over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lazyjax.execution import calibrate as calibration
from lazyjax.execution.calibrate import (
    Contention,
    calibrate,
    contended_period,
    kernels_of,
)
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.profile import load_profile
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.seconds import measured_key, template_costs
from lazyjax.planning.plan.baselines import keep_all, recompute_all
from lazyjax.planning.program.schedule import COMPUTE_ACTIONS, Action, build_schedule
from lazyjax.planning.program.simulate import Simulation
from lazyjax.timeline import Event, Resource, Timeline
from tests import tiny

ROWS, TOKENS = 2, 12


@pytest.mark.parametrize("tied", [False, True])
def test_every_kernel_of_the_schedules_is_timed_and_used(tied: bool) -> None:
    template = tiny.template("qwen2", tied=tied, blocks=1)
    names = tiny.residual_names(template)
    costs = template_costs(
        template, load_profile("h800-paper"), rows=ROWS, sequence_length=TOKENS,
        optimizer=make_host_optimizer("hybrid8bit"), compute_dtype="float32", gradient_dtype="float32",
    )  # fmt: skip
    plans = [
        planner(template.spec, names, rows=2 * ROWS, sequence_length=TOKENS, microbatches=2)
        for planner in (recompute_all, keep_all)
    ]
    schedules = [build_schedule(plan, costs.sizes) for plan in plans]
    kernels = Kernels(template, data_mesh(), compute_dtype="float32", gradient_dtype="float32")
    keys = kernels_of(schedules, kernels)
    assert len(set(keys)) == len(keys)
    assert {key.phase for key in keys} == {Action.FORWARD, Action.BACKWARD, Action.LOSS}
    found = calibrate(kernels, keys, rows=ROWS, sequence_length=TOKENS, repeats=2)
    assert set(found.seconds) == set(found.working_bytes) == set(keys)
    timed = costs.with_measured(found.seconds, found.working_bytes)
    for schedule in schedules:
        for operation in schedule.operations:
            if operation.action in COMPUTE_ACTIONS:
                key = measured_key(operation, template.spec)
                assert timed.operation_seconds(operation) == found.seconds[key] > 0
    block = template.spec.layers[1].kind
    expected = max(
        size for key, size in found.working_bytes.items() if key[:3] == (block, Action.BACKWARD, ())
    )
    assert timed.working_bytes(Action.BACKWARD, 1, ()) == expected > 0


def _simulation(*spans: tuple[Resource, float, float], period: float) -> Simulation:
    events = tuple(
        Event(1, index, "x", resource, 0, 0, start, end) for index, (resource, start, end) in enumerate(spans)
    )
    return Simulation(period, {}, {}, Timeline("simulated", events), 1)


def test_only_what_overlaps_with_compute_delays_it() -> None:
    # Half of the update, all of one copy and, folded into the next period, 0.5 s of the other.
    simulation = _simulation(
        (Resource.COMPUTE, 0.0, 4.0),
        (Resource.CPU, 3.0, 5.0),
        (Resource.H2D, 1.0, 2.0),
        (Resource.D2H, 5.0, 6.5),
        period=6.0,
    )
    contention = Contention(update=0.5, copies=0.2)
    assert contended_period(simulation, contention) == pytest.approx(6.0 + 0.5 * 1 + 0.2 * (1 + 0.5))
    assert contended_period(simulation, Contention(0.0, 0.0)) == 6.0


class _Clock:
    """Time that passes only where something runs; a thread runs while its starter waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        clock = self

        class Thread:
            def __init__(self, target: Callable[..., object], args: tuple[object, ...]) -> None:
                self._run = lambda: target(*args)

            def start(self) -> None:
                self._started = clock.now

            def join(self) -> None:
                joined, clock.now = clock.now, self._started
                self._run()
                clock.now = max(clock.now, joined)

        self.Thread = Thread

    def perf_counter(self) -> float:
        return self.now


class _Resource:
    """Serves one caller at a time."""

    def __init__(self, clock: _Clock) -> None:
        self._clock, self._free_at = clock, 0.0

    def use(self, seconds: float) -> None:
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self._clock.now = self._free_at


@pytest.mark.parametrize("shared", [True, False])
def test_what_shares_a_resource_costs_its_whole_time_and_what_does_not_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    clock = _Clock()
    monkeypatch.setattr(calibration, "time", clock)
    monkeypatch.setattr(calibration, "threading", clock)
    device = _Resource(clock)
    host = device if shared else _Resource(clock)
    share = calibration._lost_share(lambda: device.use(0.02), lambda: host.use(0.03), repeats=3)
    assert share == pytest.approx(1.0 if shared else 0.0)
