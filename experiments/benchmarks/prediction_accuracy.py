"""Predicted against measured step times, on this machine.

    python -m experiments.benchmarks.prediction_accuracy [--blocks 6] [--rounds 5] [--output FILE.md]

Seven plans of one model are simulated with kernels timed alone (`execution.calibrate`) and rates
measured on this machine, then trained. Rounds alternate between plans and medians are compared.
Expected on a quiet machine: each within 15 %, the same order, counted device bytes within 2 %.
About three minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.benchmarks.gpu_check import random_batch, random_store
from experiments.benchmarks.provenance import provenance
from lazyjax.batch import Batch
from lazyjax.execution.calibrate import calibrate, kernels_of
from lazyjax.execution.executor import Executor
from lazyjax.execution.host_update import HostUpdates
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.measure import MeasureOptions, measure_profile
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.baselines import keep_all, megatrain, recompute_all
from lazyjax.planning.costs import Costs, MeasuredKey, template_costs
from lazyjax.planning.machine import block_shapes, update_probe
from lazyjax.planning.plan import Boundary, LayerPlan, Plan
from lazyjax.planning.schedule import build_schedule
from lazyjax.planning.simulate import simulate
from lazyjax.specs import Tier

DTYPE = "float32"
RATE = 1e-5


def model(blocks: int) -> ModelTemplate:
    """About 3.3 M parameters a block."""
    return build_template(
        Qwen2Architecture(
            name=f"accuracy-{blocks}", vocab_size=4096, hidden_size=512, intermediate_size=1536,
            num_hidden_layers=blocks, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
            rms_norm_eps=1e-6, tie_word_embeddings=False, rope=Rope(theta=1e4), qkv_bias=True,
        )
    )  # fmt: skip


def plans(template: ModelTemplate, rows: int, length: int) -> dict[str, Plan]:
    """Plans that differ in what is kept, where, and in microbatches."""
    names = [template.kind(i).residual_names for i in range(len(template.spec.layers))]
    batch = {"rows": rows, "sequence_length": length, "microbatches": 2}
    last = len(names) - 1

    def on_host(choose: Callable[[Sequence[str]], Sequence[str]], tier: Tier) -> tuple[LayerPlan, ...]:
        return tuple(
            LayerPlan(
                boundary=Boundary.DEVICE if index in (0, last) else Boundary.HOST,
                saved=dict.fromkeys(choose(found), tier),
            )
            for index, found in enumerate(names)
        )

    base = recompute_all(template.spec, names, **batch)
    mlp = base.model_copy(
        update={"layers": on_host(lambda found: [n for n in found if n in ("gate", "up")], Tier.DEVICE)}
    )
    return {
        "recompute_all": base,
        "keep_all": keep_all(template.spec, names, **batch),
        "megatrain": megatrain(template.spec, names, **batch),
        "boundaries on host": base.model_copy(update={"layers": on_host(lambda found: [], Tier.HOST)}),
        "gate and up kept, boundaries on host": mlp,
        "everything on host": base.model_copy(update={"layers": on_host(lambda found: found, Tier.HOST)}),
        "recompute_all, update at once": base.model_copy(update={"update": "immediate"}),
    }


class Findings(NamedTuple):
    """Medians over all rounds: seconds and counted device bytes per plan, and calibrated costs."""

    seconds: dict[str, float]
    peak_device_bytes: dict[str, int]
    costs: Costs


def alternate(
    template: ModelTemplate, chosen: dict[str, Plan], batch: Batch, optimizer_name: str, rounds: int
) -> Findings:
    """Measures rates, times kernels and trains under every plan, again and again.

    All three share every round, so that a machine whose speed drifts gives each the same share of
    slow moments.
    """
    kernels = Kernels(template, data_mesh(), compute_dtype=DTYPE, gradient_dtype=DTYPE)
    optimizer = make_host_optimizer(optimizer_name)
    first = next(iter(chosen.values()))
    rows, length = first.microbatch_rows, first.sequence_length
    options = MeasureOptions(
        block_shapes(template, rows * length), DTYPE, transfer_bytes=2**22, update_elements=2**22, repeats=3
    )
    probes = {optimizer_name: update_probe(optimizer_name)}

    def costs_at(profile: HardwareProfile) -> Costs:
        return template_costs(
            template, profile, rows=rows, sequence_length=length, optimizer=optimizer,
            compute_dtype=DTYPE, gradient_dtype=DTYPE,
        )  # fmt: skip

    sizes = costs_at(load_profile("h800-paper")).sizes
    keys = kernels_of([build_schedule(plan, sizes) for plan in chosen.values()], kernels)
    store = random_store(template, gradient_dtype=DTYPE)
    executor = Executor(kernels, first, store, HostUpdates(store, optimizer), clip=ClipRule())
    profiles: list[HardwareProfile] = []
    kernel_seconds: dict[MeasuredKey, list[float]] = {key: [] for key in keys}
    step_seconds: dict[str, list[float]] = {name: [] for name in chosen}
    peak = dict.fromkeys(chosen, 0)
    for _ in range(rounds):
        profiles.append(measure_profile("here", options, probes))
        timed = calibrate(
            kernels, keys, rows=rows, sequence_length=length, repeats=3, working_sets=False
        ).seconds
        for key in keys:
            kernel_seconds[key].append(timed[key])
        for name, plan in chosen.items():
            executor.set_plan(plan)
            # The first steps compile and reach the steady state of deferred updates.
            results = [executor.train_step(batch, RATE) for _ in range(4)][2:]
            step_seconds[name] += [result.seconds for result in results]
            peak[name] = max(peak[name], *(result.peak_device_bytes for result in results))
    executor.close()
    costs = costs_at(median_profile(profiles, optimizer_name))
    return Findings(
        {name: statistics.median(seconds) for name, seconds in step_seconds.items()},
        peak,
        costs.with_measured({key: statistics.median(seconds) for key, seconds in kernel_seconds.items()}),
    )


def median_profile(profiles: Sequence[HardwareProfile], optimizer: str) -> HardwareProfile:
    """The profile whose every rate is the median of the measured ones."""

    def median(figure: str) -> float:
        return statistics.median(getattr(profile, figure) for profile in profiles)

    rates = ("h2d_bytes_per_second", "d2h_bytes_per_second", "duplex_factor", "matmul_flops_per_second")
    updates = statistics.median(p.host_update_parameters_per_second[optimizer] for p in profiles)
    return profiles[0].model_copy(
        update={rate: median(rate) for rate in rates}
        | {"host_update_parameters_per_second": {optimizer: updates}}
    )


def main() -> None:
    """Measures, simulates, trains, and prints the table."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--optimizer", default="hybrid8bit")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    template = model(options.blocks)
    chosen = plans(template, options.rows, options.length)
    batch = random_batch(options.rows, options.length, template.spec.vocabulary_size)
    found = alternate(template, chosen, batch, options.optimizer, options.rounds)
    predicted, predicted_bytes = {}, {}
    for name, plan in chosen.items():
        simulation = simulate(build_schedule(plan, found.costs.sizes), found.costs.operation_seconds)
        predicted[name], predicted_bytes[name] = simulation.period_seconds, simulation.peak_bytes[Tier.DEVICE]
    lines = [
        f"# Predicted and measured steps, {template.spec.parameter_count / 1e6:.1f} M parameters, "
        f"{options.rows} x {options.length} tokens, {DTYPE}",
        "",
        provenance(),
        "",
        "| plan | simulated s | measured s | simulated / measured | device MB simulated | measured |",
        "|---|---|---|---|---|---|",
    ]
    for name, seconds in found.seconds.items():
        lines.append(
            f"| {name} | {predicted[name]:.3f} | {seconds:.3f} | {predicted[name] / seconds:.3f} | "
            f"{predicted_bytes[name] / 1e6:.2f} | {found.peak_device_bytes[name] / 1e6:.2f} |"
        )
    pairs = list(itertools.combinations(chosen, 2))
    agreeing = sum((predicted[a] < predicted[b]) == (found.seconds[a] < found.seconds[b]) for a, b in pairs)
    worst = max(abs(predicted[name] / found.seconds[name] - 1) for name in chosen)
    lines += ["", f"Worst deviation {worst:.1%}; {agreeing} of {len(pairs)} pairs in the same order."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main()
