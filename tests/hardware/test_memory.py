"""Host memory is what the process can get, whatever sets the limit."""

import os

import pytest

from lazyjax.hardware.memory import host_memory, host_memory_bytes


@pytest.fixture
def machine(tmp_path):
    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


MEMINFO = {"proc/meminfo": "MemTotal: 32 kB\nMemAvailable:       1000000 kB\n"}
AVAILABLE = 1000000 * 1024


def test_this_machine_has_some():
    assert 2**28 < host_memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_without_a_limit_it_is_what_is_available(machine):
    root = machine({**MEMINFO, "proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"})
    assert host_memory(root) == (AVAILABLE, "the machine's available memory")


def test_a_limit_counts_less_what_is_used_but_not_pages_that_can_go(machine):
    root = machine(
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/user/run\n",
            "sys/fs/cgroup/user/run/memory.max": "500000000\n",
            "sys/fs/cgroup/user/run/memory.current": "300000000\n",
            "sys/fs/cgroup/user/run/memory.stat": "anon 1\ninactive_file 100000000\nactive_file 5\n",
        }
    )
    found = host_memory(root)
    assert found.bytes == 300000000
    assert "user/run/memory.max" in found.limit


def test_a_limit_above_the_own_group_counts_too(machine):
    root = machine(
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/user/run\n",
            "sys/fs/cgroup/user/memory.max": "200000000\n",
            "sys/fs/cgroup/user/memory.current": "50000000\n",
            "sys/fs/cgroup/user/run/memory.max": "max\n",
        }
    )
    assert host_memory(root).bytes == 150000000


def test_version_1_in_a_container_whose_group_is_the_mounts_root(machine):
    root = machine(
        {
            **MEMINFO,
            "proc/self/cgroup": "4:cpu,memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "400000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000000\n",
            "sys/fs/cgroup/memory/memory.stat": "cache 5\ntotal_inactive_file 40000000\n",
        }
    )
    assert host_memory(root).bytes == 340000000


def test_nothing_is_left_where_more_is_used_than_allowed(machine):
    root = machine(
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "10\n",
            "sys/fs/cgroup/memory.current": "20\n",
        }
    )
    assert host_memory(root).bytes == 0
