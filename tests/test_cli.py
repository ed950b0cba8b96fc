"""The command line: what it accepts, and how it refuses."""

import os
import re
import subprocess
import sys
import warnings

import pytest

from lazyjax import cli
from lazyjax.config import ConfigError
from lazyjax.hardware import measure


def refuse(error):
    def command():
        raise error

    return command


def test_no_command_shows_usage(capsys):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.count("lazyjax train [CONFIG.yaml]") == 2
    assert max(map(len, text.splitlines())) <= 80


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_unknown_command(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "error: no command 'trian'; did you mean train?\n"
    assert cli.main(["xyzzy"]) == 2
    assert "there are train, plan" in capsys.readouterr().err


def test_bad_key_is_one_message_and_code_2(capsys, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {architecture: Qwen2.5-0.5B}\ndata: {row: 1}\n")
    assert cli.main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "did you mean data.rows?" in error
    assert "Traceback" not in error


def test_debug_raises(tmp_path):
    with pytest.raises(ConfigError):
        cli.main(["train", str(tmp_path / "absent.yaml"), "--debug"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "absent/folder"], ["absent/folder"]),
        (["--model.architecture", "Qwen9-1B"], ["Qwen9-1B", "Qwen2.5-0.5B"]),
        (["--model.architecture", "Qwen2.5-0.5B", "--data", "absent.jsonl"], ["absent.jsonl"]),
        (["--model", "Llama-3.2-1B", "--random-weights", "--optimizer.name", "fp32_adamw"], ["hybrid8bit"]),
        (["--model", "Qwen2.5-0.5B"], ["hf download Qwen/Qwen2.5-0.5B", "--random-weights"]),
        (["--model.architecture", "Qwen2.5-0.5B", "--plan.devices", "99"], ["plan.devices", "99"]),
        (["--model.architecture", "Qwen2.5-0.5B", "--plan.file", "absent.json"], ["absent.json"]),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    capsys, monkeypatch, tmp_path, arguments, words
):
    # Whatever the machine has: half of it holds a billion parameters with 8-bit state, not with float32.
    monkeypatch.setattr(measure, "host_memory_bytes", lambda: 32 * 10**9)
    assert cli.main(["train", *arguments, "--run.folder", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error
    assert "--debug" not in error
    assert not (tmp_path / "runs").exists()


def test_codes_and_messages_of_errors(capsys):
    assert cli.guarded(refuse(ConfigError("a: wrong"))) == 2
    assert capsys.readouterr().err == "error: a: wrong\n"
    assert cli.guarded(refuse(OSError(28, "No space left on device"))) == 1
    assert "No space left" in capsys.readouterr().err
    assert cli.guarded(refuse(RuntimeError("RESOURCE_EXHAUSTED: 3 GiB"))) == 1
    assert "plan.microbatches" in capsys.readouterr().err
    assert cli.guarded(refuse(KeyboardInterrupt())) == 130


def test_a_warning_of_ours_is_one_line_and_another_stays_as_it_is(capsys, recwarn):
    def warn():
        warnings.warn_explicit("not kept", UserWarning, cli.__file__.replace("cli.py", "data/tokens.py"), 7)
        warnings.warn_explicit("old", UserWarning, "elsewhere.py", 7)

    assert cli.guarded(warn) == 0
    assert capsys.readouterr().err == "warning: not kept\n"
    assert [str(one.message) for one in recwarn] == ["old"]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_message_is_cut_between_words_on_a_terminal(columns):
    """In a pipe it stays one line."""
    path = "/a/folder/with-a-long-name-" + 40 * "x" + "/that-has-hyphens-and/no-spaces.jsonl"
    message = f"error: {path}: row 7: " + "the message goes on " * 12
    lines = cli.wrapped(f"{message}\n  {message}", columns).split("\n")
    assert all(len(line) <= columns or line.strip() == f"{path}:" for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(f"{message} {message}".split())
    assert any(path in line for line in lines)


def test_a_terminal_gets_wrapped_errors(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(cli.os, "get_terminal_size", lambda descriptor: os.terminal_size((40, 20)))
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2)
    assert cli.guarded(refuse(ConfigError("a key " * 20))) == 2
    assert max(map(len, capsys.readouterr().err.splitlines())) <= 40


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError):
        cli.guarded(refuse(KeyError("oops")))


def test_every_command_has_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in cli.COMMANDS:
        try:
            code = cli.main([name, "--help"])
        except SystemExit as exit_:
            code = exit_.code
        assert code == 0
        text = capsys.readouterr().out
        assert f"lazyjax {name}" in text
        assert max(map(len, text.splitlines())) <= 80, name
        if name == "train":
            assert "--resume RUN" in text


@pytest.mark.parametrize("arguments", [["train", "--help"], ["--help"], ["runs", "."]])
def test_a_reader_that_leaves_is_no_error(arguments, tmp_path):
    """As in `lazyjax ... | head -1`, with the pipe closed before the first line."""
    (tmp_path / "metrics.jsonl").write_text("")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "lazyjax.cli", *arguments],
        stdout=writer, stderr=subprocess.PIPE, check=False, cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    os.close(writer)
    assert (done.stderr, done.returncode) == ("", 0)


def test_planning_imports_no_matplotlib():
    """It takes most of a second of a command that draws nothing."""
    code = "import lazyjax.planning.commands.plan, sys; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_does_not_import_jax():
    program = (
        "import sys; from lazyjax import cli; cli.main(['--help']); "
        "sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0
