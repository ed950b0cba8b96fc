"""The command `lazyjax generate`: answers to a prompt, to a file of prompts, or in a conversation."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lazyjax.config.arguments import Parser
from lazyjax.data import chat
from lazyjax.data.formats import Message
from lazyjax.evaluation.generate import Completion, GenerationError, Prompt, generate
from lazyjax.evaluation.model import Model, make_decoder, open_folder
from lazyjax.evaluation.options import add_decoding_options, sampling_of
from lazyjax.execution.decode import Decoder
from lazyjax.hardware.profile import load_profile
from lazyjax.planning.commands.plan import number


class PromptFileError(ValueError):
    """A file of prompts that cannot be used; the message names the line."""


def generate_command(arguments: Sequence[str]) -> None:
    """Answers: lazyjax generate RUN|FOLDER [--prompt TEXT | --file FILE]; without either, a chat."""
    options = _parser().parse_args(list(arguments))
    sampling = sampling_of(options)
    profile = None if options.hardware is None else load_profile(options.hardware)
    texts: list[str] | None = None
    if options.prompt is not None:
        texts = [options.prompt]
    elif options.file is not None:
        texts = read_prompts(options.file)
    elif not sys.stdin.isatty():
        texts = [sys.stdin.read().strip()]
        if not texts[0]:
            raise PromptFileError("standard input holds no prompt; use --prompt TEXT or --file FILE")
    opened = open_folder(options.model, compute_dtype=options.dtype)
    prompts = [
        Prompt(index, encode_prompt(opened.tokenizer, text, options.system, raw=options.raw))
        for index, text in enumerate(texts or (), start=1)
    ]
    longest = max((len(prompt.tokens_T) for prompt in prompts), default=0)
    tokens = options.tokens if texts is None else longest + options.new_tokens
    model = opened.load()
    rows = 1 if texts is None else options.batch or len(prompts)
    decoder = make_decoder(
        model.kernels,
        model.store,
        tokens=tokens,
        rows=rows,
        sampling=sampling,
        profile=profile,
        fixed_rows=options.batch is not None or texts is None,
    )
    if texts is None:
        converse(model, decoder, options.system, options.new_tokens, read_line, write)
    elif len(prompts) == 1:
        spoken = Spoken(model.tokenizer, write)
        list(answers(model, decoder, prompts, options.new_tokens, on_token=spoken.token))
        spoken.end()
    else:
        _answer_file(model, decoder, texts, prompts, options)
    decoder.close()


def encode_prompt(tokenizer: chat.Tokenizer, text: str, system: str | None, *, raw: bool) -> np.ndarray:
    """The tokens of one user turn, in the model's chat template unless `raw`."""
    if not raw:
        messages = [] if system is None else [Message("system", system)]
        text = chat.render_prompt(tokenizer, [*messages, Message("user", text)])
    return np.asarray(tokenizer(text, add_special_tokens=raw)["input_ids"], np.int32)


def read_prompts(path: pathlib.Path) -> list[str]:
    """One prompt a line; in a `.jsonl` file the `prompt`, `query` or `instruction` of every row.

    Raises:
        PromptFileError: the file cannot be read, or a line holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PromptFileError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path}: not UTF-8 text (byte {error.start})") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise PromptFileError(f"{path}: no prompts")
    if path.suffix not in (".jsonl", ".json"):
        return [line for _, line in numbered]
    return [_prompt_of(f"{path}, line {number}", line) for number, line in numbered]


def _prompt_of(place: str, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptFileError(f"{place}: invalid JSON, {error.msg}") from error
    for key in ("prompt", "query", "instruction", "question"):
        if isinstance(row, dict) and key in row and isinstance(row[key], str) and row[key].strip():
            return str(row[key])
    raise PromptFileError(f"{place}: has no text under prompt, query, instruction or question")


def answers(
    model: Model,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    new_tokens: int,
    on_token: Callable[[int, int], None] | None = None,
) -> Iterator[Completion]:
    """Completions of the prompts."""
    return generate(decoder, prompts, stop_tokens=model.stop_tokens, new_tokens=new_tokens, on_token=on_token)


def _answer_file(
    model: Model,
    decoder: Decoder,
    texts: Sequence[str],
    prompts: Sequence[Prompt],
    options: argparse.Namespace,
) -> None:
    """Writes a JSON line per prompt, in the order in which answers are finished."""
    with contextlib.ExitStack() as stack:
        out: Callable[[str], object] = write
        if options.out is not None:
            # A line at a time: what is finished is there when the rest is not.
            out = stack.enter_context(options.out.open("w", encoding="utf-8", buffering=1)).write
        for one in answers(model, decoder, prompts, options.new_tokens):
            text = model.tokenizer.decode(list(one.tokens), skip_special_tokens=True)
            record = {
                "row": one.number,
                "prompt": texts[one.number - 1],
                "answer": text,
                "tokens": len(one.tokens),
                "stopped": one.stopped,
            }
            out(json.dumps(record, ensure_ascii=False) + "\n")


class Spoken:
    """Writes an answer as it comes, whole characters only."""

    def __init__(self, tokenizer: chat.Tokenizer, out: Callable[[str], object]) -> None:
        self._tokenizer, self._out = tokenizer, out
        self._tokens: list[int] = []
        self._written = 0

    def token(self, number: int, token: int) -> None:
        """One more token."""
        del number
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not text.endswith("�"):
            self._write(text)

    def end(self) -> str:
        """Writes what is left and a line's end; returns the whole."""
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        self._write(text)
        self._out("\n")
        return str(text)

    def _write(self, text: str) -> None:
        self._out(text[self._written :])
        self._written = len(text)


def write(text: str) -> None:
    """Writes to standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def read_line() -> str | None:
    """A line from the terminal; None at its end."""
    try:
        return input("> ")
    except EOFError:
        return None


def converse(
    model: Model,
    decoder: Decoder,
    system: str | None,
    new_tokens: int,
    read: Callable[[], str | None],
    out: Callable[[str], object],
) -> None:
    """A conversation: the model sees all of it again at every turn. An empty line begins a new one."""
    out("Ctrl-D ends; an empty line starts anew.\n")
    beginning = [] if system is None else [Message("system", system)]
    messages = list(beginning)
    while (line := read()) is not None:
        if not line.strip():
            messages = list(beginning)
            continue
        messages.append(Message("user", line))
        text = chat.render_prompt(model.tokenizer, messages)
        tokens_T = np.asarray(model.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        spoken = Spoken(model.tokenizer, out)
        try:
            list(
                answers(model, decoder, [Prompt(len(messages), tokens_T)], new_tokens, on_token=spoken.token)
            )
        except GenerationError:
            out(f"(the conversation has more than {decoder.plan.tokens} tokens: starting anew)\n")
            messages = list(beginning)
            continue
        messages.append(Message("assistant", spoken.end()))


def _parser() -> Parser:
    parser = Parser(
        prog="lazyjax generate",
        description="Answers of a model: to one prompt, to a file of prompts, or in a conversation.",
    )
    parser.add_argument("model", type=pathlib.Path, metavar="RUN|FOLDER", help="a run or a model folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", help="one prompt; the answer is printed as it is written")
    what.add_argument("--file", type=pathlib.Path, help="a prompt a line, or JSON Lines with a key `prompt`")
    parser.add_argument("--out", type=pathlib.Path, help="file for the answers to --file (JSON Lines)")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the text, without the chat template")
    parser.add_argument(
        "--tokens", type=number(2, int), default=4096, help="of a conversation (default 4096)"
    )
    add_decoding_options(parser, new_tokens=512)
    return parser
