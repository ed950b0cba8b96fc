"""One set of constants per machine: what the profiles carry fits what was published, and a fit finds it."""

import pytest

from experiments import published
from experiments.fit import MACHINES, fitted, published_figures, residual, rows_of
from experiments.systems import LAZYTRAIN, MEGATRAIN, simulated
from lazyjax.hardware.profile import load_profile

#: Largest deviation of tokens per second: of rows that were fitted, and of those that were predicted.
FITTED = {"H800": 0.06, "RTX 3090": 0.03}
PREDICTED = 0.08


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.gpu)
def test_profiles_explain_the_published_rows(machine):
    profile = load_profile(machine.profile)
    for row in rows_of(machine):
        if row.model not in machine.left_out:
            assert abs(residual(row, MEGATRAIN, profile)) <= FITTED[machine.gpu], row.model
        assert abs(residual(row, LAZYTRAIN, profile)) <= PREDICTED, row.model


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.gpu)
def test_profiles_carry_the_fit(machine):
    profile, found = load_profile(machine.profile), fitted(machine)
    for name, (_, most) in machine.limits.items():
        assert getattr(profile, name) == pytest.approx(getattr(found, name), rel=0.03)
        assert getattr(profile, name) <= most


def test_the_row_left_out_contradicts_the_others():
    """With the other rows' constants it is far off; its update would need a host of another class."""
    machine = MACHINES[1]
    (row,) = [row for row in rows_of(machine) if row.model in machine.left_out]
    profile = load_profile(machine.profile)
    assert residual(row, MEGATRAIN, profile) < -0.2
    faster = profile.model_copy(update={"host_bandwidth_bytes_per_second": 460e9})
    assert residual(row, MEGATRAIN, faster) < -0.1


def test_megatrain_runs_five_forward_units_and_its_loads_overlap():
    """Forward, recomputation, forward under autograd, and a backward pass worth two."""
    row = next(row for row in published.TABLE_3 if row.model == "Qwen2.5-7B")
    profile = load_profile(row.profile)
    outcome = simulated(MEGATRAIN, row.model, profile, row.megatrain.rows)
    half = profile.model_copy(update={"h2d_bytes_per_second": profile.h2d_bytes_per_second / 2})
    slower = simulated(MEGATRAIN, row.model, half, row.megatrain.rows)
    assert slower.simulation.busy_seconds["h2d"] == pytest.approx(
        2 * outcome.simulation.busy_seconds["h2d"]
    )
    # Only what nothing overlaps with gets longer: the first load, after the update.
    assert slower.simulation.period_seconds < outcome.simulation.period_seconds * 1.01
    lazy = simulated(LAZYTRAIN, row.model, profile, row.lazytrain.rows)
    units = outcome.simulation.busy_seconds["compute"] / lazy.simulation.busy_seconds["compute"]
    # Of 28 blocks LazyTrain's plan recomputes 6, its last units as MegaTrain's.
    assert units == pytest.approx(5 / (4 + 6 / 28), rel=0.02)
    assert published_figures(row, LAZYTRAIN) is row.lazytrain
