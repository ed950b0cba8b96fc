"""When a drive, a thread or a plan fails: nothing is lost, applied by half, left running or left behind."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import threading
from typing import Any

import jax
import numpy as np
import pytest

from experiments.benchmarks import steady_run, stress
from lazyjax.execution.build import checked_schedules
from lazyjax.execution.executor import Executor, FailedExecutorError
from lazyjax.execution.host_update import HostUpdates
from lazyjax.execution.kernels import Kernels
from lazyjax.execution.transfers import Transfers
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.planning.plan.document import Plan
from lazyjax.storage.host import HostStore
from lazyjax.storage.nvme import NvmeError, NvmeStore

BATCHES = stress.random_batches()


@functools.cache
def kernels() -> Kernels:
    return stress.stress_kernels()


class FailingDrive(NvmeStore):
    """Raises at calls whose method and key contain what `fail_at` says."""

    fail_at: tuple[str, str] | None = None

    def _check(self, method: str, key: str) -> None:
        if self.fail_at is not None and self.fail_at[0] == method and self.fail_at[1] in key:
            raise NvmeError(f"{method} of {key!r} failed")

    def write(self, key: str, source: np.ndarray) -> Any:
        self._check("write", key)
        return super().write(key, source)

    def read(self, key: str, target: np.ndarray) -> Any:
        self._check("read", key)
        return super().read(key, target)

    def close(self) -> None:
        super().close()
        self._check("close", "")


class FailingCopies(Transfers):
    """Fails when a gradient is copied into the slab of a length."""

    fail = False

    def into_slab(self, delivered: Any, gradient_N: np.ndarray) -> None:
        if self.fail:
            raise RuntimeError("the copy of a gradient failed")
        super().into_slab(delivered, gradient_N)


class Setup:
    """An executor with a drive and copies that can be told to fail."""

    def __init__(self, folder: pathlib.Path, plan: Plan | None = None) -> None:
        self.store: HostStore = stress.filled_store(kernels().template)
        self.copies = FailingCopies(kernels().sharded, kernels().compute_dtype)
        self.drive = FailingDrive(folder)
        optimizer = Hybrid8bit()
        self.updates = HostUpdates(self.store, optimizer)
        self.executor = Executor(
            kernels(), self.copies, checked_schedules(kernels(), optimizer), plan or nvme_plan(),
            self.store, self.updates, clip=ClipRule("global_norm", 0.5), open_drive=lambda: self.drive,
        )  # fmt: skip

    def masters(self) -> list[bytes]:
        return [array.tobytes() for slabs in self.store.layers for array in (slabs.hi, slabs.lo)]

    def states(self) -> list[bytes]:
        layers = range(len(self.store.layers))
        return [a.tobytes() for layer in layers for a in self.updates.read_state(layer).values()]


def train(executor: Executor, steps: int) -> None:
    for _ in range(steps):
        executor.train_step(BATCHES[0], 1e-2)


def nvme_plan() -> Plan:
    return steady_run.everything_on_nvme(kernels())


def on_host(plan: Plan) -> Plan:
    return stress.without_waiting(plan).model_copy(update={"update": plan.update})


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: pathlib.Path):
    """No thread, open file or file on the drive outlives a test's executor."""
    kernels()
    before = threading.active_count()
    files = len(os.listdir("/proc/self/fd"))
    yield
    assert not list(tmp_path.iterdir())
    assert threading.active_count() <= before
    assert len(os.listdir("/proc/self/fd")) <= files + 2  # JAX keeps its own


def test_an_executor_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(FailingDrive, "fail_at", ("write", "state-2"))
    with pytest.raises(NvmeError, match="state-2"):
        Setup(tmp_path)


@pytest.mark.parametrize(
    "fail_at",
    [
        ("write", "input-2"),
        ("read", "residual-3"),
        ("read", "state-1"),
        ("write", "state-4"),
        ("read", "hi-3"),
        ("write", "lo-2"),
        ("write", "gradient-1"),
        ("read", "gradient-5"),
    ],
)
def test_a_failing_drive_ends_the_step_by_name_and_everything_is_released(fail_at, tmp_path):
    made = Setup(tmp_path)
    for batch in BATCHES[:2]:
        made.executor.train_step(batch, 1e-2)
    made.drive.fail_at = fail_at
    with pytest.raises(NvmeError, match=fail_at[1]):
        train(made.executor, steps=2)  # a write of state is waited for in the step after
    with pytest.raises(FailedExecutorError, match=fail_at[1]):
        made.executor.train_step(BATCHES[0], 1e-2)
    made.executor.close()


def test_closing_goes_on_where_a_part_of_it_fails(tmp_path):
    made = Setup(tmp_path)
    made.executor.train_step(BATCHES[0], 1e-2)
    made.drive.fail_at = ("write", "state-3")
    with pytest.raises(NvmeError, match="state-3"):
        made.executor.close()


def test_closing_after_a_failed_step_applies_no_incomplete_gradient(tmp_path):
    """The loss and the norm were known and finite; a gradient had not arrived in its slab."""
    made = Setup(tmp_path, on_host(nvme_plan()))
    made.executor.train_step(BATCHES[0], 1e-2)
    made.executor.flush()
    before = made.masters()
    made.copies.fail = True
    with pytest.raises(RuntimeError, match="copy of a gradient failed"):
        made.executor.train_step(BATCHES[1], 1e-2)
    made.executor.close()
    made.drive.close()
    assert made.masters() == before


@pytest.mark.parametrize("fail_at", [("write", "state-3"), ("read", "state-3")])
def test_a_plan_that_cannot_be_taken_leaves_the_one_before_and_all_state(fail_at, tmp_path):
    plans = [nvme_plan(), on_host(nvme_plan())]
    first, second = plans if fail_at[0] == "read" else plans[::-1]
    made, untouched = Setup(tmp_path, first), Setup(tmp_path, first)
    for each in (made, untouched):
        each.executor.train_step(BATCHES[0], 1e-2)
        each.executor.flush()
    states = made.states()
    made.drive.fail_at = fail_at
    with pytest.raises(NvmeError, match="state-3"):
        made.executor.set_plan(second)
    made.drive.fail_at = None
    assert made.executor.plan == first
    assert made.states() == states
    losses = [each.executor.train_step(BATCHES[1], 1e-2).loss for each in (made, untouched)]
    assert losses[0] == losses[1]
    for each in (made, untouched):
        each.executor.close()
        each.drive.close()


def test_state_that_comes_back_from_the_drive_is_nobody_elses(tmp_path):
    """Layers on NVMe change under one another's scratch copies; what came back stays as it was."""
    moving, staying = Setup(tmp_path), Setup(tmp_path, on_host(nvme_plan()))
    layers = nvme_plan().layers
    some = tuple(
        layer.model_copy(update={"state": "host" if index in (2, 3) else layer.state})
        for index, layer in enumerate(layers)
    )
    losses = []
    for step, batch in enumerate(BATCHES):
        if step == 1:
            moving.executor.set_plan(nvme_plan().model_copy(update={"layers": some}))
        losses.append([each.executor.train_step(batch, 1e-2).loss for each in (moving, staying)])
    for each in (moving, staying):
        each.executor.flush()
    assert [a for a, _ in losses] == [b for _, b in losses]
    assert moving.masters() == staying.masters()
    assert moving.states() == staying.states()
    for each in (moving, staying):
        each.executor.close()
        each.drive.close()


def test_many_steps_leave_threads_files_and_arrays_as_they_were(tmp_path):
    """A short version of `experiments.benchmarks.steady_run`."""
    threads = set()

    def look(step: int) -> bool:
        if step > 4:
            threads.add(threading.active_count())
        return step in (6, 10, 14)

    seen = steady_run.run(kernels(), 14, tmp_path, look)
    # Six queues of one or two threads, two that finish transfers, four of the drive, three that watch.
    assert max(threads) - threading.active_count() <= 16
    for name in ("live_arrays", "drive_files"):
        assert len({getattr(r, name) for r in seen}) == 1, (name, seen)
    assert max(r.open_files for r in seen) - min(r.open_files for r in seen) <= 2


@pytest.mark.parametrize(("home", "most_allowed"), [("host", 6), ("device", 13)])
def test_evaluation_holds_no_more_than_the_plan_allows(home, most_allowed, tmp_path, monkeypatch):
    """Of twelve microbatches a few are on the device at a time, if activations wait on the host."""
    made = Setup(tmp_path, nvme_plan().model_copy(update={"interlayer_home": home}))
    many = BATCHES[0].with_rows(12 * nvme_plan().microbatch_rows)
    held = []
    # What earlier tests of this process left for the collector is not counted.
    gc.collect()
    earlier = {id(array) for array in jax.live_arrays()}
    forward = type(made.executor.kernels).forward

    def counted(self, kind, saved):
        kernel = forward(self, kind, saved)

        def run(slab, x, context):
            result = kernel(slab, x, context)
            shape = result[0].shape
            held.append(
                sum(
                    array.shape == shape and array.sharding.memory_kind == "device"
                    for array in jax.live_arrays()
                    if id(array) not in earlier
                )
            )
            return result

        return run

    monkeypatch.setattr(type(made.executor.kernels), "forward", counted)
    total, targets = made.executor.evaluate(many)
    assert np.isfinite(total)
    assert targets == BATCHES[0].target_tokens
    assert max(held) <= most_allowed
    assert (max(held) >= 12) == (home == "device")
    made.executor.close()
