"""Several processes train one model as one process does, stop together, and end when one of them dies.

`python -m experiments.benchmarks.process_runs` compares more numbers of processes, and more kinds of runs.
"""

from __future__ import annotations

import json
import pathlib

import pytest

from experiments.benchmarks import process_runs
from lazyjax.config import Config, ConfigError, load_config
from lazyjax.distributed.processes import Peer, Processes, alone
from lazyjax.hardware.profile import load_profile
from lazyjax.training.interrupt import StopRequest
from lazyjax.training.run_folder import RunFolder
from lazyjax.training.together import DifferentInputsError, check_same, for_processes
from tests.distributed.stores import channels, in_processes


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    process_runs.write_inputs(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_two_processes_train_save_and_export_as_one(folder: pathlib.Path) -> None:
    """8-bit state and all else that layers own on NVMe; the checkpoint of two is exported by one."""
    good, rows = process_runs.equality(folder, ["8-bit state on NVMe"], [(2, 1)])
    assert good, rows
    several = folder / "runs" / "0-2x1"
    assert (several / "timeline.json").exists()
    assert (several / "timeline-process-1.json").exists()
    assert json.loads((several / "summary.json").read_text())["processes"] == 2
    written = load_config(several / "config.yaml").distributed
    assert (written.coordinator, written.processes, written.process) == (None, None, None)


@pytest.mark.slow
def test_a_signal_at_one_process_stops_both_after_the_same_step(folder: pathlib.Path) -> None:
    good, rows = process_runs.stopping(folder, 2, 1)
    assert good, rows


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1])
def test_the_others_end_when_one_is_killed_and_the_run_goes_on(folder: pathlib.Path, victim: int) -> None:
    good, rows = process_runs.killing(folder, 2, victim)
    assert good, rows


def several(count: int) -> Processes:
    made = alone()
    made.count = count
    made.peers = tuple(Peer("host", "host", "ns", number, (0, 1)) for number in range(count))
    return made


def config(*words: str) -> Config:
    return load_config(None, ["--model.architecture", "Qwen2.5-0.5B", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan.replan-after-steps", "3"], "plan.replan_after_steps"),
        (["--plan.hardware", "calibrate"], "plan.hardware calibrate"),
        (["--training.evaluate-exact-match-rows", "3"], "evaluate_exact_match_rows"),
        (["--plan.devices", "3"], "plan.devices is 3, but 2 processes with 4 devices"),
        (["--plan.devices", "8"], "plan.devices is 8, but 2 processes with 4 devices"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        for_processes(config(*words), several(2))


def test_all_devices_and_a_share_of_the_cpus_are_taken_where_nothing_is_said() -> None:
    given = config()
    resolved = for_processes(given, several(2))
    assert (resolved.plan.devices, resolved.optimizer.threads) == (4, 1)
    assert for_processes(given, alone()) is given
    assert for_processes(config("--plan.devices", "2"), several(2)).plan.devices == 2


def test_a_plan_may_use_the_memory_of_every_host() -> None:
    processes = several(2)
    processes.peers = tuple(peer._replace(machine=str(peer.pid)) for peer in processes.peers)
    assert for_processes(config("--plan.host-bytes", "3e9"), processes).plan.host_bytes == 6_000_000_000
    assert for_processes(config("--plan.host-bytes", "3e9"), several(2)).plan.host_bytes == 3_000_000_000
    measured = for_processes(config(), processes).plan.host_bytes
    assert measured is not None
    named = for_processes(config("--plan.hardware", "h200"), processes).plan.host_bytes
    assert named == 2 * load_profile("h200").host_bytes


def test_a_process_with_other_rows_is_named() -> None:
    made = channels(3)

    def work(index: int) -> None:
        processes = several(3)
        processes.main = made[index]
        check_same(processes, config(), {"order": "a" if index < 2 else "b"})

    found = in_processes(3, work)
    assert all(isinstance(error, DifferentInputsError) for error in found)
    assert {str(error) for error in found} == {"process 2 has other rows of data than process 0"}


def test_a_stop_is_common_from_the_next_look_on() -> None:
    made = channels(2)
    stops = [StopRequest(channel.exchange) for channel in made]
    stops[1].time_is_up()
    assert [bool(stop) for stop in stops] == [False, False]
    in_processes(2, lambda index: stops[index].look())
    assert [stop.reason for stop in stops] == ["time limit", "time limit"]


def test_only_the_first_process_writes_records(tmp_path: pathlib.Path) -> None:
    folder = RunFolder(tmp_path, process=1)
    folder.write_config(config())
    folder.write_summary({})
    folder.discard()
    with folder.locked(), RunFolder(tmp_path).locked():
        pass
    folder.write_timeline([])
    assert [path.name for path in tmp_path.iterdir()] == ["timeline-process-1.json"]
