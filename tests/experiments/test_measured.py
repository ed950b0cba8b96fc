"""Measured cells beside the paper's and the simulated ones."""

import json

import pytest

from analysis.sweeps import read_sweep
from experiments import table4
from experiments.measured import add_measured
from experiments.sheet import Sheet
from lazyjax.evaluation.exact_match import wilson_interval

VARIANTS = {"LazyJAX": (200.0, 1.0), "LazyTrain's published plan": (160.0, 1.25), "padded": (80.0, 1.0)}


def write(folder, *, scores=None):
    """A sweep of one seed with known figures."""
    trials = []
    for name, (rate, seconds) in VARIANTS.items():
        digest = name.replace(" ", "-")
        trials.append(
            {
                "name": name,
                "seed": 0,
                "overrides": {},
                "digest": digest,
                "folder": digest,
                "problem": None,
                "compared_with": "LazyJAX",
            }
        )
        run = folder / "trials" / digest
        run.mkdir(parents=True)
        summary = {
            "status": "finished", "device": "this one", "commit": "abc", "date": "2026-11-30",
            "model": "small", "rows": 2, "sequence_length": 10, "tokens_per_second": rate,
            "median_step_seconds": seconds, "model_tflops": 0.5, "peak_device_bytes": 10**9,
            "peak_host_bytes": 2 * 10**9,
        }  # fmt: skip
        if scores is not None:
            summary |= {"last_exact_match": scores[name] / 500, "last_exact_match_rows": 500}
        (run / "summary.json").write_text(json.dumps(summary))
        step = {"kind": "train", "step": 1, "loss": 2.0, "real_tokens": 20, "padded_tokens": 20}
        (run / "metrics.jsonl").write_text(json.dumps({**step, "step_seconds": seconds}) + "\n")
        layers = [{"boundary": home} for home in ("device", "device", "host", "recompute")]
        plan = {"prediction": {"period_seconds": 0.9 * seconds}, "layers": layers}
        (run / "plan.json").write_text(json.dumps(plan))
        outcomes = folder / "outcomes"
        outcomes.mkdir(exist_ok=True)
        outcome = {"state": "succeeded", "message": "", "summary": summary, "seconds": 3.0}
        (outcomes / f"{digest}.json").write_text(json.dumps(outcome))
    compare = {"baseline": "LazyJAX", "metrics": ["tokens_per_second"]}
    (folder / "sweep.json").write_text(
        json.dumps({"name": "table4", "file": "f", "compare": compare, "trials": trials})
    )
    return read_sweep(folder)


def test_ratios_of_all_three_kinds_stand_beside_each_other(tmp_path):
    sheet = Sheet("Table 5", ("system", "tokens/s", "tokens/s", "step s"))
    sheet.add("LazyTrain", "1361 (paper)", "1268 (simulated)", "-")
    sheet.add("LazyJAX: the plan", "-", "1303 (simulated)", "-")
    add_measured(sheet, "table5", write(tmp_path))
    assert sheet.rows[0][4:] == ("160 (measured)", "1.00 (paper), 1.00 (simulated), 1.00 (measured)")
    assert sheet.rows[1][4:] == ("200 (measured)", "1.03 (simulated), 1.25 (measured)")
    assert sheet.rows[2] == ("here only: padded", "-", "-", "-", "80 (measured)", "0.50 (measured)")
    assert "device this one, date 2026-11-30, commit abc" in sheet.notes[-1]


def test_a_machine_has_rows_of_its_own_and_placements(tmp_path):
    records = write(tmp_path)
    columns = ["GPU", "model", "system", "rows", "tokens/s", "tokens/s", "deviation", "against LazyTrain"]
    sheet = Sheet("Table 3", [*columns, "model TFLOPS", "device GB", "host GB"])
    add_measured(sheet, "table3", records)
    rows = {row[2]: row for row in sheet.rows}
    assert rows.keys() == {"LazyTrain", "LazyJAX"}
    # Simulated to take 0.9 of what it took.
    assert rows["LazyJAX"][5:9] == ("222 (simulated)", "200 (measured)", "+11.1%", "1.25x measured")
    homes = Sheet("Table 1", ("home", "LazyTrain", "LazyJAX"))
    homes.add("host", "21 (paper)", "62 (simulated)")
    add_measured(homes, "table1", records)
    assert homes.rows[0][3:] == ("1 (measured)", "1 (measured)")


def test_without_a_sweep_a_table_says_how_to_get_one():
    sheet = Sheet("Table 5", ("system",))
    add_measured(sheet, "table5", None)
    assert "experiments.reproduce table5 --measure" in sheet.notes[0]
    add_measured(sheet, "table6", None)
    assert "only solves" in sheet.notes[1]


def test_scores_stand_beside_training_in_memory(tmp_path):
    records = write(tmp_path, scores={"LazyJAX": 54, "LazyTrain's published plan": 54, "padded": 150})
    (tmp_path / "in-memory-seed0.json").write_text(json.dumps({"correct": 52, "rows": 500}))
    sheet = table4.table4(tmp_path / "out", records, tmp_path)
    rows = {row[1]: row for row in sheet.rows if row[0].startswith("SmolLM2")}
    assert rows["LazyJAX"][2].startswith("10.8% (8.4% to 13.8%; 1 seeds)")
    assert "contains 0" in rows["LazyJAX"][3]
    assert "does not contain 0" in rows["padded"][3]
    assert ("Qwen2.5-7B", "LazyTrain", "88.95 % (paper)", "-") in sheet.rows
    assert "LazyJAX = LazyTrain's published plan = padded" in sheet.notes[-1]
    assert "table4" in (tmp_path / "out" / "table4.md").read_text().lower()


def test_the_interval_of_a_difference_is_newcombe_s():
    """Example of Newcombe (1998): 56 of 70 and 48 of 80, method 10: 0.0524 to 0.3339."""
    centre, low, high = table4.difference(table4.Score(56, 70, 1), table4.Score(48, 80, 1))
    assert centre == pytest.approx(0.2)
    assert (low, high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))
    assert wilson_interval(56, 70)[0] < 0.8
