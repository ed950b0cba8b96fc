"""`lazyjax plan` and `reproduce` give one answer for one machine, model and batch."""

import re

from experiments.ours import planned
from lazyjax.hardware.profile import load_profile
from lazyjax.planning.commands.plan import plan_command


def test_plan_and_reproduce_agree_to_the_digit(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    ours = planned("SmolLM2-135M", load_profile("rtx3090"), 4)
    assert ours is not None
    words = "--model SmolLM2-135M --hardware rtx3090 --batch 4 --seq 1024"
    plan_command(words.split())
    printed = capsys.readouterr().out
    # Found in the cache that both use: the questions are the same.
    assert "solved before" in printed
    rates = {int(found.replace(",", "")) for found in re.findall(r"([\d,]+) tokens/s", printed)}
    assert round(ours.tokens_per_second) in rates
