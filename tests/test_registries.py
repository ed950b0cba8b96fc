"""Names that configurations may use are exactly those that there is something for."""

from __future__ import annotations

import pytest

from lazyjax.config.names import OPTIMIZER_NAMES, PLANNER_NAMES
from lazyjax.optim.base import touched_bytes
from lazyjax.optim.make import OPTIMIZERS, make_host_optimizer
from lazyjax.planning.plan.baselines import BASELINES


def test_optimizers_of_configurations_are_the_registered_ones() -> None:
    assert set(OPTIMIZER_NAMES) == set(OPTIMIZERS)


def test_planners_of_configurations_are_the_solver_and_the_baselines() -> None:
    assert set(PLANNER_NAMES) == {"milp", *BASELINES}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_knows_its_name_and_what_it_touches(name: str) -> None:
    optimizer = make_host_optimizer(name, threads=1, path="pure")
    assert optimizer.name == name
    # Masters and state are read and written, gradients of half the size are half the reading.
    bf16, fp32 = (touched_bytes(optimizer, dtype) for dtype in ("bfloat16", "float32"))
    assert fp32 - bf16 == 2
    assert bf16 > 2 * optimizer.master_bytes + 2
