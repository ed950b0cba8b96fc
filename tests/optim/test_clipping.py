import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.optim.clipping import ClipRule, clip_factor, global_norm

squares = st.lists(st.floats(0, 1e6), min_size=1, max_size=6)


@given(squares, st.floats(1e-3, 1e3))
def test_the_global_factor_is_that_of_optax(squared_norms: list[float], max_norm: float) -> None:
    gradients = [jnp.float32(math.sqrt(square)) for square in squared_norms]
    clipped, _ = optax.clip_by_global_norm(max_norm).update(gradients, optax.EmptyState())
    scales = ClipRule("global_norm", max_norm).scales(squared_norms)
    assert len(set(scales)) == 1
    np.testing.assert_allclose([float(g) * scales[0] for g in gradients], clipped, rtol=1e-5, atol=1e-30)
    traced = clip_factor(jnp.float32(sum(squared_norms)), max_norm)
    np.testing.assert_allclose(float(traced), scales[0], rtol=1e-5)


def test_other_modes() -> None:
    assert ClipRule("none").scales([9.0, 1e12]) == (1.0, 1.0)
    assert ClipRule("per_layer", 1.0).scales([4.0, 0.25]) == (0.5, 1.0)
    assert ClipRule("global_norm", 1.0).scales([0.0]) == (1.0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_norm_shows(bad: float) -> None:
    assert math.isnan(global_norm([1.0, bad]))
    assert jnp.isnan(clip_factor(jnp.float32(bad), 1.0))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_useless_norm_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="max_norm"):
        ClipRule("global_norm", bad)
