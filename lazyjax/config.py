"""The configuration of a run: frozen, validated, and complete once loaded.

A run is described by one YAML file whose keys are the fields below; the command line overrides
single keys (`--optimizer.learning-rate 1e-5`). Everything is checked here, before a file is read
or a byte allocated: a key that does not exist, a value of the wrong type or out of range, and
combinations that cannot work are errors that name the key. Whatever needs more than the
configuration (does the file exist, does the plan fit the model) is checked where it is read.

Paths are relative to the working directory. Byte counts may be written as `80e9`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import pathlib
import re
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import pydantic
import tyro
import yaml

PositiveInt = Annotated[int, pydantic.Field(gt=0)]
NonNegativeInt = Annotated[int, pydantic.Field(ge=0)]
#: Options that stand for one key of a group.
_SHORTHANDS = {"--model": "model.folder", "--data": "data.source"}


def _whole(value: Any) -> Any:
    """Byte counts written as 80e9 (text in YAML 1.1) or 80.0e+9 (a float)."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


ByteCount = Annotated[int, pydantic.BeforeValidator(_whole), pydantic.Field(gt=0)]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and what it may be."""


class _Group(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: Any) -> Any:
        """YAML reads `yes` as true, which Python would count as 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"a truth value is not allowed here, it is {str(value).lower()}")
        return value


class ModelConfig(_Group):
    """Which model is trained: a folder with weights, or an architecture with random ones.

    Attributes:
        folder: Hugging Face folder (config.json, safetensors, tokenizer).
        architecture: name of a packaged architecture such as `Qwen2.5-7B`, or a config.json.
        compute_dtype: of the layers' mathematics; float32 also streams whole float32 weights.
    """

    folder: pathlib.Path | None = None
    architecture: str | None = None
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @pydantic.model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.folder is None) == (self.architecture is None):
            raise ValueError("needs exactly one of folder (with weights) and architecture (random weights)")
        return self


class DataConfig(_Group):
    """What is learned, and how rows become batches.

    Attributes:
        source: `problems` (ships with the package), a JSON or JSON Lines file, or the name of a
            data set of the Hugging Face hub such as `meta-math/MetaMathQA` (extra `hub`).
        hub_split: which split of a hub data set is read; files have none.
        tokenizer: folder of the tokenizer; by default the model folder's, or the packaged one.
        sequence_length: tokens of a sequence.
        rows: sequences of one step's batch.
        batching: `padded` (every row to sequence_length), `bucketed` (rows of like length, padded
            to the longest of them) or `packed` (several rows in one sequence).
        too_long: what happens to a row longer than sequence_length.
        cache_folder: where tokenized rows are kept for the next run; by default nowhere.
        train_fraction: share of the rows that is trained on; the rest is for evaluation.
        seed: of the split and the order.
    """

    source: str = "problems"
    hub_split: str = "train"
    tokenizer: pathlib.Path | None = None
    sequence_length: PositiveInt = 1024
    rows: PositiveInt = 8
    batching: Literal["padded", "bucketed", "packed"] = "bucketed"
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    cache_folder: pathlib.Path | None = None
    train_fraction: Annotated[float, pydantic.Field(gt=0, le=1)] = 0.7
    seed: NonNegativeInt = 42


class OptimizerConfig(_Group):
    """AdamW on the host.

    Attributes:
        name: `fp32_adamw` (exact), `hybrid8bit` (8-bit moments, float32 master weights) or
            `bf16_adamw`.
        learning_rate: the peak of the schedule.
        schedule: after warm-up: constant, or down to `final_fraction` of the peak.
        warmup_steps: steps of linear warm-up from zero.
        decay_vectors: whether weight decay also covers biases and norms.
        clip: by the norm over the whole model, by each layer's own norm, or not at all.
        clip_norm: the largest norm that passes unscaled.
        gradient_dtype: of gradients on their way to the host.
        threads: of the host update; 0 takes every core.
    """

    name: Literal["fp32_adamw", "hybrid8bit", "bf16_adamw"] = "fp32_adamw"
    learning_rate: Annotated[float, pydantic.Field(gt=0)] = 1e-5
    beta1: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.999
    epsilon: Annotated[float, pydantic.Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, pydantic.Field(ge=0)] = 0.01
    decay_vectors: bool = False
    clip: Literal["global_norm", "per_layer", "none"] = "global_norm"
    clip_norm: Annotated[float, pydantic.Field(gt=0)] = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    final_fraction: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.0
    gradient_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: NonNegativeInt = 0


class PlanConfig(_Group):
    """Who decides what is kept, moved and recomputed.

    Attributes:
        planner: `milp`, or the rule of a baseline.
        file: a plan to execute as it is; `planner` and the other keys then decide nothing.
        microbatches: parts of the batch that pass a layer one after another.
        prefetch: parameter slabs on the device during the forward pass (1: none ahead).
        backward_prefetch: the same during the backward pass.
        update: `deferred` runs the host update under the next step's forward pass.
        handoff: where activations wait between a layer and the next.
        devices: how many share every batch and every slab.
        nvme_folder: a folder on an NVMe drive; without one, plans use host memory instead.
        hardware: profile of the machine, by preset name or file, or `calibrate` to measure this
            one when training starts; the `milp` planner needs it.
        device_bytes: device memory the `milp` planner may use, instead of the profile's figure.
        host_bytes: the same for host memory.
        time_limit_seconds: of the `milp` planner's search.
        replan_after_steps: steps after which measured times replace predicted ones and the plan is
            solved again; one that is better by more than 3 % then replaces it. Off by default.

    The five keys from microbatches to handoff are the planner's choice where they are left out.
    """

    planner: Literal["recompute_all", "keep_all", "megatrain", "lazytrain", "milp"] = "recompute_all"
    file: pathlib.Path | None = None
    microbatches: PositiveInt | None = None
    prefetch: PositiveInt | None = None
    backward_prefetch: PositiveInt | None = None
    update: Literal["deferred", "immediate"] | None = None
    handoff: Literal["device", "host"] | None = None
    devices: PositiveInt = 1
    nvme_folder: pathlib.Path | None = None
    hardware: str | None = None
    device_bytes: ByteCount | None = None
    host_bytes: ByteCount | None = None
    time_limit_seconds: Annotated[float, pydantic.Field(gt=0)] = 20.0
    replan_after_steps: PositiveInt | None = None

    @pydantic.model_validator(mode="after")
    def _milp_knows_the_machine(self) -> PlanConfig:
        words = "hardware: a preset name, a file made by `lazyjax profile`, or calibrate"
        if self.planner == "milp" and self.file is None and self.hardware is None:
            raise ValueError(f"planner milp needs {words}")
        if self.replan_after_steps is not None and self.hardware is None:
            raise ValueError(f"replan_after_steps needs {words}")
        for key in ("device_bytes", "host_bytes"):
            solves = (self.planner == "milp" and self.file is None) or self.replan_after_steps is not None
            if getattr(self, key) is not None and not solves:
                raise ValueError(f"{key} limits the planner milp only; leave it out or choose planner milp")
        return self


class TrainingConfig(_Group):
    """How long, and what is looked at on the way.

    Attributes:
        steps: optimizer steps (instead of epochs).
        epochs: passes over the training rows; 1 where neither is set.
        evaluate_every: steps between evaluations; 0 evaluates only before and after training.
        evaluate_rows: rows of the held-out split that an evaluation reads; 0: no evaluation.
        log_every: steps between printed lines (metrics.jsonl has every step).
        seed: of random initial weights.
    """

    steps: PositiveInt | None = None
    epochs: Annotated[float, pydantic.Field(gt=0)] | None = None
    evaluate_every: NonNegativeInt = 0
    evaluate_rows: NonNegativeInt = 256
    log_every: PositiveInt = 1
    seed: NonNegativeInt = 42

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


class RunConfig(_Group):
    """Where the run's records go.

    Attributes:
        folder: parent of all runs.
        name: the run's own folder; by default the date and the model's name. A folder that
            already holds a run is never written to.
        save_model: whether the trained model is written there too, as a Hugging Face folder.
    """

    folder: pathlib.Path = pathlib.Path("runs")
    name: Annotated[str, pydantic.Field(pattern=r"^[\w.+-]+$")] | None = None
    save_model: bool = True


class Config(_Group):
    """Everything a training run depends on."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    plan: PlanConfig = PlanConfig()
    training: TrainingConfig = TrainingConfig()
    run: RunConfig = RunConfig()

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Config:
        rows, microbatches = self.data.rows, self.plan.microbatches
        if self.plan.file is None and microbatches is not None and rows % microbatches:
            raise ValueError(f"data.rows ({rows}) is not a multiple of plan.microbatches ({microbatches})")
        steps, warmup = self.training.steps, self.optimizer.warmup_steps
        if steps is not None and warmup >= steps:
            raise ValueError(
                f"optimizer.warmup_steps ({warmup}) leaves nothing of training.steps ({steps})"
            )
        return self


def load_config(path: pathlib.Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration file and applies command-line overrides.

    Args:
        path: YAML file; None starts from the defaults.
        overrides: arguments such as `["--optimizer.learning-rate", "1e-5"]`; `null` as a value
            unsets a key.

    Raises:
        ConfigError: the file cannot be read, or a key or value is not allowed.
        SystemExit: after printing all keys, when `--help` is among the overrides.
    """
    document = {} if path is None else _read_yaml(path)
    for group, values in _parse_overrides(overrides).items():
        if not isinstance(document.setdefault(group, {}), dict):
            break  # validation says what is wrong with the group
        document[group] = {**document[group], **values}
    try:
        return Config.model_validate(document)
    except pydantic.ValidationError as error:
        lines = [_describe(details) for details in error.errors()]
        where = "the configuration" if path is None else str(path)
        raise ConfigError(f"{where}: " + "\n  ".join(lines)) from None


def dump_config(config: Config) -> str:
    """YAML text that `load_config` reads back to an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=110)


class UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; here that is an error."""


def _mapping_with_unique_keys(loader: UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_with_unique_keys)


def _read_yaml(path: pathlib.Path) -> dict[str, Any]:
    try:
        document = yaml.load(path.read_text(), Loader=UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected the groups {', '.join(Config.model_fields)} at the top")
    return document


def _describe(details: Any) -> str:
    """One line for one of pydantic's errors: key path, what is wrong, what is allowed."""
    key = ".".join(str(part) for part in details["loc"])
    given = details["input"]
    match details["type"]:
        case "extra_forbidden":
            return _unknown_key(key)
        case "literal_error":
            return f"{key}: must be one of {details['ctx']['expected']}, it is {given!r}"
        case "model_type":
            return f"{key}: a group of keys ({', '.join(_group(key))}), it is {given!r}"
        case "value_error":
            message = str(details["ctx"]["error"])
            return f"{key}: {message}" if key else message
        case "missing" if key == "model":
            return "model: set folder (with weights; --model FOLDER) or architecture (random weights)"
        case _:
            message = details["msg"].replace("Input should", "should")
            return f"{key}: {message}, it is {given!r}"


def _group(name: str) -> tuple[str, ...]:
    """Keys of the group `name`, or the groups' names for ''."""
    if not name:
        return tuple(Config.model_fields)
    return tuple(typing.cast(type[_Group], Config.model_fields[name].annotation).model_fields)


def _unknown_key(key: str) -> str:
    """Says which keys there are, and which one was probably meant."""
    group, _, name = key.rpartition(".")
    if group and group not in Config.model_fields:
        group, name = "", group.partition(".")[0]
    known = _group(group)
    everywhere = {key: f"{outer}.{key}" for outer in Config.model_fields for key in _group(outer)}
    here = difflib.get_close_matches(name, known, n=1)
    there = difflib.get_close_matches(name, everywhere, n=1)
    prefix = f"{group}." if group else ""
    hint = ""
    if here:
        hint = f"; did you mean {prefix}{here[0]}?"
    elif there:
        hint = f"; did you mean {everywhere[there[0]]}?"
    return f"{key}: unknown key{hint} (known: {', '.join(prefix + known_key for known_key in known)})"


_UNSET = "(unset)"


def _metavar(annotation: Any) -> str:
    """What a value looks like, for `--help`."""
    if get_origin(annotation) is Annotated:
        return _metavar(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "{" + ",".join(get_args(annotation)) + "}"
    if get_origin(annotation) in (types.UnionType, typing.Union):
        return "|".join(_metavar(member) for member in get_args(annotation))
    if annotation is types.NoneType:
        return "null"
    return str(annotation.__name__).upper()


def _override_type() -> type:
    """A dataclass with the keys of `Config`, every value text that is not yet set.

    tyro parses and documents it; the texts are then merged into the file's values, so that one
    validation judges the whole, whichever way a value came in.
    """
    groups: list[tuple[str, Any, Any]] = []
    for group, group_field in Config.model_fields.items():
        group_type = typing.cast(type[_Group], group_field.annotation)
        hints = typing.get_type_hints(group_type, include_extras=True)
        keys: list[tuple[str, Any, Any]] = []
        for key, field in group_type.model_fields.items():
            hint = "" if field.default is None else f"(default: {str(field.default).lower()})"
            aliases = [alias for alias, target in _SHORTHANDS.items() if target == f"{group}.{key}"]
            argument = tyro.conf.arg(
                metavar=_metavar(hints[key]), help_behavior_hint=hint, aliases=aliases
            )
            keys.append((key, Annotated[str, argument], _UNSET))
        mirror = dataclasses.make_dataclass(f"{group_type.__name__}Overrides", keys)
        mirror.__doc__ = group_type.__doc__
        groups.append((group, mirror, dataclasses.field(default_factory=mirror)))
    return dataclasses.make_dataclass("Overrides", groups)


def _parse_overrides(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Group -> key -> value, for the keys that `arguments` set."""
    if not arguments:
        return {}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed: Any
            parsed, unknown = tyro.cli(
                _override_type(),
                args=list(arguments),
                prog="lazyjax train [CONFIG.yaml]",
                description="Fine-tunes a model. Every key of the configuration can be set here.",
                return_unknown_args=True,
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        words = re.sub(r"[^\x20-\x7e]+|-{5,}", " ", complaint.getvalue())
        raise ConfigError("command line: " + " ".join(words.split())) from None
    for argument in unknown:
        if argument.startswith("--"):
            key = argument.removeprefix("--").partition("=")[0].replace("-", "_")
            raise ConfigError(f"command line: {_unknown_key(key)}")
    if unknown:
        raise ConfigError(f"command line: {unknown[0]!r} belongs to no option")
    values: dict[str, dict[str, Any]] = {}
    for group in Config.model_fields:
        texts = dataclasses.asdict(getattr(parsed, group))
        given = {key: _value(text) for key, text in texts.items() if text != _UNSET}
        if given:
            values[group] = given
    return values


def _value(text: str) -> Any:
    """The text as YAML would read it; text that is no plain YAML value stays text."""
    if text == "None":
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float | None) else text
