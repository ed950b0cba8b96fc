"""The commands `evaluate` and `generate` on a small model folder, from command line to file of answers."""

from __future__ import annotations

import io
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from lazyjax import cli
from lazyjax.data.chat import end_of_turn_id, load_tokenizer
from lazyjax.data.sources import problems_folder
from lazyjax.evaluation import ask, evaluate, model
from lazyjax.evaluation.answers_file import AnswersFile, AnswersFileError
from lazyjax.evaluation.exact_match import Form
from lazyjax.evaluation.generate import Completion
from lazyjax.evaluation.model import make_decoder, open_folder, stop_tokens
from lazyjax.evaluation.problems import Problem, Scored, score, scores
from lazyjax.execution.decode import Sampling
from lazyjax.huggingface.export import export
from lazyjax.models.architecture import Qwen3Architecture, Rope
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.storage.host import allocate_host_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random model with the packaged tokenizer."""
    template = build_template(
        Qwen3Architecture(
            name="small",
            vocab_size=2048,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            rope=Rope(theta=1e4),
        )
    )
    store = allocate_host_store(template.spec)
    for index, slabs in enumerate(store.layers):
        for name, value in init_parameters(template, index, jax.random.key(0)).items():
            slabs.set_master(name, value)
    return export(
        tmp_path_factory.mktemp("models") / "small", template, store, tokenizer_folder=problems_folder()
    )


@pytest.fixture
def rows_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "rows.jsonl"
    rows = [
        {
            "query": f"What is {number} + 1?" + " Please." * (number % 3),
            "response": f"The answer is: {number + 1}",
        }
        for number in range(7)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_evaluate_writes_every_row_and_goes_on_where_it_was_stopped(
    folder: pathlib.Path,
    rows_file: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "answers.jsonl"
    arguments = ["evaluate", str(folder), "--data", str(rows_file), "--out", str(out), "--new-tokens", "6"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "exact match 0.0% (0.0% to 35.4%, 95 %): 0 of 7 rows" in text
    assert "target tokens" in text
    header, *rows, result = lines_of(out)
    assert (header["kind"], result["kind"]) == ("evaluation", "result")
    assert sorted(row["row"] for row in rows) == list(range(1, 8))
    assert {row["expected"] for row in rows} == {str(number) for number in range(1, 8)}
    assert all(row["tokens"] <= 6 and row["prompt"].count("What is") == 1 for row in rows)
    assert result["rows"] == 7
    assert result["loss"] > 0
    # Stopped after three rows, in the middle of a line: those rows are not answered again, the others are.
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:4]) + whole[4][:10])
    asked: list[int] = []
    stop_after = [1]

    def counted(
        problems: list[Problem], completions: Iterator[Completion], tokenizer: Any
    ) -> Iterator[Scored]:
        for one in scores(problems, completions, tokenizer):
            asked.append(one.row)
            yield one
            if len(asked) in stop_after:
                raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "scores", counted)
    assert cli.main(arguments) == 130
    assert f"4 of 7 rows are in {out}; the same command goes on from there" in capsys.readouterr().out
    stop_after.clear()
    assert cli.main(arguments) == 0
    assert "4 rows are answered" in capsys.readouterr().out
    assert len(asked) == 4
    again = lines_of(out)
    assert sorted(map(str, again)) == sorted(map(str, [header, *rows, result]))
    # Other settings never mix with what is there.
    assert cli.main([*arguments, "--temperature", "1"]) == 2
    assert "temperature was 0.0, it is 1.0 now" in capsys.readouterr().err
    assert lines_of(out) == again


def test_evaluate_says_what_is_wrong(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    poems = tmp_path / "poems.jsonl"
    poem = "Leaves fall in the wind\nand nobody counts them there.\nWinter comes again."
    poems.write_text(json.dumps({"query": "Write a poem.", "response": poem}) + "\n")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"picture": 1}) + "\n")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"query": "caf\xe9?", "response": "5"}\n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text("no answers\n")
    for words, message in (
        ([str(folder)], "--data: name a file"),
        ([str(tmp_path / "none"), "--data", "problems"], "no such folder"),
        ([str(folder), "--data", str(tmp_path / "none.jsonl")], "no such file"),
        ([str(folder), "--data", str(poems)], "none of 1 rows names an answer, e.g. row 1"),
        ([str(folder), "--data", str(other)], "row 1"),
        ([str(folder), "--data", str(latin)], "UTF-8"),
        ([str(folder), "--data", str(empty)], "no rows"),
        ([str(folder), "--data", "problems", "--rows", "0"], "--rows"),
        ([str(folder), "--data", "problems", "--top-p", "0"], "top_p: 0.0"),
        ([str(folder), "--data", "problems", "--rows", "2", "--out", str(foreign)], "no file of answers"),
    ):
        extra = [] if "--out" in words else ["--out", str(out)]
        assert cli.main(["evaluate", *words, *extra]) == 2, words
        assert message in capsys.readouterr().err
    assert not out.exists()
    assert foreign.read_text() == "no answers\n"


def test_what_host_memory_does_not_hold_is_refused_before_it_is_read(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "host_memory_bytes", lambda: 1000)
    assert cli.main(["generate", str(folder), "--prompt", "What is 2 + 2?"]) == 2
    assert "the weights take 0.00 GB of host memory, 0.00 are free" in capsys.readouterr().err


def test_a_damaged_line_in_the_middle_is_not_taken_for_an_answer(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "answers.jsonl"
    form: Form = "plain"
    answers = AnswersFile(path, {"seed": 1})
    for row in (1, 2):
        answers.add(Scored(row, "p", "a", "5", form, "5", True, 3, True))
    answers.close()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "garbage\n" + lines[2])
    with pytest.raises(AnswersFileError, match="line 2"):
        AnswersFile(path, {"seed": 1})


def test_generate_answers_a_prompt_a_file_and_a_conversation(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--new-tokens", "5"]
    assert cli.main(["generate", str(folder), "--prompt", "What is 2 + 2?", *short]) == 0
    one = capsys.readouterr().out
    assert one.endswith("\n")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is 2 + 2?\n\nWhat is 59 * 64?\n")
    out = tmp_path / "out.jsonl"
    assert cli.main(["generate", str(folder), "--file", str(prompts), "--out", str(out), *short]) == 0
    answers = {record["prompt"]: record["answer"] for record in lines_of(out)}
    assert set(answers) == {"What is 2 + 2?", "What is 59 * 64?"}
    assert one == answers["What is 2 + 2?"] + "\n"
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert cli.main(["generate", str(folder), "--file", str(bad)]) == 2
    assert "line 2: has no text under prompt" in capsys.readouterr().err
    capsys.readouterr()

    loaded = open_folder(folder).load()
    decoder = make_decoder(loaded.kernels, loaded.store, tokens=64, rows=1, sampling=Sampling())
    turns = iter(["What is 2 + 2?", "", "What is 2 + 2?", "word " * 80, None])
    spoken = io.StringIO()
    ask.converse(loaded, decoder, None, 5, lambda: next(turns), spoken.write)
    decoder.close()
    said = spoken.getvalue().splitlines()
    assert said[1] == one.splitlines()[0]
    assert said.count(said[1]) >= 2
    assert "starting anew)" in said[-1]


def test_answers_end_at_the_turn_the_sequence_and_what_the_folder_says(folder: pathlib.Path) -> None:
    tokenizer = load_tokenizer(folder)
    stops = stop_tokens(tokenizer, folder)
    assert {tokenizer.eos_token_id, end_of_turn_id(tokenizer)} <= stops
    config = folder / "generation_config.json"
    before = config.read_text() if config.exists() else None
    try:
        config.write_text(json.dumps({"eos_token_id": [7, 8]}))
        assert {7, 8} <= stop_tokens(tokenizer, folder)
        config.write_text(json.dumps({"eos_token_id": "end"}))
        with pytest.raises(ValueError, match="eos_token_id must be a number"):
            stop_tokens(tokenizer, folder)
    finally:
        config.unlink()
        if before is not None:
            config.write_text(before)


def test_a_score_reads_the_answer(folder: pathlib.Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokens = tuple(tokenizer("So 4.\nThe answer is: 4", add_special_tokens=False)["input_ids"])
    problem = Problem(3, np.asarray([1, 2], np.int32), "4.0")
    scored = score(problem, Completion(3, tokens, True), tokenizer)
    assert (scored.right, scored.extracted, scored.form, scored.tokens) == (True, "4", "phrase", len(tokens))
