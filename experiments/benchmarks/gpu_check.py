"""Whether a device behaves as the design assumes: links, limits, gradients, kernels, and streamed steps.

    python -m experiments.benchmarks.gpu_check [--seconds 540] [--sections paths parity ...] [--output FOLDER]

Runs on a GPU, and shrunk on a CPU, where the link is host memory and only the code is checked. Sections are
independent: one that fails is reported and the others still run; the exit code is then 1. The time is kept
to: what would begin after it is skipped and named, and the section `steps` ends with the plan that it is at.
`gpu_check.json` and `gpu_check.md` are written after every section, so that a run that is cut short leaves
what it has; `machine` adds `profile.yaml`. About a minute on two cores; on a GPU nine minutes, and 75 GB of
host memory for the 7B model of `steps`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import gpu_sections
from experiments.benchmarks.gpu_models import Rows, Sizes, random_batch, sizes, tiny_template
from experiments.benchmarks.provenance import provenance
from lazyjax.batch import Batch
from lazyjax.execution.build import build_executor
from lazyjax.execution.executor import Executor
from lazyjax.hardware.drive import aligned_bytes
from lazyjax.hardware.measure import device_label, median_seconds
from lazyjax.hardware.profile import dump_profile
from lazyjax.hardware.runtime import set_runtime
from lazyjax.models.template import Context, ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan
from lazyjax.specs import Tier
from lazyjax.storage.host import HostStore, allocate_host_store

#: Norm of the difference over norm of the gradient, per tensor, in float32. A delta net's decays are
#: differences of nearly equal numbers, which costs two digits in either program.
MOST_GRADIENT_ERROR = 1e-4
#: The same in bfloat16, of gradients over 16k tokens.
MOST_BFLOAT16_ERROR = 0.02


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
        rows.append(_bfloat16_parity(family))
    return rows


def _bfloat16_parity(family: str) -> dict[str, Any]:
    """The same in bfloat16, against float32 gradients of the same bfloat16 weights; one block.

    Raises:
        ArithmeticError: a tensor is off by more than rounding explains; decays, differences of nearly equal
            numbers, may be off by twice that.
    """
    template = tiny_template(family, blocks=1)
    batch = random_batch(256, 64, template.spec.vocabulary_size)
    # Few distinct targets: gradients then have a common direction, as those of text have.
    batch.targets_BT[:] %= 3
    parameters = [
        tuple(
            value.astype(jnp.bfloat16).astype(jnp.float32)
            for value in template.kind(i).initialize(jax.random.fold_in(jax.random.key(0), i))
        )
        for i in range(len(template.spec.layers))
    ]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.grad(_whole_model(template, batch)))(parameters)
    store = allocate_host_store(template.spec, gradient_dtype="float32")
    for slabs, layer, tensors in zip(store.layers, template.spec.layers, parameters, strict=True):
        for spec, value in zip(layer.parameters, tensors, strict=True):
            slabs.set_master(spec.name, np.asarray(value))
    executor = _executor(template, _recompute(template, batch, 4), store, "bfloat16")
    executor.train_step(batch, 0.0)
    executor.close()
    errors = {
        f"{layer.name}.{s.name}": _relative_error(
            slabs.gradient[s.offset : s.offset + s.elements], np.asarray(value)
        )
        for slabs, layer, tensors in zip(store.layers, template.spec.layers, expected, strict=True)
        for s, value in zip(slabs.layout.segments, tensors, strict=True)
    }
    for name, error in errors.items():
        bound = MOST_BFLOAT16_ERROR * (2 if name.endswith(("A_log", "dt_bias")) else 1)
        if not error < bound:
            raise ArithmeticError(f"{family} in bfloat16: gradient error of {name} {error:.2e}")
    return {"family": family, "plan": "bfloat16", "relative_error": max(errors.values())}


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


def _recompute(template: ModelTemplate, batch: Batch, microbatches: int) -> Plan:
    return recompute_all(
        template.spec,
        [],
        batch_rows=batch.rows,
        sequence_length=batch.sequence_length,
        microbatches=microbatches,
    )


def _everything_on_host(template: ModelTemplate, batch: Batch, microbatches: int) -> Plan:
    """All boundaries and residuals leave the device: every path of the executor is used."""
    return _host_plan(template, batch, microbatches, lambda names: names, "everything_on_host")


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


#: In this order: what is cheap and decides the rest comes first.
SECTIONS: dict[str, Callable[[Sizes], Rows]] = {
    "paths": gpu_sections.paths,
    "transfers": transfers,
    "overlap": overlap,
    "parity": parity,
    "attention": gpu_sections.attention,
    "machine": gpu_sections.machine,
    "kernels": gpu_sections.kernels,
    "steps": gpu_sections.steps,
    "limits": gpu_sections.limits,
}

Report = dict[str, dict[str, Any]]


def run_sections(names: list[str], deadline: float, written: Callable[[Report], None]) -> Report:
    """Each section's rows, or its error with the traceback; `written` gets the report after each."""
    report: Report = {}
    for name in names:
        start = time.perf_counter()
        size = sizes(deadline)
        if size.over():
            found: dict[str, Any] = {"skipped": "the time was over"}
        else:
            try:
                found = {"rows": SECTIONS[name](size)}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        report[name] = {**found, "seconds": time.perf_counter() - start}
        print(_section_text(name, report[name]), flush=True)
        written(report)
        gc.collect()
    return report


def _section_text(name: str, section: dict[str, Any]) -> str:
    lines = [f"## {name} ({section['seconds']:.0f} s)", ""]
    if "error" in section:
        return "\n".join([*lines, "FAILED", "", "```", section["traceback"].rstrip(), "```", ""])
    if "skipped" in section:
        return "\n".join([*lines, f"skipped: {section['skipped']}", ""])
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
    parser.add_argument("--seconds", type=float, default=540.0, help="after which nothing new is begun")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results"))
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    set_runtime(os.environ)
    label = f"Device: {device_label(jax.devices()[0])}. {provenance()}"
    header = f"# Device check\n\n{label} JAX {jax.__version__}, backend {jax.default_backend()}.\n"
    print(header, flush=True)
    options.output.mkdir(parents=True, exist_ok=True)

    def write(report: Report) -> None:
        document = {
            "label": label, "jax": jax.__version__, "backend": jax.default_backend(), "sections": report
        }  # fmt: skip
        (options.output / "gpu_check.json").write_text(json.dumps(document, indent=1) + "\n")
        texts = [_section_text(name, section) for name, section in report.items()]
        (options.output / "gpu_check.md").write_text("\n".join([header, *texts]))

    report = run_sections(options.sections, deadline, write)
    if "machine" in report and "rows" in report["machine"]:
        text = dump_profile(gpu_sections.profile_of(sizes()))
        (options.output / "profile.yaml").write_text(text)
    return 1 if any("error" in section for section in report.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
