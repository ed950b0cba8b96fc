"""What the machine must have for a run, checked before minutes go into data and calibration.

Threads, folders, and the memory of a step: a batch whose smallest possible step fits neither the device nor
the host is refused here, with the sum that fails, and nothing has been allocated.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import tempfile
from collections.abc import Callable

import jax

from lazyjax.config import DEFAULT_OPTIMIZER, Config
from lazyjax.hardware.measure import capacities, device_label
from lazyjax.hardware.profile import load_profile
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import usable_cpus
from lazyjax.planning.costs.sizes import BATCH_BYTES_PER_TOKEN
from lazyjax.planning.planner.feasibility import feasible, finest_miss
from lazyjax.planning.planner.question import Request
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.search import predict
from lazyjax.planning.planner.service import refusal
from lazyjax.specs import Part, Tier, item_bytes
from lazyjax.training.calibration import AUTO, CALIBRATE
from lazyjax.training.start_plan import fixed_plan, is_solved

#: A preset with every figure; only its memory is replaced, its rates are not used.
_ANY_PROFILE = "h200"


class MachineError(ValueError):
    """The machine lacks what the configuration asks for; the message names the key and the sum."""


class StepMemoryError(MachineError):
    """No step of the configuration fits the machine."""


def check_machine(config: Config, template: ModelTemplate, device: jax.Device) -> None:
    """All checks that need no data.

    Raises:
        MachineError: naming the key, what it asks for and what there is.
        PlanError, ProfileError: the plan file or the profile cannot be used.
    """
    cpus = usable_cpus()
    if config.optimizer.threads > cpus:
        raise MachineError(
            f"optimizer.threads is {config.optimizer.threads}, this process may use {cpus} CPU(s); "
            "0 takes every one of them"
        )
    folders = {
        "run.folder": config.run.folder,
        "data.cache_folder": config.data.cache_folder,
    }
    drives = [("plan.nvme_folder", folder) for folder in config.plan.drives]
    for key, folder in (*folders.items(), *drives):
        if folder is not None:
            _check_folder(key, folder)
    if config.plan.hardware not in (AUTO, CALIBRATE):
        load_profile(config.plan.hardware)
    check_step_memory(config, template, device)


def _check_folder(key: str, folder: pathlib.Path) -> None:
    """A folder that is there and takes a file, or one that can be made; nothing is left behind."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise MachineError(f"{key} {folder}: {existing} is a file, not a folder")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise MachineError(f"{key} {folder}: cannot be written ({error.strerror})") from error


def check_step_memory(config: Config, template: ModelTemplate, device: jax.Device) -> None:
    """Whether some plan (or the rule that was asked for) fits device and host at all.

    Raises:
        StepMemoryError: says which memory, how much the leanest step takes, and what would help.
    """
    limits = {figure: value for figure, (value, _) in capacities(device).items()}
    device_bytes, host_bytes = limits["device_total_bytes"], limits["host_bytes"]
    keys = f"data.rows {config.data.rows} x data.sequence_length {config.data.sequence_length}"
    tokens = config.data.rows * config.data.sequence_length
    hidden_bytes = template.spec.hidden_size * item_bytes(config.model.compute_dtype)
    # The batch itself, and what passes between two layers, are somewhere whatever a plan does.
    least = tokens * (BATCH_BYTES_PER_TOKEN + hidden_bytes)
    there = config.plan.devices * device_bytes + host_bytes
    if not config.plan.drives and least > there:
        raise StepMemoryError(
            f"{keys}: the batch and one layer's input alone take {least / 1e9:,.1f} GB, device and host have "
            f"{there / 1e9:,.1f} GB: lower one of the two"
        )
    width = config.plan.token_chunk if is_solved(config) else fixed_plan(config, template).token_chunk
    in_use = template.in_chunks(width)
    ask = functools.partial(
        _request, template=in_use, device=device, device_bytes=device_bytes, host_bytes=host_bytes
    )
    request = ask(config)
    try:
        if not is_solved(config):
            _check_fixed(config, template, request, keys)
        elif not feasible(request):
            words = refusal(request, finest_miss(request), _offers(config, ask))
            less = f"{_less(config, request, ask)}shorter sequences take less"
            raise StepMemoryError(f"{keys}: {words}; {less}")
    except OverflowError as error:
        raise StepMemoryError(f"{keys}: too large for any machine") from error


def _offers(config: Config, ask: Callable[[Config], Request]) -> dict[str, Request]:
    """What else the configuration could say, for the message where nothing fits."""
    offers: dict[str, Request] = {}
    if config.optimizer.name != DEFAULT_OPTIMIZER:
        optimizer = config.optimizer.model_copy(update={"name": DEFAULT_OPTIMIZER})
        offers[f"optimizer.name {DEFAULT_OPTIMIZER}"] = ask(
            config.model_copy(update={"optimizer": optimizer})
        )
    if not config.plan.drives:
        plan = config.plan.model_copy(update={"nvme_folder": pathlib.Path("drive")})
        offers["a large plan.nvme_folder"] = ask(config.model_copy(update={"plan": plan}))
    return offers


def _less(config: Config, request: Request, ask: Callable[[Config], Request]) -> str:
    """How much the default optimizer would save, where another was asked for."""
    if config.optimizer.name == DEFAULT_OPTIMIZER:
        return ""
    optimizer = config.optimizer.model_copy(update={"name": DEFAULT_OPTIMIZER})
    other = ask(config.model_copy(update={"optimizer": optimizer}))
    sizes = [sum(layer.state_bytes for layer in of.sizes(of.devices).layers) for of in (request, other)]
    saved = sizes[0] - sizes[1]
    return (
        f"optimizer.name {DEFAULT_OPTIMIZER} takes {saved / 1e9:.1f} GB less host memory; "
        if saved > 0
        else ""
    )


def _check_fixed(config: Config, template: ModelTemplate, request: Request, keys: str) -> None:
    """Whether the plan of a file or a rule fits the device."""
    plan = fixed_plan(config, template)
    needed = predict(request, plan).peak_bytes[Tier.DEVICE.value]
    if needed > request.capacity[Tier.DEVICE]:
        what = f"the plan {config.plan.file}" if config.plan.file is not None else f"the rule {plan.planner}"
        raise StepMemoryError(
            f"{keys}: {what} in {plan.microbatches} microbatch(es) takes {needed / 1e9:.2f} GB of device "
            f"memory, {request.capacity[Tier.DEVICE] / 1e9:.2f} GB are there: use more microbatches, fewer "
            "data.rows, or plan.planner milp, which finds what fits"
        )


def _request(
    config: Config, template: ModelTemplate, device: jax.Device, *, device_bytes: int, host_bytes: int
) -> Request:
    """A question about memory only: its rates are never used."""
    optimizer: str = config.optimizer.name
    memory = {
        "device_total_bytes": device_bytes,
        "device_bytes": device_bytes,
        "host_bytes": host_bytes,
        "nvme_bytes": 2**60 if config.plan.drives else 0,
        "devices": config.plan.devices,
    }
    profile = load_profile(_ANY_PROFILE)
    named = {"name": "memory", "device": device_label(device)}
    sources = {**profile.sources, **dict.fromkeys(memory, "this machine")}
    profile = profile.model_copy(update={**memory, **named, "sources": sources})
    request = build_request(
        template,
        profile,
        batch_rows=config.data.rows,
        sequence_length=config.data.sequence_length,
        optimizer=optimizer,
        compute_dtype=config.model.compute_dtype,
        gradient_dtype=config.optimizer.gradient_dtype,
        device_bytes=config.plan.device_bytes,
        host_bytes=config.plan.host_bytes,
    )
    parts = config.plan.on_nvme
    on_nvme = None if parts is None else frozenset(map(Part, parts))
    return dataclasses.replace(request, microbatches=config.plan.microbatches, on_nvme=on_nvme)
