"""What streaming costs where it buys nothing: the streamed step against the whole step in one jit.

    python -m experiments.benchmarks.streaming_overhead

Both train the same model of about 50 M parameters in float32 on the same batch: one compiled
function (layers unrolled, every layer recomputed in the backward pass, optax clip and AdamW in
place) against the executor under the plan `recompute_all`. Rounds alternate and medians are
compared. Printed beside them: the time that the step's matrix products take at the rate this
machine reaches on one large product. Takes about two minutes on two cores; expected ratio: at
most 1.10 for the wide shape. Then where the streamed step's time goes, by its own timeline.

The deep shape shows the limit: a streamed kernel ends where its layer ends, while one jit also
runs the weight gradients and the recomputation of neighbouring layers side by side, which on
XLA:CPU fills the cores that small operations leave idle.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks.provenance import provenance
from lazyjax.batch import Batch
from lazyjax.execution.build import executor_of
from lazyjax.execution.executor import Executor
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import Context, ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.storage.host import allocate_host_store
from lazyjax.timeline import Resource, Timeline, covered_seconds

RATE, CLIP, DECAY = 1e-4, 1.0, 0.01
Parameters = list[tuple[jax.Array, ...]]


#: Two shapes of about 50 M parameters: hidden size, inner size, blocks, vocabulary.
SHAPES = {"wide": (1024, 3072, 3, 4096), "deep": (512, 1536, 12, 8192)}


def model(shape: str) -> ModelTemplate:
    """A Qwen2-type model of one of `SHAPES`."""
    hidden, inner, blocks, vocabulary = SHAPES[shape]
    return build_template(
        Qwen2Architecture(
            name=f"overhead-{shape}",
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=blocks,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            head_dim=64,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            rope=Rope(theta=1e4),
            qkv_bias=True,
        )
    )


def random_batch(rows: int, length: int, vocabulary: int) -> Batch:
    """Full rows; every token is a target."""
    rng = np.random.default_rng(0)
    shape = (rows, length)
    return Batch(
        tokens_BT=rng.integers(0, vocabulary, shape, dtype=np.int32),
        targets_BT=rng.integers(0, vocabulary, shape, dtype=np.int32),
        loss_mask_BT=np.ones(shape, np.bool_),
        segment_ids_BT=np.ones(shape, np.int32),
        positions_BT=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    )


def in_memory_step(template: ModelTemplate, parameters: Parameters, batch: Batch) -> Callable[[], float]:
    """The step as one jit; each call trains one step and returns the loss."""
    decayed = jax.tree.map(lambda p: p.ndim >= 2, parameters)
    transform = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(RATE, weight_decay=DECAY, mask=decayed)
    )
    context = Context(jnp.asarray(batch.positions_BT), jnp.asarray(batch.segment_ids_BT))
    tokens, targets = jnp.asarray(batch.tokens_BT), jnp.asarray(batch.targets_BT)

    def loss(parameters: Parameters) -> jax.Array:
        x = tokens
        for index, params in enumerate(parameters):
            x = jax.checkpoint(template.kind(index).apply)(params, x, context)
        table = parameters[template.table.layer_index][template.table.parameter_index]
        logits = jnp.einsum("btd,vd->btv", x, table)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(parameters: Parameters, state: optax.OptState) -> tuple[Parameters, optax.OptState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = transform.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    donated = jax.jit(step, donate_argnums=(0, 1))
    current: list = [parameters, transform.init(parameters)]

    def run() -> float:
        current[0], current[1], value = donated(*current)
        return float(value)

    return run


def streamed_step(
    template: ModelTemplate, parameters: Parameters, batch: Batch, optimizer: str
) -> tuple[Callable[[], float], Executor]:
    """The executor on the same parameters; each call trains one step and returns the loss."""
    store = allocate_host_store(template.spec, gradient_dtype="float32")
    for slabs, layer, tensors in zip(store.layers, template.spec.layers, parameters, strict=True):
        for spec, value in zip(layer.parameters, tensors, strict=True):
            slabs.set_master(spec.name, np.asarray(value))
    kernels = Kernels(template, data_mesh(), compute_dtype="float32", gradient_dtype="float32")
    plan = recompute_all(template.spec, [], batch_rows=batch.rows, sequence_length=batch.sequence_length)
    updater = make_host_optimizer(optimizer, weight_decay=DECAY)
    executor = executor_of(kernels, plan, store, updater, clip=ClipRule("global_norm", CLIP))
    return lambda: executor.train_step(batch, RATE).loss, executor


def where_time_goes(timeline: Timeline, step_seconds: float) -> dict[str, float]:
    """Seconds of a step by operation, and those in which no kernel runs.

    An update is deferred: it runs beside the forward pass of the step after its own.
    """
    seconds: dict[str, float] = defaultdict(float)
    for event in timeline.events:
        seconds[event.action] += event.end_seconds - event.start_seconds
    kernels = (event for event in timeline.events if event.resource is Resource.COMPUTE)
    return {**seconds, "no kernel runs": step_seconds - covered_seconds(kernels)}


def lane_rows(lanes: Sequence[dict[str, float]], step_seconds: float) -> list[str]:
    """Medians over the steps, longest first."""
    medians = {name: statistics.median(one[name] for one in lanes) for name in lanes[0]}
    ordered = sorted(medians.items(), key=lambda item: -item[1])
    return [
        f"| {name.replace('_', ' ')} | {seconds:.3f} | {seconds / step_seconds:.1%} |"
        for name, seconds in ordered
    ]


def matmul_flops_per_second(size: int = 1536) -> float:
    """Best of five large float32 products."""
    a = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        product(a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def step_flops(template: ModelTemplate, batch: Batch) -> float:
    """Matrix products of one step: forward, recompute and backward (4 x forward) and attention."""
    matrices = sum(
        tensor.elements
        for layer in template.spec.layers[1:]
        for tensor in layer.parameters
        if len(tensor.shape) == 2
    )
    table = template.spec.vocabulary_size * template.spec.hidden_size
    tokens = batch.rows * batch.sequence_length
    attention = 4 * template.spec.block_count * batch.sequence_length * template.spec.hidden_size
    return tokens * (2 * 4 * (matrices - table) + 2 * 3 * table + 4 * attention)


def main() -> None:
    """Runs the comparison and writes its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="wide")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--optimizers", nargs="+", default=["fp32_adamw", "hybrid8bit"])
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    template = model(options.shape)
    batch = random_batch(options.rows, options.length, template.spec.vocabulary_size)
    parameters: Parameters = [
        template.kind(i).initialize(jax.random.fold_in(jax.random.key(0), i))
        for i in range(len(template.spec.layers))
    ]
    executors: dict[str, Executor] = {}
    streamed: dict[str, Callable[[], float]] = {}
    lanes: dict[str, list[dict[str, float]]] = {name: [] for name in options.optimizers}
    for name in options.optimizers:
        streamed[name], executors[name] = streamed_step(template, parameters, batch, name)
    steps = {"one jit": in_memory_step(template, parameters, batch)} | streamed
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(options.rounds + 2):
        losses = {}
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name] = step()
            if round_number >= 2:
                seconds[name].append(time.perf_counter() - start)
                if name in executors:
                    lanes[name].append(where_time_goes(executors[name].timeline(), seconds[name][-1]))
        print(f"round {round_number}: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
    for executor in executors.values():
        executor.close()
    bound = step_flops(template, batch) / matmul_flops_per_second()
    reference = statistics.median(seconds["one jit"])
    lines = [
        f"# Streaming overhead, {options.shape}, {template.spec.parameter_count / 1e6:.1f} M parameters, "
        f"{options.rows} x {options.length} tokens, float32",
        "",
        provenance(),
        "",
        "| step | median seconds | / one jit | / matmul bound |",
        "|---|---|---|---|",
    ]
    for name, times in seconds.items():
        median = statistics.median(times)
        label = name if name == "one jit" else f"streamed, {name}"
        lines.append(f"| {label} | {median:.3f} | {median / reference:.3f} | {median / bound:.2f} |")
    for name in options.optimizers:
        lines += ["", f"Where {name}'s step goes, by its timeline; lanes run side by side:", ""]
        lines += ["| | median seconds | of the step |", "|---|---|---|"]
        lines += lane_rows(lanes[name], statistics.median(seconds[name]))
    text = "\n".join(lines) + "\n"
    print("\n" + text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main()
