import json
import math

import pytest

from lazyjax import cli
from lazyjax.config import dump_config, load_config
from lazyjax.runs import read_run
from lazyjax.training.reproducing import ReproduceError, first_difference, pinned
from tests.training.test_setup import small  # noqa: F401  (a fixture)


def test_a_run_is_repeated_bit_for_bit_under_its_own_plan(small, tmp_path, capsys):  # noqa: F811
    config = small(run__name="run", run__save_model="false", plan__planner="megatrain")
    (tmp_path / "base.yaml").write_text(dump_config(config))
    assert cli.main(["train", str(tmp_path / "base.yaml")]) == 0
    run = tmp_path / "runs" / "run"
    capsys.readouterr()
    assert cli.main(["train", "--reproduce", str(run)]) == 0
    assert "3 steps, every loss bit for bit the same" in capsys.readouterr().out
    again = read_run(tmp_path / "runs" / "run-again")
    summary, repeated = read_run(run).summary, again.summary
    assert repeated["plan"] == summary["plan"]
    assert len(summary["config"]) == 12
    # What differs is found and named.
    lines = (run / "metrics.jsonl").read_text().splitlines()
    changed = json.loads(lines[2])
    changed["loss"] = math.nextafter(changed["loss"], 0.0)
    (run / "metrics.jsonl").write_text("\n".join([*lines[:2], json.dumps(changed), *lines[3:]]) + "\n")
    assert "after step 2 the loss was" in first_difference(read_run(run), again)


def test_only_the_place_of_the_records_may_change(small, tmp_path):  # noqa: F811
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ReproduceError, match="not a finished run"):
        pinned(run, [])
    with pytest.raises(ReproduceError, match=r"--training\.steps: a run is repeated as it was"):
        pinned(run, ["--training.steps", "5"])
    config = small(run__name="run", plan__planner="milp", plan__device_bytes="1e9")
    (run / "config.yaml").write_text(dump_config(config))
    (run / "summary.json").write_text(json.dumps({"status": "finished", "attention": "dense"}))
    repeated = pinned(run, [])
    assert repeated.run.name == "run-again"
    assert repeated.model.attention == "dense"
    assert repeated.plan.file == run / "plan.json"
    assert (repeated.plan.device_bytes, repeated.plan.hardware) == (None, "auto")
    assert pinned(run, ["--run.name", "other"]).run.name == "other"
    assert load_config(run / "config.yaml").plan.device_bytes == 10**9
