"""Whether a device behaves as the design assumes: links, overlap, gradients, and one streamed step.

    python -m experiments.benchmarks.gpu_check [--sections transfers overlap parity step] [--output FOLDER]

Runs on a GPU, and shrunk on a CPU, where the link is host memory and only the code is checked.
Sections are independent: one that fails is reported and the others still run; the exit code is
then 1. Writes `gpu_check.json` and `gpu_check.md`. About a minute on two cores; on a GPU about
ten, and 75 GB of host memory for the 7B model of the section `step`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.provenance import provenance
from lazyjax.batch import Batch
from lazyjax.execution.build import build_executor
from lazyjax.execution.executor import Executor
from lazyjax.hardware.measure import (
    MeasureOptions,
    aligned_bytes,
    device_label,
    matmul_flops_per_second,
    measure_profile,
    median_seconds,
)
from lazyjax.models.architecture import Qwen2Architecture, Qwen3Architecture, Qwen35Architecture, Rope
from lazyjax.models.registry import architecture, build_template
from lazyjax.models.template import Context, ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.probes import block_shapes, update_probe
from lazyjax.planning.costs.seconds import model_flops, template_costs
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.planning.program.simulate import simulate
from lazyjax.specs import Tier
from lazyjax.storage.host import HostStore, allocate_host_store

Rows = list[dict[str, Any]]
MIB = 2**20
#: Norm of the difference over norm of the gradient, per tensor, in float32. A delta net's decays are
#: differences of nearly equal numbers, which costs two digits in either program.
MOST_GRADIENT_ERROR = 1e-4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the checks are on the device at hand."""

    transfer_bytes: int
    overlap_layers: int
    step_rows: int
    step_tokens: int
    step_microbatches: int
    repeats: int
    families: tuple[str, ...]


def sizes() -> Sizes:
    """Full on an accelerator, shrunk on a CPU."""
    if jax.default_backend() == "cpu":
        return Sizes(16 * MIB, 4, 8, 64, 2, 3, ("qwen2",))
    return Sizes(512 * MIB, 12, 32, 1024, 4, 5, ("qwen2", "qwen3", "qwen3_5"))


def transfers(size: Sizes) -> Rows:
    """Bytes per second of every way between host and device (design 3.6)."""
    device = jax.devices()[0]
    there = jax.sharding.SingleDeviceSharding(device)
    here = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    slab = aligned_bytes(size.transfer_bytes)
    slab[:] = 1
    resident = jnp.ones(size.transfer_bytes, jnp.uint8)
    pinned = jax.device_put(resident, here)

    def through_pinned() -> None:
        slab[:] = np.asarray(jax.device_put(resident, here))

    def as_array() -> None:
        # A fresh array each time: JAX keeps the host copy of one it has converted before.
        np.asarray(resident + 1)

    ways: dict[str, Callable[[], Any]] = {
        "numpy slab -> device": lambda: jax.device_put(slab, there, may_alias=False),
        "pinned_host array -> device": lambda: jax.device_put(pinned, there, may_alias=False),
        "device -> pinned_host": lambda: jax.device_put(resident, here),
        "device -> pinned_host -> numpy slab": through_pinned,
        "device -> np.asarray": as_array,
    }
    rows = [_rate(way, size, run) for way, run in ways.items()]
    client = device.client
    if not hasattr(client, "dma_map"):
        return [*rows, {"path": "numpy slab under dma_map -> device", "note": "this backend has no dma_map"}]
    try:
        client.dma_map(slab.ctypes.data, slab.nbytes)
    except jax.errors.JaxRuntimeError as error:
        return [*rows, {"path": "numpy slab under dma_map -> device", "note": str(error)}]
    try:
        rows.append(_rate("numpy slab under dma_map -> device", size, ways["numpy slab -> device"]))
    finally:
        client.dma_unmap(slab.ctypes.data)
    return rows


def _rate(way: str, size: Sizes, run: Callable[[], Any]) -> dict[str, Any]:
    seconds = median_seconds(run, size.repeats)
    return {"path": way, "seconds": seconds, "GB_per_second": size.transfer_bytes / seconds / 1e9}


def overlap(size: Sizes) -> Rows:
    """Copy in, compute, copy out of a chain of layers, with the puts issued before or after compute.

    Every layer's compute is made about as long as its copy in. `share_hidden` is 1 where the chain
    takes as long as its busiest resource, 0 where everything runs one after another; on a CPU, where
    all share the same cores and memory, it says nothing.
    """
    device = jax.devices()[0]
    there = jax.sharding.SingleDeviceSharding(device)
    here = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    elements = size.transfer_bytes // 4
    source = jax.device_put(jnp.ones(elements, jnp.float32), here)
    side = 2048 if jax.default_backend() != "cpu" else 256

    @jax.jit
    def layer(x: jax.Array, slab: jax.Array, products: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = slab[0] / side
        x = jax.lax.fori_loop(0, products, lambda _, y: (y @ x) * scale, x)
        return x, slab * x[0, 0]

    x = jnp.ones((side, side), jnp.float32) / side
    slab = jax.device_put(source, there)
    put_seconds = median_seconds(lambda: jax.device_put(source, there), size.repeats)
    out = layer(x, slab, jnp.int32(1))[1]
    out_seconds = median_seconds(lambda: jax.device_put(out, here), size.repeats)
    few, many = jnp.int32(4), jnp.int32(36)
    few_seconds = median_seconds(lambda: layer(x, slab, few), size.repeats)
    one = max(1e-7, (median_seconds(lambda: layer(x, slab, many), size.repeats) - few_seconds) / 32)
    products = jnp.int32(max(1, round(put_seconds / one)))
    compute_seconds = median_seconds(lambda: layer(x, slab, products), size.repeats)

    def chain(order: str) -> Any:
        """One pass over the layers; the window is one slab ahead."""
        y, parameters, leaving = x, jax.device_put(source, there), []
        for index in range(size.overlap_layers):
            following = None
            if order == "before" and index + 1 < size.overlap_layers:
                following = jax.device_put(source, there)
            y, gradient = layer(y, parameters, products)
            if order == "serial":
                jax.block_until_ready(gradient)
            leaving.append(jax.device_put(gradient, here))
            if order == "serial":
                jax.block_until_ready(leaving[-1])
            if order != "before" and index + 1 < size.overlap_layers:
                following = jax.device_put(source, there)
            if order == "serial":
                jax.block_until_ready(following)
            if following is not None:
                parameters = following
            if len(leaving) > 2:
                jax.block_until_ready(leaving[-3])
        return y, leaving

    layers = size.overlap_layers
    parts = (put_seconds, compute_seconds, out_seconds)
    rows: Rows = [
        {"order": name, "seconds": layers * seconds}
        for name, seconds in zip(("copy in alone", "compute alone", "copy out alone"), parts, strict=True)
    ]
    seconds = {
        order: median_seconds(lambda order=order: chain(order), size.repeats)  # type: ignore[misc]
        for order in ("serial", "after", "before")
    }
    least, most = layers * max(parts), seconds["serial"]
    for order, took in seconds.items():
        share = (most - took) / (most - least) if most > least else 0.0
        name = order if order == "serial" else f"put {order} compute"
        rows.append({"order": name, "seconds": took, "share_hidden": share})
    return rows


def parity(size: Sizes) -> Rows:
    """Gradients of streamed steps against `jax.grad` of the whole model, float32, largest relative error."""
    rows = []
    for family in size.families:
        template = tiny_template(family)
        batch = random_batch(4, 40, template.spec.vocabulary_size)
        parameters = [
            template.kind(i).initialize(jax.random.fold_in(jax.random.key(0), i))
            for i in range(len(template.spec.layers))
        ]
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(jax.grad(_whole_model(template, batch)))(parameters)
            for plan in (_recompute(template, batch, 2), _everything_on_host(template, batch, 2)):
                store = allocate_host_store(template.spec, gradient_dtype="float32")
                for slabs, layer, tensors in zip(store.layers, template.spec.layers, parameters, strict=True):
                    for spec, value in zip(layer.parameters, tensors, strict=True):
                        slabs.set_master(spec.name, np.asarray(value))
                executor = _executor(template, plan, store, "float32")
                executor.train_step(batch, 0.0)
                worst = max(
                    _relative_error(slabs.gradient[s.offset : s.offset + s.elements], np.asarray(value))
                    for slabs, tensors in zip(store.layers, expected, strict=True)
                    for s, value in zip(slabs.layout.segments, tensors, strict=True)
                )
                executor.close()
                rows.append({"family": family, "plan": plan.planner, "relative_error": worst})
                if not worst < MOST_GRADIENT_ERROR:
                    raise ArithmeticError(f"{family} under {plan.planner}: gradient error {worst:.2e}")
    return rows


def _relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    difference = np.linalg.norm(found.astype(np.float64) - expected.reshape(-1))
    return float(difference / max(np.linalg.norm(expected), 1e-12))


def _whole_model(template: ModelTemplate, batch: Batch) -> Callable[[Any], jax.Array]:
    context = Context(jnp.asarray(batch.positions_BT), jnp.asarray(batch.segment_ids_BT))

    def loss(parameters: Any) -> jax.Array:
        x = jnp.asarray(batch.tokens_BT)
        for index, params in enumerate(parameters):
            x = template.kind(index).apply(params, x, context)
        table = parameters[template.table.layer_index][template.table.parameter_index]
        logits = jnp.einsum("btd,vd->btv", x, table)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(batch.targets_BT)[..., None], -1)
        return -chosen.mean()

    return loss


def step(size: Sizes) -> Rows:
    """A streamed step of a Qwen2.5-7B-shaped model with random weights, beside its bound and prediction."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    template = build_template(shrunk_7b() if on_cpu else architecture("Qwen2.5-7B"))
    optimizer = make_host_optimizer("hybrid8bit")
    store = random_store(template)
    batch = random_batch(size.step_rows, size.step_tokens, template.spec.vocabulary_size)
    shapes = block_shapes(template, size.step_rows * size.step_tokens // size.step_microbatches)
    rate = matmul_flops_per_second(shapes, dtype, size.repeats)
    options = MeasureOptions(
        shapes, dtype, transfer_bytes=size.transfer_bytes, update_elements=8 * MIB, repeats=size.repeats
    )
    profile = measure_profile("here", options, {optimizer.name: update_probe(optimizer.name)})
    costs = template_costs(
        template, profile, rows=size.step_rows // size.step_microbatches, sequence_length=size.step_tokens,
        optimizer=optimizer, compute_dtype=dtype,
    )  # fmt: skip
    flops_per_step = model_flops(template.spec, batch.rows, batch.sequence_length)
    rows: Rows = []
    for plan in (_recompute(template, batch, size.step_microbatches), _mlp_on_host(template, batch, size)):
        executor = _executor(template, plan, store, dtype)
        results = [executor.train_step(batch, 1e-5) for _ in range(2 + size.repeats)][2:]
        executor.close()
        seconds = statistics.median(result.seconds for result in results)
        schedule = build_schedule(plan, costs.sizes)
        flops = costs.executed_flops(schedule)
        rows.append(
            {
                "plan": plan.planner,
                "parameters": template.spec.parameter_count,
                "rows_tokens_microbatches": [size.step_rows, size.step_tokens, size.step_microbatches],
                "step_seconds": seconds,
                "model_TFLOPS": flops_per_step / seconds / 1e12,
                "executed_TFLOPS": flops / seconds / 1e12,
                "matmul_TFLOPS": rate / 1e12,
                "step_over_matmul_bound": seconds / (flops / rate),
                "simulated_seconds": simulate(schedule, costs.operation_seconds).period_seconds,
                "peak_device_bytes_counted": max(result.peak_device_bytes for result in results),
                "peak_device_bytes_allocator": _allocator_peak(),
                "loss": results[-1].loss,
            }
        )
    return rows


def _allocator_peak() -> int | None:
    """Peak of the device's allocator in this process; None where it does not count (CPU)."""
    stats = jax.devices()[0].memory_stats()
    return int(stats["peak_bytes_in_use"]) if stats else None


def _recompute(template: ModelTemplate, batch: Batch, microbatches: int) -> Plan:
    return recompute_all(
        template.spec, [], rows=batch.rows, sequence_length=batch.sequence_length, microbatches=microbatches
    )


def _everything_on_host(template: ModelTemplate, batch: Batch, microbatches: int) -> Plan:
    """All boundaries and residuals leave the device: every path of the executor is used."""
    return _host_plan(template, batch, microbatches, lambda names: names, "everything_on_host")


def _mlp_on_host(template: ModelTemplate, batch: Batch, size: Sizes) -> Plan:
    """The two tensors that save most recomputation, and the boundaries, on the host."""

    def choose(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name in ("gate", "up"))

    return _host_plan(template, batch, size.step_microbatches, choose, "mlp_on_host")


def _host_plan(
    template: ModelTemplate,
    batch: Batch,
    microbatches: int,
    choose: Callable[[tuple[str, ...]], tuple[str, ...]],
    name: str,
) -> Plan:
    last = len(template.spec.layers) - 1
    layers = tuple(
        LayerPlan(
            boundary=Boundary.DEVICE if index in (0, last) else Boundary.HOST,
            saved=dict.fromkeys(choose(template.kind(index).residual_names), Tier.HOST),
        )
        for index in range(last + 1)
    )
    plan = _recompute(template, batch, microbatches)
    return plan.model_copy(update={"layers": layers, "planner": name})


def _executor(template: ModelTemplate, plan: Plan, store: HostStore, dtype: str) -> Executor:
    optimizer = make_host_optimizer("hybrid8bit")
    return build_executor(template, plan, store, optimizer, compute_dtype=dtype, clip=ClipRule())


def random_batch(rows: int, tokens: int, vocabulary: int) -> Batch:
    """Full rows of random tokens, every one a target."""
    rng = np.random.default_rng(0)
    shape = (rows, tokens)
    return Batch(
        tokens_BT=rng.integers(0, vocabulary, shape, dtype=np.int32),
        targets_BT=rng.integers(0, vocabulary, shape, dtype=np.int32),
        loss_mask_BT=np.ones(shape, np.bool_),
        segment_ids_BT=np.ones(shape, np.int32),
        positions_BT=np.tile(np.arange(tokens, dtype=np.int32), (rows, 1)),
    )


def random_store(template: ModelTemplate, *, gradient_dtype: str = "bfloat16") -> HostStore:
    """Host slabs with initial values, equal for all layers of a kind, so that 7B is filled quickly."""
    store = allocate_host_store(template.spec, gradient_dtype=gradient_dtype)
    filled: dict[str, int] = {}
    for index, (slabs, layer) in enumerate(zip(store.layers, template.spec.layers, strict=True)):
        if layer.kind in filled:
            first = store.layers[filled[layer.kind]]
            slabs.hi[:], slabs.lo[:] = first.hi, first.lo
            continue
        filled[layer.kind] = index
        for spec, value in zip(
            layer.parameters, template.kind(index).initialize(jax.random.key(index)), strict=True
        ):
            slabs.set_master(spec.name, np.asarray(value))
    return store


def shrunk_7b() -> Qwen2Architecture:
    """Qwen2.5-7B with an eighth of its width, a seventh of its depth and few words."""
    return Qwen2Architecture(
        name="Qwen2.5-7B-shrunk", vocab_size=8192, hidden_size=448, intermediate_size=2368,
        num_hidden_layers=4, num_attention_heads=7, num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-6,
        tie_word_embeddings=False, rope=Rope(theta=1e6), qkv_bias=True,
    )  # fmt: skip


def tiny_template(family: str) -> ModelTemplate:
    """A narrow model of four blocks."""
    common: dict[str, Any] = dict(
        name=f"gpu-check-{family}", vocab_size=128, hidden_size=64, intermediate_size=96,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )  # fmt: skip
    match family:
        case "qwen2":
            return build_template(Qwen2Architecture(**common, rope=Rope(theta=1e4), qkv_bias=True))
        case "qwen3":
            return build_template(Qwen3Architecture(**common, rope=Rope(theta=1e4)))
        case _:
            return build_template(
                Qwen35Architecture(
                    **common,
                    rope=Rope(theta=1e4, partial_rotary_factor=0.5),
                    layer_types=("linear_attention",) * 3 + ("full_attention",),
                    linear_conv_kernel_dim=4,
                    linear_num_key_heads=2,
                    linear_num_value_heads=4,
                    linear_key_head_dim=16,
                    linear_value_head_dim=16,
                )
            )


SECTIONS: dict[str, Callable[[Sizes], Rows]] = {
    "transfers": transfers,
    "overlap": overlap,
    "parity": parity,
    "step": step,
}


def run_sections(names: list[str]) -> dict[str, dict[str, Any]]:
    """Each section's rows, or its error with the traceback."""
    report: dict[str, dict[str, Any]] = {}
    for name in names:
        start = time.perf_counter()
        try:
            found: dict[str, Any] = {"rows": SECTIONS[name](sizes())}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        report[name] = {**found, "seconds": time.perf_counter() - start}
        print(_section_text(name, report[name]), flush=True)
        gc.collect()
    return report


def _section_text(name: str, section: dict[str, Any]) -> str:
    lines = [f"## {name} ({section['seconds']:.0f} s)", ""]
    if "error" in section:
        return "\n".join([*lines, "FAILED", "", "```", section["traceback"].rstrip(), "```", ""])
    keys = list(dict.fromkeys(key for row in section["rows"] for key in row))
    lines += ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    for row in section["rows"]:
        lines.append("| " + " | ".join(_cell(row[key]) if key in row else "" for key in keys) + " |")
    return "\n".join([*lines, ""])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Runs the chosen sections and writes the report; 1 if one failed."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results"))
    options = parser.parse_args()
    label = f"Device: {device_label(jax.devices()[0])}. {provenance()}"
    header = f"# Device check\n\n{label} JAX {jax.__version__}, backend {jax.default_backend()}.\n"
    print(header, flush=True)
    report = run_sections(options.sections)
    options.output.mkdir(parents=True, exist_ok=True)
    document = {"label": label, "jax": jax.__version__, "backend": jax.default_backend(), "sections": report}
    (options.output / "gpu_check.json").write_text(json.dumps(document, indent=1) + "\n")
    texts = [_section_text(name, section) for name, section in report.items()]
    (options.output / "gpu_check.md").write_text("\n".join([header, *texts]))
    return 1 if any("error" in section for section in report.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
