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
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console

from lazyjax.config import Config, ConfigError, digest
from lazyjax.data import chat
from lazyjax.data.batches import Batches, load_data_tokenizer, read_batches
from lazyjax.data.chat import Tokenizer
from lazyjax.data.loader import Loader
from lazyjax.data.sources import problems_folder
from lazyjax.distributed.channel import PeerError
from lazyjax.distributed.processes import Processes
from lazyjax.distributed.start import start
from lazyjax.execution.attention_choice import AttentionChoice, Shape, choose_attention
from lazyjax.execution.build import checked_schedules, executor_of
from lazyjax.execution.executor import Executor, StepResult
from lazyjax.execution.kernels import Kernels, data_mesh, first_axis
from lazyjax.execution.shards import share_of
from lazyjax.execution.slab_paths import PathChoice, choose_path
from lazyjax.hardware.devices import visible_devices
from lazyjax.hardware.measure import device_label
from lazyjax.hardware.runtime import RuntimeSettings, set_runtime
from lazyjax.huggingface import find
from lazyjax.huggingface.checkpoint import Checkpoint, bind, load_into
from lazyjax.huggingface.export import export
from lazyjax.huggingface.find import open_model
from lazyjax.huggingface.finite import nonfinite_tensors
from lazyjax.huggingface.parameters import ReadableStore
from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.models.architecture import Architecture
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.base import HostOptimizer
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer, usable_cpus
from lazyjax.planning.plan.document import Plan, uses_nvme
from lazyjax.planning.program.schedule import Schedule
from lazyjax.runs import RunError, read_run
from lazyjax.specs import ModelSpec, Tier, item_bytes, slab_layout
from lazyjax.storage.host import HostStore, allocate_host_store
from lazyjax.storage.nvme import Drive
from lazyjax.storage.striped import open_drives
from lazyjax.training.answering import ExactMatchEvaluation, Questions, read_questions
from lazyjax.training.calibration import AUTO
from lazyjax.training.capacity import check_capacity, needed_bytes
from lazyjax.training.checkpoints import Identity, identity_of
from lazyjax.training.checks import check_machine
from lazyjax.training.display import Display, format_bytes
from lazyjax.training.examination import no_answers
from lazyjax.training.gathering import Gathering
from lazyjax.training.learning_rate import learning_rates
from lazyjax.training.loop import Trainer
from lazyjax.training.replanning import Replan, make_replanner
from lazyjax.training.reserves import Beside
from lazyjax.training.resume import Resume
from lazyjax.training.run_context import TrainingSchedule
from lazyjax.training.run_folder import RunFolder, create_run_folder
from lazyjax.training.saving import Saver
from lazyjax.training.screens import plan_sentences, same_device, show_closing, show_facts
from lazyjax.training.start_plan import Choice, choose, is_solved
from lazyjax.training.status import say
from lazyjax.training.streams import silence_when_closed
from lazyjax.training.summary import plan_facts
from lazyjax.training.together import (
    check_same,
    common_folder,
    common_rate,
    console_of,
    for_processes,
    mesh_devices,
    profile_of_processes,
)
from lazyjax.training.wandb_log import Mirror, WandbError, WandbLog, check_installed, no_mirror


class SetupError(ValueError):
    """A configuration that does not fit the model, the data or the machine."""


def read_architecture(config: Config) -> tuple[Architecture, Checkpoint | None]:
    """The architecture to train, and the opened checkpoint where weights are given."""
    if config.model.folder is not None:
        return open_model(config.model.folder)
    assert config.model.architecture is not None
    return find.read_architecture(config.model.architecture), None


def make_optimizer(config: Config) -> HostOptimizer:
    """The host optimizer that a configuration names."""
    keys = config.optimizer
    return make_host_optimizer(
        keys.name,
        b1=keys.beta1,
        b2=keys.beta2,
        eps=keys.epsilon,
        weight_decay=keys.weight_decay,
        threads=keys.threads,
    )


def training_state_bytes(
    spec: ModelSpec, optimizer: HostOptimizer, *, gradient_dtype: str, devices: int = 1
) -> int:
    """Host bytes of parameters, gradients and optimizer state; nothing is allocated."""
    total = 0
    for layer in spec.layers:
        layout = slab_layout(layer.parameters, devices=devices)
        total += layout.length * (2 + 2 + item_bytes(gradient_dtype))
        for shape, dtype in optimizer.describe_state(layout).values():
            total += math.prod(shape) * item_bytes(dtype)
    return total


def _checkpoint_bytes(spec: ModelSpec, optimizer: HostOptimizer) -> int:
    """Size of one checkpoint: training state without gradients."""
    state = training_state_bytes(spec, optimizer, gradient_dtype="bfloat16")
    return state - 2 * sum(slab_layout(layer.parameters).length for layer in spec.layers)


def disk_bytes(config: Config, spec: ModelSpec, optimizer: HostOptimizer) -> dict[str, tuple[str, int]]:
    """What a run writes at most: the setting that avoids it -> what it is, and its bytes."""
    keys = config.checkpoints
    model_bytes, checkpoint_bytes = 2 * spec.parameter_count, _checkpoint_bytes(spec, optimizer)
    needed = {"run.save_model to false": ("the trained model", model_bytes if config.run.save_model else 0)}
    if keys.enabled:
        # The next one is whole before an old one goes.
        count = keys.keep_last + keys.keep_best + 1
        words = f"{count} checkpoints of {format_bytes(checkpoint_bytes)}"
        needed["checkpoints.every_steps and every_minutes to null"] = (words, count * checkpoint_bytes)
    return needed


def _check_disk(config: Config, spec: ModelSpec, optimizer: HostOptimizer) -> None:
    """What cannot be written at the end is better known of before training."""
    folder, needed = config.run.folder, disk_bytes(config, spec, optimizer)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes, total_bytes = shutil.disk_usage(existing).free, sum(size for _, size in needed.values())
    if free_bytes < total_bytes:
        what = " and ".join(words for words, size in needed.values() if size)
        remedies = ", or ".join(key for key, (_, size) in needed.items() if size)
        raise SetupError(
            f"{what}: {format_bytes(total_bytes)} to write, {existing} has room for "
            f"{format_bytes(free_bytes)}: name another run.folder, or set {remedies}"
        )


def _check_replanning(config: Config, steps: int) -> None:
    """A plan that is solved again after the last step would never run."""
    after_steps = config.plan.replan_after_steps
    if after_steps is None or after_steps < steps:
        return
    words = f"training.steps ({steps})"
    if config.training.steps is None:
        words = f"training.epochs ({config.training.epochs}: {steps} steps)"
    raise ConfigError(
        f"plan.replan_after_steps ({after_steps}) leaves nothing of {words} for another plan to run"
    )


def _fill_store(store: HostStore, template: ModelTemplate, checkpoint: Checkpoint | None, seed: int) -> None:
    if checkpoint is not None:
        load_into(checkpoint, template, store)
    else:
        key = jax.random.key(seed)
        for index, slabs in enumerate(store.layers):
            for name, value in init_parameters(template, index, key).items():
                if slabs.range_of(name):
                    slabs.set_master(name, value)
    store.settle()


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything of one run, allocated and filled."""

    trainer: Trainer
    template: ModelTemplate
    store: HostStore
    folder: RunFolder
    executor: Executor


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """What a configuration names, read and checked; nothing large is allocated.

    Attributes:
        config: with what follows from the processes (`lazyjax.training.together.for_processes`).
        given: as it was given.
        chat_template: what rows are written with, where it is not the tokenizer's own.
        state_bytes: of parameters, gradients and optimizer state.
        runtime: with which the devices were opened.
        slab_path: of parameters to the device.
    """

    config: Config
    given: Config
    processes: Processes
    template: ModelTemplate
    attention: AttentionChoice
    checkpoint: Checkpoint | None
    mesh: jax.sharding.Mesh
    optimizer: HostOptimizer
    identity: Identity
    tokenizer: Tokenizer
    tokenizer_folder: pathlib.Path
    chat_template: str | None
    batches: Batches
    questions: Questions | None
    schedule: TrainingSchedule
    state_bytes: int
    runtime: RuntimeSettings
    slab_path: PathChoice

    def allocate(self, plan: Plan, drive: Drive | None, *, fill: bool) -> HostStore:
        """The slabs where the plan has them, with the weights that training starts from."""
        store = allocate_host_store(
            self.template.spec,
            gradient_dtype=self.config.optimizer.gradient_dtype,
            devices=self.mesh.size,
            decay_vectors=self.config.optimizer.decay_vectors,
            on_nvme=[layer.on_nvme for layer in plan.layers],
            drive=drive,
            share=share_of(self.mesh),
        )
        if fill:
            _fill_store(store, self.template, self.checkpoint, self.config.training.seed)
        return store

    def save_model(self, folder: RunFolder, gathering: Gathering, begun_after: int) -> pathlib.Path:
        """Writes the model as it is now, with its tokenizer, into the run folder; all processes call this."""
        return pathlib.Path(gathering.read(lambda store: str(self._write_model(folder, store, begun_after))))

    def _write_model(self, folder: RunFolder, store: ReadableStore, begun_after: int) -> pathlib.Path:
        folder.make_way_for_model(begun_after)
        stop = chat.end_of_turn_id(self.tokenizer)
        return export(
            folder.model,
            self.template,
            store,
            self.checkpoint,
            tokenizer_folder=self.tokenizer_folder,
            chat_template=self.chat_template,
            stop_token_ids=[] if stop is None else [stop],
        )

    def show(self, console: Console, plan: Plan, folder: RunFolder) -> None:
        """The first lines of a run."""
        config, spec = self.config, self.template.spec
        device = self.mesh.devices.flat[0]
        weights = "random weights" if self.checkpoint is None else f"weights from {config.model.folder}"
        words: dict[str, str | tuple[str, ...]] = {
            "model": f"{spec.name}: {spec.parameter_count / 1e6:,.1f} M parameters in {spec.block_count} "
            f"blocks ({spec.family}), {weights}",
            "data": self.batches.report,
            "optimizer": f"{self.optimizer.name}: {format_bytes(self.state_bytes)} of host memory for "
            "parameters, gradients and its state",
            "device": (
                f"{self.mesh.size} x {device_label(device)}, {config.model.compute_dtype}",
                *(self.runtime.sentences() if device.platform == "gpu" else ()),
            ),
            "plan": tuple(plan_sentences(plan)),
            "run": f"{self.schedule.steps} steps, records in {folder.path}",
        }
        show_facts(console, words)
        for warning in self.batches.warnings:
            say(console, f"warning: {warning}")
        if plan.device is not None and not same_device(plan.device, device_label(device)):
            say(
                console,
                f"warning: the plan is for {plan.device}, this is {device_label(device)}: "
                "what it predicts does not hold here",
            )


def _read_inputs(
    given: Config, processes: Processes, runtime: RuntimeSettings, resume: Resume | None
) -> _Inputs:
    """Opens and checks all that a configuration names.

    Raises:
        ValueError: (SetupError, DataError, CheckpointError, ResumeError, ...)
    """
    check_installed(given)
    model, checkpoint = read_architecture(given)
    devices = visible_devices()
    config = for_processes(given, processes)
    # Which form was faster may come out otherwise now, and sums in another order.
    wanted = config.model.attention if resume is None else resume.attention
    attention = _choose_attention(config, model, wanted, processes, devices[0].platform)
    template = build_template(model, attention.name)
    if checkpoint is not None:
        bind(checkpoint, template)
    spec = template.spec
    if config.plan.devices > len(devices):
        raise SetupError(f"plan.devices is {config.plan.devices}, but JAX sees {len(devices)} device(s)")
    mesh = data_mesh(mesh_devices(config, processes, devices))
    slab_path = choose_path(first_axis(mesh), platform=devices[0].platform)
    check_machine(config, template, jax.local_devices()[0])
    optimizer = make_optimizer(config)
    state_bytes = training_state_bytes(
        spec, optimizer, gradient_dtype=config.optimizer.gradient_dtype, devices=mesh.size
    )
    identity = identity_of(spec, optimizer)
    if resume is not None:
        resume.check_identity(identity)
    tokenizer_folder = config.data.tokenizer or config.model.folder or problems_folder()
    tokenizer = load_data_tokenizer(config.data, tokenizer_folder)
    own_template = config.data.chat_template is None and tokenizer.chat_template
    chat_template = None if own_template else chat.default_template(tokenizer)
    _check_vocabulary(tokenizer, tokenizer_folder, spec)
    batches = read_batches(config.data, tokenizer, config.training.evaluate_rows)
    schedule = make_training_schedule(config, batches.training)
    questions = read_questions(config, batches.sides, tokenizer)
    if resume is not None:
        resume.check_length(schedule.steps)
        batches.training.restore(resume.position.data)
        config, given = resume.without_past(config), resume.without_past(given)
    _check_replanning(config, schedule.steps)
    _check_disk(config, spec, optimizer)
    return _Inputs(
        config, given, processes, template, attention, checkpoint, mesh, optimizer, identity, tokenizer,
        tokenizer_folder, chat_template, batches, questions, schedule, state_bytes, runtime, slab_path,
    )  # fmt: skip


def _choose_attention(
    config: Config, model: Architecture, wanted: str, processes: Processes, platform: str
) -> AttentionChoice:
    """The form of attention, the same in all processes."""

    def choose() -> tuple[Any, ...]:
        # One row is enough to tell which form is faster.
        shape = Shape.of(model, 1, config.data.sequence_length, config.model.compute_dtype)
        packed = config.data.batching == "packed"
        return dataclasses.astuple(choose_attention(wanted, shape, packed=packed, platform=platform))

    return AttentionChoice(*processes.main.decide(choose))


def _check_vocabulary(tokenizer: Tokenizer, folder: pathlib.Path, spec: ModelSpec) -> None:
    largest = chat.largest_token_id(tokenizer)
    if largest >= spec.vocabulary_size:
        raise SetupError(
            f"the tokenizer of {folder} has {len(tokenizer)} tokens with ids up to {largest}, "
            f"{spec.name} only {spec.vocabulary_size} (ids below that): set data.tokenizer to the model's own"
        )


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
        inputs = _read_inputs(config, processes, runtime, resume)
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
    inputs: _Inputs, kernels: Kernels, console: Console, resume: Resume | None, beside: Beside
) -> Choice:
    """The plan to start with; of several processes the first makes it, for all."""
    known = None if resume is None else resume.plan_for(inputs.mesh.size)
    processes = inputs.processes
    if not processes.several:
        return choose(
            inputs.config, inputs.template, kernels, console, known, beside, slab_path=inputs.slab_path
        )
    config, template, rate = inputs.config, inputs.template, None
    if config.plan.hardware == AUTO and known is None and is_solved(config):
        rate = common_rate(inputs.mesh)

    def made() -> dict[str, Any]:
        profile = None if rate is None else profile_of_processes(config, template, console, rate)
        plan = choose(
            config, template, None, console, known, beside, profile=profile, slab_path=inputs.slab_path
        ).plan
        return plan.model_dump(mode="json")

    return Choice(Plan.model_validate(processes.main.decide(made)), None)


def _check_capacity(inputs: _Inputs, schedule: Schedule, beside: Beside) -> None:
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
    inputs: _Inputs,
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
    inputs: _Inputs,
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


def _make_saver(inputs: _Inputs, executor: Executor, folder: RunFolder, display: Display) -> Saver:
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


def _open_folder(config: Config, inputs: _Inputs, resume: Resume | None) -> RunFolder:
    """A new run folder, or that of the run that goes on."""
    if resume is None:
        return create_run_folder(config, inputs.template.spec.name)
    if resume.folder.path == resume.source:
        resume.folder.write_config(config, after_step=resume.position.step)
        return resume.folder
    return create_run_folder(config, inputs.template.spec.name)


def make_training_schedule(config: Config, loader: Loader) -> TrainingSchedule:
    """How many steps, at which learning rates."""
    batches_per_epoch = loader.batches_in_epoch()
    steps = config.training.steps
    if steps is None:
        assert config.training.epochs is not None
        steps = max(1, round(config.training.epochs * batches_per_epoch))
    return TrainingSchedule(
        learning_rates(config.optimizer, steps), config.training.evaluate_every, batches_per_epoch
    )


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


def _facts(config: Config, spec: ModelSpec, choice: Choice, inputs: _Inputs) -> dict[str, Any]:
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
