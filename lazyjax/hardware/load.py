"""What other processes take of the CPUs that this one may use, while something is measured.

A load average counts this process too, and follows minutes behind. The kernel's own account of the CPUs,
less the CPU time of this process, is what the others took, over exactly the time in question.
"""

from __future__ import annotations

import os
import pathlib
import time
from typing import NamedTuple

#: Others that take more than this share of the usable CPUs move what is measured.
BUSY_SHARE = 0.1


class CpuReading(NamedTuple):
    """Seconds since some moment: of the clock, and of CPU time.

    Attributes:
        wall_seconds: of the clock.
        others_seconds: CPU time of the usable CPUs that this process did not use; with what a hypervisor
            kept from them.
    """

    wall_seconds: float
    others_seconds: float


def read_cpus(root: pathlib.Path = pathlib.Path("/")) -> CpuReading | None:
    """A reading of the usable CPUs (Linux; None elsewhere). Only differences of two readings mean something.

    Args:
        root: of the file system with `proc`.
    """
    try:
        text = (root / "proc/stat").read_text()
        usable = os.sched_getaffinity(0)
    except (OSError, AttributeError):
        return None
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    busy = 0
    for line in text.splitlines():
        name, *columns = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in usable:
            busy += _busy_ticks([int(column) for column in columns])
    return CpuReading(time.perf_counter(), busy / ticks_per_second - time.process_time())


def _busy_ticks(columns: list[int]) -> int:
    """Of a line of /proc/stat (proc(5)): all but idle and iowait; guests are in user and nice already."""
    user, nice, system, _, _, *others = columns
    return user + nice + system + sum(others[:3])


def other_cpu_seconds(before: CpuReading | None, after: CpuReading | None) -> float | None:
    """CPU time that others took between two readings; None where that is unknown.

    The kernel counts in ticks of 10 ms, so that a quiet moment may come out below zero; sums over many
    moments are right.
    """
    return None if before is None or after is None else after.others_seconds - before.others_seconds


def other_cpus(before: CpuReading | None, after: CpuReading | None) -> float | None:
    """How many of the usable CPUs others took on average between two readings; None where unknown."""
    seconds = other_cpu_seconds(before, after)
    if before is None or after is None or seconds is None or after.wall_seconds <= before.wall_seconds:
        return None
    return max(0.0, seconds / (after.wall_seconds - before.wall_seconds))


def is_busy(other_cpus: float | None, cpus: int) -> bool:
    """Whether others took so much of `cpus` that times do not show what this machine can do."""
    return other_cpus is not None and other_cpus >= BUSY_SHARE * cpus
