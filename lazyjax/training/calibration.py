"""The planner's question for the machine that a configuration names, or for this one, measured.

With `plan.hardware` set to `calibrate` the machine's rates are measured and kernels are timed on it, of
the smallest and the largest microbatches; those between follow (`lazyjax.training.timed_costs`). With
`auto`, kernels are timed where that takes about a minute at most; else rates have to do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from rich.console import Console

from lazyjax.config import Config
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.execution.slab_paths import PathChoice
from lazyjax.hardware.measure import MeasureOptions, measure_profile
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.bare import without_residuals
from lazyjax.planning.costs.packing import Packing
from lazyjax.planning.costs.probes import block_shapes, update_probe
from lazyjax.planning.costs.seconds import Costs, template_costs
from lazyjax.planning.planner.question import HEAD_CHUNKS, CostModel, Request, Tables
from lazyjax.planning.planner.request import build_request
from lazyjax.specs import Part
from lazyjax.training.reserves import NOTHING_BESIDE, Beside, reserved_bytes
from lazyjax.training.status import say, stage
from lazyjax.training.timed_costs import (
    kernel_bytes,
    time_kernels,
    timed_costs,
    timed_head_chunks,
    timed_rows,
    timing_seconds,
)

#: Value of `plan.hardware` that stands for measuring the machine when training starts.
CALIBRATE = "calibrate"
#: The same, where timing the model's kernels takes no longer than `_AUTO_SECONDS`.
AUTO = "auto"
_AUTO_SECONDS = 60.0


def make_request(
    config: Config,
    template: ModelTemplate,
    kernels: Kernels | None = None,
    console: Console | None = None,
    *,
    microbatches: int | None = None,
    beside: Beside = NOTHING_BESIDE,
    profile: HardwareProfile | None = None,
    slab_path: PathChoice | None = None,
    packing: Packing | None = None,
) -> Request:
    """The planner's question, for the machine in `plan.hardware`.

    To calibrate, rates are measured and kernels are timed here: those of the microbatches that
    `microbatches` gives, or else of the smallest and the largest that the planner considers. Costs
    of other sizes follow from these (`lazyjax.training.timed_costs`).

    Args:
        microbatches: parts of the batch, where their number is decided.
        beside: what the host has to hold beside what is planned.
        profile: of this machine, measured already; kernels are then not timed.
        packing: of the rows, where they are packed; kernels are timed on rows like these.

    Raises:
        ProfileError: there is no such profile.
    """
    hardware = config.plan.hardware
    measured = hardware in (CALIBRATE, AUTO)
    may_time = measured and profile is None
    if profile is None:
        profile = (
            measured_profile(config, template, console, [config.optimizer.name])
            if measured
            else load_profile(hardware)
        )
    if measured:
        profile = _at_the_path(profile, slab_path, config.plan.devices)
    profile = _of_devices(config, profile)
    request = profile_request(
        config, template, profile, packing=packing, identity=CALIBRATE if measured else ""
    )
    reserved = reserved_bytes(request.sizes(request.devices), beside, devices=1)
    request = dataclasses.replace(
        request, microbatches=microbatches, static_host_bytes=request.static_host_bytes + reserved
    )
    if not may_time:
        return request
    # The request has checked that the batch can be split at all: now there are sizes to time.
    timed = _timed_costs(config, template, profile, kernels, console, microbatches, packing)
    if timed is None:
        return request
    # Kernels of other chunks of tokens were not timed.
    costs, head_chunks = timed
    return _as_allowed(
        config, dataclasses.replace(request, costs=costs, chunked=None, head_chunks=head_chunks)
    )


def _at_the_path(profile: HardwareProfile, slab_path: PathChoice | None, devices: int) -> HardwareProfile:
    """The profile with the rate of the way that parameters take, where several were measured.

    Args:
        devices: that shared the link while the way was measured.
    """
    if slab_path is None or slab_path.name not in slab_path.bytes_per_second:
        return profile
    figure = "slab_bytes_per_second"
    source = f"measured: slabs by the way in use, {slab_path.name} ({slab_path.reason})"
    return profile.model_copy(
        update={
            figure: slab_path.bytes_per_second[slab_path.name] / devices,
            "sources": {**profile.sources, figure: source},
        }
    )


def profile_request(
    config: Config,
    template: ModelTemplate,
    profile: HardwareProfile,
    *,
    packing: Packing | None = None,
    identity: str = "",
) -> Request:
    """The planner's question at the rates of a profile, whatever `plan.hardware` is."""
    profile = _of_devices(config, profile)
    request = build_request(
        template,
        profile,
        batch_rows=config.data.rows,
        sequence_length=config.data.sequence_length,
        optimizer=config.optimizer.name,
        compute_dtype=config.model.compute_dtype,
        gradient_dtype=config.optimizer.gradient_dtype,
        device_bytes=config.plan.device_bytes,
        host_bytes=config.plan.host_bytes,
        nvme_bytes=None if config.plan.drives else 0,
        packing=packing,
        identity=identity,
    )
    parts = config.plan.on_nvme
    on_nvme = None if parts is None else frozenset(map(Part, parts))
    return _as_allowed(config, dataclasses.replace(request, on_nvme=on_nvme))


def _of_devices(config: Config, profile: HardwareProfile) -> HardwareProfile:
    return profile.spread(config.plan.devices, source="plan.devices of the configuration")


def _as_allowed(config: Config, request: Request) -> Request:
    """The request, without the choices that a configuration takes from the planner."""
    if config.plan.head_chunk is not None:
        request = dataclasses.replace(request, head_chunks=(config.plan.head_chunk,))
    if config.plan.keep_residuals:
        return request

    def bare(whole: Callable[[int], CostModel]) -> Callable[[int], CostModel]:
        @functools.cache
        def costs(microbatch_rows: int) -> CostModel:
            found = whole(microbatch_rows)
            assert isinstance(found, Costs)
            return without_residuals(found)

        return costs

    chunked = request.chunked

    def bare_chunked(width: int) -> Tables:
        assert chunked is not None
        sizes, costs = chunked(width)
        return Tables(sizes, bare(costs))

    return dataclasses.replace(
        request,
        costs=bare(request.costs),
        chunked=None if chunked is None else functools.cache(bare_chunked),
        identity=f"{request.identity} without residuals",
    )


def measured_profile(
    config: Config, template: ModelTemplate, console: Console | None, optimizers: Sequence[str]
) -> HardwareProfile:
    """The rates of this machine, for a model, its dtype and optimizers."""
    options = MeasureOptions(
        shapes=block_shapes(template, config.data.rows * config.data.sequence_length),
        compute_dtype=config.model.compute_dtype,
        transfer_bytes=2**24,
        update_elements=2**22,
        nvme_folder=config.plan.drives[0] if config.plan.drives else None,
        devices=config.plan.devices,
        repeats=3,
    )
    with stage(console, "calibrating: measuring the rates of this machine") as advance:
        probes = {optimizer: update_probe(optimizer) for optimizer in optimizers}
        return measure_profile(CALIBRATE, options, probes, progress=advance)


def _profile_costs(
    config: Config,
    template: ModelTemplate,
    profile: HardwareProfile,
    packing: Packing | None,
    microbatch_rows: int,
) -> Costs:
    return template_costs(
        template,
        profile,
        microbatch_rows=microbatch_rows,
        sequence_length=config.data.sequence_length,
        optimizer=make_host_optimizer(config.optimizer.name, threads=1, path="pure"),
        compute_dtype=config.model.compute_dtype,
        gradient_dtype=config.optimizer.gradient_dtype,
        packing=packing,
    )


def _timed_costs(
    config: Config,
    template: ModelTemplate,
    profile: HardwareProfile,
    kernels: Kernels | None,
    console: Console | None,
    microbatches: int | None,
    packing: Packing | None,
) -> tuple[Callable[[int], Costs], tuple[int, ...]] | None:
    """Rows of a microbatch -> costs, from kernels of one size or two, timed now; and their head chunks.

    None: rates have to do.
    """
    if template.token_chunk is not None:
        # The run's kernels belong to the whole template; those of chunks are timed by themselves.
        kernels = None
    predicted = functools.cache(functools.partial(_profile_costs, config, template, profile, packing))
    kernels = kernels or Kernels(
        template,
        data_mesh(),
        compute_dtype=config.model.compute_dtype,
        gradient_dtype=config.optimizer.gradient_dtype,
    )
    batch_rows = config.data.rows
    capacity = config.plan.device_bytes or profile.device_bytes
    sizes = timed_rows(
        batch_rows,
        microbatches=microbatches,
        devices=config.plan.devices,
        fits=lambda size: kernel_bytes(predicted(size)) <= capacity,
    )
    words = " and ".join(map(str, sizes))
    fixed = config.plan.head_chunk
    allowed = HEAD_CHUNKS if fixed is None else (fixed,)
    head_chunks = functools.partial(timed_head_chunks, predicted, allowed, capacity)
    expected = timing_seconds(predicted, template, sizes, batch_rows=batch_rows, head_chunks=head_chunks)
    if config.plan.hardware == AUTO and expected > _AUTO_SECONDS:
        say(
            console,
            f"timing this model's kernels would take about {expected:.0f} s: their times follow from the "
            "rates of this machine instead (plan.hardware calibrate times them all the same)",
        )
        return None
    with stage(console, f"calibrating: timing kernels of microbatches of {words} rows") as advance:
        timed = time_kernels(
            predicted,
            kernels,
            sizes,
            batch_rows=batch_rows,
            packing=packing,
            head_chunks=head_chunks,
            advance=advance,
        )

    @functools.cache
    def costs(microbatch_rows: int) -> Costs:
        return timed_costs(predicted, timed, microbatch_rows=microbatch_rows)

    return costs, tuple(sorted({tokens for size in sizes for tokens in head_chunks(size)}))
