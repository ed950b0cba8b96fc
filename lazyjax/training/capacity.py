"""Whether this machine holds what a plan keeps on the host and on NVMe, before anything is allocated."""

from __future__ import annotations

import pathlib
import shutil

from lazyjax.hardware.memory import host_memory
from lazyjax.planning.costs.seconds import static_host_bytes
from lazyjax.planning.program.schedule import Schedule
from lazyjax.planning.program.verify import state_bytes_per_tier
from lazyjax.specs import ModelSpec, Tier
from lazyjax.training.display import format_bytes

#: For Python, JAX and the batches.
_OTHER_HOST_BYTES = 2**30


class CapacityError(ValueError):
    """The plan needs more host memory or more of the drive than there is."""


def needed_bytes(
    schedule: Schedule, spec: ModelSpec, *, gradient_dtype: str, devices: int
) -> dict[str, dict[Tier, int]]:
    """What a plan keeps on each tier, on all devices together, by what it is.

    Args:
        schedule: with the sizes of the optimizer's state.
        devices: that share every slab; a schedule counts bytes of one.
    """
    states = state_bytes_per_tier(schedule.plan, schedule.sizes)
    activations = schedule.peak_bytes()
    static = static_host_bytes(spec, gradient_dtype=gradient_dtype, devices=devices)
    return {
        "parameters and gradients": {Tier.HOST: static, Tier.NVME: 0},
        "optimizer state": {tier: devices * states[tier] for tier in (Tier.HOST, Tier.NVME)},
        "activations": {tier: devices * activations[tier] for tier in (Tier.HOST, Tier.NVME)},
    }


def check_capacity(
    needed: dict[str, dict[Tier, int]], *, optimizer_name: str, nvme_folder: pathlib.Path | None
) -> None:
    """Compares with what is there.

    Raises:
        CapacityError: says what is needed for what, what there is, and what would help.
    """
    host = {name: size[Tier.HOST] for name, size in needed.items()} | {"Python and JAX": _OTHER_HOST_BYTES}
    available, source = host_memory()
    on_host = sum(host.values())
    if on_host > available:
        hints = [] if optimizer_name == "hybrid8bit" else ["optimizer.name hybrid8bit takes less"]
        if nvme_folder is None:
            hints.append("plan.nvme_folder lets a plan keep activations and optimizer state on NVMe")
        hints.append("or use a smaller model, fewer data.rows or a larger machine")
        raise CapacityError(
            f"a run of the plan takes {format_bytes(on_host)} of host memory, "
            f"{format_bytes(available)} are available by {source} ({_listed(host)}): {'; '.join(hints)}"
        )
    drive = {name: size[Tier.NVME] for name, size in needed.items()}
    on_drive = sum(drive.values())
    if nvme_folder is not None and on_drive > 0:
        existing = next(p for p in (nvme_folder, *nvme_folder.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if on_drive > free:
            raise CapacityError(
                f"the plan takes {format_bytes(on_drive)} of the drive, {existing} has room for "
                f"{format_bytes(free)} ({_listed(drive)}): name another plan.nvme_folder"
            )


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
