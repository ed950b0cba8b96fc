"""Host memory of the training state, by what the operating system says is resident.

    python -m experiments.benchmarks.host_memory

Trains a model of 160 M parameters for two steps, streamed, with bf16 gradients, once with `hybrid8bit`
and once with `fp32_adamw`, each in a process of its own, and reads the resident set

- before the slabs and the optimizer state are allocated and after the second update of every layer; the
  slabs are shared anonymous mappings, which JAX does not use, so that the growth of shared memory is theirs;
- before and after they are released, everything else staying: the fall of the whole resident set.

Prints both per parameter, beside the bytes counted from shapes. Needs 3.5 GB; takes two minutes.
Expected: at most 8.1 bytes per parameter with hybrid8bit, 14.0 with fp32_adamw.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np

from experiments.benchmarks.process_status import status_fields
from experiments.benchmarks.provenance import ROOT, provenance
from lazyjax.batch import Batch
from lazyjax.execution.build import build_executor
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.plan.baselines import BASELINES
from lazyjax.storage.host import allocate_host_store
from lazyjax.training.inputs import training_state_bytes

RESULT = pathlib.Path(__file__).parent / "results" / "host_memory.md"
SOURCES = ("lazyjax", "experiments/benchmarks/host_memory.py")
OPTIMIZERS = ("hybrid8bit", "fp32_adamw")
ROWS, LENGTH, STEPS = 1, 16, 2
MODEL = Qwen2Architecture(
    name="memory-160M",
    vocab_size=32768,
    hidden_size=768,
    intermediate_size=2560,
    num_hidden_layers=18,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    rope=Rope(theta=1e4),
    qkv_bias=True,
)


def resident_bytes() -> dict[str, int]:
    """The resident set of this process: all of it, and its shared anonymous part (Linux)."""
    fields = status_fields()
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssShmem")}


def random_batch(seed: int) -> Batch:
    """Random tokens, all of them targets."""
    tokens_BT = np.random.default_rng(seed).integers(0, MODEL.vocab_size, (ROWS, LENGTH), dtype=np.int32)
    shape = tokens_BT.shape
    positions_BT = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    targets_BT = np.roll(tokens_BT, -1, axis=1)
    return Batch(tokens_BT, targets_BT, np.ones(shape, bool), np.ones(shape, np.int32), positions_BT)


def measure(optimizer_name: str) -> dict[str, float]:
    """Trains in this process; bytes of the training state, counted and resident."""
    template = build_template(MODEL)
    spec = template.spec
    optimizer = make_host_optimizer(optimizer_name)
    key = jax.random.key(0)
    for index in range(3):  # compiles what fills the store
        init_parameters(template, index, key)
    gc.collect()
    start = resident_bytes()
    store = allocate_host_store(spec, gradient_dtype="bfloat16")
    for index, slabs in enumerate(store.layers):
        for name, value in init_parameters(template, index, key).items():
            slabs.set_master(name, value)
    names = [template.kind(index).residual_names for index in range(len(spec.layers))]
    plan = BASELINES["recompute_all"](spec, names, batch_rows=ROWS, sequence_length=LENGTH)
    executor = build_executor(template, plan, store, optimizer, clip=ClipRule())
    for step in range(STEPS):
        result = executor.train_step(random_batch(step), 1e-3)
        assert np.isfinite(result.loss), result
    executor.flush()
    trained = resident_bytes()
    executor.close()
    gc.collect()
    closed = resident_bytes()
    del executor, store, slabs
    gc.collect()
    released = resident_bytes()
    return {
        "parameters": spec.parameter_count,
        "counted": training_state_bytes(spec, optimizer, gradient_dtype="bfloat16"),
        "growth": trained["RssShmem"] - start["RssShmem"],
        "fall": closed["VmRSS"] - released["VmRSS"],
        "left": released["RssShmem"] - start["RssShmem"],
        "process": trained["VmRSS"],
    }


def table(measured: dict[str, dict[str, float]]) -> str:
    """Markdown, bytes per parameter."""
    lines = [
        "| optimizer | counted | growth of shared memory | fall on release | whole process, GB |",
        "|---|---|---|---|---|",
    ]
    for name, figures in measured.items():
        per_parameter = [figures[key] / figures["parameters"] for key in ("counted", "growth", "fall")]
        cells = [f"{value:.3f}" for value in per_parameter] + [f"{figures['process'] / 1e9:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures each optimizer in its own process, prints and writes the table."""
    parser = argparse.ArgumentParser(description="Resident host memory of the training state.")
    parser.add_argument("--only", choices=OPTIMIZERS, help="measure one, in this process, and print JSON")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only)))
        return
    measured = {}
    for name in OPTIMIZERS:
        command = [sys.executable, "-m", "experiments.benchmarks.host_memory", "--only", name]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(done.stderr)
        measured[name] = json.loads(done.stdout.splitlines()[-1])
    parameters = measured[OPTIMIZERS[0]]["parameters"]
    text = (
        f"# Host memory of the training state\n\n{provenance(*SOURCES)}\n\n"
        f"{parameters / 1e6:.1f} M parameters, bf16 compute and gradients, after {STEPS} streamed steps; "
        f"bytes per parameter for weights, gradient and optimizer state.\n\n{table(measured)}\n"
    )
    print(text)
    RESULT.write_text(text)


if __name__ == "__main__":
    main()
