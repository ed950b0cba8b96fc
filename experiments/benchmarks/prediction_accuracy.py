"""Predicted against measured step times, on this machine.

    python -m experiments.benchmarks.prediction_accuracy [--blocks 5] [--rounds 9] [--output FILE.md]

Nine plans of one model are simulated with kernels timed alone (`execution.calibrate`), rates
measured on this machine, what compute loses to copies and updates on its cores among them, then trained.
Rounds alternate between plans and medians are compared. Expected on a quiet machine: each within
15 %, the same order where predictions differ by more than the noise, counted device bytes within
2 %. About five minutes on two cores. With five rounds the order of close plans may still be noise.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from experiments.benchmarks.gpu_models import random_batch, random_store
from experiments.benchmarks.provenance import provenance
from lazyjax.batch import Batch
from lazyjax.execution.build import executor_of
from lazyjax.execution.calibrate import calibrate, kernels_of
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.measure import MeasureOptions, measure_profile
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.probes import block_shapes, update_probe
from lazyjax.planning.costs.seconds import Costs, MeasuredKey, template_costs
from lazyjax.planning.plan.baselines import keep_all, megatrain, recompute_all
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.planning.program.simulate import simulate
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
    batch = {"batch_rows": rows, "sequence_length": length, "microbatches": 2}
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
        "recompute_all, 4 microbatches": recompute_all(template.spec, names, **(batch | {"microbatches": 4})),
        "keep_all, 4 microbatches": keep_all(template.spec, names, **(batch | {"microbatches": 4})),
    }


class Findings(NamedTuple):
    """What all rounds found.

    Attributes:
        seconds: of each plan's steps, one median per round.
        peak_device_bytes: counted by the executor, per plan.
        costs: calibrated, per rows of a microbatch.
    """

    seconds: dict[str, list[float]]
    peak_device_bytes: dict[str, int]
    costs: dict[int, Costs]


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
    length = first.sequence_length
    sizes_of_rows = sorted({plan.microbatch_rows for plan in chosen.values()})
    options = MeasureOptions(
        block_shapes(template, first.microbatch_rows * length), DTYPE,
        transfer_bytes=2**23, update_elements=2**22, repeats=3,
    )  # fmt: skip
    probe = update_probe(optimizer_name)

    def costs_at(profile: HardwareProfile, rows: int) -> Costs:
        return template_costs(
            template, profile, microbatch_rows=rows, sequence_length=length, optimizer=optimizer,
            compute_dtype=DTYPE, gradient_dtype=DTYPE,
        )  # fmt: skip

    some_profile = load_profile("h800-paper")
    keys = {}
    for rows in sizes_of_rows:
        sizes = costs_at(some_profile, rows).sizes
        plans_of_size = [plan for plan in chosen.values() if plan.microbatch_rows == rows]
        keys[rows] = kernels_of([build_schedule(plan, sizes) for plan in plans_of_size], kernels)
    store = random_store(template, gradient_dtype=DTYPE)
    executor = executor_of(kernels, first, store, optimizer, clip=ClipRule())
    profiles: list[HardwareProfile] = []
    kernel_seconds: dict[tuple[int, MeasuredKey], list[float]] = defaultdict(list)
    step_seconds: dict[str, list[float]] = {name: [] for name in chosen}
    peak = dict.fromkeys(chosen, 0)
    for plan in chosen.values():
        executor.set_plan(plan)
        executor.train_step(batch, RATE)  # compiles
    for _ in range(rounds):
        profiles.append(measure_profile("here", options, {optimizer_name: probe}))
        for rows in sizes_of_rows:
            timed = calibrate(
                kernels,
                keys[rows],
                microbatch_rows=rows,
                sequence_length=length,
                repeats=3,
                working_sets=False,
            )
            for key, seconds in timed.seconds.items():
                kernel_seconds[rows, key].append(seconds)
        for name, plan in chosen.items():
            executor.set_plan(plan)
            # The first step has no deferred update to do.
            results = [executor.train_step(batch, RATE) for _ in range(3)][1:]
            step_seconds[name].append(statistics.median(result.seconds for result in results))
            peak[name] = max(peak[name], *(result.peak_device_bytes for result in results))
    executor.close()
    profile = median_profile(profiles, optimizer_name)
    costs = {
        rows: costs_at(profile, rows).with_measured(
            {key: statistics.median(kernel_seconds[rows, key]) for key in keys[rows]}
        )
        for rows in sizes_of_rows
    }
    return Findings(step_seconds, peak, costs)


class Prediction(NamedTuple):
    """Period with and without contention, in seconds, and device bytes of one plan."""

    contended_seconds: float
    independent_seconds: float
    device_bytes: int


def predict(plan: Plan, found: Findings) -> Prediction:
    """Simulates a plan with calibrated costs."""
    costs = found.costs[plan.microbatch_rows]
    schedule = build_schedule(plan, costs.sizes)
    alone = simulate(schedule, costs.operation_seconds)
    contended = simulate(schedule, costs.operation_seconds, costs.contention)
    return Prediction(contended.period_seconds, alone.period_seconds, alone.peak_bytes[Tier.DEVICE])


def kendall_tau(predicted: Sequence[float], measured: Sequence[float], noise: float) -> tuple[float, int]:
    """(concordant - discordant) / pairs, and the pairs, of those predicted to differ by more than `noise`."""
    score, pairs = 0, 0
    for a, b in itertools.combinations(range(len(predicted)), 2):
        if abs(predicted[a] - predicted[b]) <= noise * min(predicted[a], predicted[b]):
            continue
        pairs += 1
        score += 1 if (predicted[a] < predicted[b]) == (measured[a] < measured[b]) else -1
    return (score / pairs if pairs else 1.0), pairs


def median_profile(profiles: Sequence[HardwareProfile], optimizer: str) -> HardwareProfile:
    """The profile whose every rate is the median of the measured ones."""

    def median(figure: str) -> float:
        return statistics.median(getattr(profile, figure) for profile in profiles)

    rates = (
        "h2d_bytes_per_second", "d2h_bytes_per_second", "slab_bytes_per_second", "duplex_factor",
        "matmul_flops_per_second", "update_contention", "copy_contention",
    )  # fmt: skip
    updates = statistics.median(p.host_update_parameters_per_second[optimizer] for p in profiles)
    return profiles[0].model_copy(
        update={rate: median(rate) for rate in rates}
        | {"host_update_parameters_per_second": {optimizer: updates}}
    )


def main() -> None:
    """Measures, simulates, trains, and prints the table."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--optimizer", default="hybrid8bit")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    # Compute is one queue in every schedule, as on a GPU; XLA:CPU would otherwise run kernels of two
    # microbatches side by side.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    template = model(options.blocks)
    chosen = plans(template, options.rows, options.length)
    batch = random_batch(options.rows, options.length, template.spec.vocabulary_size)
    found = alternate(template, chosen, batch, options.optimizer, options.rounds)
    predicted = {name: predict(plan, found) for name, plan in chosen.items()}
    measured = {name: statistics.median(seconds) for name, seconds in found.seconds.items()}
    # Half the distance between the quartiles of a plan's rounds, relative to their median.
    spreads = []
    for name, rounds in found.seconds.items():
        low, _, high = statistics.quantiles(rounds, n=4)
        spreads.append((high - low) / 2 / measured[name])
    noise = statistics.median(spreads)
    contention = next(iter(found.costs.values())).contention
    lines = [
        f"# Predicted and measured steps, {template.spec.parameter_count / 1e6:.1f} M parameters, "
        f"{options.rows} x {options.length} tokens, {DTYPE}",
        "",
        provenance(),
        "",
        f"Rounds: {options.rounds}. A second of host updates costs the compute beside it "
        f"{contention.updates:.2f} s, a second of copies {contention.copies:.2f} s (measured once "
        "a round, medians).",
        "",
        "| plan | simulated s, no contention | simulated s | measured s | simulated / measured "
        "| device MB simulated | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seconds in measured.items():
        expected = predicted[name]
        lines.append(
            f"| {name} | {expected.independent_seconds:.3f} | {expected.contended_seconds:.3f} | "
            f"{seconds:.3f} | {expected.contended_seconds / seconds:.3f} | "
            f"{expected.device_bytes / 1e6:.2f} | {found.peak_device_bytes[name] / 1e6:.2f} |"
        )
    times = [predicted[name].contended_seconds for name in chosen]
    tau, pairs = kendall_tau(times, [measured[name] for name in chosen], noise)
    worst = max(abs(predicted[name].contended_seconds / measured[name] - 1) for name in chosen)
    alone = max(abs(predicted[name].independent_seconds / measured[name] - 1) for name in chosen)
    worst_bytes = max(
        abs(predicted[name].device_bytes / found.peak_device_bytes[name] - 1) for name in chosen
    )
    lines += [
        "",
        f"Worst deviation of seconds {worst:.1%} (without contention {alone:.1%}), of device bytes "
        f"{worst_bytes:.2%}. Kendall's tau {tau:.2f} over the {pairs} pairs predicted to differ by more than "
        f"the noise of the measured steps ({noise:.1%}, half the interquartile range over rounds).",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main()
