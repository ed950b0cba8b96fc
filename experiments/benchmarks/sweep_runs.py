"""Sweeps that are killed, and sweeps that two workers share, against a sweep left alone.

Commands:
    python -m experiments.benchmarks.sweep_runs kills [--kills 10] [--seed 0] [--save]     about 3 minutes
    python -m experiments.benchmarks.sweep_runs workers [--save]                           about 3 minutes

Real trainings of a model of one block, each in a process of its own, with a checkpoint after every
tenth step. `kills`: the runner is killed (SIGKILL) at moments drawn by the seed, and started again
each time. Expected: the losses of every trial bit for bit as in the sweep that was left alone,
every step recorded once, no trial that had ended begun again. `workers`: the same trials by one
worker on one core, and by two workers on a core each. Expected: every trial once, and at most 0.65
of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from experiments.benchmarks.kill_resume import ARCHITECTURE
from experiments.benchmarks.provenance import ROOT, provenance

RESULTS = pathlib.Path(__file__).parent / "results"
SOURCES = ("lazyjax", "experiments/sweep.py", "experiments/sweeping", "experiments/benchmarks/sweep_runs.py")
STEPS, TRIALS = 200, 8
_SWEEP = f"""
base: base.yaml
grid: {{optimizer.learning_rate: [1.0e-3, 3.0e-3, 1.0e-2, 3.0e-2]}}
seeds: [0, 1]
set: {{training.steps: {STEPS}, checkpoints.every_steps: 10, checkpoints.keep_last: 2}}
compare: {{baseline: learning_rate=0.001, metrics: [last_evaluation_loss]}}
"""
_BASE = """
model: {{architecture: {folder}/model.json, compute_dtype: float32}}
data: {{source: problems, sequence_length: 64, rows: 4, batching: packed}}
optimizer: {{threads: 1}}
plan: {{planner: recompute_all}}
training: {{evaluate_rows: 32, log_every: 50}}
run: {{save_model: false}}
"""


def write_sweep(folder: pathlib.Path) -> pathlib.Path:
    """The sweep's file, with what it names beside it."""
    (folder / "model.json").write_text(json.dumps(ARCHITECTURE))
    (folder / "base.yaml").write_text(_BASE.format(folder=folder))
    (folder / "tried.yaml").write_text(_SWEEP)
    return folder / "tried.yaml"


def start(
    path: pathlib.Path, records: pathlib.Path, *words: str, cores: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """The sweep in a process of its own, on `cores` where some are named."""
    parts = (str(ROOT), os.environ["PYTHONPATH"] if "PYTHONPATH" in os.environ else "")
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.sweep", str(path), "--folder", str(records), *words],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in parts if part)},
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
    )


def losses(records: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """Trial -> step and loss of every record of its metrics, in order."""
    found = {}
    for path in sorted((records / "trials").iterdir()):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        found[path.name] = [(line["step"], line["loss"]) for line in lines]
    return found


def repeated(records: pathlib.Path) -> list[str]:
    """Runs that had come to their end and were put aside all the same."""
    found = []
    for path in (records / "abandoned").iterdir():
        summary = path / "summary.json"
        if summary.exists() and json.loads(summary.read_text())["status"] == "finished":
            found.append(path.name)
    return found


def run_kills(kills: int, seed: int) -> tuple[bool, str]:
    """Whether the killed sweep equals the other, and a sentence about it."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        path = write_sweep(folder)
        begun = time.monotonic()
        _end(start(path, folder / "whole"))
        seconds = time.monotonic() - begun
        rng, done = random.Random(seed), 0
        for _ in range(kills):
            process = start(path, folder / "killed")
            try:
                process.wait(timeout=rng.uniform(0.02, 0.2) * seconds)
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                done += 1
        _end(start(path, folder / "killed"))
        whole, killed = losses(folder / "whole"), losses(folder / "killed")
        again = repeated(folder / "killed")
        aside = len(list((folder / "killed" / "abandoned").iterdir()))
    equal = whole == killed and len(whole) == TRIALS
    text = (
        f"{done} kills of a sweep of {TRIALS} trials of {STEPS} steps, {seconds:.0f} s undisturbed: "
        f"losses of all steps {'equal bit for bit, each step once' if equal else 'NOT EQUAL'}; "
        f"{len(again)} trials repeated after their end; {aside} attempts without a checkpoint begun again."
    )
    return equal and not again and done == kills, text


def run_workers() -> tuple[bool, str]:
    """Whether two workers take at most 0.65 of one's time, and a sentence about it."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        path = write_sweep(folder)
        seconds = []
        for records, words, used in (
            ("one", (), cores[:1]),
            ("two", ("--workers", "2"), cores),
        ):
            begun = time.monotonic()
            _end(start(path, folder / records, *words, cores=used))
            seconds.append(time.monotonic() - begun)
        equal = losses(folder / "one") == losses(folder / "two")
        put_aside = len(list((folder / "two" / "abandoned").iterdir()))
        claims = len(list((folder / "two" / "claims").glob("*.json")))
    share = seconds[1] / seconds[0]
    text = (
        f"{TRIALS} single-threaded trials: {seconds[0]:.1f} s by one worker on one core, "
        f"{seconds[1]:.1f} s by two on a core each: {share:.2f}. "
        f"{claims} claims, {put_aside} attempts put aside, losses "
        f"{'equal bit for bit' if equal else 'NOT EQUAL'}."
    )
    return equal and claims == TRIALS and not put_aside and share <= 0.65, text


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise RuntimeError(f"the sweep ended with exit code {process.returncode}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kills", "workers"))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write results/sweep_KIND.md")
    options = parser.parse_args()
    good, text = run_kills(options.kills, options.seed) if options.what == "kills" else run_workers()
    print(text)
    if options.save:
        command = f"python -m experiments.benchmarks.sweep_runs {options.what} --seed {options.seed}"
        (RESULTS / f"sweep_{options.what}.md").write_text(
            f"# Sweeps: {options.what}\n\n{provenance(*SOURCES)} `{command}`\n\n{text}\n"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
