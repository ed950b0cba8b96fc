"""How the processes of a run find each other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

import jax

from lazyjax.config import ConfigError, DistributedConfig
from lazyjax.distributed.processes import Processes, alone

#: Seconds to wait for the others when a process ends.
_SHUTDOWN_SECONDS = 20
#: Numbers of the runs of this Python process, the same in all processes that run them.
_numbers = itertools.count(1)


class ProcessesError(RuntimeError):
    """Processes that did not come together."""


def start(config: DistributedConfig, environment: Mapping[str, str] | None = None) -> Processes:
    """Finds the other processes; has to come before the first device is opened.

    The configuration names them, or the launcher's variables do (SLURM, Open MPI, MPICH, an indexed job of
    Kubernetes), which `jax.distributed.initialize` reads itself. Without either there is one process.

    Raises:
        ProcessesError: the others did not come. ConfigError: the numbers do not fit together.
    """
    environment = os.environ if environment is None else environment
    by_hand = config.coordinator is not None
    if not by_hand and (config.processes == 1 or launcher(environment) is None):
        if not jax.distributed.is_initialized():
            return alone()
    elif not jax.distributed.is_initialized():
        _initialize(config, None if by_hand else launcher(environment))
    # `jax.process_count` would open the devices.
    from jax._src import distributed

    state = distributed.global_state
    if config.processes not in (None, state.num_processes):
        raise ConfigError(f"distributed.processes is {config.processes}, but there are {state.num_processes}")
    store = state.client if state.num_processes > 1 else None
    return Processes(
        state.process_id,
        state.num_processes,
        store,
        timeout_seconds=config.timeout_seconds,
        number=next(_numbers),
    )


def launcher(environment: Mapping[str, str]) -> str | None:
    """Who started several processes, by the variables that each leaves; None where nobody did."""
    for name, count, others in _LAUNCHERS:
        enough = count is None or (count in environment and int(environment[count]) > 1)
        if enough and all(variable in environment for variable in others):
            return name
    return None


#: Launcher, variable with the number of processes, and variables that are there besides.
_LAUNCHERS: Sequence[tuple[str, str | None, tuple[str, ...]]] = (
    ("slurm", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")),
    ("ompi", "OMPI_COMM_WORLD_SIZE", ()),
    ("mpi4py", "PMI_SIZE", ()),
    ("k8s", None, ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")),
)


def _initialize(config: DistributedConfig, found: str | None) -> None:
    # Signals are answered by `lazyjax.training.interrupt`, SIGTERM too.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.processes,
            config.process,
            cluster_detection_method="deactivate" if found is None else found,
            initialization_timeout=int(config.timeout_seconds),
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        where = config.coordinator or f"the coordinator that {found} names"
        raise ProcessesError(
            f"distributed: the processes did not come together at {where} within "
            f"{config.timeout_seconds:g} s ({' '.join(str(error).split())[:300]})"
        ) from error
