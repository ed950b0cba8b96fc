"""What the operating system says of processes and of the CPUs that this one may use."""

from __future__ import annotations

import os
import pathlib


def usable_cpus() -> frozenset[int]:
    """Numbers of the CPUs that this process may run on."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return frozenset(range(os.cpu_count() or 1))


def boot_id() -> str:
    """Of the machine since it was started; empty where that cannot be told."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat (proc(5)) from the third, the state, on.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    # The command, in parentheses, may itself hold spaces and parentheses.
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where that cannot be told."""
    try:
        return int(process_fields(pid)[19])
    except OSError:
        return None
