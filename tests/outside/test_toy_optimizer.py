"""A host optimizer from outside the package, in one file: plain gradient descent, which has no state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from lazyjax.config import load_config
from lazyjax.config.names import OPTIMIZER_NAMES
from lazyjax.execution.build import executor_of
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.profile import load_profile
from lazyjax.optim.base import (
    VERSION,
    VERSION_BYTES,
    HostOptimizer,
    HostState,
    StateDescription,
    create_described,
)
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import OPTIMIZERS, make_host_optimizer, register
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.program.schedule import Action, Operation
from lazyjax.specs import SlabLayout
from lazyjax.storage.host import LayerSlabs
from lazyjax.timeline import Resource
from tests import reference, tiny

MODEL = tiny.template("qwen2", tied=False, blocks=2)
ROWS, LENGTH, RATE = 4, 16, 1e-2


@dataclasses.dataclass(frozen=True)
class Descent:
    """w - rate * gradient, in float32."""

    name: str = "descent"
    master_bytes: int = 4
    state_version: str = "descent/1"

    def describe_state(self, layout: SlabLayout) -> StateDescription:
        """Nothing but the version tag."""
        del layout
        return {VERSION: ((VERSION_BYTES,), "uint8")}

    def create_state(self, layout: SlabLayout) -> HostState:
        """The tag."""
        return create_described(self.describe_state(layout), self.state_version)

    def update(
        self, slabs: LayerSlabs, state: HostState, *, learning_rate: float, count: int, scale: float
    ) -> None:
        """One step."""
        for segment in slabs.layout.segments:
            gradient_N = slabs.gradient[segment.offset : segment.offset + segment.elements]
            gradient = gradient_N.astype(np.float32).reshape(segment.shape)
            slabs.set_master(
                segment.name, slabs.master(segment.name) - np.float32(learning_rate * scale) * gradient
            )


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registered for one test."""
    with monkeypatch.context() as patch:
        patch.setattr(OPTIMIZER_NAMES, "_names", [*OPTIMIZER_NAMES])
        register("descent", lambda **settings: Descent())
        yield
        del OPTIMIZERS["descent"]


def test_a_name_that_is_taken_is_refused() -> None:
    for name in ("hybrid8bit", "descent"):
        with pytest.raises(ValueError, match=f"there is a {name!r} already"):
            register(name, Descent)


def test_configurations_may_name_it_and_it_is_an_optimizer() -> None:
    words = ["--model", "Qwen2.5-0.5B", "--random-weights", "--data", "problems"]
    assert load_config(None, [*words, "--optimizer.name", "descent"]).optimizer.name == "descent"
    assert isinstance(make_host_optimizer("descent"), HostOptimizer)


def test_its_bytes_and_seconds_are_those_that_it_touches() -> None:
    """4 bytes of masters read and written, 2 of the gradient read: 10 of the 14.06 of 8-bit AdamW."""
    seconds = {}
    for name in ("descent", "hybrid8bit"):
        asked = build_request(
            MODEL, load_profile("h800-paper"), batch_rows=2, sequence_length=8, optimizer=name
        )
        operation = Operation(0, Action.UPDATE, Resource.CPU, 1, None, 0)
        seconds[name] = asked.costs(2).operation_seconds(operation)
        if name == "descent":
            assert all(layer.state_bytes <= VERSION_BYTES for layer in asked.sizes(2).layers)
    assert seconds["descent"] / seconds["hybrid8bit"] == pytest.approx(10 / (2 * (4 + 2 + 8 / 256) + 2))


def test_a_streamed_step_applies_it() -> None:
    store = tiny.filled_store(MODEL, reference.random_parameters(MODEL, seed=1), gradient_dtype="bfloat16")
    before = [
        {segment.name: slabs.master(segment.name).copy() for segment in slabs.layout.segments}
        for slabs in store.layers
    ]
    kernels = Kernels(MODEL, data_mesh(), compute_dtype="bfloat16", gradient_dtype="bfloat16")
    plan = recompute_all(
        MODEL.spec, tiny.residual_names(MODEL), batch_rows=ROWS, sequence_length=LENGTH, update="immediate"
    )
    executor = executor_of(kernels, plan, store, Descent(), clip=ClipRule("none", 1.0))
    try:
        executor.train_step(reference.random_batch(0, ROWS, LENGTH, tiny.VOCABULARY), RATE)
    finally:
        executor.close()
    for slabs, old in zip(store.layers, before, strict=True):
        for segment in slabs.layout.segments:
            gradient = slabs.gradient[segment.offset : segment.offset + segment.elements]
            gradient = gradient.astype(np.float32).reshape(segment.shape)
            expected = old[segment.name] - np.float32(RATE) * gradient
            np.testing.assert_array_equal(slabs.master(segment.name), expected)
            assert segment.elements < 100 or np.any(gradient)
