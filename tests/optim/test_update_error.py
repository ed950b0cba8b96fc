"""The measurement that the codes were chosen by, in small."""

import numpy as np
import pytest

from experiments.benchmarks.update_error import SPREADS, candidates, dynamic_levels, synthetic, walk
from lazyjax.optim import codes


@pytest.mark.parametrize("spread", SPREADS)
def test_the_chosen_code_is_below_the_dynamic_map(spread: float) -> None:
    dynamic, *_, chosen = candidates()
    assert "dynamic" in dynamic.name
    assert codes.CODES_VERSION in chosen.name
    errors = [walk(candidate, synthetic(spread, 120, 16)).relative_rms for candidate in (dynamic, chosen)]
    assert errors[1] < errors[0]
    assert errors[1] < {0.5: 0.045, 1.5: 0.1, 3.0: 0.35}[spread]


def test_v_follows_a_fall_that_rounding_to_nearest_misses() -> None:
    by_name = {candidate.name: candidate for candidate in candidates()}
    chosen = list(by_name.values())[-1]
    nearest = by_name["m power 4, v power 8, nearest"]
    for candidate, bounds in ((chosen, (0.9, 1.1)), (nearest, (2.0, 99.0))):
        error = walk(candidate, synthetic(0.5, 3000, 1, falls_after=500), count_from=2500)
        assert bounds[0] < error.v_ratio < bounds[1]


def test_the_dynamic_map_has_the_published_shape() -> None:
    signed, unsigned = dynamic_levels(signed=True), dynamic_levels(signed=False)
    assert signed.size == unsigned.size == 256
    np.testing.assert_allclose(signed[signed < 0], -signed[signed > 0][:-1][::-1])
    assert signed[-1] == unsigned[-1] == 1.0
    # Finest decade: 64 and 128 levels between 0.1 and 1.
    assert np.count_nonzero(signed > 0.1) == 65
    assert np.count_nonzero(unsigned > 0.1) == 129
