"""Python time of an operation: what the thread that issues a step spends, with kernels that compute nothing.

    python -m experiments.benchmarks.dispatch              # about a minute on two cores
    python -m experiments.benchmarks.dispatch --profile    # and where it goes

A hybrid of 64 narrow blocks is trained under three plans in four microbatches. Walk, copies, queues and JAX's
dispatch are the real ones; each kernel is replaced by a compiled function of the same operands and results
that fills them with zeros. Counted is the processor time of the issuing thread alone (`time.thread_time`), so
that neither waiting nor other threads are in it; what of it JAX takes to start kernels and copies is counted
apart. Wanted: at most 100 microseconds an operation besides.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pathlib
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.provenance import provenance
from lazyjax.batch import Batch
from lazyjax.execution.build import checked_schedules
from lazyjax.execution.executor import Executor
from lazyjax.execution.host_update import HostUpdates
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.execution.transfers import Transfers
from lazyjax.models.architecture import Qwen35Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import LayerKind, ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan
from lazyjax.specs import Tier
from lazyjax.storage.host import allocate_host_store

ROWS, LENGTH, MICROBATCHES = 8, 16, 4
WARM_UP = 3
RESULT = pathlib.Path(__file__).parent / "results" / "dispatch.md"


class Spent:
    """Processor seconds of a thread inside JAX."""

    seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which adds what it takes."""

        def call(*operands: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*operands, **options)
            finally:
                self.seconds += time.thread_time() - start

        return call


class TimedTransfers(Transfers):
    """Copies whose start is counted; only the issuing thread starts any under these plans."""

    def __init__(self, kernels: Kernels, spent: Spent) -> None:
        super().__init__(kernels.sharded, kernels.compute_dtype)
        for name in ("slab_to_device", "batch_to_device", "scalar_to_device", "to_host", "to_device"):
            setattr(self, name, spent.timed(getattr(self, name)))


class IdleKernels:
    """The kernels of a model, computing nothing: results of the right shapes, full of zeros."""

    def __init__(self, kernels: Kernels, spent: Spent) -> None:
        self._kernels, self.template, self.devices = kernels, kernels.template, kernels.devices
        self._spent = spent

    def _idle(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        made: list[Callable[..., Any]] = []

        def call(*operands: Any) -> Any:
            if not made:
                shapes = jax.eval_shape(kernel, *operands)
                zeros = functools.partial(
                    jax.tree.map, lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes
                )
                made.append(self._spent.timed(jax.jit(lambda *given: zeros(), keep_unused=True)))
            return made[0](*operands)

        return call

    @functools.cache  # noqa: B019 - lives as long as the process
    def unpack(self, kind: LayerKind) -> Callable[..., Any]:
        """See `Kernels.unpack`."""
        return self._idle(self._kernels.unpack(kind))

    def gather(self) -> Callable[..., Any]:
        """Not needed."""
        raise NotImplementedError("there is one device")

    def scatter(self, accumulates: bool, last: bool) -> Callable[..., Any]:
        """Not needed."""
        raise NotImplementedError("there is one device")

    @functools.cache  # noqa: B019
    def forward(self, kind: LayerKind, saved: tuple[str, ...]) -> Callable[..., Any]:
        """See `Kernels.forward`."""
        return self._idle(self._kernels.forward(kind, saved))

    @functools.cache  # noqa: B019
    def backward(
        self, kind: LayerKind, saved: tuple[str, ...], accumulates: bool, last: bool
    ) -> Callable[..., Any]:
        """See `Kernels.backward`."""
        return self._idle(self._kernels.backward(kind, saved, accumulates, last))

    @functools.cache  # noqa: B019
    def embed_backward(self, accumulates: bool, last: bool) -> Callable[..., Any]:
        """See `Kernels.embed_backward`."""
        return self._idle(self._kernels.embed_backward(accumulates, last))

    @functools.cache  # noqa: B019
    def loss(self, head_chunk: int, accumulates: bool, last: bool) -> Callable[..., Any]:
        """See `Kernels.loss`."""
        return self._idle(self._kernels.loss(head_chunk, accumulates, last))

    def evaluation_loss(self, head_chunk: int) -> Callable[..., Any]:
        """Not needed."""
        raise NotImplementedError("nothing is evaluated")

    def logits(self) -> Callable[..., Any]:
        """Not needed."""
        raise NotImplementedError("nothing is evaluated")


def model(blocks: int) -> ModelTemplate:
    """The layers of a 27B hybrid, sixteen numbers wide."""
    return build_template(
        Qwen35Architecture(
            name="dispatch", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=blocks,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-6,
            tie_word_embeddings=False, rope=Rope(theta=1e4, partial_rotary_factor=0.5),
            layer_types=tuple(
                "full_attention" if index % 4 == 3 else "linear_attention" for index in range(blocks)
            ),
            linear_conv_kernel_dim=4, linear_num_key_heads=1, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8,
        )
    )  # fmt: skip


def plans(template: ModelTemplate) -> dict[str, Plan]:
    """Everything on the device; boundaries and waiting activations on the host; two tensors more there."""
    last = len(template.spec.layers) - 1

    def plan(name: str, home: str, boundary: str, saved: tuple[str, ...]) -> Plan:
        inner = LayerPlan(boundary=Boundary(boundary), saved=dict.fromkeys(saved, Tier.HOST))
        return Plan(
            model=template.spec.name, planner=name, batch_rows=ROWS, sequence_length=LENGTH,
            microbatches=MICROBATCHES, interlayer_home=home, prefetch=2, reload_ahead=2,
            layers=(LayerPlan(), *[inner] * (last - 1), LayerPlan()),
        )  # fmt: skip

    return {
        "device": plan("device", "device", "device", ()),
        "host": plan("host", "host", "host", ()),
        "host, two tensors saved": plan("saved", "host", "host", ("gate", "up")),
    }


class Figures(NamedTuple):
    """Operations of a step, and median microseconds of one."""

    operations: int
    thread: float
    in_jax: float
    clock: float


def microseconds(template: ModelTemplate, plan: Plan, steps: int, profile: bool) -> Figures:
    """Of the thread that issues a plan's steps: all, the part in JAX, and on the clock."""
    store, spent = allocate_host_store(template.spec), Spent()
    kernels = Kernels(template, data_mesh())
    optimizer = make_host_optimizer("hybrid8bit")
    executor = Executor(
        IdleKernels(kernels, spent),
        TimedTransfers(kernels, spent),
        checked_schedules(kernels, optimizer),
        plan,
        store,
        HostUpdates(store, optimizer),
        clip=ClipRule("global_norm", 1.0),
    )
    ids = np.zeros((ROWS, LENGTH), np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    batch = Batch(ids, ids, ones.astype(bool), ones, ids)
    own, inside, clock = [], [], []
    profiler = cProfile.Profile()
    for step in range(WARM_UP + steps):
        if profile and step == WARM_UP:
            profiler.enable()
        start, wall, before = time.thread_time(), time.perf_counter(), spent.seconds
        executor.train_step(batch, 1e-4)
        own.append(time.thread_time() - start)
        inside.append(spent.seconds - before)
        clock.append(time.perf_counter() - wall)
    profiler.disable()
    operations = len(executor.schedule.operations)
    executor.close()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    each = (1e6 * statistics.median(times[WARM_UP:]) / operations for times in (own, inside, clock))
    return Figures(operations, *each)


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output", type=pathlib.Path, default=None)
    options = parser.parse_args()
    template = model(options.blocks)
    lines = [
        f"# Python time of an operation, {options.blocks} blocks, {MICROBATCHES} microbatches",
        "",
        provenance("lazyjax", "experiments/benchmarks/dispatch.py"),
        "",
        "Microseconds of an operation, of the thread that issues them:",
        "",
        "| homes | operations a step | ours | JAX's dispatch | on the clock |",
        "|---|---|---|---|---|",
    ]
    for name, plan in plans(template).items():
        found = microseconds(template, plan, options.steps, options.profile)
        lines.append(
            f"| {name} | {found.operations:,} | {found.thread - found.in_jax:.0f} | {found.in_jax:.0f} "
            f"| {found.clock:.0f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
