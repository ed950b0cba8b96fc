"""Records of a run at Weights & Biases (`run.wandb`), beside metrics.jsonl and TensorBoard.

The package `wandb` is an optional extra and is imported only when a project is named. Its own environment
variables hold: with WANDB_MODE=offline nothing is sent, and `wandb sync` sends it later.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from lazyjax.config import Config

#: Gets every record as it is written: its kind, its step, and its values.
Mirror = Callable[[str, int, Mapping[str, Any]], None]


class WandbError(ValueError):
    """W&B cannot record the run; the message says what to do."""


def no_mirror(kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Where records go nowhere else."""
    del kind, step, values


def check_installed(config: Config) -> None:
    """Raises WandbError where a project is named and the package is missing."""
    if config.run.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise WandbError("run.wandb: the package is not installed: pip install 'lazyjax[wandb]'")


class WandbLog:
    """One run at W&B; a resumed run goes on there, too.

    Args:
        folder: of the run; keeps its identity there in `wandb.id`, and what W&B writes in `wandb/`.
        say: shows a warning.

    Raises:
        WandbError: W&B refuses it, or cannot be reached.
    """

    def __init__(self, config: Config, folder: pathlib.Path, say: Callable[[str], None]) -> None:
        self._say = say
        wandb = importlib.import_module("wandb")
        known = folder / "wandb.id"
        identity = known.read_text().strip() if known.exists() else uuid.uuid4().hex[:12]
        try:
            self._run: Any = wandb.init(
                project=config.run.wandb,
                name=folder.name,
                id=identity,
                resume="allow",
                dir=str(folder),
                config=config.model_dump(mode="json"),
            )
        except Exception as error:  # its errors have no common parent that is ours to name
            raise WandbError(f"run.wandb: {error} (WANDB_MODE=offline records without a network)") from error
        known.write_text(identity + "\n")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Adds a record. Whatever goes wrong ends the records there, not the run."""
        if self._run is None:
            return
        try:
            self._run.log(
                {f"{kind}/{key}": value for key, value in values.items() if key != "step"}, step=step
            )
        except Exception as error:
            self._say(f"WARNING: run.wandb: {error}; the run goes on without it")
            self._run = None

    def close(self) -> None:
        """Waits until everything is sent, or written where nothing is sent."""
        if self._run is not None:
            self._run.finish()
