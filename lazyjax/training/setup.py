"""From a configuration to a trainer that is ready to run.

The order matters: everything that can be wrong with the model, the data, the plan or the machine is
found before the run folder is made and the first large allocation happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import math
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console

from lazyjax.config import Config, digest
from lazyjax.distributed.channel import PeerError
from lazyjax.distributed.processes import Processes
from lazyjax.distributed.start import start
from lazyjax.execution.build import checked_schedules, executor_of
from lazyjax.execution.executor import Executor, StepResult
from lazyjax.execution.kernels import Kernels
from lazyjax.execution.shards import share_of
from lazyjax.hardware.measure import device_label
from lazyjax.hardware.runtime import RuntimeSettings, set_runtime
from lazyjax.huggingface.finite import nonfinite_tensors
from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import usable_cpus
from lazyjax.planning.plan.document import Plan, uses_nvme
from lazyjax.planning.program.schedule import Schedule
from lazyjax.runs import RunError, read_run
from lazyjax.specs import ModelSpec, Tier
from lazyjax.storage.host import HostStore
from lazyjax.storage.nvme import Drive
from lazyjax.storage.striped import open_drives
from lazyjax.training.answering import ExactMatchEvaluation
from lazyjax.training.calibration import AUTO
from lazyjax.training.capacity import check_capacity, needed_bytes
from lazyjax.training.display import Display
from lazyjax.training.examination import no_answers
from lazyjax.training.gathering import Gathering
from lazyjax.training.inputs import Inputs, read_inputs
from lazyjax.training.loop import Trainer
from lazyjax.training.replanning import Replan, make_replanner
from lazyjax.training.reserves import Beside
from lazyjax.training.resume import Resume
from lazyjax.training.run_folder import RunFolder, create_run_folder
from lazyjax.training.saving import Saver
from lazyjax.training.screens import show_closing
from lazyjax.training.start_plan import Choice, choose, is_solved
from lazyjax.training.status import say
from lazyjax.training.streams import silence_when_closed
from lazyjax.training.summary import plan_facts
from lazyjax.training.together import (
    check_same,
    common_folder,
    common_rate,
    console_of,
    profile_of_processes,
)
from lazyjax.training.wandb_log import Mirror, WandbError, WandbLog, no_mirror


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything of one run, allocated and filled."""

    trainer: Trainer
    template: ModelTemplate
    store: HostStore
    folder: RunFolder
    executor: Executor


@contextlib.contextmanager
def prepare(config: Config, console: Console, resume: Resume | None = None) -> Iterator[Prepared]:
    """Makes everything that `config` asks for; the executor is closed at the end.

    Args:
        resume: the run goes on from there.

    Raises:
        ValueError: (SetupError, PlanError, DataError, CheckpointError, ...) before anything large is
            allocated and anything is written.
    """
    # Before the first device is opened.
    runtime = set_runtime(os.environ, deterministic=config.training.deterministic)
    with start(config.distributed).running() as processes, contextlib.ExitStack() as stack:
        yield _prepare(config, console_of(processes, console), resume, runtime, processes, stack)


def _prepare(
    config: Config,
    console: Console,
    resume: Resume | None,
    runtime: RuntimeSettings,
    processes: Processes,
    stack: contextlib.ExitStack,
) -> Prepared:
    """See `prepare`; `stack` closes what is opened."""
    with processes.main.together():
        inputs = read_inputs(config, processes, runtime, resume)
    saved = [] if resume is None else [checkpoint.path.name for checkpoint in resume.checkpoints]
    check_same(processes, config, inputs.batches.training.state(), saved)
    # Last, because measuring and solving may take minutes.
    kernels = Kernels(
        inputs.template, inputs.mesh, config.model.compute_dtype, config.optimizer.gradient_dtype
    )
    beside = Beside(config.checkpoints.enabled, inputs.batches.training.held_bytes)
    choice = _choose(inputs, kernels, console, resume, beside)
    schedules = checked_schedules(kernels, inputs.optimizer)
    with processes.main.together():
        schedule = schedules(choice.plan, choice.plan.sequence_length)
        _check_capacity(inputs, schedule, beside)
    folder = common_folder(processes, lambda: _open_folder(config, inputs, resume).path)
    with processes.main.together():
        stack.enter_context(folder.locked())
        if resume is None:
            folder.write_plan(choice.plan)
    inputs.show(console, choice.plan, folder)
    store, drive, mirror = _allocate(inputs, choice.plan, folder, console, resume, stack)
    slab_path = inputs.slab_path.open(kernels.sharded)
    stack.callback(slab_path.close)
    with processes.main.together():
        executor = executor_of(
            kernels,
            choice.plan,
            store,
            inputs.optimizer,
            clip=ClipRule(config.optimizer.clip, config.optimizer.clip_norm),
            nvme_folders=config.plan.drives,
            run=folder.path.name,
            drive=drive,
            schedules=schedules,
            slab_path=slab_path,
        )
        stack.callback(executor.close)
    if processes.watch is not None:
        watch = processes.watch
        executor.on_operation = lambda operation: watch.advance()
    trainer = _make_trainer(inputs, choice, kernels, executor, folder, console, resume, mirror)
    stack.callback(trainer.close)
    return Prepared(trainer, inputs.template, store, folder, executor)


def _choose(
    inputs: Inputs, kernels: Kernels, console: Console, resume: Resume | None, beside: Beside
) -> Choice:
    """The plan to start with; of several processes the first makes it, for all."""
    known = None if resume is None else resume.plan_for(inputs.mesh.size)
    processes = inputs.processes
    if not processes.several:
        return choose(
            inputs.config, inputs.template, kernels, console, known, beside,
            slab_path=inputs.slab_path, packing=inputs.packing,
        )  # fmt: skip
    config, template, rate = inputs.config, inputs.template, None
    if config.plan.hardware == AUTO and known is None and is_solved(config):
        rate = common_rate(inputs.mesh)

    def made() -> dict[str, Any]:
        profile = None if rate is None else profile_of_processes(config, template, console, rate)
        plan = choose(
            config, template, None, console, known, beside,
            profile=profile, slab_path=inputs.slab_path, packing=inputs.packing,
        ).plan  # fmt: skip
        return plan.model_dump(mode="json")

    return Choice(Plan.model_validate(processes.main.decide(made)), None)


def _check_capacity(inputs: Inputs, schedule: Schedule, beside: Beside) -> None:
    """Whether this host holds what the plan keeps there for the devices of all processes on it."""
    config, share, here = inputs.config, share_of(inputs.mesh), inputs.processes.here
    check_capacity(
        needed_bytes(
            schedule,
            beside._replace(data_bytes=here * beside.data_bytes),
            devices=here * (share.last - share.first),
        ),
        optimizer_name=inputs.optimizer.name,
        nvme_folders=config.plan.drives,
        host_bytes=inputs.given.plan.host_bytes,
    )


def _allocate(
    inputs: Inputs,
    plan: Plan,
    folder: RunFolder,
    console: Console,
    resume: Resume | None,
    stack: contextlib.ExitStack,
) -> tuple[HostStore, Drive | None, Mirror]:
    """The slabs, the drive where the plan uses one, and where records go besides the folder."""
    config, main, drive = inputs.config, inputs.processes.main, None
    try:
        with main.together():
            if uses_nvme(plan):
                drive = open_drives(config.plan.drives, run=folder.path.name)
                stack.callback(drive.close)
            store = inputs.allocate(plan, drive, fill=resume is None)
            mirror = _open_mirror(config, folder, stack, console)
    except (CheckpointError, WandbError, PeerError):
        # Weights are looked at while they are read; what cannot be trained leaves no run behind.
        if resume is None:
            folder.discard()
        raise
    return store, drive, mirror


def _make_trainer(
    inputs: Inputs,
    choice: Choice,
    kernels: Kernels,
    executor: Executor,
    folder: RunFolder,
    console: Console,
    resume: Resume | None,
    mirror: Mirror,
) -> Trainer:
    config, spec, store = inputs.config, inputs.template.spec, executor.store
    display = Display(console, steps=inputs.schedule.steps, log_every=config.training.log_every)
    processes = inputs.processes
    gathering = Gathering(processes, store, inputs.mesh)
    replanner = make_replanner(config, inputs.template.in_chunks(choice.plan.token_chunk), choice)
    saver = _make_saver(inputs, executor, folder, display)
    start = None
    if resume is not None:
        start = resume.start(store, executor, inputs.batches.training, display.say, processes.main)
        folder.write_plan(choice.plan, after_step=start.last_step)
        saver.resumed(start.last_step, here=resume.folder.path == resume.source)
    begun_after = 0 if start is None else start.last_step

    def after_step(step: int, result: StepResult) -> Replan | None:
        if replanner is None:
            return None
        return replanner.after_step(step, executor, result.padded_tokens, display.say)

    answers = no_answers
    if inputs.questions is not None:
        answers = ExactMatchEvaluation(inputs.questions, kernels, store, executor.flush, folder.path).run
    hours = config.training.max_hours
    return Trainer(
        executor,
        inputs.batches.training,
        inputs.batches.evaluation_batches,
        inputs.schedule,
        parameter_count=spec.parameter_count,
        folder=folder,
        display=display,
        facts=_facts(config, spec, choice, inputs),
        after_step=after_step,
        save_model=(
            (lambda: inputs.save_model(folder, gathering, begun_after)) if config.run.save_model else None
        ),
        saver=saver,
        start=start,
        max_seconds=math.inf if hours is None else 3600 * hours,
        answers=answers,
        find_nonfinite=lambda: gathering.read(
            lambda whole: [str(tensor) for tensor in nonfinite_tensors(inputs.template, whole)]
        ),
        mirror=mirror,
        processes=processes,
    )


def _make_saver(inputs: Inputs, executor: Executor, folder: RunFolder, display: Display) -> Saver:
    """Saves checkpoints; updates wait for it before they change what is being saved."""
    config = inputs.config
    saver = Saver(
        folder.checkpoints,
        inputs.template.spec,
        executor.updates.reading,
        inputs.identity,
        config.checkpoints,
        data_state=inputs.batches.training.state,
        plan=lambda: executor.plan,
        seed={"weights": config.training.seed, "data": config.data.seed},
        config=inputs.given.model_dump(mode="json"),
        attention=inputs.attention.name,
        devices=inputs.mesh.size,
        processes=inputs.processes,
        say=display.say,
    )
    executor.updates.before_change = saver.fence
    return saver


def _open_mirror(config: Config, folder: RunFolder, stack: contextlib.ExitStack, console: Console) -> Mirror:
    """Where records go besides the run folder; closed with `stack`."""
    if config.run.wandb is None or folder.process:
        return no_mirror
    log = WandbLog(config, folder.path, lambda text: say(console, text))
    stack.callback(log.close)
    return log.record


def _open_folder(config: Config, inputs: Inputs, resume: Resume | None) -> RunFolder:
    """A new run folder, or that of the run that goes on."""
    if resume is None:
        return create_run_folder(config, inputs.template.spec.name)
    if resume.folder.path == resume.source:
        resume.folder.write_config(config, after_step=resume.position.step)
        return resume.folder
    return create_run_folder(config, inputs.template.spec.name)


def train(config: Config, console: Console, resume: Resume | None = None) -> dict[str, Any]:
    """Prepares and runs a training; returns the summary of the run folder."""
    silence_when_closed(console)
    with prepare(config, console, resume) as prepared:
        summary = prepared.trainer.run()
        executor = prepared.executor
        peak = executor.schedule.peak_bytes()[Tier.DEVICE]
        here = device_label(jax.devices()[0])
        if prepared.folder.process:
            return summary
        # Records that a full disk has kept from being written end no run.
        with contextlib.suppress(OSError, RunError):
            show_closing(console, executor.plan, read_run(prepared.folder.path), buffer_bytes=peak, here=here)
        return summary


def _facts(config: Config, spec: ModelSpec, choice: Choice, inputs: Inputs) -> dict[str, Any]:
    plan, device, attention = choice.plan, inputs.mesh.devices.flat[0], inputs.attention
    return {
        "model": spec.name,
        "parameters": spec.parameter_count,
        **plan_facts(plan),
        "optimizer": config.optimizer.name,
        "rows": plan.batch_rows,
        "sequence_length": plan.sequence_length,
        "device": device_label(device),
        "platform": device.platform,
        "devices": config.plan.devices,
        **inputs.processes.facts(),
        "cpus": usable_cpus(),
        "other_cpus_while_calibrated": choice.other_cpus,
        "attention": attention.name,
        "attention_reason": attention.reason,
        "attention_seconds": dict(attention.seconds),
        "runtime": dict(inputs.runtime.values),
        "slab_path": inputs.slab_path.name,
        "slab_path_reason": inputs.slab_path.reason,
        "slab_path_bytes_per_second": dict(inputs.slab_path.bytes_per_second),
        "jax": jax.__version__,
        "lazyjax": importlib.metadata.version("lazyjax"),
        "commit": source_commit(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(sys.argv),
        "config": digest(config)[:12],
    }


def source_commit() -> str | None:
    """The commit of the source tree that runs; None where the package does not lie in one."""
    here = pathlib.Path(__file__).resolve().parent
    command: list[str] = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
