"""Sections of the device check about the library's own choices: limits, ways, attention, rates, steps."""

from __future__ import annotations

import functools
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.gpu_models import MIB, Rows, Sizes, random_batch, random_store, shrunk_7b
from lazyjax.execution.attention_choice import FORMS_TO_TRY, Shape, timed_form
from lazyjax.execution.build import build_executor
from lazyjax.execution.calibrate import calibrate
from lazyjax.execution.kernels import Kernels, data_mesh, first_axis
from lazyjax.execution.slab_paths import PATHS, fastest_path
from lazyjax.hardware.drive import aligned_bytes
from lazyjax.hardware.measure import MeasureOptions, capacities, measure_profile
from lazyjax.hardware.memory import host_memory_bytes
from lazyjax.hardware.profile import HardwareProfile
from lazyjax.models.registry import architecture, build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.probes import block_shapes, update_probe
from lazyjax.planning.costs.seconds import Costs, measured_key, model_flops, template_costs
from lazyjax.planning.plan.baselines import BASELINES, PUBLISHED, recompute_all, without_nvme
from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.question import Request, microbatch_counts
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.search import fits, predict
from lazyjax.planning.planner.service import InfeasibleError, residual_names, solve_cached
from lazyjax.planning.program.schedule import COMPUTE_ACTIONS, build_schedule
from lazyjax.specs import Tier
from lazyjax.storage.host import HostMemoryError

#: Bytes of host memory per parameter that training takes: masters, gradient and 8-bit state.
_HOST_BYTES = 8.1
_BUDGET = 16 * 2**30


def limits(size: Sizes) -> Rows:
    """Whether the allocators give what plans count on: most of the device, and more than 64 GiB pinned."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    rows: Rows = [
        {"limit": name, "value": os.environ[name]}
        for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "XLA_FLAGS")
        if name in os.environ
    ]
    rows += [{"limit": name, "value": value} for name, (value, _) in capacities(device).items()]
    if stats is not None:
        most = int(0.9 * (stats["bytes_limit"] - stats["bytes_in_use"]))
        rows.append({"limit": "allocator", "value": stats["bytes_limit"], "reached": _allocates(most)})
    wanted = 4 * MIB if device.platform == "cpu" else min(66 * 2**30, int(0.6 * host_memory_bytes()))
    here = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    chunk, pinned = jnp.zeros(min(wanted, 2**30), jnp.uint8), []
    for _ in range(wanted // chunk.nbytes):
        if size.over():
            break
        pinned.append(jax.block_until_ready(jax.device_put(chunk, here)))
    rows.append({"limit": "pinned host memory", "value": wanted, "reached": chunk.nbytes * len(pinned)})
    return rows


def _allocates(size: int) -> int:
    """`size` if the device gives that much at once, else an error."""
    return int(jax.block_until_ready(jnp.zeros(size, jnp.uint8)).nbytes)


def paths(size: Sizes) -> Rows:
    """Every way of slabs to the device (`lazyjax.execution.slab_paths`), and which would be taken.

    Beside each: how long a put holds its caller up, and the rate while as many bytes come back, that of
    both directions together.
    """
    choice = fastest_path(first_axis(data_mesh()), PATHS, size.transfer_bytes)
    rows: Rows = []
    for name, rate in choice.bytes_per_second.items():
        row = {"way": name, "GB_per_second": rate / 1e9, "taken": name == choice.name}
        rows.append(row | _traffic(name, size))
    return [*rows, {"way": choice.name, "reason": choice.reason}]


def _traffic(name: str, size: Sizes) -> dict[str, float]:
    """Medians of a way in use: the call's own milliseconds, and GB/s of both directions at once."""
    sharding = first_axis(data_mesh())
    slab = aligned_bytes(size.transfer_bytes).view(np.uint16)
    slab[:] = 1
    resident = jax.block_until_ready(jax.device_put(slab, sharding, may_alias=False))
    here = sharding.with_memory_kind("pinned_host")
    path = PATHS[name](sharding)
    held, both = [], []
    try:
        for _ in range(size.repeats + 1):
            start = time.perf_counter()
            sent = path.send([slab])
            held.append(time.perf_counter() - start)
            jax.block_until_ready(sent)
            start = time.perf_counter()
            back = jax.device_put(resident, here)
            jax.block_until_ready((path.send([slab]), back))
            both.append(2 * slab.nbytes / (time.perf_counter() - start))
    finally:
        path.close()
    return {
        "put_milliseconds": 1e3 * statistics.median(held[1:]),
        "both_ways_GB_per_second": statistics.median(both[1:]) / 1e9,
    }


def attention(size: Sizes) -> Rows:
    """Each form on one row of a Qwen2.5-7B layer: seconds of both passes, and bytes of the program."""
    rows: Rows = []
    heads = (28, 4, 128) if jax.default_backend() != "cpu" else (4, 2, 16)
    for tokens in size.attention_tokens:
        for name in FORMS_TO_TRY:
            if size.over():
                return rows
            shape = Shape(1, tokens, *heads, "bfloat16")
            row: dict[str, Any] = {"tokens": tokens, "form": name}
            try:
                seconds, temporary = timed_form(name, shape)
                row |= {"seconds": seconds, "temporary_MiB": temporary / MIB}
            except Exception as error:  # a form that is missing is a result
                row["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            rows.append(row)
    return rows


@functools.cache
def measured_profile(model: str, tokens: int, transfer_bytes: int, repeats: int) -> HardwareProfile:
    """Constants of the machine in use, for a model's products."""
    template = _template(model, None)
    options = MeasureOptions(
        block_shapes(template, tokens), _dtype(), transfer_bytes=transfer_bytes, update_elements=8 * MIB,
        repeats=repeats, nvme_folder=pathlib.Path(tempfile.gettempdir()), nvme_bytes=8 * transfer_bytes,
    )  # fmt: skip
    return measure_profile("here", options, {"hybrid8bit": update_probe("hybrid8bit")})


def machine(size: Sizes) -> Rows:
    """Constants that plans are made with; `gpu_check` writes them as a profile."""
    profile = profile_of(size)
    return [
        {"figure": name, "value": _figure(profile, name), "source": profile.sources[name]}
        for name in sorted(profile.figure_names())
    ]


def _figure(profile: HardwareProfile, name: str) -> Any:
    """A figure by its name among the sources; those of updates have the optimizer behind a point."""
    field, _, optimizer = name.partition(".")
    value = getattr(profile, field)
    return value[optimizer] if optimizer else value


def kernels(size: Sizes) -> Rows:
    """Every kernel of a step that recomputes all, timed, beside what the constants of `machine` predict."""
    rows: Rows = []
    microbatch_rows = size.step_rows // size.step_microbatches
    for model, blocks in size.models:
        if size.over():
            break
        template = _template(model, blocks)
        costs = template_costs(
            template, profile_of(size), microbatch_rows=microbatch_rows, sequence_length=size.step_tokens,
            optimizer=make_host_optimizer("hybrid8bit"), compute_dtype=_dtype(),
        )  # fmt: skip
        plan = recompute_all(
            template.spec, [], batch_rows=size.step_rows, sequence_length=size.step_tokens,
            microbatches=size.step_microbatches,
        )  # fmt: skip
        schedule = build_schedule(plan, costs.sizes)
        predicted = {
            measured_key(operation, template.spec): costs.operation_seconds(operation)
            for operation in schedule.operations
            if operation.action in COMPUTE_ACTIONS
        }
        for key, seconds in predicted.items():
            if size.over():
                break
            timed = calibrate(
                Kernels(template, data_mesh(), _dtype()), [key], microbatch_rows=microbatch_rows,
                sequence_length=size.step_tokens, repeats=size.repeats, working_sets=False,
            ).seconds[key]  # fmt: skip
            rows.append(
                {
                    "model": template.spec.name, "kernel": f"{key.kind} {key.phase.value}",
                    "accumulates": key.accumulates, "last": key.last, "predicted_seconds": seconds,
                    "measured_seconds": timed, "ratio": seconds / timed,
                }
            )  # fmt: skip
    return rows


def profile_of(size: Sizes) -> HardwareProfile:
    """Of the machine in use, measured at the first call."""
    tokens = size.step_rows * size.step_tokens // size.step_microbatches
    return measured_profile(size.models[0][0], tokens, size.transfer_bytes, size.repeats)


def _dtype() -> str:
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _template(model: str, blocks: int | None) -> ModelTemplate:
    """A model by name, with its first blocks only where there is not room for all."""
    config = shrunk_7b() if model == "shrunk" else architecture(model)
    if blocks is not None:
        changes: dict[str, Any] = {"num_hidden_layers": blocks, "name": f"{config.name}, {blocks} blocks"}
        if "layer_types" in type(config).model_fields:
            changes["layer_types"] = config.layer_types[:blocks]  # type: ignore[attr-defined]
        config = config.model_copy(update=changes)
    return build_template(config)


def steps(size: Sizes) -> Rows:
    """Streamed steps under the planner's plan and the published rules: predicted and measured."""
    rows: Rows = []
    for model, blocks in size.models:
        if size.over():
            break
        template = _template(model, blocks)
        if template.spec.parameter_count * _HOST_BYTES > 0.9 * host_memory_bytes():
            rows.append({"model": template.spec.name, "note": "host memory does not hold it"})
            continue
        try:
            store = random_store(template)
        except HostMemoryError as error:
            rows.append({"model": template.spec.name, "note": str(error)})
            continue
        for budget in (_BUDGET, None) if jax.default_backend() != "cpu" else (None,):
            request = build_request(
                template, profile_of(size), batch_rows=size.step_rows, sequence_length=size.step_tokens,
                compute_dtype=_dtype(), device_bytes=budget, nvme_bytes=0,
            )  # fmt: skip
            for name, plan in _plans(request):
                if size.over():
                    break
                memory = "all" if budget is None else budget / 2**30
                row = {"model": template.spec.name, "device_GiB": memory, "plan": name}
                rows.append(row | _step(template, request, plan, store, size))
    return rows


def _plans(request: Request) -> Iterator[tuple[str, Plan]]:
    """The planner's plan, and each published rule with the fewest microbatches that fit."""
    try:
        yield "lazyjax", solve_cached(request, None, time_limit_seconds=5.0)[0]
    except InfeasibleError:
        return
    for name in PUBLISHED:
        for count in microbatch_counts(request.batch_rows):
            plan = without_nvme(
                BASELINES[name](
                    request.spec, residual_names(request), batch_rows=request.batch_rows,
                    sequence_length=request.sequence_length, microbatches=count,
                    interlayer_home="device" if count == 1 else "host", **request.made_for,
                )
            )  # fmt: skip
            if fits(request, predict(request, plan)):
                yield name, plan
                break


def _step(template: ModelTemplate, request: Request, plan: Plan, store: Any, size: Sizes) -> dict[str, Any]:
    """Predicted and measured figures of a plan; an error is a figure, too."""
    batch = random_batch(plan.batch_rows, plan.sequence_length, template.spec.vocabulary_size)
    expected = predict(request, plan)
    costs = request.costs(plan.microbatch_rows)
    assert isinstance(costs, Costs)
    executed = costs.executed_flops(build_schedule(plan, request.sizes(plan.microbatch_rows)))
    row: dict[str, Any] = {"microbatches": plan.microbatches, "predicted_seconds": expected.period_seconds}
    try:
        executor = build_executor(
            template, plan, store, make_host_optimizer("hybrid8bit"), compute_dtype=_dtype(), clip=ClipRule()
        )
        seconds = []
        for number in range(2 + size.repeats):
            start = time.perf_counter()
            result = executor.train_step(batch, 1e-5)
            if number > 1:
                seconds.append(time.perf_counter() - start)
            if number > 2 and size.over():
                break
        executor.close()
    except Exception as error:  # one plan that fails is not the end of the others
        return row | {"note": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    measured = statistics.median(seconds)
    stats = jax.devices()[0].memory_stats()
    return row | {
        "measured_seconds": measured,
        "tokens_per_second": batch.real_tokens / measured,
        "model_TFLOPS": model_flops(template.spec, batch.rows, batch.sequence_length) / measured / 1e12,
        "executed_TFLOPS": executed / measured / 1e12,
        "predicted_device_GB": expected.peak_bytes[Tier.DEVICE.value] / 1e9,
        "counted_device_GB": result.peak_device_bytes / 1e9,
        "allocator_peak_GB": stats["peak_bytes_in_use"] / 1e9 if stats else None,
        "loss": result.loss,
    }
