"""Puts an executor together: kernels, copies, schedules, optimizer state, drive."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence

from jax.sharding import Mesh

from lazyjax.execution.executor import Executor, Schedules
from lazyjax.execution.host_update import HostUpdates
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.execution.slab_paths import SlabPath
from lazyjax.execution.transfers import Transfers
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.base import HostOptimizer
from lazyjax.optim.clipping import ClipRule
from lazyjax.planning.costs.seconds import with_state_bytes
from lazyjax.planning.costs.sizes import model_sizes
from lazyjax.planning.plan.document import Plan
from lazyjax.planning.program.schedule import Schedule, build_schedule
from lazyjax.planning.program.verify import check_buffers, check_data_flow, check_order
from lazyjax.storage.host import HostStore
from lazyjax.storage.nvme import Drive
from lazyjax.storage.striped import open_drives

#: Plans and sequence lengths whose schedules are kept: a running plan and its buckets.
_SCHEDULES = 32


def checked_schedules(kernels: Kernels, optimizer: HostOptimizer) -> Schedules:
    """Schedules of plans for these kernels; each passes the checks of order, buffers and data flow."""
    whole, devices = kernels.template, kernels.devices

    @functools.lru_cache(maxsize=_SCHEDULES)
    def of(plan_json: str, sequence_length: int) -> Schedule:
        plan = Plan.model_validate_json(plan_json)
        template = whole.in_chunks(plan.token_chunk)
        sizes = model_sizes(
            template,
            microbatch_rows=plan.microbatch_rows,
            sequence_length=sequence_length,
            compute_dtype=kernels.compute_dtype,
            gradient_dtype=kernels.gradient_dtype,
            devices=devices,
        )
        sizes = with_state_bytes(sizes, template.spec, optimizer, devices=devices)
        schedule = build_schedule(plan, sizes)
        check_order(schedule)
        check_buffers(schedule)
        check_data_flow(schedule)
        return schedule

    # Writing a plan down to compare it costs a millisecond, and a step's plan is mostly the very object of
    # the step before. Plans are frozen, and are kept here, so that an address means one plan.
    recent: dict[tuple[int, int], tuple[Plan, Schedule]] = {}

    def schedules(plan: Plan, sequence_length: int) -> Schedule:
        key = (id(plan), sequence_length)
        if key not in recent:
            if len(recent) >= _SCHEDULES:
                recent.clear()
            recent[key] = (plan, of(plan.model_dump_json(), sequence_length))
        return recent[key][1]

    return schedules


def executor_of(
    kernels: Kernels,
    plan: Plan,
    store: HostStore,
    optimizer: HostOptimizer,
    *,
    clip: ClipRule,
    nvme_folder: pathlib.Path | None = None,
    nvme_folders: Sequence[pathlib.Path] = (),
    run: str = "run",
    drive: Drive | None = None,
    step: int = 0,
    updates: HostUpdates | None = None,
    schedules: Schedules | None = None,
    slab_path: SlabPath | None = None,
) -> Executor:
    """An executor for kernels that exist already.

    Args:
        nvme_folder: in it a scratch folder named after `run` is made once a plan needs NVMe.
        nvme_folders: the same for several drives, in place of one.
        drive: one that is open already, where the store is; the executor closes it.
        step: optimizer steps that were applied before.
        updates: optimizer state that exists already; None makes a new one.
        schedules: that were checked already; None makes them.
        slab_path: of slabs to the device, closed by its owner after the executor; None: JAX's own copy.

    Raises:
        PlanError: the plan does not fit. NvmeError: the folder cannot be used.
    """
    open_drive: Callable[[], Drive] | None = None
    if drive is not None:
        open_drive = functools.partial(_given, drive)
    elif nvme_folders or nvme_folder is not None:
        folders = nvme_folders or [folder for folder in (nvme_folder,) if folder is not None]
        open_drive = functools.partial(open_drives, folders, run=run)
    return Executor(
        kernels,
        Transfers(kernels.sharded, kernels.compute_dtype, path=slab_path),
        checked_schedules(kernels, optimizer) if schedules is None else schedules,
        plan,
        store,
        HostUpdates(store, optimizer) if updates is None else updates,
        clip=clip,
        open_drive=open_drive,
        step=step,
    )


def _given(drive: Drive) -> Drive:
    return drive


def build_executor(
    template: ModelTemplate,
    plan: Plan,
    store: HostStore,
    optimizer: HostOptimizer,
    *,
    compute_dtype: str = "bfloat16",
    clip: ClipRule,
    mesh: Mesh | None = None,
    nvme_folder: pathlib.Path | None = None,
) -> Executor:
    """An executor for a template, with kernels of its own."""
    kernels = Kernels(
        template=template,
        mesh=mesh if mesh is not None else data_mesh(),
        compute_dtype=compute_dtype,
        gradient_dtype=store.gradient_dtype,
    )
    return executor_of(kernels, plan, store, optimizer, clip=clip, nvme_folder=nvme_folder)
