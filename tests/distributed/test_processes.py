"""Common decisions of several processes, and how they find each other."""

from __future__ import annotations

import os

import pytest

from lazyjax.config import ConfigError, DistributedConfig, load_config
from lazyjax.distributed.channel import PeerError
from lazyjax.distributed.processes import Peer, Processes, alone
from lazyjax.distributed.start import launcher, start
from tests.distributed.stores import MemoryStore, channels, in_processes


@pytest.mark.parametrize("count", [2, 4])
def test_all_get_what_all_give_in_every_round(count: int) -> None:
    made, store = channels(count, store=(store := MemoryStore())), store

    def work(index: int) -> list[object]:
        return [made[index].exchange({"round": number, "by": index}) for number in range(5)]

    for found in in_processes(count, work):
        expected = [[{"round": n, "by": by} for by in range(count)] for n in range(5)]
        assert found == expected
    # What nobody will read again is not kept.
    assert all(key.startswith("main/5/") for key in store.values)


def test_values_longer_than_a_message_arrive() -> None:
    made, text = channels(2), "x" * 3_000_000
    assert in_processes(2, lambda index: made[index].decide(lambda: text)) == [text, text]


def test_only_the_first_decides() -> None:
    made, asked = channels(3), []

    def work(index: int) -> object:
        return made[index].decide(lambda: asked.append(index) or "plan")

    assert in_processes(3, work) == ["plan"] * 3
    assert asked == [0]


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_is_an_error_of_all_that_names_it(failing: int) -> None:
    made = channels(3)

    def work(index: int) -> None:
        with made[index].together():
            if index == failing:
                raise ValueError("no such file")
            # The others are further, and meet the error where they next agree on something.
            made[index].decide(lambda: "attention")

    found = in_processes(3, work)
    assert isinstance(found[failing], ValueError)
    for index in {0, 1, 2} - {failing}:
        assert isinstance(found[index], PeerError)
        assert str(found[index]) == f"process {failing} cannot go on (ValueError: no such file)"


def test_after_an_error_all_are_at_the_same_round() -> None:
    made = channels(2)

    def full() -> None:
        raise OSError("no space left")

    def work(index: int) -> object:
        with pytest.raises((OSError, PeerError)):
            made[index].decide(full)
        return made[index].exchange(index)

    assert in_processes(2, work) == [[0, 1], [0, 1]]


def test_one_process_asks_nobody() -> None:
    processes = alone()
    assert processes.main.exchange(3) == [3]
    assert processes.main.decide(lambda: "plan") == "plan"
    with pytest.raises(OSError, match="full"), processes.main.together():
        raise OSError("full")
    assert (processes.leads, processes.several, processes.machines, processes.here) == (True, False, 1, 1)
    with processes.running() as same:
        assert same is processes


def test_cpus_are_shared_by_processes_that_may_use_the_same_ones() -> None:
    def peers(*cpus: tuple[int, ...]) -> Processes:
        made = alone()
        made.peers = tuple(Peer("host", "host", "ns", number, own) for number, own in enumerate(cpus))
        return made

    assert peers((0, 1, 2, 3), (0, 1, 2, 3)).own_cpus() == 2
    assert peers((0, 1), (2, 3)).own_cpus() == 2
    assert peers((0,), (0,), (0,)).own_cpus() == 1


LAUNCHED = {
    "slurm": {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "2",
    },
    "ompi": {"OMPI_COMM_WORLD_SIZE": "4"},
    "mpi4py": {"PMI_SIZE": "4"},
    "k8s": {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHED)
def test_launchers_are_known_by_their_variables(name: str) -> None:
    assert launcher(LAUNCHED[name]) == name


@pytest.mark.parametrize(
    "environment",
    [{}, LAUNCHED["slurm"] | {"SLURM_NTASKS": "1"}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
     {"OMPI_COMM_WORLD_SIZE": "1"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}],
)  # fmt: skip
def test_a_single_task_a_batch_script_and_a_lone_pod_are_one_process(environment: dict[str, str]) -> None:
    assert not start(DistributedConfig(), environment).several


def test_one_process_can_be_asked_for_under_a_launcher() -> None:
    assert not start(DistributedConfig(processes=1), LAUNCHED["slurm"]).several


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--distributed.coordinator", "host"], "HOST:PORT"),
        (["--distributed.coordinator", "host:1"], "needs processes"),
        (["--distributed.process", "0"], "needs coordinator"),
        (
            ["--distributed.coordinator=h:1", "--distributed.processes=2", "--distributed.process=2"],
            "must be below processes",
        ),
    ],
)
def test_places_that_do_not_fit_together_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["--model.architecture", "Qwen2.5-0.5B", *words])


def test_processes_of_a_run_leave_together_after_an_error_that_all_know() -> None:
    """Nobody is told a second time, which would end the others while they write their records."""
    store = MemoryStore()

    def work(index: int) -> Processes:
        processes = Processes(index, 2, store, timeout_seconds=100.0)
        with processes.running():
            assert [peer.pid for peer in processes.peers] == [os.getpid()] * 2
            with processes.main.together():
                if index:
                    raise ValueError("no such file")
        return processes

    found = in_processes(2, work)
    assert [type(error) for error in found] == [PeerError, ValueError]
    assert not [key for key in store.values if "/failed/" in key]


def test_an_error_of_one_process_alone_is_told_before_it_ends() -> None:
    store = MemoryStore()
    # Process 0 has heard of it: nobody waits.
    store.values["lazyjax/0/watch/known/0"] = "1"

    def work(index: int) -> None:
        processes = Processes(index, 2, store, timeout_seconds=100.0)
        if index:
            with processes.running():
                raise OSError("no space left")
        assert processes.watch is not None
        processes.watch.stop()

    found = in_processes(2, work)
    assert [type(error) for error in found] == [type(None), OSError]
    told = [value for key, value in store.values.items() if key.endswith("/failed/1")]
    assert told == ["OSError: no space left"]
