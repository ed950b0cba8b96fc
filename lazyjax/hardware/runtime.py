"""Settings of XLA's runtime, which it reads from the environment when the first device is opened.

XLA takes 75 % of a GPU's memory and pins at most 64 GiB of the host's unless it is told otherwise: plans for
more would fail in the middle of a step. This module does not import JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping

from lazyjax.hardware.memory import host_memory_bytes

#: Share of a GPU's memory that XLA may take; the rest is for the CUDA context and libraries.
DEVICE_SHARE = 0.95
#: The older name of a variable comes second; XLA refuses both at once.
_DEVICE_SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_PINNED_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_FLAGS = "XLA_FLAGS"
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@dataclasses.dataclass(frozen=True)
class RuntimeSettings:
    """What a process runs with.

    Attributes:
        values: variables that decide, with their values.
        given: those of them that the user had set, which are left alone.
    """

    values: Mapping[str, str]
    given: frozenset[str]

    def sentences(self) -> tuple[str, ...]:
        """For a run's first lines, on a GPU."""
        return tuple(
            f"{name} is {value}" + (", as set in the environment" if name in self.given else "")
            for name, value in self.values.items()
        )


def set_runtime(
    environment: MutableMapping[str, str], *, deterministic: bool = False, host_bytes: int | None = None
) -> RuntimeSettings:
    """Sets what is not set; has to come before the first device is opened, else it changes nothing.

    Of the GPU, XLA gets `DEVICE_SHARE`, at once: a pool that grows piece by piece ends in pieces. Of the
    host's memory as much may be pinned as is available. Both are limits: plans keep below them by themselves.

    Args:
        environment: `os.environ`, changed in place.
        deterministic: whether every operation has to give the same bits each time (see docs/precision.md).
        host_bytes: available on the host; None: asked of the machine.
    """
    share = next((name for name in _DEVICE_SHARE if name in environment), _DEVICE_SHARE[0])
    available = host_memory_bytes() if host_bytes is None else host_bytes
    wanted = {
        share: f"{DEVICE_SHARE:g}",
        _PREALLOCATE: "true",
        _PINNED_GIB: str(max(1, available // 2**30)),
    }
    given = frozenset(name for name in wanted if name in environment)
    for name, value in wanted.items():
        environment.setdefault(name, value)
    values = {name: environment[name] for name in wanted}
    if deterministic:
        flags = environment[_FLAGS].split() if _FLAGS in environment else []
        if not any(flag.startswith(_DETERMINISTIC.split("=")[0]) for flag in flags):
            flags.append(_DETERMINISTIC)
        environment[_FLAGS] = values[_FLAGS] = " ".join(flags)
    return RuntimeSettings(values, given)
