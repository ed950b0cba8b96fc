"""Limits of XLA's allocators: set before a device is opened, and what the user set is left alone."""

from __future__ import annotations

import subprocess
import sys

from lazyjax.hardware.runtime import set_runtime


def test_limits_are_set_where_nothing_is() -> None:
    environment: dict[str, str] = {"HOME": "/root"}
    found = set_runtime(environment, host_bytes=200 * 2**30 + 5)
    assert environment["XLA_CLIENT_MEM_FRACTION"] == "0.95"
    assert environment["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "200"
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert "XLA_FLAGS" not in environment
    assert found.given == frozenset()
    assert all(environment[name] == value for name, value in found.values.items())


def test_settings_of_the_user_stay_and_are_said() -> None:
    """The older name of the share counts too: XLA refuses both at once."""
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "32"}
    found = set_runtime(environment, host_bytes=2**40)
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert environment["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "32"
    assert "XLA_CLIENT_MEM_FRACTION" not in environment
    said = "; ".join(found.sentences())
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION is 0.5, as set in the environment" in said
    assert "XLA_PYTHON_CLIENT_PREALLOCATE is true" in said
    assert "PREALLOCATE is true, as set" not in said


def test_determinism_is_a_flag_beside_others() -> None:
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    set_runtime(environment, deterministic=True, host_bytes=2**30)
    flags = environment["XLA_FLAGS"].split()
    assert flags == ["--xla_force_host_platform_device_count=4", "--xla_gpu_deterministic_ops=true"]
    own = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=false"}
    set_runtime(own, deterministic=True, host_bytes=2**30)
    assert own["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=false"


def test_setting_them_opens_no_device_and_imports_no_jax() -> None:
    code = "import sys, os; from lazyjax.hardware.runtime import set_runtime; set_runtime(os.environ)"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'jax' not in sys.modules"], check=True)


def test_xla_knows_the_flag() -> None:
    """A flag that it does not know ends the process."""
    code = (
        "import os; from lazyjax.hardware.runtime import set_runtime;"
        "set_runtime(os.environ, deterministic=True);"
        "import jax; assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
