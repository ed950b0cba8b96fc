"""The command `lazyjax`: one function per subcommand, and how errors reach the user.

Whatever is wrong with the input is printed as one message, without a traceback, and ends with
exit code 2; `--debug` shows the traceback. A run that went wrong later ends with exit code 1, one that
was stopped with a code of its own (`lazyjax.training.interrupt.exit_status`).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from rich.console import Console

from lazyjax.hardware.runtime import set_runtime

#: Commands that open a device by themselves; `train` does so with what its configuration says.
_OPEN_DEVICES = ("evaluate", "generate", "profile")
#: A subcommand: gets the arguments that follow its name; may give an exit code.
Command = Callable[[Sequence[str]], int | None]


def train(arguments: Sequence[str]) -> int:
    """Fine-tune: lazyjax train [CONFIG.yaml] [--resume RUN] [--reproduce RUN] [--model DIR] [...]."""
    repeated, rest = _split_folder(arguments, "--reproduce")
    if repeated is not None:
        from lazyjax.training.reproducing import reproduce

        return reproduce(repeated, rest, Console())
    run, rest = _split_folder(arguments, "--resume")
    if run is None:
        from lazyjax.config import load_command_line

        config, resume = load_command_line(rest), None
    else:
        from lazyjax.training.resume import read_resume

        config, resume = read_resume(run, rest)
    from lazyjax.training import setup
    from lazyjax.training.interrupt import exit_status

    return exit_status(setup.train(config, Console(), resume)["reason"])


def _split_folder(arguments: Sequence[str], option: str) -> tuple[pathlib.Path | None, list[str]]:
    """The run that an option names, and the other arguments."""
    rest, run = list(arguments), None
    for index, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name == option:
            if not equals and index + 1 == len(rest):
                from lazyjax.config import ConfigError

                raise ConfigError(f"{option} needs a value, the folder of a run")
            run = pathlib.Path(value if equals else rest.pop(index + 1))
            del rest[index]
            break
    return run, rest


def plan(arguments: Sequence[str]) -> None:
    """Plan a step: lazyjax plan --model NAME --hardware PROFILE --batch ROWS --seq TOKENS; or --generate."""
    if "--generate" in arguments:
        from lazyjax.planning.commands.decode import decode_plan_command

        decode_plan_command(arguments)
        return
    from lazyjax.planning.commands.plan import plan_command

    plan_command(arguments)


def profile(arguments: Sequence[str]) -> None:
    """Measure this machine: lazyjax profile [--out FILE.yaml] [--model NAME] [--nvme-folder FOLDER]."""
    from lazyjax.config.arguments import Parser

    parser = Parser(prog="lazyjax profile", description="Measures this machine.")
    default = pathlib.Path("machine.yaml")
    parser.add_argument("--out", type=pathlib.Path, default=default, help="profile to write")
    parser.add_argument("--model", default="Qwen2.5-7B", help="products are timed at this model's shapes")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products")
    parser.add_argument("--nvme-folder", type=pathlib.Path, help="on the drive that plans may use")
    options = parser.parse_args(list(arguments))

    from lazyjax.huggingface.find import read_architecture
    from lazyjax.models.registry import build_template
    from lazyjax.planning.commands.profile import profile_machine

    template = build_template(read_architecture(options.model))
    profile_machine(
        options.out,
        template,
        name=options.out.stem,
        compute_dtype=options.dtype,
        nvme_folder=options.nvme_folder,
    )


def evaluate(arguments: Sequence[str]) -> None:
    """Score a model: lazyjax evaluate RUN|FOLDER [--data FILE] [--rows N] [--seed S] [--help]."""
    from lazyjax.evaluation.evaluate import evaluate_command

    evaluate_command(arguments)


def generate(arguments: Sequence[str]) -> None:
    """Ask a model: lazyjax generate RUN|FOLDER [--prompt TEXT | --file FILE]; without either, a chat."""
    from lazyjax.evaluation.ask import generate_command

    generate_command(arguments)


def runs(arguments: Sequence[str]) -> None:
    """Compare runs: lazyjax runs [FOLDER ...] [--plot losses.png]."""
    from lazyjax.runs import runs_command

    runs_command(arguments)


def inspect_data(arguments: Sequence[str]) -> None:
    """Show what training makes of data: lazyjax inspect-data [CONFIG.yaml] [--model FOLDER] [--data FILE]."""
    from lazyjax.data.inspection import inspect_command

    inspect_command(arguments)


def export(arguments: Sequence[str]) -> None:
    """Write a trained model: lazyjax export RUN|FOLDER OUT [--dtype float32]; OUT.gguf for llama.cpp."""
    from lazyjax.training.exporting import export_command

    export_command(arguments)


#: Imported inside each command: `lazyjax --help` must not wait for JAX.
COMMANDS: Mapping[str, Command] = {
    "train": train,
    "plan": plan,
    "evaluate": evaluate,
    "generate": generate,
    "profile": profile,
    "runs": runs,
    "inspect-data": inspect_data,
    "export": export,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code."""
    from lazyjax.training.streams import silenced_when_closed

    with silenced_when_closed():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0 if given else 2
    if given[0] == "--version":
        import importlib.metadata

        print(importlib.metadata.version("lazyjax"))
        return 0
    name, rest = given[0], given[1:]
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        print(f"error: no command {name!r}; {hint}", file=sys.stderr)
        return 2
    words = [argument for argument in rest if argument != "--debug"]
    quiet_libraries()
    if name in _OPEN_DEVICES:
        set_runtime(os.environ)
    return guarded(lambda: COMMANDS[name](words), debug="--debug" in rest)


def usage() -> str:
    """The subcommands, in 80 columns."""
    import textwrap

    lines = ["usage: lazyjax COMMAND [ARGUMENTS]; lazyjax COMMAND --help"]
    for name, command in COMMANDS.items():
        words = (command.__doc__ or "").splitlines()[0]
        lines += textwrap.wrap(
            words, 80, initial_indent=f"    {name:<14}", subsequent_indent=" " * 18, break_on_hyphens=False
        )
    return "\n".join([*lines, "    --debug       show where an error came from"])


def quiet_libraries() -> None:
    """Keeps notices that do not concern the user off the screen; before the libraries are imported."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def guarded(command: Callable[[], int | None], *, debug: bool = False) -> int:
    """Runs `command`; its errors become a message on stderr and an exit code."""
    from lazyjax.training.interrupt import StoppedAtOnce
    from lazyjax.training.streams import silenced_when_closed

    try:
        with silenced_when_closed(), _warnings_in_words():
            code = command()
    except StoppedAtOnce as stopped:
        _complain(f"stopped at once ({stopped})")
        return stopped.exit_status
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except (ValueError, ArithmeticError, MemoryError, OSError, RuntimeError) as error:
        if debug:
            raise
        _complain(f"error: {_message(error)}")
        return 2 if isinstance(error, ValueError) else 1
    return code or 0


@contextlib.contextmanager
def _warnings_in_words() -> Iterator[None]:
    """In it, warnings of this package are one line each, without the line of code they come from."""
    import warnings

    show = warnings.showwarning

    def say(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if pathlib.Path(__file__).parent in pathlib.Path(filename).parents:
            _complain(f"warning: {message}")
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = say
    try:
        yield
    finally:
        warnings.showwarning = show


def _complain(text: str) -> None:
    """To stderr, if there still is one: a dropped terminal must not change the exit code."""
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            text = wrapped(text, os.get_terminal_size(sys.stderr.fileno()).columns)
        print(text, file=sys.stderr, flush=True)


def wrapped(text: str, columns: int) -> str:
    """Lines that a terminal would cut within words, cut between them; paths and names stay whole."""
    import textwrap

    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + "  "
        lines += textwrap.wrap(
            line, max(columns, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def _message(error: Exception) -> str:
    """The error in words, with what may help where it is not one of ours."""
    text = str(error) or type(error).__name__
    if "RESOURCE_EXHAUSTED" in text:
        return (
            f"device memory ran out: use more plan.microbatches, fewer data.rows, or a plan that keeps less "
            f"on the device\n{text}"
        )
    if type(error).__module__.partition(".")[0] == "lazyjax":
        return text
    return f"{text}\n(--debug shows where)"


if __name__ == "__main__":
    sys.exit(main())
