"""Claims, workers and the command of a sweep, with `fake_trial` in place of trainings."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from experiments.sweeping.claims import claim, is_claimed
from experiments.sweeping.document import read_sweep
from experiments.sweeping.folder import State, SweepFolder
from experiments.sweeping.worker import Worker

ROOT = pathlib.Path(__file__).parents[2]
FAKE = "tests.experiments.fake_trial"


def sweep_file(
    folder: pathlib.Path, rates: list[float], *, seeds: int = 2, milliseconds: int = 20
) -> pathlib.Path:
    (folder / "base.yaml").write_text("model: {architecture: Qwen2.5-7B}\n")
    path = folder / "tried.yaml"
    path.write_text(
        f"base: base.yaml\nset: {{training.steps: {milliseconds}}}\n"
        f"grid: {{optimizer.learning_rate: {rates}}}\nseeds: {list(range(seeds))}\n"
        f"compare: {{baseline: learning_rate={rates[0]}, metrics: [last_evaluation_loss]}}\n"
    )
    return path


def command(path: pathlib.Path, *words: str) -> list[str]:
    fixed = ["--folder", str(path.parent / "records"), "--trial-module", FAKE]
    return [sys.executable, "-m", "experiments.sweep", str(path), *fixed, *words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def ledger(folder: SweepFolder, word: str) -> list[str]:
    lines = (folder.claims / "ledger").read_text().splitlines()
    return sorted(line.split()[1] for line in lines if line.startswith(word))


def test_one_of_many_gets_a_claim(tmp_path):
    taken = []
    barrier = threading.Barrier(8)

    def try_it() -> None:
        barrier.wait()
        mine = claim(tmp_path, "ab")
        if mine is not None:
            taken.append(mine)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    assert is_claimed(tmp_path, "ab")
    assert not is_claimed(tmp_path, "abc")


def test_a_claim_that_was_not_renewed_passes_to_another_and_its_owner_notices(tmp_path):
    first = claim(tmp_path, "ab")
    assert first is not None
    assert claim(tmp_path, "ab") is None
    past = time.time() - 120
    os.utime(first.path, (past, past))
    second = claim(tmp_path, "ab")
    assert second is not None
    assert not first.is_held()
    first.release()  # of no effect
    assert second.is_held()
    assert is_claimed(tmp_path, "ab")
    second.release()
    assert not is_claimed(tmp_path, "ab")


def test_a_claim_is_renewed_while_its_owner_works(tmp_path):
    mine = claim(tmp_path, "ab")
    assert mine is not None
    past = time.time() - 120
    with mine.renewed(every_seconds=0.01):
        os.utime(mine.path, (past, past))
        deadline = time.monotonic() + 30
        while mine.path.stat().st_mtime < past + 60:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert is_claimed(tmp_path, "ab")


def test_a_claim_of_a_dead_process_of_this_host_is_free_at_once(tmp_path):
    lines = [
        "import pathlib, sys",
        "from experiments.sweeping.claims import claim",
        "claim(pathlib.Path(sys.argv[1]), 'ab')",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines), str(tmp_path)], check=True, env=environment())
    assert list(tmp_path.glob("ab.1.json"))
    assert not is_claimed(tmp_path, "ab")


def test_every_state_is_told_apart_and_only_what_is_left_runs_again(tmp_path):
    sweep = read_sweep(sweep_file(tmp_path, [0.001, 0.5, 0.25, -1.0], seeds=1))
    folder = SweepFolder(tmp_path / "records")
    folder.prepare(sweep)
    assert [folder.state(trial) for trial in sweep.trials][:3] == [State.PLANNED] * 3
    worker = Worker(sweep, folder, trial_module=FAKE)
    assert worker.run() is None
    states = [folder.state(trial) for trial in sweep.trials]
    assert states == [State.SUCCEEDED, State.INFEASIBLE, State.FAILED, State.FAILED]
    outcomes = [folder.outcome(trial) for trial in sweep.trials]
    assert "3 GB of host memory" in outcomes[1].message
    assert "SIGKILL" in outcomes[2].message
    assert "learning_rate" in outcomes[3].message

    starts = ledger(folder, "start")
    Worker(sweep, folder, trial_module=FAKE).run()
    assert ledger(folder, "start") == starts
    Worker(sweep, folder, retry=True, trial_module=FAKE).run()
    again = ledger(folder, "start")
    assert len(again) == len(starts) + 1
    # The attempt that failed is kept.
    assert [path.name for path in folder.abandoned.iterdir()] == [sweep.trials[2].folder_name + ".1"]


def test_a_sweep_killed_at_random_moments_ends_with_the_same_table_and_no_trial_twice(tmp_path):
    path = sweep_file(tmp_path, [0.001, 0.002, 0.003], seeds=2, milliseconds=300)
    moments = np.random.default_rng(7).uniform(0.3, 2.5, 4)
    for moment in moments:
        process = subprocess.Popen(
            command(path), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command(path), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sweep = read_sweep(path)
    folder = SweepFolder(tmp_path / "records")
    losses = [folder.outcome(trial).summary["last_evaluation_loss"] for trial in sweep.trials]
    assert losses == [rate + seed for seed in (0, 1) for rate in (0.001, 0.002, 0.003)]
    # A trial may begin again after a kill; none that came to its end does.
    assert ledger(folder, "end") == sorted(trial.folder_name for trial in sweep.trials)
    assert not [path for path in folder.abandoned.iterdir() if (path / "summary.json").exists()]


def test_a_trial_that_died_after_its_end_is_not_repeated(tmp_path):
    sweep = read_sweep(sweep_file(tmp_path, [0.125], seeds=1))
    folder = SweepFolder(tmp_path / "records")
    folder.prepare(sweep)
    Worker(sweep, folder, trial_module=FAKE).run()
    # A worker that is killed with its trial records nothing.
    (folder.outcomes / f"{sweep.trials[0].digest}.json").unlink()
    Worker(sweep, folder, trial_module=FAKE).run()
    assert folder.outcome(sweep.trials[0]).summary["last_evaluation_loss"] == 0.125
    assert len(ledger(folder, "start")) == 1


def test_two_workers_share_a_sweep_and_a_signal_stops_both(tmp_path):
    path = sweep_file(tmp_path, [0.001, 0.002, 0.003], seeds=2, milliseconds=30)
    folder = SweepFolder(tmp_path / "records")
    done = subprocess.run(
        command(path, "--workers", "2"), env=environment(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(ledger(folder, "start")) == 6
    assert len(set(ledger(folder, "start"))) == 6

    longer = sweep_file(tmp_path, [0.004, 0.005], seeds=1, milliseconds=60_000)
    process = subprocess.Popen(
        command(longer, "--workers", "2"), env=environment(), stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(ledger(folder, "start")) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    states = [folder.state(trial) for trial in read_sweep(longer).trials]
    assert states == [State.INTERRUPTED, State.INTERRUPTED]


def test_the_folder_of_another_sweep_is_refused(tmp_path):
    folder = SweepFolder(tmp_path / "records")
    folder.prepare(read_sweep(sweep_file(tmp_path, [0.001])))
    record = json.loads((folder.path / "sweep.json").read_text())
    (folder.path / "sweep.json").write_text(json.dumps({**record, "name": "other"}))
    with pytest.raises(ValueError, match="holds the sweep 'other'"):
        folder.prepare(read_sweep(sweep_file(tmp_path, [0.001])))
