"""A baseline plan from outside the package, in one file: every second boundary waits on the host."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lazyjax.config import load_config
from lazyjax.config.names import PLANNER_NAMES
from lazyjax.hardware.profile import load_profile
from lazyjax.planning.commands.report import baseline_rows
from lazyjax.planning.plan.baselines import BASELINES, register
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan
from lazyjax.planning.planner.request import build_request
from lazyjax.specs import ModelSpec
from lazyjax.training.start_plan import choose_plan
from tests import tiny
from tests.execution.test_oracle import check_against_oracle

MODEL = tiny.template("qwen2", tied=False, blocks=3)


def by_turns(spec: ModelSpec, residual_names: Sequence[Sequence[str]], **batch: Any) -> Plan:
    """The rule."""
    del residual_names
    last = len(spec.layers) - 1
    homes = [
        Boundary.HOST if 0 < layer < last and layer % 2 else Boundary.DEVICE for layer in range(last + 1)
    ]
    made_for = {"model": spec.name, "architecture": spec.architecture}
    layers = tuple(LayerPlan(boundary=home) for home in homes)
    return Plan(**made_for, planner="by_turns", layers=layers, **batch)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registered for one test."""
    with monkeypatch.context() as patch:
        patch.setattr(PLANNER_NAMES, "_names", [*PLANNER_NAMES])
        patch.delitem(BASELINES, "by_turns", raising=False)
        register("by_turns", by_turns)
        yield
        del BASELINES["by_turns"]


def test_a_name_that_is_taken_is_refused() -> None:
    for name in ("milp", "megatrain", "by_turns"):
        with pytest.raises(ValueError, match=f"there is a {name!r} already"):
            register(name, by_turns)


def test_configurations_may_name_it() -> None:
    words = [
        "--model",
        "Qwen2.5-0.5B",
        "--random-weights",
        "--data",
        "problems",
        "--plan.planner",
        "by_turns",
    ]
    plan = choose_plan(load_config(None, [*words, "--data.rows", "2"]), MODEL)
    assert plan.planner == "by_turns"
    assert [layer.boundary.value for layer in plan.layers] == ["device", "host", "device", "host", "device"]


def test_it_is_shown_beside_a_plan() -> None:
    request = build_request(MODEL, load_profile("h800-paper"), batch_rows=2, sequence_length=8)
    row = next(row for row in baseline_rows(request) if row.name == "by_turns")
    assert 0 < row.period_seconds < 1


def test_a_step_under_it_equals_the_oracle(tmp_path: pathlib.Path) -> None:
    plan = by_turns(MODEL.spec, [], batch_rows=4, sequence_length=16, microbatches=2)
    check_against_oracle(MODEL, plan, tmp_path)
