"""What a configuration names, opened and checked before anything large is allocated or written.

Everything that can be wrong with the model, the data or the machine is found here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import shutil
from typing import Any

import jax
from rich.console import Console

from lazyjax.config import Config, ConfigError
from lazyjax.data import chat
from lazyjax.data.batches import Batches, load_data_tokenizer, read_batches
from lazyjax.data.chat import Tokenizer
from lazyjax.data.loader import Loader
from lazyjax.data.sources import problems_folder
from lazyjax.distributed.processes import Processes
from lazyjax.execution.attention_choice import AttentionChoice, Shape, choose_attention
from lazyjax.execution.kernels import data_mesh, first_axis
from lazyjax.execution.shards import share_of
from lazyjax.execution.slab_paths import PathChoice, choose_path
from lazyjax.hardware.devices import visible_devices
from lazyjax.hardware.measure import device_label
from lazyjax.hardware.runtime import RuntimeSettings
from lazyjax.huggingface import find
from lazyjax.huggingface.checkpoint import Checkpoint, bind, load_into
from lazyjax.huggingface.export import export
from lazyjax.huggingface.find import open_model
from lazyjax.huggingface.parameters import ReadableStore
from lazyjax.models.architecture import Architecture
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.base import HostOptimizer
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.packing import Packing, packing_of
from lazyjax.planning.plan.document import Plan
from lazyjax.specs import ModelSpec, item_bytes, slab_layout
from lazyjax.storage.host import HostStore, allocate_host_store
from lazyjax.storage.nvme import Drive
from lazyjax.training.answering import Questions, read_questions
from lazyjax.training.checkpoints import Identity, identity_of
from lazyjax.training.checks import check_machine
from lazyjax.training.display import format_bytes
from lazyjax.training.gathering import Gathering
from lazyjax.training.learning_rate import learning_rates
from lazyjax.training.resume import Resume
from lazyjax.training.run_context import TrainingSchedule
from lazyjax.training.run_folder import RunFolder
from lazyjax.training.screens import plan_sentences, same_device, show_facts
from lazyjax.training.status import say
from lazyjax.training.together import (
    for_processes,
    mesh_devices,
)
from lazyjax.training.wandb_log import check_installed


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
class Inputs:
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

    @functools.cached_property
    def packing(self) -> Packing | None:
        """Of the rows to train on; None where each is one segment."""
        if self.config.data.batching != "packed":
            return None
        return packing_of(self.batches.training.segment_lengths())

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


def read_inputs(
    given: Config, processes: Processes, runtime: RuntimeSettings, resume: Resume | None
) -> Inputs:
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
    return Inputs(
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
