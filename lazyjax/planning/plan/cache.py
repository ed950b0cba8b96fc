"""Plans that were solved before, found again by the content of what they depend on.

A cached plan is a plan file whose name is a digest of everything that went into it, so a changed
profile, model, batch or release of the planner is simply another file. Also here: when a plan
solved again from measured times replaces the one that is running.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from lazyjax.planning.plan.document import Plan, PlanError, load_plan

#: Part of every key: raised whenever the planner may answer the same question differently.
PLANNER_VERSION = 5
#: A plan solved again must be better by more than this to be worth a swap.
SWAP_GAIN = 0.03


def content_key(content: Mapping[str, Any]) -> str:
    """Digest of plain data (text, numbers, lists, mappings)."""
    document = json.dumps({"planner": PLANNER_VERSION, **content}, sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:24]


def default_folder() -> pathlib.Path:
    """`$XDG_CACHE_HOME/lazyjax/plans`, or its usual place under the home folder."""
    base = os.environ["XDG_CACHE_HOME"] if "XDG_CACHE_HOME" in os.environ else "~/.cache"
    return pathlib.Path(base).expanduser() / "lazyjax" / "plans"


def path_of(folder: pathlib.Path, key: str) -> pathlib.Path:
    """The file of the plan stored under `key`."""
    return folder / f"{key}.json"


def find(folder: pathlib.Path, key: str) -> Plan | None:
    """The plan stored under `key`; None if there is none, or it cannot be read any more."""
    path = path_of(folder, key)
    if not path.is_file():
        return None
    try:
        return load_plan(path)
    except PlanError:
        return None


def store(folder: pathlib.Path, key: str, plan: Plan) -> None:
    """Writes a plan; a reader sees all of it or nothing. A folder that cannot be written is no error."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        os.close(handle)
        temporary = pathlib.Path(name)
        try:
            plan.save(temporary)
            temporary.replace(path_of(folder, key))
        finally:
            temporary.unlink(missing_ok=True)


def worth_swapping(running_seconds: float, candidate_seconds: float, gain: float = SWAP_GAIN) -> bool:
    """Whether a plan re-solved from measured times should replace the running one.

    Args:
        running_seconds: period of the running plan under the measured times.
        candidate_seconds: period of the new one under the same times.
        gain: improvement of throughput that the swap has to exceed.

    Raises:
        ValueError: a period that is not positive.
    """
    if not (running_seconds > 0 and candidate_seconds > 0):
        raise ValueError(f"periods must be positive, they are {running_seconds} and {candidate_seconds}")
    return running_seconds / candidate_seconds > 1 + gain
