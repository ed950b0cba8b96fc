"""Plans found again by content, and when a better one is worth a swap."""

import pytest

from lazyjax.planning.plan import cache
from tests.planning.chains import random_plans


def test_a_stored_plan_is_found_and_a_broken_one_is_not(tmp_path):
    _, plans = random_plans(2, 1)
    key = cache.content_key({"a": 1})
    assert cache.find(tmp_path, key) is None
    cache.store(tmp_path / "deep", key, plans[0])
    assert cache.find(tmp_path / "deep", key) == plans[0]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [f"{key}.json"]
    (tmp_path / "deep" / f"{key}.json").write_text("{")
    assert cache.find(tmp_path / "deep", key) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    _, plans = random_plans(2, 1)
    (tmp_path / "file").write_text("")
    cache.store(tmp_path / "file" / "below", "key", plans[0])


def test_keys_follow_content():
    key = cache.content_key({"a": 1, "b": [2, 3]})
    assert key == cache.content_key({"b": [2, 3], "a": 1})
    assert key != cache.content_key({"a": 1, "b": [3, 2]})


@pytest.mark.parametrize(
    ("running", "candidate", "swap"), [(1.04, 1.0, True), (1.03, 1.0, False), (1.0, 1.2, False)]
)
def test_swap_above_three_percent(running, candidate, swap):
    assert cache.worth_swapping(running, candidate) is swap


def test_swap_refuses_nonsense():
    with pytest.raises(ValueError, match="positive"):
        cache.worth_swapping(0.0, 1.0)
