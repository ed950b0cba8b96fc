"""One line that says where, when and from which source a figure was measured."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def provenance(*sources: str) -> str:
    """Processor, CPUs of this process, date (UTC) and commit, marked when `sources` differ from it.

    Args:
        sources: paths in the repository that the figure depends on; none: all.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return f"Measured on {cpus} CPUs of {_processor()}, {date}, commit {_commit(sources)}."


def command_line() -> str:
    """How this process was started, as a person would type it."""
    spec = sys.modules["__main__"].__spec__
    start = ["python", sys.argv[0]] if spec is None else ["python", "-m", spec.name]
    return shlex.join([*start, *sys.argv[1:]])


def _processor() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit(sources: tuple[str, ...]) -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=10", "HEAD")
    if not commit:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *(sources or (".",)))
    return commit + (" with changes" if changed else "")
