"""Which plan a run starts with; it is verified before anything runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console

from lazyjax.config import Config
from lazyjax.execution.kernels import Kernels
from lazyjax.execution.slab_paths import PathChoice
from lazyjax.hardware.load import is_busy, other_cpus, read_cpus
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import usable_cpus
from lazyjax.planning.costs.packing import Packing
from lazyjax.planning.costs.sizes import model_sizes
from lazyjax.planning.plan import cache
from lazyjax.planning.plan.baselines import BASELINES, without_nvme
from lazyjax.planning.plan.document import (
    Plan,
    PlanError,
    check_made_for,
    load_plan,
    uses_nvme,
    validate_plan,
)
from lazyjax.planning.planner.question import Request
from lazyjax.planning.planner.search import predict
from lazyjax.planning.planner.service import solve_cached, verify_for
from lazyjax.planning.program.verify import VerificationError, verify
from lazyjax.specs import Part
from lazyjax.training.calibration import AUTO, CALIBRATE, make_request
from lazyjax.training.reserves import NOTHING_BESIDE, Beside
from lazyjax.training.status import say


def choose_plan(config: Config, template: ModelTemplate) -> Plan:
    """The plan that a configuration asks for, checked and verified.

    Raises:
        PlanError: a plan file of another model, batch or version.
        VerificationError: a schedule that must not run.
        InfeasibleError: the planner finds no plan that fits the machine.
    """
    return choose(config, template).plan


class Choice(NamedTuple):
    """The plan to start with.

    Attributes:
        request: the question it answers; None where none was asked.
        other_cpus: how many CPUs other processes took while the machine was measured; None where it was
            not, or where that is unknown.
    """

    plan: Plan
    request: Request | None
    other_cpus: float | None = None


def choose(
    config: Config,
    template: ModelTemplate,
    kernels: Kernels | None = None,
    console: Console | None = None,
    known: Plan | None = None,
    beside: Beside = NOTHING_BESIDE,
    *,
    profile: HardwareProfile | None = None,
    slab_path: PathChoice | None = None,
    packing: Packing | None = None,
) -> Choice:
    """`choose_plan`, with what is needed to plan again.

    Args:
        kernels: those of the run, so that a calibration compiles nothing twice.
        console: shows what is measured and solved; None: nothing is shown.
        known: the plan of a run that goes on; it is checked as a file's is.
        beside: what the host has to hold beside what is planned.
        profile: of this machine, measured already; kernels are then not timed.
        slab_path: of parameters to the device; its rate is the link's where that is measured.
        packing: of the run's rows, where they are packed.
    """
    ask = functools.partial(
        _ask, config, kernels=kernels, console=console, beside=beside, profile=profile, slab_path=slab_path,
        packing=packing,
    )  # fmt: skip
    if known is None and is_solved(config):
        template = template.in_chunks(config.plan.token_chunk)
        request, others = ask(template=template, microbatches=config.plan.microbatches)
        plan = _solve(config, dataclasses.replace(request, **given_fields(config)), console)
        _check_runs(plan, config, template.in_chunks(plan.token_chunk))
        return Choice(plan, request.at(plan), others)
    if known is None:
        plan = fixed_plan(config, template)
    else:
        plan = known
        _check_runs(plan, config, template.in_chunks(plan.token_chunk))
    template = template.in_chunks(plan.token_chunk)
    _verify_structure(plan, config, template)
    replans = config.plan.replan_after_steps is not None
    # With `auto` nothing is measured for a plan that is given: a run under it begins at once.
    predicts = plan.prediction is None and config.plan.hardware != AUTO
    if not (replans or predicts):
        return Choice(plan, None)
    request, others = ask(template=template, microbatches=plan.microbatches)
    if predicts:
        plan = plan.model_copy(update={"prediction": predict(request, plan)})
    return Choice(plan, request.at(plan) if replans else None, others)


def _ask(
    config: Config,
    template: ModelTemplate,
    kernels: Kernels | None,
    console: Console | None,
    microbatches: int | None,
    beside: Beside,
    profile: HardwareProfile | None,
    slab_path: PathChoice | None,
    packing: Packing | None,
) -> tuple[Request, float | None]:
    """The planner's question, and the CPUs that others took while it was measured for it."""
    before = read_cpus()
    request = make_request(
        config, template, kernels, console,
        microbatches=microbatches, beside=beside, profile=profile, slab_path=slab_path, packing=packing,
    )  # fmt: skip
    if config.plan.hardware not in (AUTO, CALIBRATE):
        return request, None
    others, cpus = other_cpus(before, read_cpus()), usable_cpus()
    if is_busy(others, cpus):
        say(
            console,
            f"warning: other programs took {others:.1f} of {cpus} CPUs meanwhile: what was measured is too "
            "slow for a quiet machine",
        )
    return request, others


def is_solved(config: Config) -> bool:
    """Whether the planner makes the plan; else a file or a rule decides it, whatever the machine."""
    return config.plan.planner == "milp" and config.plan.file is None


def fixed_plan(config: Config, template: ModelTemplate) -> Plan:
    """The plan of a file or a rule, if this run can use it.

    Raises:
        PlanError: it was made for something else, or needs a drive or devices that are not there.
    """
    batch = {"batch_rows": config.data.rows, "sequence_length": config.data.sequence_length}
    if config.plan.file is not None:
        plan = _load(config, batch)
    else:
        rule, fixed = BASELINES[config.plan.planner], {**given_fields(config), **_made_for(config)}
        names = _names(template.in_chunks(config.plan.token_chunk))
        if config.plan.head_chunk is not None:
            fixed["head_chunk"] = config.plan.head_chunk
        plan = rule(template.spec, names, **batch, **fixed, token_chunk=config.plan.token_chunk)
        if not config.plan.drives:
            plan = without_nvme(plan)
        if config.plan.on_nvme is not None:
            parts = frozenset(map(Part, config.plan.on_nvme))
            layers = tuple(layer.with_on_nvme(parts) for layer in plan.layers)
            plan = plan.model_copy(update={"layers": layers})
    _check_runs(plan, config, template.in_chunks(plan.token_chunk))
    return plan


def given_fields(config: Config) -> dict[str, Any]:
    """Fields of a plan that the configuration fixes."""
    keys = ("microbatches", "prefetch", "backward_prefetch", "update", "interlayer_home")
    return {key: getattr(config.plan, key) for key in keys if getattr(config.plan, key) is not None}


def _names(template: ModelTemplate) -> list[tuple[str, ...]]:
    """The tensors that each layer can save."""
    return [tuple(template.kind(index).residual_names) for index in range(len(template.spec.layers))]


def _made_for(config: Config) -> dict[str, str]:
    """What a plan of this run records: its fields, and so the keys that another must agree with."""
    return {
        "optimizer": config.optimizer.name,
        "compute_dtype": config.model.compute_dtype,
        "gradient_dtype": config.optimizer.gradient_dtype,
    }


def _load(config: Config, batch: Mapping[str, int]) -> Plan:
    """The plan in `plan.file`, if it was made for what this run is.

    Raises:
        PlanError: it was made for another batch, optimizer, dtype or profile; the key is named.
    """
    path = config.plan.file
    assert path is not None
    plan = load_plan(path)
    for key, value in batch.items():
        if getattr(plan, key) != value:
            given = key.removeprefix("batch_")
            raise PlanError(f"{path}: {key} is {getattr(plan, key)}, but data.{given} is {value}")
    asked = _made_for(config)
    hardware = config.plan.hardware
    if hardware not in (AUTO, CALIBRATE):
        asked["hardware"] = load_profile(hardware).name
    check_made_for(plan, asked, str(path))
    return plan


def _check_runs(plan: Plan, config: Config, template: ModelTemplate) -> None:
    """Whether the plan is one of this model and has the drive and the devices that it needs."""
    try:
        validate_plan(plan, template.spec, _names(template))
    except PlanError as error:
        raise PlanError(f"{config.plan.file}: {error}" if config.plan.file else str(error)) from error
    if uses_nvme(plan) and not config.plan.drives:
        raise PlanError(f"{config.plan.file}: the plan uses NVMe; set plan.nvme_folder to a folder there")
    microbatch_rows, devices = plan.microbatch_rows, config.plan.devices
    if microbatch_rows % devices:
        raise PlanError(
            f"plan.devices ({devices}) does not divide the {microbatch_rows} rows of a microbatch"
        )


def _solve(config: Config, request: Request, console: Console | None) -> Plan:
    """The planner's plan, or the one it found before; either fits and takes as long as it says."""
    seconds = config.plan.time_limit_seconds
    # Times that were just measured never come back exactly: there is nothing to find again.
    folder = None if config.plan.hardware in (CALIBRATE, AUTO) else cache.default_folder()
    say(console, f"planning: looking for the fastest plan, for {seconds:g} s or a little longer")
    plan, found = solve_cached(request, folder, time_limit_seconds=seconds, console=console)
    try:
        verify_for(request, plan)
    except VerificationError:
        if found is not None:
            raise
        plan, _ = solve_cached(request, None, time_limit_seconds=seconds, console=console)
        verify_for(request, plan)
    return plan


def _verify_structure(plan: Plan, config: Config, template: ModelTemplate) -> None:
    """Order, buffers and precedence; without a machine there are no times or capacities to check."""
    sizes = model_sizes(
        template,
        microbatch_rows=plan.microbatch_rows,
        sequence_length=plan.sequence_length,
        compute_dtype=config.model.compute_dtype,
        gradient_dtype=config.optimizer.gradient_dtype,
        devices=config.plan.devices,
    )
    verify(plan.model_copy(update={"prediction": None}), sizes, lambda operation: 1.0)
