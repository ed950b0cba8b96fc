"""Files and command lines into a `Config`, and every mistake in them into words.

One YAML file holds the keys; the command line overrides single ones (`--optimizer.learning-rate 1e-5`).
A mistake names its key and where it was written, file or command line.
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
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import pydantic
import tyro
import yaml

from lazyjax.config.keys import Config, ConfigError, _Group
from lazyjax.config.names import Names

#: tyro puts the lines of a paragraph together, unless they begin like an option, and wraps none of them.
_HELP = """Fine-tunes a model. CONFIG.yaml sets keys; options win over it.

--model FOLDER: a Hugging Face folder with weights (sets model.folder).
--model NAME --random-weights: a packaged name or a config.json; no weights.
--resume RUN: goes on from that run's last checkpoint (docs/checkpoints.md).
--reproduce RUN: trains once more as that run did, and compares.
--debug: shows where an error came from."""
#: Where a key's value was written, for error messages: keys that the command line set.
_OnCommandLine = frozenset[tuple[str, str]]
_COMMAND_LINE = "command line"


def load_command_line(arguments: Sequence[str]) -> Config:
    """The configuration of `lazyjax train [CONFIG.yaml] [--GROUP.KEY VALUE ...]`.

    Raises:
        ConfigError, SystemExit: see `load_config`; or more than one file is named.
    """
    given = _parse_overrides(arguments)
    if len(given.others) > 1:
        raise ConfigError(
            f"{_COMMAND_LINE}: {given.others[1]!r} belongs to no option; "
            f"the configuration file is {given.others[0]!r} already"
        )
    return _merged(pathlib.Path(given.others[0]) if given.others else None, given)


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
    given = _parse_overrides(overrides)
    if given.others:
        raise ConfigError(f"{_COMMAND_LINE}: {given.others[0]!r} belongs to no option")
    return _merged(path, given)


def _merged(path: pathlib.Path | None, given: _Overrides) -> Config:
    document = {} if path is None else _read_yaml(path)
    for group, values in given.values.items():
        if group not in document or document[group] is None:
            document[group] = {}
        if not isinstance(document[group], dict):
            break  # validation says what is wrong with the group
        document[group] = {**document[group], **values}
    # A group whose keys are all commented out.
    document = {group: {} if keys is None else keys for group, keys in document.items()}
    try:
        return Config.model_validate(document)
    except pydantic.ValidationError as error:
        here = frozenset((group, key) for group, values in given.values.items() for key in values)
        lines = [_located(details, path, here) for details in error.errors()]
        raise ConfigError("\n  ".join(lines)) from None


def _located(details: Any, path: pathlib.Path | None, on_command_line: _OnCommandLine) -> str:
    """One mistake, led by where it was made."""
    key = tuple(str(part) for part in details["loc"])
    where = "the configuration" if path is None else str(path)
    if key[:2] in on_command_line or (path is None and on_command_line):
        where = _COMMAND_LINE
    return f"{where}: {_describe(details)}"


def dump_config(config: Config) -> str:
    """YAML text that `load_config` reads back to an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=110)


class UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; here that is an error."""


class _TextLoader(UniqueKeyLoader):
    """Plain scalars stay text, except null: 007, 12:30 and on are what was written."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own table
        first: [("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"))]
        for first in ("~", "n", "N", "")
    }


def _mapping_with_unique_keys(loader: UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key must be one word", problem_mark=key_node.start_mark)
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_with_unique_keys)


def _read_yaml(path: pathlib.Path) -> dict[str, Any]:
    try:
        document = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_TextLoader)
    except IsADirectoryError as error:
        raise ConfigError(
            f"{path}: is a folder, not a configuration file; a model is --model FOLDER"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {_of_yaml(error)}{_rows_instead(path)}") from error
    if not isinstance(document, dict):
        groups = ", ".join(Config.model_fields)
        raise ConfigError(f"{path}: expected the groups {groups} at the top{_rows_instead(path)}")
    return {str(group): keys for group, keys in document.items()}


def _of_yaml(error: Exception) -> str:
    """What is wrong and in which line, without the excerpt."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def _rows_instead(path: pathlib.Path) -> str:
    """A hint where a file of rows was given as the configuration."""
    rows = path.suffix.lower() in (".json", ".jsonl", ".txt", ".csv", ".parquet", ".arrow", ".gz")
    return f"; a configuration is a .yaml file, rows to train on are --data {path}" if rows else ""


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
            # Of a key, of a group, or of the whole.
            message = str(details["ctx"]["error"])
            plain = "." in key and not isinstance(given, dict)
            return f"{key}: {message}, it is {given!r}" if plain else f"{key}: {message}" if key else message
        case "missing" if key == "model":
            return (
                "model: say which one is trained: --model FOLDER, or model.folder in a file "
                "(with weights), or model.architecture (random weights)"
            )
        case "int_type" | "int_parsing" | "int_from_float":
            return f"{key}: must be a whole number, it is {given!r}"
        case "float_type" | "float_parsing" | "finite_number":
            return f"{key}: must be a number, it is {given!r}"
        case "bool_type" | "bool_parsing":
            return f"{key}: must be true or false, it is {given!r}"
        case "string_type" | "path_type":
            return f"{key}: must be text, it is {given!r}"
        case _:
            return f"{key}: {details['msg'].replace('Input should', 'must')}, it is {given!r}"


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
    if name in _ELSEWHERE:
        hint = f"; did you mean {_ELSEWHERE[name]}?"
    elif here:
        hint = f"; did you mean {prefix}{here[0]}?"
    elif there:
        hint = f"; did you mean {everywhere[there[0]]}?"
    return f"{key}: unknown key{hint} (known: {', '.join(prefix + known_key for known_key in known)})"


#: What other tools call a key, and `lazyjax plan` where it takes a word of its own.
_ELSEWHERE = {
    "batch": "data.rows",
    "batch_size": "data.rows",
    "per_device_train_batch_size": "data.rows",
    "gradient_accumulation_steps": "plan.microbatches",
    "seq": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "dataset": "data.source",
    "train_file": "data.source",
    "lr": "optimizer.learning_rate",
    "wd": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.clip_norm",
    "num_train_epochs": "training.epochs",
    "max_steps": "training.steps",
    "eval_steps": "training.evaluate_every",
    "logging_steps": "training.log_every",
    "save_steps": "checkpoints.every_steps",
    "output_dir": "run.folder",
    "out": "run.folder",
    "dtype": "model.compute_dtype",
    "gpus": "plan.devices",
    "optimizer": "optimizer.name",
}

_UNSET = "(unset)"
#: Options that are one key of a group (`--model` may be either of two, see `_take_model`).
_SHORTHANDS = {"--data": "data.source", "--max-host-memory": "plan.host_bytes"}


def _metavar(annotation: Any) -> str:
    """What a value looks like, for `--help`."""
    if get_origin(annotation) is Annotated:
        for names in get_args(annotation)[1:]:
            if isinstance(names, Names):
                return "{" + ",".join(names) + "}"
        return _metavar(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "{" + ",".join(get_args(annotation)) + "}"
    if get_origin(annotation) in (types.UnionType, typing.Union):
        return "|".join(_metavar(member) for member in get_args(annotation))
    if annotation is types.NoneType:
        return "null"
    words = {str: "TEXT", float: "NUMBER", tuple: "LIST"}
    return words[annotation] if annotation in words else str(annotation.__name__).upper()


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
            argument = tyro.conf.arg(metavar=_metavar(hints[key]), help_behavior_hint=hint, aliases=aliases)
            keys.append((key, Annotated[str, argument], _UNSET))
        mirror = dataclasses.make_dataclass(f"{group_type.__name__}Overrides", keys)
        mirror.__doc__ = group_type.__doc__
        groups.append((group, mirror, dataclasses.field(default_factory=mirror)))
    return dataclasses.make_dataclass("Overrides", groups)


@dataclasses.dataclass(frozen=True)
class _Overrides:
    """What a command line says: group -> key -> value, and the words that belong to no option."""

    values: Mapping[str, Mapping[str, Any]]
    others: tuple[str, ...]


def _parse_overrides(arguments: Sequence[str]) -> _Overrides:
    words, model = _take_model(arguments)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed: Any
            parsed, unknown = tyro.cli(
                _override_type(),
                args=words,
                prog="lazyjax train [CONFIG.yaml]",
                description=_HELP,
                return_unknown_args=True,
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise ConfigError(f"{_COMMAND_LINE}: {_plain(complaint.getvalue())}") from None
    for argument in unknown:
        if argument.startswith("-"):
            key = argument.lstrip("-").partition("=")[0].replace("-", "_")
            raise ConfigError(f"{_COMMAND_LINE}: {_unknown_key(key)}")
    values: dict[str, dict[str, Any]] = {}
    for group in Config.model_fields:
        texts = dataclasses.asdict(getattr(parsed, group))
        given = {key: _value(text) for key, text in texts.items() if text != _UNSET}
        if given:
            values[group] = given
    for key in model:
        if key in values.get("model", {}):
            raise ConfigError(f"{_COMMAND_LINE}: --model and --model.{key} exclude each other")
    if model:
        values["model"] = {**values.get("model", {}), **model}
    return _Overrides(values, tuple(unknown))


def _take_model(arguments: Sequence[str]) -> tuple[list[str], dict[str, str | None]]:
    """Takes `--model NAME` and `--random-weights` out, as the keys of the group `model` that they set."""
    words, names, random = [], list[str](), False
    left = iter(arguments)
    for argument in left:
        option, equals, value = argument.partition("=")
        if option == "--random-weights" and not equals:
            random = True
        elif option == "--model":
            value = value if equals else next(left, "--")
            if value.startswith("--") or not value.strip():
                raise ConfigError(f"{_COMMAND_LINE}: --model needs a value, a folder with weights")
            names.append(value)
        else:
            words.append(argument)
    if len(names) > 1:
        raise ConfigError(f"{_COMMAND_LINE}: --model is given twice ({names[0]}, {names[1]})")
    if random and not names:
        raise ConfigError(f"{_COMMAND_LINE}: --random-weights needs --model NAME")
    if not names:
        return words, {}
    chosen, other = ("architecture", "folder") if random else ("folder", "architecture")
    return words, {chosen: names[0], other: None}


def _plain(complaint: str) -> str:
    """tyro's message without its frame."""
    valueless = re.search(r"Missing value for argument '(--[^']+)'", complaint)
    if valueless:
        return f"{valueless.group(1)} needs a value"
    return " ".join(re.sub(r"[^\x20-\x7e]+|-{5,}", " ", complaint).split())


def _value(text: str) -> str | None:
    """What the key's type makes of the text is validation's business; null unsets the key."""
    return None if text in ("null", "None", "~") else text
