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
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console

from lazyjax.config import Config, ConfigError
from lazyjax.data import chat
from lazyjax.data.batches import load_data_tokenizer, read_batches
from lazyjax.data.loader import Loader
from lazyjax.data.sources import problems_folder
from lazyjax.execution.attention_choice import AttentionChoice, Shape, choose_attention
from lazyjax.execution.build import checked_schedules, executor_of
from lazyjax.execution.executor import Executor, StepResult
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.devices import visible_devices
from lazyjax.hardware.measure import device_label
from lazyjax.huggingface import find
from lazyjax.huggingface.checkpoint import Checkpoint, bind, load_into
from lazyjax.huggingface.export import export
from lazyjax.huggingface.find import open_model
from lazyjax.models.architecture import Architecture
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.base import HostOptimizer
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.plan.document import Plan
from lazyjax.runs import read_run
from lazyjax.specs import ModelSpec, Tier, item_bytes, slab_layout
from lazyjax.storage.host import HostStore, allocate_host_store
from lazyjax.training.answering import ExactMatchEvaluation, read_questions
from lazyjax.training.capacity import check_capacity, needed_bytes
from lazyjax.training.checks import check_machine
from lazyjax.training.display import Display, format_bytes, silence_when_closed
from lazyjax.training.learning_rate import learning_rates
from lazyjax.training.loop import Trainer, TrainingSchedule, no_answers, plan_facts
from lazyjax.training.replanning import Replan, make_replanner
from lazyjax.training.run_folder import RunFolder, create_run_folder
from lazyjax.training.screens import plan_sentences, same_device, show_closing, show_facts
from lazyjax.training.start_plan import choose
from lazyjax.training.status import say


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


def _check_disk(folder: pathlib.Path, needed_bytes: int) -> None:
    """A model that cannot be written at the end is better known of before training."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise SetupError(
            f"the trained model takes {format_bytes(needed_bytes)}, {existing} has room for "
            f"{format_bytes(free_bytes)}: name another run.folder, or set run.save_model to false"
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
        return
    key = jax.random.key(seed)
    for index, slabs in enumerate(store.layers):
        for name, value in init_parameters(template, index, key).items():
            slabs.set_master(name, value)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything of one run, allocated and filled.

    Attributes:
        chat_template: what rows are written with, where it is not the tokenizer's own.
    """

    trainer: Trainer
    template: ModelTemplate
    store: HostStore
    folder: RunFolder
    executor: Executor


@contextlib.contextmanager
def prepare(config: Config, console: Console) -> Iterator[Prepared]:
    """Makes everything that `config` asks for; the executor is closed at the end.

    Raises:
        ValueError: (SetupError, PlanError, DataError, CheckpointError, ...) before anything large is
            allocated and anything is written.
    """

    model, checkpoint = read_architecture(config)
    devices = visible_devices()
    attention = choose_attention(
        config.model.attention,
        # One row is enough to tell which form is faster.
        Shape.of(model, 1, config.data.sequence_length, config.model.compute_dtype),
        packed=config.data.batching == "packed",
        platform=devices[0].platform,
    )
    template = build_template(model, attention.name)
    if checkpoint is not None:
        bind(checkpoint, template)
    spec = template.spec
    if config.plan.devices > len(devices):
        raise SetupError(f"plan.devices is {config.plan.devices}, but JAX sees {len(devices)} device(s)")
    mesh = data_mesh(devices[: config.plan.devices])
    check_machine(config, template, devices[0])
    optimizer = make_optimizer(config)
    state_bytes = training_state_bytes(
        spec, optimizer, gradient_dtype=config.optimizer.gradient_dtype, devices=mesh.size
    )
    tokenizer_folder = config.data.tokenizer or config.model.folder or problems_folder()
    tokenizer = load_data_tokenizer(config.data, tokenizer_folder)
    own_template = config.data.chat_template is None and tokenizer.chat_template
    chat_template = None if own_template else chat.default_template(tokenizer)
    if chat.largest_token_id(tokenizer) >= spec.vocabulary_size:
        raise SetupError(
            f"the tokenizer of {tokenizer_folder} has {len(tokenizer)} tokens with ids up to "
            f"{chat.largest_token_id(tokenizer)}, {spec.name} only {spec.vocabulary_size} (ids below that): "
            f"set data.tokenizer to the model's own"
        )
    batches = read_batches(config.data, tokenizer, config.training.evaluate_rows)
    schedule = make_training_schedule(config, batches.training)
    questions = read_questions(config, batches.sides, tokenizer)
    _check_replanning(config, schedule.steps)
    if config.run.save_model:
        _check_disk(config.run.folder, 2 * spec.parameter_count)
    # Last, because measuring and solving may take minutes.
    kernels = Kernels(template, mesh, config.model.compute_dtype, config.optimizer.gradient_dtype)
    choice = choose(config, template, kernels, console)
    plan = choice.plan
    replanner = make_replanner(config, template.in_chunks(plan.token_chunk), choice)
    schedules = checked_schedules(kernels, optimizer)
    check_capacity(
        needed_bytes(
            schedules(plan, plan.sequence_length),
            spec,
            gradient_dtype=config.optimizer.gradient_dtype,
            devices=mesh.size,
        ),
        optimizer_name=optimizer.name,
        nvme_folder=config.plan.nvme_folder,
    )
    folder = create_run_folder(config, spec.name)
    folder.write_plan(plan)
    weights = "random weights" if checkpoint is None else f"weights from {config.model.folder}"
    words: dict[str, str | tuple[str, ...]] = {
        "model": f"{spec.name}: {spec.parameter_count / 1e6:,.1f} M parameters in {spec.block_count} blocks "
        f"({spec.family}), {weights}",
        "data": batches.report,
        "optimizer": f"{optimizer.name}: {format_bytes(state_bytes)} of host memory for parameters, "
        "gradients and its state",
        "device": f"{mesh.size} x {device_label(devices[0])}, {config.model.compute_dtype}",
        "plan": tuple(plan_sentences(plan)),
        "run": f"{schedule.steps} steps, records in {folder.path}",
    }
    show_facts(console, words)
    for warning in batches.warnings:
        say(console, f"warning: {warning}")
    if plan.device is not None and not same_device(plan.device, device_label(devices[0])):
        say(
            console,
            f"warning: the plan is for {plan.device}, this is {device_label(devices[0])}: "
            "what it predicts does not hold here",
        )
    store = allocate_host_store(
        spec,
        gradient_dtype=config.optimizer.gradient_dtype,
        devices=mesh.size,
        decay_vectors=config.optimizer.decay_vectors,
    )
    _fill_store(store, template, checkpoint, config.training.seed)
    executor = executor_of(
        kernels,
        plan,
        store,
        optimizer,
        clip=ClipRule(config.optimizer.clip, config.optimizer.clip_norm),
        nvme_folder=config.plan.nvme_folder,
        run=folder.path.name,
        schedules=schedules,
    )

    display = Display(console, steps=schedule.steps, log_every=config.training.log_every)

    def after_step(step: int, result: StepResult) -> Replan | None:
        if replanner is None:
            return None
        return replanner.after_step(step, executor, result.padded_tokens, display.say)

    def save_model() -> pathlib.Path:
        """Writes the model as it is now, with its tokenizer, into the run folder."""
        stop = chat.end_of_turn_id(tokenizer)
        return export(
            folder.model,
            template,
            store,
            checkpoint,
            tokenizer_folder=tokenizer_folder,
            chat_template=chat_template,
            stop_token_ids=[] if stop is None else [stop],
        )

    answers = no_answers
    if questions is not None:
        answers = ExactMatchEvaluation(questions, kernels, store, executor.flush, folder.path).run
    trainer = Trainer(
        executor,
        batches.training,
        batches.evaluation_batches,
        schedule,
        parameter_count=spec.parameter_count,
        folder=folder,
        display=display,
        facts=_facts(config, spec, plan, devices[0], attention),
        after_step=after_step,
        save_model=save_model if config.run.save_model else None,
        answers=answers,
    )
    try:
        yield Prepared(trainer, template, store, folder, executor)
    finally:
        executor.close()


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


def train(config: Config, console: Console) -> dict[str, Any]:
    """Prepares and runs a training; returns the summary of the run folder."""
    silence_when_closed(console)
    with prepare(config, console) as prepared:
        summary = prepared.trainer.run()
        executor = prepared.executor
        peak = executor.schedule.peak_bytes()[Tier.DEVICE]
        here = device_label(jax.devices()[0])
        show_closing(console, executor.plan, read_run(prepared.folder.path), buffer_bytes=peak, here=here)
        return summary


def _facts(
    config: Config, spec: ModelSpec, plan: Plan, device: jax.Device, attention: AttentionChoice
) -> dict[str, Any]:
    return {
        "model": spec.name,
        "parameters": spec.parameter_count,
        **plan_facts(plan),
        "optimizer": config.optimizer.name,
        "rows": plan.rows,
        "sequence_length": plan.sequence_length,
        "device": device.device_kind,
        "platform": device.platform,
        "devices": config.plan.devices,
        "attention": attention.name,
        "attention_reason": attention.reason,
        "attention_seconds": dict(attention.seconds),
        "jax": jax.__version__,
        "lazyjax": importlib.metadata.version("lazyjax"),
        "commit": source_commit(),
        "date": datetime.date.today().isoformat(),
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
