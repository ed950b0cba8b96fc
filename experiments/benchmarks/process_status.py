"""Memory and threads of this process, as Linux counts them."""

from __future__ import annotations

import pathlib


def status_fields() -> dict[str, str]:
    """The lines of /proc/self/status, by name."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)


def status_bytes(field: str) -> int:
    """A size in /proc/self/status: VmRSS is resident memory now, VmHWM at its highest."""
    return int(status_fields()[field].split()[0]) * 1024
