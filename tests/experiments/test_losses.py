"""The smoke run's losses are those recorded: what makes training drift does not go unnoticed."""

import json

import pytest

from experiments.record_losses import OUTPUT, ROOT, curve

#: Of the difference that rounding alone makes (see `experiments.record_losses`), so 0.1 % of a loss and
#: 0.5 % of a gradient norm. A CPU with other vector units rounds in other places than the variants did, but
#: by no more: they go from narrower units and another order of sums to float32 throughout. The loss falls by
#: 42 % in these steps: a learning rate that is 1 % off, an update left out or data in another order show.
ALLOWED = 4.0


@pytest.mark.slow
def test_the_curve_of_the_smoke_run_is_the_recorded_one(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    golden = json.loads(OUTPUT.read_text())
    found = curve((), tmp_path)
    for kind, values in found.items():
        assert len(values) == len(golden[kind]) > 1
        for number, (value, expected) in enumerate(zip(values, golden[kind], strict=True), start=1):
            allowed = ALLOWED * golden["spread"][kind]
            assert value == pytest.approx(expected, rel=allowed), f"{kind}, number {number}"
