"""Whether this machine, and what a run may use of it, holds what a plan keeps on the host and on NVMe.

All of it is counted before anything is allocated.
"""

from __future__ import annotations

import pathlib
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence

from lazyjax.hardware.memory import host_memory
from lazyjax.planning.program.schedule import Schedule
from lazyjax.specs import Part, Tier
from lazyjax.training.display import format_bytes
from lazyjax.training.reserves import Beside, fixed_bytes

#: For Python, JAX and the batches; beside `plan.host_bytes`.
_OTHER_HOST_BYTES = 2**30

#: Bytes per tier, by what they are.
Needed = Mapping[str, Mapping[Tier, int]]


class CapacityError(ValueError):
    """The plan needs more host memory or more of the drives than there is, or than it may use."""


def needed_bytes(schedule: Schedule, beside: Beside, *, devices: int) -> Needed:
    """What a plan keeps on each tier, on all devices together, by what it is.

    Args:
        schedule: with the sizes of the optimizer's state.
        devices: that share every slab; a schedule counts bytes of one.
    """
    sizes, plan = schedule.sizes, schedule.plan
    slabs, states = dict.fromkeys(Tier, 0), dict.fromkeys(Tier, 0)
    for layer, decided in enumerate(plan.layers):
        for part in Part:
            kept = states if part is Part.STATE else slabs
            kept[decided.owned_home(part)] += devices * sizes.owned_bytes(layer, part)
    below = [layer.on_nvme for layer in plan.layers]
    live = schedule.peak_bytes()
    fixed = fixed_bytes(sizes, devices, below if beside.checkpoints else None)
    needed = {
        "parameters and gradients": slabs,
        "optimizer state": states,
        "activations and copies of what lives on NVMe": {t: devices * live[t] for t in Tier},
        **{words: {Tier.HOST: size, Tier.NVME: 0} for words, size in fixed.items()},
        "data": {Tier.HOST: beside.data_bytes, Tier.NVME: 0},
    }
    return {words: {tier: size[tier] for tier in (Tier.HOST, Tier.NVME)} for words, size in needed.items()}


def check_capacity(
    needed: Needed,
    *,
    optimizer_name: str,
    nvme_folders: Sequence[pathlib.Path] = (),
    host_bytes: int | None = None,
) -> None:
    """Compares with what is there, and with what may be used.

    Args:
        host_bytes: `plan.host_bytes`.

    Raises:
        CapacityError: says what is needed for what, what there is, and what would help.
    """
    host = {name: size[Tier.HOST] for name, size in needed.items()}
    counted = sum(host.values())
    if host_bytes is not None and counted > host_bytes:
        raise CapacityError(
            f"plan.host_bytes: the plan takes {format_bytes(counted)} of host memory, "
            f"{format_bytes(counted - host_bytes)} more than the {format_bytes(host_bytes)} that it may use "
            f"({_listed(host)}): {_help(optimizer_name, nvme_folders)}"
        )
    host |= {"Python and JAX": _OTHER_HOST_BYTES}
    available, source = host_memory()
    on_host = sum(host.values())
    if on_host > available:
        raise CapacityError(
            f"a run of the plan takes {format_bytes(on_host)} of host memory, "
            f"{format_bytes(available)} are available by {source} ({_listed(host)}): "
            f"{_help(optimizer_name, nvme_folders)}"
        )
    _check_drives({name: size[Tier.NVME] for name, size in needed.items()}, nvme_folders)


def _help(optimizer_name: str, nvme_folders: Sequence[pathlib.Path]) -> str:
    hints = [] if optimizer_name == "hybrid8bit" else ["optimizer.name hybrid8bit takes less"]
    if not nvme_folders:
        hints.append("plan.nvme_folder lets a plan keep activations and what layers own on NVMe")
    return "; ".join([*hints, "or use a smaller model, fewer data.rows or a larger machine"])


def _check_drives(needed: Mapping[str, int], folders: Sequence[pathlib.Path]) -> None:
    """Every drive takes an equal share for each of the folders on it."""
    total = sum(needed.values())
    if not folders or not total:
        return
    on_drive: dict[int, list[pathlib.Path]] = defaultdict(list)
    for folder in folders:
        existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        on_drive[existing.stat().st_dev].append(existing)
    for places in on_drive.values():
        share, free = total * len(places) // len(folders), shutil.disk_usage(places[0]).free
        if share > free:
            raise CapacityError(
                f"the plan takes {format_bytes(share)} of the drive, {places[0]} has room for "
                f"{format_bytes(free)} ({_listed(needed)}): name another plan.nvme_folder"
            )


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
