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

from experiments.benchmarks.gpu_check import random_batch, random_store
from experiments.benchmarks.provenance import provenance
from lazyjax.batch import Batch
from lazyjax.execution.calibrate import calibrate, kernels_of
from lazyjax.execution.executor import Executor
from lazyjax.execution.host_update import HostUpdates
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.measure import MeasureOptions, measure_profile
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.baselines import keep_all, megatrain, recompute_all
from lazyjax.planning.costs import Costs, template_costs
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


def calibrated_costs(
    template: ModelTemplate, kernels: Kernels, chosen: Sequence[Plan], optimizer_name: str
) -> Costs:
    """Costs of microbatches as in `chosen`, from this machine's rates and timed kernels."""
    rows, length = chosen[0].microbatch_rows, chosen[0].sequence_length
    options = MeasureOptions(
        block_shapes(template, rows * length), DTYPE, transfer_bytes=2**22, update_elements=2**22
    )
    profile = measure_profile("here", options, {optimizer_name: update_probe(optimizer_name)})
    costs = template_costs(
        template, profile, rows=rows, sequence_length=length, optimizer=make_host_optimizer(optimizer_name),
        compute_dtype=DTYPE, gradient_dtype=DTYPE,
    )  # fmt: skip
    keys = kernels_of([build_schedule(plan, costs.sizes) for plan in chosen], kernels)
    found = calibrate(kernels, keys, rows=rows, sequence_length=length, working_sets=False)
    return costs.with_measured(found.seconds)


def measured(
    kernels: Kernels, chosen: dict[str, Plan], batch: Batch, optimizer_name: str, rounds: int
) -> dict[str, tuple[float, int]]:
    """Median step seconds and counted device bytes of each plan, in alternating rounds."""
    store = random_store(kernels.template, gradient_dtype=DTYPE)
    updates = HostUpdates(store, make_host_optimizer(optimizer_name))
    executor = Executor(kernels, next(iter(chosen.values())), store, updates, clip=ClipRule())
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    peak = dict.fromkeys(chosen, 0)
    for _ in range(rounds):
        for name, plan in chosen.items():
            executor.set_plan(plan)
            # The first steps compile and reach the steady state of deferred updates.
            results = [executor.train_step(batch, RATE) for _ in range(4)][2:]
            seconds[name] += [result.seconds for result in results]
            peak[name] = max(peak[name], *(result.peak_device_bytes for result in results))
    executor.close()
    return {name: (statistics.median(seconds[name]), peak[name]) for name in chosen}


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
    kernels = Kernels(template, data_mesh(), compute_dtype=DTYPE, gradient_dtype=DTYPE)
    costs = calibrated_costs(template, kernels, list(chosen.values()), options.optimizer)
    predicted = {}
    for name, plan in chosen.items():
        schedule = build_schedule(plan, costs.sizes)
        simulation = simulate(schedule, costs.operation_seconds)
        predicted[name] = (simulation.period_seconds, simulation.peak_bytes[Tier.DEVICE])
    batch = random_batch(options.rows, options.length, template.spec.vocabulary_size)
    found = measured(kernels, chosen, batch, options.optimizer, options.rounds)
    lines = [
        f"# Predicted and measured steps, {template.spec.parameter_count / 1e6:.1f} M parameters, "
        f"{options.rows} x {options.length} tokens, {DTYPE}",
        "",
        provenance(),
        "",
        "| plan | simulated s | measured s | simulated / measured | device MB simulated | measured |",
        "|---|---|---|---|---|---|",
    ]
    for name in chosen:
        (expected, expected_bytes), (seconds, peak) = predicted[name], found[name]
        lines.append(
            f"| {name} | {expected:.3f} | {seconds:.3f} | {expected / seconds:.3f} | "
            f"{expected_bytes / 1e6:.2f} | {peak / 1e6:.2f} |"
        )
    pairs = list(itertools.combinations(chosen, 2))
    agreeing = sum((predicted[a][0] < predicted[b][0]) == (found[a][0] < found[b][0]) for a, b in pairs)
    worst = max(abs(predicted[name][0] / found[name][0] - 1) for name in chosen)
    lines += ["", f"Worst deviation {worst:.1%}; {agreeing} of {len(pairs)} pairs in the same order."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main()
