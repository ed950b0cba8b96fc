"""The keys of a run's configuration: frozen, validated, and complete once loaded.

Everything is checked here, before a file is read or a byte allocated: a key that does not exist, a
value of the wrong type or out of range, and combinations that cannot work are errors that name the
key. Whatever needs more than the configuration (does the file exist, does the plan fit the model) is
checked where it is read. Values may come as text, from a file or from the command line; what they
mean follows from the key, so that a run may be called 007 or on.

Paths are relative to the working directory; `~` and `$VARIABLE` expand. Byte counts may be written as
`80e9`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
from typing import Annotated, Any, Literal, get_args

import pydantic
import yaml

from lazyjax.config.names import OPTIMIZER_NAMES, PLANNER_NAMES

#: Both `lazyjax plan` and `lazyjax train`. State of 8 bits beside exact float32 masters is what this
#: project is about: 8 host bytes a parameter in place of 14, at losses within 1 % of float32 state
#: (experiments/benchmarks/results/optimizer_training.md).
DEFAULT_OPTIMIZER: Literal["hybrid8bit"] = "hybrid8bit"

#: Smallest normal float32. AdamW adds epsilon to a root that is 0 where a parameter has had no gradient, and
#: float32 units flush what is smaller to 0.
SMALLEST_EPSILON = 1.1754943508222875e-38


#: What a layer owns from step to step: optimizer state, the low half of the float32 master weights, the
#: gradient until the update, the high half.
OwnedPart = Literal["state", "lo", "gradient", "hi"]


def _normal(value: float) -> float:
    if value < SMALLEST_EPSILON:
        raise ValueError(f"should be at least {SMALLEST_EPSILON:.4g}, the smallest normal float32")
    return value


def _whole(value: Any) -> Any:
    """Numbers written as 80e9 or 8.0 that are whole."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _expanded(value: Any) -> Any:
    """`~` and `$VARIABLE` as a shell would expand them; a path that cannot be meant is an error."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise ValueError("must not be empty")
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    text = os.path.expandvars(os.path.expanduser(value))
    if text.startswith("~"):
        raise ValueError(f"there is no home folder for {text.split('/')[0]!r}")
    unset = re.search(r"\$\{?(\w+)", text)
    if unset is not None and not os.path.lexists(text):
        raise ValueError(f"the environment variable {unset.group(1)} is not set")
    return text


def _run_name(value: Any) -> Any:
    if isinstance(value, str) and (not re.fullmatch(r"[\w.+:-]+", value) or set(value) <= {"."}):
        raise ValueError("must be one folder name of letters, digits and . _ + - : without spaces or slashes")
    return value


def _take(value: Any) -> Any:
    """A number of rows, or a share of them."""
    value = _whole(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, float) and 0 < value < 1:
        return value
    raise ValueError("must be a number of rows from 1, or a share of them between 0 and 1")


def _sources(value: Any) -> Any:
    """One name, or a list of sources; on the command line the list is written as in YAML."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"is no list in YAML: {' '.join(str(error).split())}") from error
    if isinstance(value, str):
        return _expanded(value)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("must be a name, or a list of names or of {source, weight, take}")
    sources = []
    for number, item in enumerate(value, start=1):
        if isinstance(item, SourceConfig):
            sources.append(item)
            continue
        try:
            sources.append(SourceConfig.model_validate({"source": item} if isinstance(item, str) else item))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            known = ", ".join(SourceConfig.model_fields)
            raise ValueError(f"item {number}: {key}: {first['msg']} (keys: {known})") from None
    return tuple(sources)


Whole = pydantic.BeforeValidator(_whole)
PositiveInt = Annotated[int, Whole, pydantic.Field(gt=0)]
NonNegativeInt = Annotated[int, Whole, pydantic.Field(ge=0)]
ByteCount = Annotated[int, Whole, pydantic.Field(gt=0)]
#: A path, or a name that may also be one.
PathKey = Annotated[pathlib.Path, pydantic.BeforeValidator(_expanded)]
NameOrPath = Annotated[str, pydantic.BeforeValidator(_expanded)]
Take = Annotated[int | float, pydantic.BeforeValidator(_take)]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and what it may be."""


class _Group(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: Any) -> Any:
        """YAML reads `yes` as true, which Python would count as 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("a truth value is not allowed here")
        return value


class ModelConfig(_Group):
    """Which model is trained: a folder with weights, or an architecture with random ones.

    Attributes:
        folder: Hugging Face folder (config.json, safetensors, tokenizer).
        architecture: name of a packaged architecture such as `Qwen2.5-7B`, a config.json, or a folder
            with one; training starts from random weights.
        compute_dtype: of the layers' mathematics; float32 also streams whole float32 weights.
        attention: `auto` takes the fastest form that the device has and gets right: on a GPU whose rows are
            not packed cuDNN's or tokamax's kernel, else `blockwise`; `dense` needs memory with the square of
            the length.
    """

    folder: PathKey | None = None
    architecture: NameOrPath | None = None
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Literal["auto", "blockwise", "cudnn", "tokamax", "dense"] = "auto"

    @pydantic.model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.folder is None) == (self.architecture is None):
            raise ValueError("needs exactly one of folder (with weights) and architecture (random weights)")
        return self


class SourceConfig(_Group):
    """One of several sources of rows.

    Attributes:
        source: as `DataConfig.source`, one name.
        weight: how often an epoch meets each of its rows; 0.5 is every other row, and by the next
            epoch the others.
        take: as `DataConfig.take`, of this source.
    """

    source: NameOrPath
    weight: Annotated[float, pydantic.Field(gt=0, le=1000)] = 1.0
    take: Take | None = None


class DataConfig(_Group):
    """What is learned, and how rows become batches.

    Attributes:
        source: `problems` (ships with the package); a JSON, JSON Lines or text file, or a folder of
            them; or, with the extra `hub`, Parquet, Arrow, or the name of a data set of the Hugging
            Face hub such as `meta-math/MetaMathQA`. Also a list of those, or of {source, weight,
            take}: an epoch meets each row as often as its weight says.
        validation: another source, whose rows are held out for evaluation in place of a share.
        take: how many rows are used, or (below 1) which share; drawn by seed. By default all.
        hub_split: which split is read of a hub data set, or of a folder with files named after
            splits.
        tokenizer: folder of the tokenizer; by default the model folder's, or the packaged one.
        chat_template: a file with a Jinja template, or which of the tokenizer's named templates; by
            default the tokenizer's own.
        sequence_length: tokens of a sequence.
        rows: sequences of one step's batch.
        batching: `padded` (every row to sequence_length), `bucketed` (rows of like length, padded
            to the longest of them) or `packed` (several rows in one sequence).
        too_long: what happens to a row longer than sequence_length; a plain text is not truncated but
            goes on in the next row.
        bad_rows: what happens to a row that cannot be read, or that the chat template cannot write.
        cache_folder: where tokenized rows are kept for the next run; by default nowhere.
        train_fraction: share of the rows that is trained on; the rest is for evaluation. 0.7 where it is
            left out, or 1 with `validation`.
        seed: of the split and the order.
    """

    source: Annotated[str | tuple[SourceConfig, ...], pydantic.BeforeValidator(_sources)] = "problems"
    validation: NameOrPath | None = None
    take: Take | None = None
    hub_split: str = "train"
    tokenizer: PathKey | None = None
    chat_template: NameOrPath | None = None
    sequence_length: PositiveInt = 1024
    rows: PositiveInt = 8
    batching: Literal["padded", "bucketed", "packed"] = "bucketed"
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    bad_rows: Literal["error", "skip"] = "error"
    cache_folder: PathKey | None = None
    train_fraction: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    seed: NonNegativeInt = 42

    @pydantic.model_validator(mode="after")
    def _one_way_to_hold_out(self) -> DataConfig:
        if self.validation is not None and self.training_share < 1:
            raise ValueError(
                f"validation ({self.validation}) and train_fraction ({self.train_fraction:g}) both hold rows "
                f"out: leave one of them out"
            )
        if self.take is not None and not isinstance(self.source, str):
            raise ValueError("take belongs to each of several sources: {source: ..., take: ...}")
        return self

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources, also where there is one."""
        if isinstance(self.source, str):
            return (SourceConfig(source=self.source, take=self.take),)
        return self.source

    @property
    def training_share(self) -> float:
        """Share of the rows that is trained on."""
        if self.train_fraction is not None:
            return self.train_fraction
        return 0.7 if self.validation is None else 1.0


class OptimizerConfig(_Group):
    """AdamW on the host.

    Attributes:
        name: `hybrid8bit` (8-bit moments, float32 master weights), `fp32_adamw` (exact),
            `bf16_adamw`, or `hybrid8bit_2percent` (2 % of the moments in 8 bits, to compare with).
        learning_rate: the peak of the schedule.
        schedule: after warm-up: constant, or down to `final_fraction` of the peak.
        warmup_steps: steps of linear warm-up from zero.
        decay_vectors: whether weight decay also covers biases and norms.
        clip: by the norm over the whole model, by each layer's own norm, or not at all.
        clip_norm: the largest norm that passes unscaled.
        gradient_dtype: of gradients on their way to the host.
        threads: of the host update; 0 takes every core.
    """

    name: Annotated[str, OPTIMIZER_NAMES] = DEFAULT_OPTIMIZER
    learning_rate: Annotated[float, pydantic.Field(gt=0)] = 1e-5
    beta1: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.999
    epsilon: Annotated[float, pydantic.AfterValidator(_normal)] = 1e-8
    weight_decay: Annotated[float, pydantic.Field(ge=0)] = 0.01
    decay_vectors: bool = False
    clip: Literal["global_norm", "per_layer", "none"] = "global_norm"
    clip_norm: Annotated[float, pydantic.Field(gt=0)] = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    final_fraction: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.0
    gradient_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: NonNegativeInt = 0


def _listed(value: Any) -> Any:
    """A list, also as one text with commas in it."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _parts(value: Any) -> Any:
    """Parts of what a layer owns, `all` or `none` of them."""
    words = _listed(value)
    if words == ("all",):
        return get_args(OwnedPart)
    return () if words == ("none",) else words


class PlanConfig(_Group):
    """Who decides what is kept, moved and recomputed.

    Attributes:
        planner: `milp` (the best plan that is found for this machine), or the rule of a baseline.
        file: a plan to execute as it is; `planner` and the other keys then decide nothing.
        microbatches: parts of the batch that pass a layer one after another.
        prefetch: parameter slabs on the device during the forward pass (1: none ahead).
        backward_prefetch: the same during the backward pass.
        update: `deferred` runs the host update under the next step's forward pass.
        interlayer_home: where activations wait between a layer and the next.
        keep_residuals: whether the `milp` planner may keep tensors inside blocks for the backward pass;
            without them, all but the blocks' inputs is computed again.
        token_chunk: tokens of a row that a block computes at a time; left out, the `milp` planner decides it
            where rows are longer than 8192 tokens, and else it is the whole row.
        head_chunk: tokens of a microbatch whose logits exist at once; left out, the `milp` planner decides
            it, and other planners take 1024.
        devices: how many share every batch and every slab; of several processes all, where it is left out.
        nvme_folder: a folder on an NVMe drive; without one, plans use host memory instead.
        nvme_folders: several, on drives of their own, in place of one (a,b on the command line).
        on_nvme: what of every layer lives there: `all`, `none`, or some of state, lo, gradient and hi
            (docs/nvme.md). Left out, the planner decides; a plan's file says it itself.
        hardware: what the `milp` planner knows of the machine: `calibrate` measures this one and times
            the model's kernels when training starts; `auto` does so where timing takes seconds, and
            else measures rates only; or a profile, by preset name or file.
        device_bytes: device memory the `milp` planner may use, instead of the profile's figure.
        host_bytes: host memory that a run may use for slabs, optimizer state, buffers and copies, also of
            checkpoints, and the data; a plan that takes more is refused (`--max-host-memory`).
        time_limit_seconds: of the `milp` planner's search.
        replan_after_steps: steps after which measured times replace predicted ones and the plan is
            solved again; one that is better by more than 3 % then replaces it. Off by default.

    The five keys from microbatches to interlayer_home are the planner's choice where they are left out.
    """

    planner: Annotated[str, PLANNER_NAMES] = "milp"
    file: PathKey | None = None
    microbatches: PositiveInt | None = None
    prefetch: PositiveInt | None = None
    backward_prefetch: PositiveInt | None = None
    update: Literal["deferred", "immediate"] | None = None
    interlayer_home: Literal["device", "host"] | None = None
    keep_residuals: bool = True
    token_chunk: PositiveInt | None = None
    head_chunk: PositiveInt | None = None
    devices: PositiveInt = 1
    nvme_folder: PathKey | None = None
    nvme_folders: Annotated[tuple[PathKey, ...], pydantic.BeforeValidator(_listed)] | None = None
    on_nvme: Annotated[tuple[OwnedPart, ...], pydantic.BeforeValidator(_parts)] | None = None
    hardware: NameOrPath = "auto"
    device_bytes: ByteCount | None = None
    host_bytes: ByteCount | None = None
    time_limit_seconds: Annotated[float, pydantic.Field(gt=0)] = 20.0
    replan_after_steps: PositiveInt | None = None

    @property
    def drives(self) -> tuple[pathlib.Path, ...]:
        """The folders on NVMe drives, if any."""
        if self.nvme_folders is not None:
            return self.nvme_folders
        return () if self.nvme_folder is None else (self.nvme_folder,)

    @pydantic.model_validator(mode="after")
    def _limits_are_used(self) -> PlanConfig:
        solves = (self.planner == "milp" and self.file is None) or self.replan_after_steps is not None
        if self.device_bytes is not None and not solves:
            raise ValueError("device_bytes limits the planner milp only; leave it out or choose planner milp")
        if not self.keep_residuals and (self.planner != "milp" or self.file is not None):
            raise ValueError("keep_residuals limits the planner milp only; leave it out")
        if self.nvme_folder is not None and self.nvme_folders is not None:
            raise ValueError("nvme_folder and nvme_folders exclude each other")
        if self.nvme_folders is not None and len(set(self.nvme_folders)) < len(self.nvme_folders):
            raise ValueError("nvme_folders names a folder twice")
        if self.on_nvme and not self.drives:
            raise ValueError(f"on_nvme ({', '.join(self.on_nvme)}) needs nvme_folder")
        return self


class TrainingConfig(_Group):
    """How long, and what is looked at on the way.

    Attributes:
        steps: optimizer steps (instead of epochs).
        epochs: passes over the training rows; 1 where neither is set.
        evaluate_every: steps between evaluations; 0 evaluates only before and after training.
        evaluate_rows: rows of the held-out split that an evaluation reads; 0: no evaluation.
        evaluate_exact_match_rows: held-out rows that every evaluation also answers and scores; 0: none.
        exact_match_rows_before, exact_match_rows_after: of the first and the last evaluation, where
            these answer another number of rows; the last one comes when the model is saved.
        exact_match_new_tokens: the most tokens of an answer.
        log_every: steps between printed lines (metrics.jsonl has every step).
        seed: of random initial weights.
        deterministic: whether a GPU may only use kernels that give the same bits each time (see
            docs/precision.md); slower.
        max_hours: the run stops after the step in which this time is over, saves and exits with status
            124; counted from the first step of the process. Without it there is no limit.
    """

    steps: PositiveInt | None = None
    epochs: Annotated[float, pydantic.Field(gt=0)] | None = None
    evaluate_every: NonNegativeInt = 0
    evaluate_rows: NonNegativeInt = 256
    evaluate_exact_match_rows: NonNegativeInt = 0
    exact_match_rows_before: NonNegativeInt | None = None
    exact_match_rows_after: NonNegativeInt | None = None
    exact_match_new_tokens: PositiveInt = 512
    log_every: PositiveInt = 1
    seed: NonNegativeInt = 42
    deterministic: bool = False
    max_hours: Annotated[float, pydantic.Field(gt=0)] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _one_epoch_by_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and all(
            key not in values or values[key] is None for key in ("steps", "epochs")
        ):
            return {**values, "epochs": 1.0}
        return values

    @pydantic.model_validator(mode="after")
    def _one_length(self) -> TrainingConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs exclude each other: leave one out (null)")
        return self


class CheckpointsConfig(_Group):
    """What `lazyjax train --resume RUN` goes on from: all training state, in the run's own folder.

    One takes as many bytes as the training state without gradients (6 to 12 per parameter), and the next
    one is complete before an old one goes. A run that is stopped saves one too.

    Attributes:
        every_steps: save after every so many steps.
        every_minutes: save when so much time has passed. With neither, nothing is saved.
        keep_last: how many to keep.
        keep_best: also keep the one with the lowest evaluation loss.
    """

    every_steps: PositiveInt | None = None
    every_minutes: Annotated[float, pydantic.Field(gt=0)] | None = None
    keep_last: PositiveInt = 1
    keep_best: bool = False

    @property
    def enabled(self) -> bool:
        """Whether any are saved."""
        return self.every_steps is not None or self.every_minutes is not None


class RunConfig(_Group):
    """Where the run's records go.

    Attributes:
        folder: parent of all runs.
        name: the run's own folder; by default the date and the model's name. A folder that
            already holds a run is never written to.
        save_model: whether the trained model is written there too, as a Hugging Face folder.
        wandb: project at Weights & Biases that gets the records too; needs the extra `wandb`.
    """

    folder: PathKey = pathlib.Path("runs")
    name: Annotated[str, pydantic.BeforeValidator(_run_name)] | None = None
    save_model: bool = True
    wandb: Annotated[str, pydantic.Field(min_length=1)] | None = None


def _address(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"\S+:\d{1,5}", value):
        raise ValueError("must be HOST:PORT")
    return value


class DistributedConfig(_Group):
    """Several processes that train one model together, each on devices of its own (docs/distributed.md).

    Under SLURM, MPI or an indexed job of Kubernetes nothing has to be set: they find each other.

    Attributes:
        coordinator: HOST:PORT at which process 0 can be reached, where no launcher tells it.
        processes: how many there are; 1 stays alone whatever a launcher says.
        process: which of them this is, from 0.
        timeout_seconds: for which all may get nowhere in a step before the run ends, naming the process that
            is the least far; also how long they wait for each other at the beginning. A dead process is
            noticed after 30 s.
    """

    coordinator: Annotated[str, pydantic.BeforeValidator(_address)] | None = None
    processes: PositiveInt | None = None
    process: NonNegativeInt | None = None
    timeout_seconds: Annotated[float, pydantic.Field(gt=0)] = 600.0

    @pydantic.model_validator(mode="after")
    def _all_or_none(self) -> DistributedConfig:
        by_hand = self.coordinator is not None
        if by_hand and (self.processes is None or self.process is None):
            raise ValueError("coordinator needs processes (how many) and process (which one it is) beside it")
        if not by_hand and self.process is not None:
            raise ValueError("process needs coordinator (HOST:PORT of process 0) beside it")
        if self.process is not None and self.processes is not None and self.process >= self.processes:
            raise ValueError(f"process ({self.process}) must be below processes ({self.processes})")
        return self


class Config(_Group):
    """Everything a training run depends on."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    plan: PlanConfig = PlanConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    run: RunConfig = RunConfig()
    distributed: DistributedConfig = DistributedConfig()

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Config:
        rows, microbatches = self.data.rows, self.plan.microbatches
        if self.plan.file is None and microbatches is not None:
            each = -(-rows // microbatches)
            if rows <= (microbatches - 1) * each:
                raise ValueError(
                    f"plan.microbatches ({microbatches}) of {each} rows are more than data.rows ({rows}) fill"
                )
        steps, warmup = self.training.steps, self.optimizer.warmup_steps
        if steps is not None and warmup >= steps:
            raise ValueError(f"optimizer.warmup_steps ({warmup}) leaves nothing of training.steps ({steps})")
        return self


def digest(config: Config) -> str:
    """SHA-256 in hexadecimal of a configuration without the place of its records and its processes."""
    values = config.model_dump(mode="json", exclude={"run", "distributed"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


#: Keys whose value is a name, or a path where such a file exists.
_NAMES_OR_PATHS = (
    ("model", "architecture"),
    ("data", "source"),
    ("data", "validation"),
    ("data", "chat_template"),
    ("plan", "hardware"),
)


def _absolute_name(name: str) -> str:
    # A plain word is a name, whatever lies in this folder.
    return os.path.abspath(name) if re.search(r"[./]", name) and os.path.exists(name) else name


def with_absolute_paths(config: Config) -> Config:
    """The same configuration, which means the same from every working directory."""
    changed: dict[str, Any] = {}
    for group in type(config).model_fields:
        keys = getattr(config, group)
        update: dict[str, Any] = {
            key: pathlib.Path(os.path.abspath(getattr(keys, key)))
            for key in type(keys).model_fields
            if isinstance(getattr(keys, key), pathlib.Path)
        }
        for key in (key for of, key in _NAMES_OR_PATHS if of == group):
            name = getattr(keys, key)
            if isinstance(name, str):
                update[key] = _absolute_name(name)
            elif name is not None:
                update[key] = tuple(
                    one.model_copy(update={"source": _absolute_name(one.source)}) for one in name
                )
        changed[group] = keys.model_copy(update=update)
    return config.model_copy(update=changed)
