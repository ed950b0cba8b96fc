"""A model to ask: a run's or any Hugging Face folder's weights in host memory, and a decoder for them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable

import jax

from lazyjax.config import Config, load_config
from lazyjax.data.chat import Tokenizer, end_of_turn_id, load_tokenizer
from lazyjax.data.formats import DataError
from lazyjax.execution.decode import Decoder, Sampling
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.measure import host_memory_bytes, usable_device_bytes
from lazyjax.hardware.profile import HardwareProfile
from lazyjax.huggingface.checkpoint import Checkpoint, CheckpointError, bind, load_into, read_json_table
from lazyjax.huggingface.find import open_model
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.planning.costs.decode import DecodeSizes, decode_costs
from lazyjax.planning.plan.decode import DecodePlan
from lazyjax.planning.planner.decode import most_resident, plan_decoding
from lazyjax.storage.host import HostStore, allocate_host_store

#: Rows decoded together where nobody asks for another number: beyond, a step gets longer almost everywhere.
DEFAULT_ROWS = 64


class ModelMemoryError(ValueError):
    """A model that host memory does not hold; the message says what it takes."""


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A folder that was opened and checked; its weights are not read yet.

    Attributes:
        config: of the run whose folder it is.
    """

    folder: pathlib.Path
    config: Config | None
    checkpoint: Checkpoint
    template: ModelTemplate
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    compute_dtype: str

    def load(self) -> Model:
        """Reads the weights.

        Raises:
            ModelMemoryError: host memory is too small. CheckpointError: a file is damaged.
        """
        spec = self.template.spec
        needed, free = 4 * spec.parameter_count, host_memory_bytes()
        if needed > free:
            raise ModelMemoryError(
                f"{spec.name}: the weights take {needed / 1e9:.2f} GB of host memory, {free / 1e9:.2f} are "
                "free; use a smaller model or a larger machine"
            )
        store = allocate_host_store(spec)
        load_into(self.checkpoint, self.template, store)
        kernels = Kernels(self.template, data_mesh(), self.compute_dtype)
        return Model(self.template, store, kernels, self.tokenizer, self.stop_tokens)


@dataclasses.dataclass(frozen=True)
class Model:
    """Weights in host memory and what belongs to them."""

    template: ModelTemplate
    store: HostStore
    kernels: Kernels
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]


def find_run(path: pathlib.Path) -> tuple[pathlib.Path, Config | None]:
    """The model folder that `path` means, and the configuration where it is a run's folder.

    Raises:
        CheckpointError: neither a run's folder with a trained model nor a model's.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; name a run's folder or a Hugging Face folder")
    config = path / "config.yaml"
    if not config.is_file():
        return path, None
    model = path / "model"
    if not model.is_dir():
        raise CheckpointError(
            f"{path}: the run left no trained model (no folder `model`); it was stopped before, or "
            "run.save_model is false"
        )
    return model, load_config(config)


def open_folder(path: pathlib.Path, *, compute_dtype: str | None = None) -> ModelFolder:
    """Opens a model and its tokenizer; what is wrong with them is found here, before weights are read.

    Args:
        path: of a run or a Hugging Face folder.
        compute_dtype: by default the run's; for a folder float32 on a CPU, which is fastest there, else
            bfloat16.

    Raises:
        CheckpointError, ArchitectureError, DataError: see `find_run`, `open_model`, `load_tokenizer`.
    """
    folder, config = find_run(path)
    architecture, checkpoint = open_model(folder)
    tokenizer = load_tokenizer(folder)
    template = build_template(architecture)
    bind(checkpoint, template)
    if compute_dtype is None:
        compute_dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        compute_dtype = compute_dtype if config is None else config.model.compute_dtype
    stops = stop_tokens(tokenizer, folder)
    return ModelFolder(folder, config, checkpoint, template, tokenizer, stops, compute_dtype)


def stop_tokens(tokenizer: Tokenizer, folder: pathlib.Path | None = None) -> frozenset[int]:
    """Tokens that end an answer.

    The tokenizer's end of sequence, what closes a turn in the chat template, and what the folder's
    generation_config.json says.
    """
    found: set[int | None] = {tokenizer.eos_token_id, end_of_turn_id(tokenizer)}
    path = None if folder is None else folder / "generation_config.json"
    if path is not None and path.is_file():
        settings = read_json_table(path)
        if "eos_token_id" in settings:
            given = settings["eos_token_id"]
            if isinstance(given, int) or given is None:
                given = [given]
            if not isinstance(given, list) or not all(one is None or isinstance(one, int) for one in given):
                raise CheckpointError(
                    f"{path}: eos_token_id must be a number or a list of them, it is {given!r}"
                )
            found.update(given)
    stops = frozenset(token for token in found if token is not None)
    if not stops:
        raise DataError("the tokenizer has no end-of-sequence token: no answer would ever end")
    return stops


def make_decoder(
    kernels: Kernels,
    store: HostStore,
    *,
    tokens: int,
    rows: int,
    sampling: Sampling,
    profile: HardwareProfile | None = None,
    fixed_rows: bool = False,
) -> Decoder:
    """A decoder under a plan for the device in use.

    Args:
        tokens: of a row's prompt and answer together.
        rows: most rows that there are to decode together.
        profile: with one, the batch is chosen by the cost model; without, it is `DEFAULT_ROWS`, and half of
            that as often as needed for it to fit.
        fixed_rows: take `rows` as it is.
    """
    template, devices = kernels.template, kernels.mesh.size
    device_bytes = usable_device_bytes(kernels.mesh.devices.flat[0])
    rows = -(-rows // devices) * devices
    plan: DecodePlan | None = None
    if profile is not None:
        costs = decode_costs(template, profile, tokens=tokens, compute_dtype=kernels.compute_dtype)
        plan = plan_decoding(
            costs, device_bytes=device_bytes, most_rows=rows, batch_rows=rows if fixed_rows else None
        )
        return Decoder(kernels, store, plan, sampling)
    sizes = DecodeSizes(template, tokens, kernels.compute_dtype, devices)
    for count in _halved(rows if fixed_rows else min(rows, DEFAULT_ROWS), devices):
        plan = most_resident(sizes, count, device_bytes)
        if plan is not None:
            return Decoder(kernels, store, plan, sampling)
        if fixed_rows:
            break
    raise sizes.too_large(device_bytes, rows if fixed_rows else devices)


def _halved(rows: int, devices: int) -> Iterable[int]:
    while rows >= devices:
        yield rows
        rows = rows // 2 // devices * devices
