import numpy as np
import pytest

from lazyjax.config import OptimizerConfig
from lazyjax.training.learning_rate import learning_rates


def config(**keys) -> OptimizerConfig:
    return OptimizerConfig(learning_rate=2.0, **keys)


def test_constant():
    np.testing.assert_array_equal(learning_rates(config(), 3), np.float32([2, 2, 2]))


def test_warmup_reaches_the_peak_with_its_last_step():
    rates = learning_rates(config(warmup_steps=4), 6)
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_linear_starts_at_the_peak_and_nears_the_final_fraction():
    rates = learning_rates(config(schedule="linear", final_fraction=0.5, warmup_steps=1), 5)
    np.testing.assert_allclose(rates, [2.0, 2.0, 1.75, 1.5, 1.25])


def test_cosine_is_half_way_down_at_half_time():
    rates = learning_rates(config(schedule="cosine", final_fraction=0.1), 10)
    assert rates[0] == 2.0
    assert rates[5] == pytest.approx((2.0 + 0.2) / 2)
    assert (np.diff(rates) < 0).all()


def test_no_step_left_by_warmup():
    with pytest.raises(ValueError, match=r"optimizer\.warmup_steps \(3\).*3 steps"):
        learning_rates(config(warmup_steps=3), 3)
