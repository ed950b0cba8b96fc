"""`lazyjax export`: a run's model as a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from rich.console import Console

from lazyjax.data import chat
from lazyjax.huggingface.checkpoint import CONFIG_FILE, bind
from lazyjax.huggingface.export import ExportDtype, export
from lazyjax.huggingface.find import open_model
from lazyjax.huggingface.gguf_file import write_gguf
from lazyjax.huggingface.parameters import StoredParameters
from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.models.registry import build_template
from lazyjax.training.display import format_bytes

_GGUF = ".gguf"


def export_command(arguments: Sequence[str]) -> None:
    """Parses a command line and writes the model.

    Raises CheckpointError before anything is written; a failure while writing leaves nothing behind.
    """
    parser = argparse.ArgumentParser(
        prog="lazyjax export",
        description="Writes a model as a Hugging Face folder, or as one GGUF file for llama.cpp.",
    )
    parser.add_argument("source", type=pathlib.Path, metavar="RUN|FOLDER", help="a run, or a model's folder")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help=f"new folder, or new {_GGUF} file")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rule", help="GGUF: llama.cpp's name of the tokenizer's splitting rule")
    options = parser.parse_args(list(arguments))
    export_folder(find_model(options.source), options.out, options.dtype, options.rule, Console())


def find_model(source: pathlib.Path) -> pathlib.Path:
    """The folder with the model that a run's folder, or a model's own, means.

    Raises CheckpointError where there is none, saying what is there.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder; name a run's folder or a model's")
    if (source / CONFIG_FILE).is_file():
        return source
    model = source / "model"
    if model.is_dir():
        return model
    is_run = (source / "config.yaml").is_file()
    why = "the run saved none" if is_run else f"neither {CONFIG_FILE} nor model/ is there"
    raise CheckpointError(f"{source}: holds no model ({why})")


def export_folder(
    folder: pathlib.Path, out: pathlib.Path, dtype: ExportDtype, rule: str | None, console: Console
) -> None:
    """Writes the model of a Hugging Face folder in another form.

    Its tensors pass through one at a time, so the size of the model does not matter.
    """
    architecture, checkpoint = open_model(folder)
    template = build_template(architecture)
    binding = bind(checkpoint, template)
    parameters = StoredParameters(binding.entries, binding.stored)
    if out.suffix == _GGUF:
        write_gguf(
            out,
            template,
            parameters,
            folder,
            checkpoint.config,
            dtype=dtype,
            rule=rule,
            stop_token_ids=_stop_tokens(folder),
        )
    else:
        export(out, template, parameters, checkpoint, dtype=dtype)
    words = f"{out}: {len(binding.entries)} tensors in {dtype}, {format_bytes(_size(out))}"
    stored = {tensor.dtype for tensor in binding.stored.values()}
    if dtype == "float32" and "F32" not in stored:
        words += f" (widened: {folder} holds {', '.join(sorted(stored))})"
    left_out = len(binding.rest) if out.suffix == _GGUF else 0
    if left_out:
        words += f"; {left_out} tensors beside the text model are not in it"
    console.print(words, highlight=False, markup=False, soft_wrap=True)


def _stop_tokens(folder: pathlib.Path) -> tuple[int, ...]:
    stop = chat.end_of_turn_id(chat.load_tokenizer(folder))
    return () if stop is None else (stop,)


def _size(out: pathlib.Path) -> int:
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)
