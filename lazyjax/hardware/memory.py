"""How much host memory this process can still get: what is available, within every control group's limit."""

from __future__ import annotations

import os
import pathlib
from typing import NamedTuple


class HostMemory(NamedTuple):
    """Bytes that can be had, and what sets them: the machine, or the file of a control group's limit."""

    bytes: int
    limit: str


def host_memory(root: pathlib.Path = pathlib.Path("/")) -> HostMemory:
    """What this process can still get without swapping.

    Linux: `MemAvailable`, and for the process's control group and every one above it (versions 1 and 2)
    its limit less what it uses; file pages that it can drop do not count as used. Elsewhere: all memory
    of the machine.

    Args:
        root: of the file system with `proc` and `sys`.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            total = int(line.split()[1]) * 1024
    limits = [HostMemory(total, "the machine's available memory")]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits(root / "sys/fs/cgroup", path, _VERSION_2)
        elif "memory" in controllers.split(","):
            limits += _limits(root / "sys/fs/cgroup/memory", path, _VERSION_1)
    return min(limits)


def host_memory_bytes() -> int:
    """The bytes of `host_memory`."""
    return host_memory().bytes


#: Names of a control group's files: limit, use, and the entry of memory.stat with pages that can be dropped.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _limits(mount: pathlib.Path, path: str, names: tuple[str, str, str]) -> list[HostMemory]:
    """What the group and those above it leave; in a container the group is often the mount's root."""
    limit_name, use_name, droppable_name = names
    group = pathlib.PurePosixPath(path)
    found = []
    for part in (group, *group.parents):
        folder = mount / str(part).lstrip("/")
        limit, used = _lines(folder / limit_name), _lines(folder / use_name)
        if not limit or not limit[0].isdigit() or not used:
            continue
        droppable = [
            int(line.split()[1])
            for line in _lines(folder / "memory.stat")
            if line.split()[0] == droppable_name
        ]
        left = int(limit[0]) - max(0, int(used[0]) - sum(droppable))
        found.append(HostMemory(max(0, left), f"the limit in {folder / limit_name}"))
    return found


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return []
