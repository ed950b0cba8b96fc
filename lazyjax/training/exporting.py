"""`lazyjax export`: a run's model as a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.console import Console

from lazyjax.config import load_config
from lazyjax.config.arguments import Parser
from lazyjax.data import chat
from lazyjax.data.batches import load_data_tokenizer
from lazyjax.data.sources import problems_folder
from lazyjax.huggingface.checkpoint import CONFIG_FILE, Checkpoint, bind
from lazyjax.huggingface.configs import to_hf_config
from lazyjax.huggingface.export import ExportDtype, export
from lazyjax.huggingface.find import open_model
from lazyjax.huggingface.gguf_file import write_gguf
from lazyjax.huggingface.parameters import ReadableLayer, ReadableStore, StoredParameters
from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.base import HostOptimizer
from lazyjax.specs import ModelSpec
from lazyjax.storage.host import LayerSlabs, allocate_host_store
from lazyjax.training import checkpoints
from lazyjax.training.display import format_bytes
from lazyjax.training.inputs import make_optimizer, read_architecture
from lazyjax.training.run_folder import RunFolder

_GGUF = ".gguf"


def export_command(arguments: Sequence[str]) -> None:
    """Parses a command line and writes the model.

    Raises CheckpointError, or another ValueError, before anything is written; a failure while writing
    leaves nothing behind.
    """
    parser = Parser(
        prog="lazyjax export",
        description="Writes a model as a Hugging Face folder, or as one GGUF file for llama.cpp.",
    )
    parser.add_argument("source", type=pathlib.Path, metavar="RUN|FOLDER", help="a run, or a model's folder")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help=f"new folder, or new {_GGUF} file")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--checkpoint", metavar="STEP", help="of this step of a run, or `last`; by default its final model"
    )
    parser.add_argument("--rule", help="GGUF: llama.cpp's name of the tokenizer's splitting rule")
    options = parser.parse_args(list(arguments))
    if options.checkpoint is None:
        trained = open_folder(find_model(options.source))
    else:
        trained = open_training_checkpoint(options.source, options.checkpoint)
    console = Console()
    console.print(
        write(trained, options.out, options.dtype, options.rule),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """A model to be exported, and what goes with it.

    Attributes:
        parameters: read a tensor or a layer at a time.
        source: the Hugging Face folder that config, companions and tensors beside the text model come from.
        tokenizer_folder: of the tokenizer that rows were written with.
        chat_template: what they were written with, where it is not the tokenizer's own.
        stored: types that the parameters are stored in.
    """

    template: ModelTemplate
    parameters: ReadableStore
    source: Checkpoint | None
    tokenizer_folder: pathlib.Path
    chat_template: str | None
    stop_token_ids: tuple[int, ...]
    stored: frozenset[str]


def open_folder(folder: pathlib.Path) -> Trained:
    """The model of a Hugging Face folder; raises CheckpointError or ArchitectureError."""
    architecture, checkpoint = open_model(folder)
    template = build_template(architecture)
    binding = bind(checkpoint, template)
    return Trained(
        template,
        StoredParameters(binding.entries, binding.stored),
        checkpoint,
        folder,
        None,
        (),
        frozenset(tensor.dtype for tensor in binding.stored.values()),
    )


def open_training_checkpoint(run: pathlib.Path, step: str) -> Trained:
    """The float32 master weights of a run's checkpoint.

    Args:
        step: a number, or `last`.

    Raises ValueError: no such run or checkpoint (naming those there are), or a damaged one.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{run}: no run (no config.yaml), so no checkpoint of one")
    config = load_config(path)
    chosen = _choose(RunFolder(run).checkpoints, step)
    model, source = read_architecture(config)
    template = build_template(model)
    optimizer = make_optimizer(config)
    checkpoint = checkpoints.open_checkpoint(chosen)
    checkpoint.check_identity(checkpoints.identity_of(template.spec, optimizer))
    folder = config.data.tokenizer or config.model.folder or problems_folder()
    tokenizer = load_data_tokenizer(config.data, folder)
    own_template = config.data.chat_template is None and tokenizer.chat_template
    stop = chat.end_of_turn_id(tokenizer)
    return Trained(
        template,
        CheckpointParameters(checkpoint, template.spec, optimizer),
        source,
        folder,
        None if own_template else chat.default_template(tokenizer),
        () if stop is None else (stop,),
        frozenset({"F32"}),
    )


def _choose(folder: pathlib.Path, step: str) -> pathlib.Path:
    there = checkpoints.list_checkpoints(folder)
    if not there:
        raise CheckpointError(f"{folder}: holds no checkpoint; checkpoints.every_steps has a run save some")
    if step == "last":
        return there[0]
    steps = {str(checkpoints.step_of(path)): path for path in there}
    if step not in steps:
        raise CheckpointError(f"{folder}: no checkpoint of step {step}; there are {', '.join(steps)}")
    return steps[step]


class CheckpointParameters:
    """A checkpoint's master weights, restored when they are asked for; one layer is held at a time."""

    def __init__(self, checkpoint: checkpoints.Checkpoint, spec: ModelSpec, optimizer: HostOptimizer) -> None:
        self._checkpoint, self._spec, self._optimizer = checkpoint, spec, optimizer
        self._held: tuple[int, LayerSlabs] | None = None
        self._layers = tuple(_CheckpointLayer(self, index) for index in range(len(spec.layers)))

    @property
    def layers(self) -> Sequence[ReadableLayer]:
        """In the order of `ModelSpec.layers`."""
        return self._layers

    def slabs(self, index: int) -> LayerSlabs:
        """One layer with its masters; raises DamagedCheckpointError."""
        if self._held is None or self._held[0] != index:
            self._held = None
            alone = dataclasses.replace(self._spec, layers=(self._spec.layers[index],))
            slabs = allocate_host_store(alone).slabs(0)
            self._checkpoint.restore_layer(index, slabs, self._optimizer.create_state(slabs.layout))
            self._held = (index, slabs)
        return self._held[1]


@dataclasses.dataclass(frozen=True, slots=True)
class _CheckpointLayer:
    parameters: CheckpointParameters
    index: int

    def master_chunks(
        self, segment_name: str, arrange: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """As `LayerSlabs.master_chunks`."""
        return self.parameters.slabs(self.index).master_chunks(segment_name, arrange)


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


def write(trained: Trained, out: pathlib.Path, dtype: ExportDtype, rule: str | None = None) -> str:
    """Writes a model as a folder, or as a GGUF file where `out` is called so; says what was written."""
    is_gguf = out.suffix == _GGUF
    if is_gguf:
        config = to_hf_config(trained.template.config) if trained.source is None else trained.source.config
        write_gguf(
            out,
            trained.template,
            trained.parameters,
            trained.tokenizer_folder,
            config,
            dtype=dtype,
            rule=rule,
            chat_template=trained.chat_template,
            stop_token_ids=trained.stop_token_ids or _stop_tokens(trained.tokenizer_folder),
        )
    else:
        export(
            out,
            trained.template,
            trained.parameters,
            trained.source,
            tokenizer_folder=trained.tokenizer_folder,
            chat_template=trained.chat_template,
            stop_token_ids=trained.stop_token_ids,
            dtype=dtype,
        )
    count = sum(len(layer.parameters) for layer in trained.template.spec.layers)
    words = f"{out}: {count} tensors in {dtype}, {format_bytes(_size(out))}"
    if dtype == "float32" and "F32" not in trained.stored:
        words += f" (widened from {', '.join(sorted(trained.stored))})"
    if is_gguf and trained.source is not None:
        beside = len(bind(trained.source, trained.template).rest)
        words += f"; {beside} tensors beside the text model are not in it" if beside else ""
    return words


def _stop_tokens(folder: pathlib.Path) -> tuple[int, ...]:
    stop = chat.end_of_turn_id(chat.load_tokenizer(folder))
    return () if stop is None else (stop,)


def _size(out: pathlib.Path) -> int:
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)
