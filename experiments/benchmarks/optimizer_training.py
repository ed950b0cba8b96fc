"""Compares where training ends with 8-bit and with fp32 optimizer state.

    python -m experiments.benchmarks.optimizer_training

Trains the smoke model from random weights, streamed, 300 steps for each of three seeds, with
`fp32_adamw` and with `hybrid8bit`, and with `fp32_adamw` from weights rounded to bfloat16 to see how far
a small disturbance moves the result; then the first two with a clip norm so small that it always clips.
A seed fixes the weights, the split and the order of the data, so that the two optimizers of a pair see
the same batches. Prints the final evaluation losses and the ratio of their means.

Finished runs are kept in results/optimizer_training.json and not repeated; other settings (--rows,
--length, --steps) are other runs. Takes twenty minutes on two cores.
Expected: hybrid8bit's mean within 1 % of fp32_adamw's, in both tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import ml_dtypes

from experiments.benchmarks.provenance import provenance
from lazyjax.config import Config, load_config
from lazyjax.data.batches import Batches, read_batches
from lazyjax.data.chat import load_tokenizer
from lazyjax.execution.build import executor_of
from lazyjax.execution.executor import Executor
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.optim.clipping import ClipRule
from lazyjax.storage.host import allocate_host_store
from lazyjax.training.inputs import make_optimizer, read_architecture
from lazyjax.training.learning_rate import learning_rates
from lazyjax.training.start_plan import choose_plan

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "qwen27b_smoke.yaml"
RESULTS = pathlib.Path(__file__).parent / "results"
SOURCES = ("lazyjax", "experiments/benchmarks/optimizer_training.py", "experiments/configs")
OPTIMIZERS = ("fp32_adamw", "hybrid8bit")
#: fp32_adamw from weights rounded to bfloat16: how far the smallest disturbance moves the final loss.
CONTROL = "fp32_adamw, rounded start"
SEEDS = (0, 1, 2)
CLIP_NORMS = (1.0, 0.01)
ORDER = [
    (clip_norm, seed, optimizer) for clip_norm in CLIP_NORMS for seed in SEEDS for optimizer in OPTIMIZERS
]
ORDER += [(CLIP_NORMS[0], seed, CONTROL) for seed in SEEDS]
EVALUATED_ROWS = 200
#: The preset's rate and batch. A smaller batch takes a rate that is lower by the square root: with the
#: preset's own, gradient noise alone moves the final loss by more than what is to be resolved.
PRESET_RATE, PRESET_TOKENS = 2e-3, 1024
WARMUP_STEPS = 30


@dataclasses.dataclass(frozen=True)
class Run:
    """One training, and how it ended.

    Attributes:
        clipped_steps: steps whose gradient norm was above `clip_norm`.
        losses: mean -log p per target token of the held-out rows, before and after training.
    """

    optimizer: str
    clip_norm: float
    seed: int
    rows: int
    length: int
    steps: int
    learning_rate: float
    clipped_steps: int
    losses: tuple[float, float]
    seconds: float
    source: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What the run is, without how it went."""
        settings = (self.rows, self.length, self.steps, self.learning_rate)
        return (self.optimizer, self.clip_norm, self.seed, *settings)


def train(config: Config, kernels: Kernels, batches: Batches, label: str) -> Run:
    """Trains by `config`, with kernels that other runs share; `label` is an optimizer or `CONTROL`."""
    start = time.perf_counter()
    template = kernels.template
    store = allocate_host_store(template.spec, gradient_dtype=config.optimizer.gradient_dtype)
    for index, slabs in enumerate(store.layers):
        for name, value in init_parameters(template, index, jax.random.key(config.training.seed)).items():
            rounded = value.astype(ml_dtypes.bfloat16) if label == CONTROL else value
            slabs.set_master(name, rounded)
    executor = executor_of(
        kernels,
        choose_plan(config, template),
        store,
        make_optimizer(config),
        clip=ClipRule(config.optimizer.clip, config.optimizer.clip_norm),
    )
    assert config.training.steps is not None
    before = evaluate(executor, batches)
    clipped_steps = 0
    rates = learning_rates(config.optimizer, config.training.steps)
    for rate, batch in zip(rates, batches.training, strict=False):
        clipped_steps += executor.train_step(batch, float(rate)).gradient_norm > config.optimizer.clip_norm
    after = evaluate(executor, batches)
    assert executor.counts.applied == config.training.steps
    executor.close()
    return Run(
        label,
        config.optimizer.clip_norm,
        config.training.seed,
        config.data.rows,
        config.data.sequence_length,
        config.training.steps,
        config.optimizer.learning_rate,
        clipped_steps,
        (before, after),
        time.perf_counter() - start,
        provenance(*SOURCES),
    )


def evaluate(executor: Executor, batches: Batches) -> float:
    """Mean loss per target token of the held-out rows."""
    sums = [executor.evaluate(batch) for batch in batches.evaluation_batches()]
    return sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


def read_runs(file: pathlib.Path) -> list[Run]:
    """The runs finished so far."""
    if not file.exists():
        return []
    return [Run(**{**entry, "losses": tuple(entry["losses"])}) for entry in json.loads(file.read_text())]


def table(runs: list[Run]) -> str:
    """Markdown: one table per clip norm."""
    parts = []
    for clip_norm in CLIP_NORMS:
        chosen = [run for run in runs if run.clip_norm == clip_norm]
        if not chosen:
            continue
        lines = [f"## clip_norm {clip_norm}", ""]
        lines.append(
            "| optimizer | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean | clipped steps |"
        )
        lines.append("|---" * (len(SEEDS) + 3) + "|")
        means = {}
        for optimizer in (*OPTIMIZERS, CONTROL):
            if all(run.optimizer != optimizer for run in chosen):
                continue
            by_seed = {run.seed: run for run in chosen if run.optimizer == optimizer}
            losses = [by_seed[seed].losses[1] for seed in SEEDS if seed in by_seed]
            cells = [f"{by_seed[seed].losses[1]:.4f}" if seed in by_seed else "-" for seed in SEEDS]
            if len(losses) == len(SEEDS):
                means[optimizer] = statistics.mean(losses)
            cells.append(f"{means[optimizer]:.4f}" if optimizer in means else "-")
            clipped = sum(run.clipped_steps for run in by_seed.values())
            cells.append(f"{clipped} of {sum(run.steps for run in by_seed.values())}")
            lines.append(f"| {optimizer} | " + " | ".join(cells) + " |")
        before = statistics.mean(run.losses[0] for run in chosen)
        lines += ["", f"Before training {before:.4f}."]
        for optimizer in means:
            if optimizer != "fp32_adamw" and "fp32_adamw" in means:
                ratio = means[optimizer] / means["fp32_adamw"]
                lines[-1] += f" Mean of {optimizer} over mean of fp32_adamw: {ratio:.4f}."
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def report(runs: list[Run]) -> str:
    """The result file."""
    first = runs[0]
    words = (
        f"Smoke model, streamed, bf16; {first.steps} steps of {first.rows} x {first.length} tokens; "
        f"learning rate {first.learning_rate:g}, cosine, {WARMUP_STEPS} steps of warm-up; loss per target "
        f"token of {EVALUATED_ROWS} held-out rows after the last step."
    )
    sources = "\n".join(sorted({run.source for run in runs}))
    return f"# Training with 8-bit and with fp32 state\n\n{sources}\n\n{words}\n\n{table(runs)}\n"


def main() -> None:
    """Trains what has not been trained yet, prints and writes the table."""
    parser = argparse.ArgumentParser(description="Final losses with 8-bit and with fp32 optimizer state.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--only", choices=(*OPTIMIZERS, CONTROL), help="train this alone")
    parser.add_argument("--folder", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    file = arguments.folder / "optimizer_training.json"
    batch_and_steps = (arguments.rows, arguments.length, arguments.steps)
    learning_rate = float(f"{PRESET_RATE * (arguments.rows * arguments.length / PRESET_TOKENS) ** 0.5:.1e}")

    kernels = None
    wanted = []
    for clip_norm, seed, optimizer in ORDER:
        if arguments.only not in (None, optimizer):
            continue
        key = (optimizer, clip_norm, seed, *batch_and_steps, learning_rate)
        wanted.append(key)
        if any(run.key == key for run in read_runs(file)):
            continue
        settings = {
            "optimizer.name": optimizer.partition(",")[0],
            "optimizer.clip-norm": clip_norm,
            "optimizer.learning-rate": learning_rate,
            "optimizer.warmup-steps": WARMUP_STEPS,
            "training.seed": seed,
            "training.steps": arguments.steps,
            "data.seed": seed,
            "data.rows": arguments.rows,
            "data.sequence-length": arguments.length,
            "plan.microbatches": 1,
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        config = load_config(CONFIG, words)
        if kernels is None:
            template = build_template(read_architecture(config)[0])
            types = config.model.compute_dtype, config.optimizer.gradient_dtype
            kernels = Kernels(template, data_mesh(), *types)
        # The training order begins anew for every run.
        batches = read_batches(config.data, load_tokenizer(), EVALUATED_ROWS)
        run = train(config, kernels, batches, optimizer)
        print(
            f"{optimizer} clip {clip_norm} seed {seed}: {run.losses[1]:.4f}, {run.seconds:.0f} s",
            flush=True,
        )
        entries = [dataclasses.asdict(entry) for entry in [*read_runs(file), run]]
        file.write_text(json.dumps(entries, indent=1) + "\n")

    text = report([run for run in read_runs(file) if run.key in wanted])
    print(text)
    file.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
