"""What several processes do differently from one when a run is set up.

Every process reads the same configuration, checkpoint and data; process 0 alone decides, writes and speaks.
"""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from lazyjax.config import Config, ConfigError, digest
from lazyjax.distributed.processes import Processes
from lazyjax.execution.kernels import first_axis
from lazyjax.execution.shards import put_parts, share_of
from lazyjax.hardware.measure import capacities
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.template import ModelTemplate
from lazyjax.training.calibration import AUTO, CALIBRATE, measured_profile
from lazyjax.training.run_folder import RunFolder, RunFolderError

#: What all processes give of themselves has to be equal.
_SAME = ("another configuration", "other rows of data", "other checkpoints")


class DifferentInputsError(ValueError):
    """Processes that were given different things."""


def for_processes(config: Config, processes: Processes) -> Config:
    """The configuration with what follows from the processes: devices, host memory, threads of the update.

    Raises:
        ConfigError: a key that several processes cannot follow, or devices that they do not have.
    """
    if not processes.several:
        return config
    _refuse(config)
    there = jax.device_count()
    devices = there if config.plan.devices == 1 else config.plan.devices
    if devices > there or devices % processes.count:
        raise ConfigError(
            f"plan.devices is {devices}, but {processes.count} processes with {there} devices in all "
            "each give an equal number of theirs"
        )
    planned: dict[str, Any] = {"devices": devices}
    if processes.machines > 1:
        planned["host_bytes"] = processes.machines * _host_bytes(config)
    plan = config.plan.model_copy(update=planned)
    threads = config.optimizer.threads or processes.own_cpus()
    optimizer = config.optimizer.model_copy(update={"threads": threads})
    return config.model_copy(update={"plan": plan, "optimizer": optimizer})


def _host_bytes(config: Config) -> int:
    """What a plan may use of one host, where all hosts are like this one."""
    if config.plan.host_bytes is not None:
        return config.plan.host_bytes
    if config.plan.hardware != AUTO:
        return load_profile(config.plan.hardware).host_bytes
    size, _ = capacities(jax.local_devices()[0])["host_bytes"]
    return size


def _refuse(config: Config) -> None:
    """What is decided or computed by one process alone so far."""
    training = config.training
    answers = (
        training.evaluate_exact_match_rows, training.exact_match_rows_before, training.exact_match_rows_after
    )  # fmt: skip
    refused = {
        "plan.replan_after_steps: a plan is not made again while several processes run": (
            config.plan.replan_after_steps is not None
        ),
        f"plan.hardware {CALIBRATE}: kernels are timed by one process only; auto measures rates, or name a "
        "profile": config.plan.hardware == CALIBRATE,
        "training.evaluate_exact_match_rows: several processes generate no answers; `lazyjax evaluate RUN` "
        "scores the trained model": any(answers),
    }
    for words, asked in refused.items():
        if asked:
            raise ConfigError(words)


def mesh_devices(config: Config, processes: Processes, visible: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices that share the work: the first ones, as many of every process."""
    if not processes.several:
        return list(visible[: config.plan.devices])
    each = config.plan.devices // processes.count
    chosen = []
    for process in range(processes.count):
        own = [device for device in visible if device.process_index == process]
        if len(own) < each:
            raise ConfigError(f"plan.devices is {config.plan.devices}, but process {process} has {len(own)}")
        chosen += own[:each]
    return chosen


def check_same(processes: Processes, config: Config, data: Any, checkpoints: Sequence[str] = ()) -> None:
    """Whether all processes have the same configuration, rows in the same order, and the same checkpoints.

    Raises:
        DifferentInputsError: naming a process that has others than process 0.
    """
    given = processes.main.exchange([digest(config), data, list(checkpoints)])
    for process, theirs in enumerate(given):
        for number, what in enumerate(_SAME):
            if theirs[number] != given[0][number]:
                error = DifferentInputsError(f"process {process} has {what} than process 0")
                processes.main.told = error
                raise error


def common_rate(mesh: Mesh, *, whole_bytes: int = 2**24, repeats: int = 5) -> float:
    """Bytes per second that each device receives in an all-gather; all processes measure it together."""
    share = share_of(mesh)
    elements = whole_bytes // 4 // share.devices
    own = np.zeros(elements * (share.last - share.first), np.float32)
    (parts,) = put_parts([own], first_axis(mesh))
    gather = jax.jit(lambda whole: whole, out_shardings=NamedSharding(mesh, PartitionSpec()))
    jax.block_until_ready(gather(parts))
    seconds = []
    # As many times as the others, however much they differ.
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(gather(parts))
        seconds.append(time.perf_counter() - start)
    return 4 * elements * (share.devices - 1) / statistics.median(seconds)


def profile_of_processes(
    config: Config, template: ModelTemplate, console: Console, rate: float
) -> HardwareProfile:
    """The rates of this host as one device sees them, and between the devices of all processes `rate`."""
    one = config.model_copy(update={"plan": config.plan.model_copy(update={"devices": 1})})
    profile = measured_profile(one, template, console, [config.optimizer.name])
    between = {
        "interconnect_bytes_per_second": (rate, "measured: an all-gather over all processes"),
        "collective_contention": (1.0, "assumption: JAX runs the programs of a device one after another"),
    }
    values: dict[str, Any] = {name: value for name, (value, _) in between.items()}
    sources = {**profile.sources, **{name: source for name, (_, source) in between.items()}}
    return profile.model_copy(update={**values, "sources": sources})


def common_folder(processes: Processes, make: Callable[[], pathlib.Path]) -> RunFolder:
    """The run folder that process 0 makes, as this process may use it.

    Raises:
        RunFolderError: it cannot be made, or this process does not see it.
    """
    if not processes.several:
        return RunFolder(make())
    path = pathlib.Path(processes.main.decide(lambda: str(make().absolute())))
    with processes.main.together():
        if not path.is_dir():
            raise RunFolderError(
                f"{path}: process 0 has made this folder, process {processes.index} does not see it; "
                "run.folder has to be on a drive that all of them share"
            )
    return RunFolder(path, process=processes.index)


def console_of(processes: Processes, console: Console) -> Console:
    """Where this process speaks: process 0 as it was asked to, the others nowhere."""
    return console if processes.leads else Console(quiet=True)
