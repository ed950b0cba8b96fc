"""What stays on the device for decoding, and how long a step is said to take."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax import cli
from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning.costs.decode import (
    DecodeMemoryError,
    DecodeSizes,
    LayerCost,
    decode_costs,
    period_seconds,
)
from lazyjax.planning.planner.decode import batch_sizes, most_resident, plan_decoding, spread
from tests import tiny

_SECONDS = st.floats(0, 1, allow_subnormal=False)
_COSTS = st.lists(st.tuples(st.builds(LayerCost, _SECONDS, _SECONDS, _SECONDS), st.booleans()), min_size=1)


@given(_COSTS, st.integers(1, 4))
def test_the_period_lies_between_its_bounds(layers: list[tuple[LayerCost, bool]], prefetch: int) -> None:
    costs, streamed = [cost for cost, _ in layers], [is_streamed for _, is_streamed in layers]
    link = sum(cost.fetch_seconds for cost, is_streamed in layers if is_streamed)
    compute = sum(cost.compute_seconds + cost.unpack_seconds * is_streamed for cost, is_streamed in layers)
    period = period_seconds(costs, streamed, prefetch)
    assert max(link, compute) - 1e-9 <= period <= link + compute + 1e-9
    assert period_seconds(costs, streamed, prefetch + 1) <= period + 1e-9


def test_one_slab_alternates_and_two_overlap() -> None:
    costs = [LayerCost(2.0, 0.0, 3.0)] * 4
    assert period_seconds(costs, [True] * 4, prefetch=2) == pytest.approx(12.0)
    assert period_seconds(costs, [False] * 4, prefetch=2) == pytest.approx(12.0)
    assert period_seconds([LayerCost(3.0, 0.0, 2.0)] * 4, [True] * 4, prefetch=2) == pytest.approx(12.0)


@given(st.integers(1, 80), st.data())
def test_resident_layers_are_spread(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, total))
    chosen = spread(range(1, total + 1), count)
    assert len(set(chosen)) == count
    assert set(chosen) <= set(range(1, total + 1))


def test_state_bytes_are_those_of_the_arrays() -> None:
    for family in ("qwen2", "qwen3", "qwen3_5"):
        model = tiny.template(family, tied=False, blocks=4)
        arrays = [
            shape
            for layer in model.spec.layers[1:-1]
            for shape in model.kinds[layer.kind].decoding.state_shapes(1, 32, "float32")  # type: ignore[union-attr]
        ]
        expected = sum(shape.size * shape.dtype.itemsize for shape in arrays)
        assert DecodeSizes(model, 32, "float32").row_state_bytes == expected
    # The figures of the published model: 151 MB of delta-net states, 64 KiB of keys and values a token.
    large = build_template(architecture("Qwen3.6-27B"))
    with_tokens = [DecodeSizes(large, tokens).row_state_bytes for tokens in (1000, 2000)]
    assert with_tokens[1] - with_tokens[0] == 1000 * 64 * 1024
    states = 2 * with_tokens[0] - with_tokens[1]
    convolution = 48 * 3 * (2 * 16 * 128 + 48 * 128) * 2
    assert states == 48 * 48 * 128 * 128 * 4 + convolution


def test_as_much_stays_as_fits_and_the_rest_streams() -> None:
    costs = decode_costs(build_template(architecture("Qwen3.6-27B")), load_profile("h800-paper"), tokens=1024)
    whole = plan_decoding(costs, device_bytes=75 * 10**9)
    assert set(whole.resident) == set(costs.sizes.uses)
    # Where the link is the limit more rows pay more than fewer bytes: r / (W - M + s r) grows with r.
    less = plan_decoding(costs, device_bytes=40 * 10**9)
    assert not less.resident
    # Where there are no more rows, layers take the room.
    few = plan_decoding(costs, device_bytes=40 * 10**9, most_rows=48)
    assert few.batch_rows == 48
    assert 0 < len(few.resident) < len(costs.sizes.uses)
    rates = {}
    for name, plan, most in (("whole", whole, 75), ("less", less, 40), ("few", few, 40)):
        prediction = costs.predict(plan)
        assert prediction.device_bytes <= most * 10**9
        rates[name] = plan.batch_rows / prediction.step_seconds
    assert rates["whole"] > rates["less"] > rates["few"]
    # No other batch with as many layers as fit is faster.
    for rows in batch_sizes(1024):
        other = most_resident(costs.sizes, rows, 40 * 10**9)
        if other is not None:
            assert rows / costs.predict(other).step_seconds <= rates["less"] * (1 + 1e-6)
    with pytest.raises(DecodeMemoryError, match="decoding 1 row"):
        plan_decoding(costs, device_bytes=10**9)


def test_a_streamed_step_takes_the_link_its_bytes() -> None:
    """At 12 GB/s every parameter but the embedding's crosses once: 4.3 s a token for 27B."""
    costs = decode_costs(build_template(architecture("Qwen3.6-27B")), load_profile("h800-paper"), tokens=1024)
    plan = dataclasses.replace(most_resident(costs.sizes, 8, 75 * 10**9), resident=())  # type: ignore[type-var]
    streamed_bytes = sum(costs.sizes.parameter_bytes(layer) for layer in costs.sizes.uses)
    assert costs.predict(plan).step_seconds == pytest.approx(streamed_bytes / 12e9, rel=0.01)
    assert streamed_bytes / 12e9 == pytest.approx(4.27, abs=0.02)


def test_the_command_says_first_whether_it_fits_and_how_long_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--generate", "--model", "Qwen3-0.6B", "--hardware", "rtx3090", "--rows", "1000"]
    assert cli.main(["plan", *arguments]) == 0
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Qwen3-0.6B fits rtx3090 whole: ")
    assert "tokens/s" in second
    assert "(simulated)" in second
    assert third.startswith("1,000 rows of 150 prompt and 200 answer tokens (assumed averages) take ")
    assert cli.main(["plan", *arguments, "--tokens", "100"]) == 2
    assert "less than an average row has" in capsys.readouterr().err
    assert cli.main(["plan", *arguments, "--device-gb", "0.1"]) == 2
    assert "decoding 1 row(s) of 1024 tokens takes" in capsys.readouterr().err
    assert cli.main(["plan", *arguments[:-1], "none"]) == 2
    assert "whole number from 1 on" in capsys.readouterr().err


def test_the_command_breaks_no_word_on_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["--generate", "--model", "Qwen3-0.6B", "--hardware", "rtx3090", "--rows", "1000"]
    assert cli.main(["plan", *arguments]) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "Qwen3-0.6B fits rtx3090 whole: " in text
    assert max(map(len, text.splitlines())) <= 80
