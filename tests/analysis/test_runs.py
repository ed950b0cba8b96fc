import json

import pytest
from rich.console import Console

from analysis.runs import RunError, main, read_run, run_table

STEP = {"kind": "train", "loss": 2.0, "real_tokens": 60, "peak_device_bytes": 2**21, "model_tflops": 0.5}


@pytest.fixture
def folder(tmp_path):
    steps = [STEP | {"step": number, "step_seconds": 10.0 if number == 1 else 2.0} for number in (1, 2, 3)]
    steps[1]["loss"] = None
    evaluations = [{"kind": "evaluation", "step": step, "loss": 3.0 - step} for step in (0, 2)]
    lines = [json.dumps(record) for record in [evaluations[0], *steps, evaluations[1]]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_run_without_summary_is_unfinished(folder):
    run = read_run(folder)
    assert run.status == "unfinished"
    assert [step["step"] for step in run.steps] == [1, 2, 3]
    assert [evaluation["loss"] for evaluation in run.evaluations] == [3.0, 1.0]


def test_a_torn_last_line_is_left_out(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    assert len(read_run(folder).steps) == 3


def test_damage_is_named(folder):
    path = folder / "metrics.jsonl"
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 1"):
        read_run(folder)
    with pytest.raises(RunError, match="cannot be read"):
        read_run(folder / "absent")


def test_rates_leave_out_the_step_that_compiles(folder, capsys):
    summary = {"status": "finished", "device": "cpu", "commit": "abc"}
    (folder / "summary.json").write_text(json.dumps(summary))
    console = Console(width=200)
    console.print(run_table([read_run(folder)]))
    text = capsys.readouterr().out
    for word in ("measured", "finished", " 30 ", " 0.5 ", " 3.0000 ", " 1.0000 ", " 2.0 ", "cpu, abc"):
        assert word in text


def test_command_line_writes_a_picture(folder, capsys):
    main([str(folder), "--plot", str(folder / "losses.png")])
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "runs (measured)" in capsys.readouterr().out
