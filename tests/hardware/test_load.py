"""What other programs take of the CPUs is told apart from what this process takes."""

import os

import pytest

from lazyjax.hardware import load
from lazyjax.hardware.load import CpuReading, is_busy, other_cpu_seconds, other_cpus, read_cpus

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes a machine's account: CPU -> seconds in user and idle; this process may use CPUs 1 and 2."""
    monkeypatch.setattr(load.os, "sched_getaffinity", lambda process: {1, 2})

    def write(seconds):
        lines = ["cpu  9 9 9 9 9 9 9 9 0 0"]
        for number, (user, idle) in seconds.items():
            lines.append(f"cpu{number} {user * TICKS} 0 0 {idle * TICKS} 0 0 0 0 0 0")
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc" / "stat").write_text("\n".join([*lines, "intr 1 2 3", "ctxt 5"]) + "\n")
        return read_cpus(tmp_path)

    return write


def test_only_usable_cpus_and_only_others_count(machine, monkeypatch):
    monkeypatch.setattr(load.time, "process_time", lambda: 5.0)
    before = machine({0: (50, 0), 1: (10, 7), 2: (20, 7), 12: (50, 0)})
    monkeypatch.setattr(load.time, "process_time", lambda: 11.0)
    after = machine({0: (99, 0), 1: (17, 9), 2: (26, 9), 12: (99, 0)})
    # 13 seconds of CPUs 1 and 2, of which this process had 6.
    assert other_cpu_seconds(before, after) == pytest.approx(7.0)


def test_waiting_for_a_drive_is_idle_and_a_stolen_cpu_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(load.os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(load.time, "process_time", lambda: 0.0)
    (tmp_path / "proc").mkdir()
    # user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice
    columns = [1, 2, 4, 1000, 2000, 8, 16, 32, 4000, 8000]
    (tmp_path / "proc" / "stat").write_text("cpu0 " + " ".join(str(n * TICKS) for n in columns) + "\n")
    assert read_cpus(tmp_path).others_seconds == pytest.approx(63.0)


def test_where_the_kernel_keeps_no_account_nothing_is_known(tmp_path):
    assert read_cpus(tmp_path) is None
    assert other_cpus(None, CpuReading(1.0, 1.0)) is None
    assert other_cpu_seconds(CpuReading(1.0, 1.0), None) is None
    assert not is_busy(None, 2)


def test_a_mean_over_the_time_that_has_passed():
    assert other_cpus(CpuReading(10.0, 3.0), CpuReading(14.0, 9.0)) == pytest.approx(1.5)
    assert other_cpus(CpuReading(10.0, 3.0), CpuReading(14.0, 2.99)) == 0.0
    assert other_cpus(CpuReading(10.0, 3.0), CpuReading(10.0, 3.0)) is None
    assert is_busy(1.5, 2)
    assert not is_busy(0.1, 2)

