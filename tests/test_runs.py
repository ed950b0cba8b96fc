import json
import math

import pytest

from lazyjax import cli
from lazyjax.runs import RunError, find_runs, read_run, run_table

STEP = {"kind": "train", "loss": 2.0, "real_tokens": 60, "peak_device_bytes": 2**21, "model_tflops": 0.5}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "20261130-074238-qwen27b_smoke_model-with-a-name-as-long-as-names-become-in-practice"
    folder.mkdir()
    steps = [STEP | {"step": number, "step_seconds": 10.0 if number == 1 else 2.0} for number in (1, 2, 3)]
    steps[1]["loss"] = None
    evaluations = [{"kind": "evaluation", "step": step, "loss": 3.0 - step} for step in (0, 2)]
    lines = [json.dumps(record) for record in [evaluations[0], *steps, evaluations[1]]]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_run_without_summary_is_unfinished(folder):
    run = read_run(folder)
    assert run.status == "unfinished"
    assert [step["step"] for step in run.steps] == [1, 2, 3]
    assert [evaluation["loss"] for evaluation in run.evaluations] == [3.0, 1.0]


def test_a_torn_last_line_is_left_out(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    assert len(read_run(folder).steps) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 1"),
        ("[1]", "line 1: not a record"),
        ('{"kind": "train", "step": 1}', "line 1: a record of kind train without loss"),
    ],
)
def test_damage_is_named(folder, line, words):
    path = folder / "metrics.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(RunError, match=words):
        read_run(folder)


def test_what_is_no_run_is_refused_without_a_traceback(folder, capsys):
    pictures = [[str(folder), "--plot", name] for name in ("losses.xyz", "absent/a.png")]
    for words in (["absent"], ["--plto", "a.png"], *pictures):
        assert cli.main(["runs", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="not a text file"):
        read_run(folder)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"no run \(no metrics.jsonl\) in it"):
        find_runs([folder])


def test_an_empty_run_and_one_of_nan_are_shown(folder, capsys):
    (folder / "metrics.jsonl").write_text("")
    assert cli.main(["runs", str(folder)]) == 0
    lines = [STEP | {"step": 1, "step_seconds": 0.0, "loss": math.nan, "model_tflops": math.nan}]
    lines += [{"kind": "evaluation", "step": 0, "loss": math.nan}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert cli.main(["runs", str(folder), "--plot", str(folder / "a.png")]) == 0
    assert "nan" not in capsys.readouterr().out


def test_rates_leave_out_the_step_that_compiles(folder):
    summary = {"status": "finished", "device": "cpu", "commit": "abc"}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "plan.json").write_text(json.dumps({"prediction": {"period_seconds": 1.875}}))
    text = run_table([read_run(folder)])
    for word in (
        "measured",
        "finished",
        " 30 ",
        " 0.5 ",
        " 3.0000 ",
        " 1.0000 ",
        " 2 ",
        "1.875",
        "(cpu, abc)",
    ):
        assert word in text, word


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((0, 100), "exact match 1.0% before, 21.0% after step 100 (19.0% to 23.0%, 95 %, of 500 rows)"),
        ((100,), "exact match 21.0% after step 100 (19.0% to 23.0%, 95 %, of 500 rows)"),
        ((), None),
    ],
)
def test_exact_match_is_shown_where_a_run_has_it(folder, steps, words):
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            share = 0.01 + 0.002 * step
            score = {"kind": "exact_match", "step": step, "exact_match": share, "rows": 500}
            file.write(json.dumps(score | {"low": share - 0.02, "high": share + 0.02}) + "\n")
    lines = run_table([read_run(folder)]).splitlines()
    assert lines[4:] == ([] if words is None else [f"  {words}"])


def test_small_rates_keep_their_column(folder):
    text = (folder / "metrics.jsonl").read_text().replace('"model_tflops": 0.5', '"model_tflops": 5.24e-06')
    (folder / "metrics.jsonl").write_text(text)
    assert " <0.001 " in run_table([read_run(folder)])


def test_names_are_never_cut_and_figures_fit_80_columns(folder):
    head, columns, name, figures = run_table([read_run(folder)]).splitlines()
    assert name == folder.name
    assert max(map(len, (head, columns, figures))) <= 80


def test_command_line_finds_runs_in_a_folder_and_writes_a_picture(folder, capsys):
    assert cli.main(["runs", str(folder.parent), "--plot", str(folder / "losses.png")]) == 0
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert folder.name in capsys.readouterr().out
