"""A sweep as a YAML file: a base configuration, what varies, over which seeds, and what is compared.

    base: ../configs/qwen27b_smoke.yaml     # beside this file
    set: {training.steps: 30}               # overrides of every trial, by dotted key
    trials:                                 # a list of named overrides, or a grid, or their product
      - {name: planned}
      - {name: recompute all, set: {plan.planner: recompute_all}}
    grid:
      optimizer.learning_rate: [1.0e-3, 2.0e-3]
    seeds: [0, 1, 2]                        # of the weights, the split and the order of the data
    compare:
      baseline: planned                     # the trial that the others are held against; or keys, such as
                                            # {optimizer.name: fp32_adamw}: each is held against the one
                                            # that differs from it in these alone
      metrics: [last_evaluation_loss, median_step_seconds]

A trial is one configuration: its identity is a digest of everything in it but the place where its
records go, so that the same trial is found again whichever file asks for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic
import yaml

from lazyjax.config import Config, ConfigError, UniqueKeyLoader, digest

#: Keys that a seed sets.
SEED_KEYS = ("training.seed", "data.seed")
#: Hexadecimal digits of a digest in a folder's name.
_DIGEST_DIGITS = 10


class SweepError(ValueError):
    """A sweep file that cannot be used; the message names the file and the key."""


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class NamedTrial(_Strict):
    """One entry of `trials`: a name, and overrides by dotted key."""

    name: Annotated[str, pydantic.Field(min_length=1)]
    set: dict[str, Any] = {}


class Comparison(_Strict):
    """Which trial the others are held against (see the module), and by which entries of summary.json."""

    baseline: str | dict[str, Any]
    metrics: Annotated[list[str], pydantic.Field(min_length=1)]


class SweepDocument(_Strict):
    """The keys of a sweep file (see the module)."""

    base: pathlib.Path
    set: dict[str, Any] = {}
    trials: Annotated[list[NamedTrial], pydantic.Field(min_length=1)] | None = None
    grid: dict[str, Annotated[list[Any], pydantic.Field(min_length=1)]] = {}
    seeds: Annotated[list[Annotated[int, pydantic.Field(ge=0)]], pydantic.Field(min_length=1)] = [42]
    compare: Comparison


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training run of a sweep.

    Attributes:
        name: of the variant; trials that differ in their seed alone share it.
        overrides: dotted keys that differ from the base, the seed's left out.
        digest: SHA-256 of the resolved configuration without `run`, in hexadecimal.
        problem: why the configuration cannot be used; None where it can.
        compared_with: name of the variant that it is held against.
    """

    name: str
    seed: int
    overrides: Mapping[str, Any]
    config: Config | None
    digest: str
    problem: str | None = None
    compared_with: str = ""

    @property
    def folder_name(self) -> str:
        """Name of the run folder: readable, and unique by the digest."""
        words = re.sub(r"[^A-Za-z0-9.+-]+", "-", self.name).strip("-")
        return f"{words[:60]}-seed{self.seed}-{self.digest[:_DIGEST_DIGITS]}"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep file, expanded."""

    path: pathlib.Path
    document: SweepDocument
    trials: tuple[Trial, ...]

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem


def read_sweep(path: pathlib.Path) -> Sweep:
    """Reads and expands a sweep file.

    A trial whose configuration is refused is kept with the reason, as data.

    Raises:
        SweepError: the file, its base, or a key of the file cannot be used; two trials are equal;
            the baseline names no trial.
    """
    document = _document(path)
    base = _mapping(path.parent / document.base)
    trials = []
    # All variants with one seed before the next one: a sweep that is cut short can be compared all the same.
    for seed in document.seeds:
        for name, overrides in _variants(document):
            trials.append(_trial(path, base, name, {**document.set, **overrides}, seed))
    _check_distinct(path, trials)
    compared = [
        dataclasses.replace(trial, compared_with=_baseline_of(path, document, trial, trials))
        for trial in trials
    ]
    return Sweep(path, document, tuple(compared))


def _baseline_of(path: pathlib.Path, document: SweepDocument, trial: Trial, trials: Sequence[Trial]) -> str:
    """Name of the variant that a trial is held against."""
    baseline = document.compare.baseline
    if isinstance(baseline, str):
        if baseline not in {other.name for other in trials}:
            names = ", ".join(dict.fromkeys(other.name for other in trials))
            raise SweepError(f"{path}: compare.baseline {baseline!r} is no trial ({names})")
        return baseline
    wanted = {**trial.overrides, **baseline}
    found = [other.name for other in trials if other.overrides == wanted]
    if not found:
        raise SweepError(f"{path}: compare.baseline {baseline}: no trial is as {trial.name!r} but for that")
    return found[0]


def _document(path: pathlib.Path) -> SweepDocument:
    try:
        return SweepDocument.model_validate(_mapping(path))
    except pydantic.ValidationError as error:
        problems = []
        for details in error.errors():
            key = ".".join(str(part) for part in details["loc"])
            known = f" (known: {', '.join(SweepDocument.model_fields)})" if "extra" in details["type"] else ""
            problems.append(f"{key}: {details['msg']}{known}")
        raise SweepError(f"{path}: " + "\n  ".join(problems)) from None


def _mapping(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
    except OSError as error:
        raise SweepError(f"{path}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise SweepError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise SweepError(f"{path}: expected keys at the top")
    return values


def _variants(document: SweepDocument) -> list[tuple[str, dict[str, Any]]]:
    """Name and overrides of every variant: the product of the list and the grid."""
    named = [(entry.name, entry.set) for entry in document.trials or ()] or [("", {})]
    variants = []
    for first, overrides in named:
        for values in itertools.product(*document.grid.values()):
            point = dict(zip(document.grid, values, strict=True))
            words = [f"{key.rpartition('.')[2]}={value}" for key, value in point.items()]
            name = " ".join([first, *words] if first else words)
            variants.append((name or "base", {**overrides, **point}))
    return variants


def _trial(
    path: pathlib.Path, base: Mapping[str, Any], name: str, overrides: Mapping[str, Any], seed: int
) -> Trial:
    values = json.loads(json.dumps(base))
    for key, value in {**overrides, **dict.fromkeys(SEED_KEYS, seed)}.items():
        _set_key(path, values, key, value)
    try:
        config = Config.model_validate(values)
    except (pydantic.ValidationError, ConfigError) as error:
        words = "; ".join(
            f"{'.'.join(str(part) for part in details['loc'])}: {details['msg']}"
            for details in (error.errors() if isinstance(error, pydantic.ValidationError) else ())
        )
        # It never runs; its identity only has to be its own.
        refused = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return Trial(name, seed, overrides, None, refused, words or str(error))
    return Trial(name, seed, overrides, config, digest(config))


def _set_key(path: pathlib.Path, values: dict[str, Any], key: str, value: Any) -> None:
    group, _, name = key.partition(".")
    if not name or "." in name:
        raise SweepError(f"{path}: {key!r}: expected GROUP.KEY, for example optimizer.learning_rate")
    if group not in Config.model_fields:
        raise SweepError(f"{path}: {key!r}: no such group (known: {', '.join(Config.model_fields)})")
    if not isinstance(values.setdefault(group, {}), dict):
        raise SweepError(f"{path}: {key!r}: {group} is not a group of keys in the base")
    values[group][name] = value


def _check_distinct(path: pathlib.Path, trials: list[Trial]) -> None:
    seen: dict[str, Trial] = {}
    for trial in trials:
        if trial.digest in seen:
            other = seen[trial.digest]
            raise SweepError(
                f"{path}: trials {other.name!r} and {trial.name!r} (seed {trial.seed}) are the same "
                "configuration"
            )
        seen[trial.digest] = trial
