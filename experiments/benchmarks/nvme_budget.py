"""A model whose training state is three times the memory that it is given, against the same run in memory.

    python -m experiments.benchmarks.nvme_budget [--blocks 86] [--limit-gib 1.5] [--steps 3] [--save]

Both runs are `lazyjax train` of random weights, bfloat16 with 8-bit state: one with everything that
layers own on NVMe, in a process whose data segment may not grow beyond the limit (RLIMIT_DATA: private
memory that can be written, all heaps, buffers and stacks; what is refused ends the run), the other in
memory without a limit. Expected: the same losses and gradient norms, bit for bit, and a peak of resident
memory (VmHWM, which also counts pages of files that are mapped) below the limit. A minute or two each on
two cores; writes about 5 GB.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from experiments.benchmarks.process_status import status_bytes
from experiments.benchmarks.provenance import provenance

RESULT = pathlib.Path(__file__).parent / "results" / "nvme_budget.md"
SOURCES = ("lazyjax", "experiments/benchmarks/nvme_budget.py")
_GIB = 2**30


def architecture(blocks: int) -> dict[str, Any]:
    """About 7.1 M parameters a block: few bytes in each of the copies that are under way."""
    return {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 2048,
        "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": blocks,
        "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 64, "rms_norm_eps": 1e-6,
        "initializer_range": 0.02, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip


class Outcome(NamedTuple):
    """What one process reports.

    Attributes:
        recorded: loss and gradient norm of every step.
        state_bytes: of masters, gradients and optimizer state.
        start_bytes: resident before anything of the model was there.
        peak_bytes: the most that was ever resident.
        data_bytes: private memory that could be written at the end, as the limit counts it.
    """

    recorded: list[tuple[float, float]]
    state_bytes: int
    start_bytes: int
    peak_bytes: int
    data_bytes: int
    seconds: float


def child(folder: pathlib.Path, blocks: int, steps: int, limit: int | None) -> None:
    """Trains and prints an `Outcome` as JSON; with a limit, with everything on NVMe."""
    # One arena for each core would reserve what nothing uses.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    from rich.console import Console

    from lazyjax.config import load_config
    from lazyjax.training import inputs, setup

    name = "nvme" if limit is not None else "memory"
    (folder / "model.json").write_text(json.dumps(architecture(blocks)))
    keys = {
        "model.architecture": folder / "model.json", "data.sequence-length": 64, "data.rows": 2,
        "data.batching": "padded", "data.take": 200, "plan.planner": "recompute_all",
        "training.steps": steps, "training.evaluate-rows": 0, "optimizer.learning-rate": 1e-3,
        "run.folder": folder / "runs", "run.name": name, "run.save-model": "false",
    }  # fmt: skip
    if limit is not None:
        keys |= {"plan.nvme-folder": folder / "nvme", "plan.on-nvme": "all"}
        # Limits of the parent's own; the hard one stays.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    config = load_config(None, [str(word) for key, value in keys.items() for word in (f"--{key}", value)])
    start_bytes, start = status_bytes("VmRSS"), time.perf_counter()
    console = Console(file=io.StringIO(), width=200)
    with setup.prepare(config, console) as prepared:
        prepared.trainer.run()
        optimizer = inputs.make_optimizer(config)
        spec = prepared.template.spec
        state_bytes = inputs.training_state_bytes(spec, optimizer, gradient_dtype="bfloat16")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    outcome = Outcome(
        [(record["loss"], record["gradient_norm"]) for record in records],
        state_bytes, start_bytes, status_bytes("VmHWM"), status_bytes("VmData"), time.perf_counter() - start,
    )  # fmt: skip
    print(json.dumps(outcome))


def run(folder: pathlib.Path, blocks: int, steps: int, limit: int | None) -> Outcome:
    """`child` in a process of its own.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    words = [f"--blocks={blocks}", f"--steps={steps}", f"--child={folder}"]
    if limit is not None:
        words.append(f"--limit-gib={limit / _GIB}")
    else:
        words.append("--limit-gib=0")
    command = [sys.executable, "-m", "experiments.benchmarks.nvme_budget", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return Outcome([(loss, norm) for loss, norm in figures[0]], *figures[1:])


def main() -> None:
    """Prints the table; exits with 1 where the runs differ or the limit was exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=86)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit-gib", type=float, default=1.5)
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    limit = int(options.limit_gib * _GIB)
    if options.child is not None:
        child(options.child, options.blocks, options.steps, limit or None)
        return
    with tempfile.TemporaryDirectory() as name:
        on_nvme = run(pathlib.Path(name), options.blocks, options.steps, limit)
        in_memory = run(pathlib.Path(name), options.blocks, options.steps, None)
    same = on_nvme.recorded == in_memory.recorded
    below = on_nvme.peak_bytes <= limit
    lines = [
        f"# Training state of {on_nvme.state_bytes / _GIB:.2f} GiB in {options.limit_gib:g} GiB",
        "",
        provenance(*SOURCES),
        "",
        "| | on NVMe | in memory |",
        "|---|---|---|",
    ]
    for words, figure in (
        ("peak of resident memory, GiB", "peak_bytes"),
        ("of it before the model, GiB", "start_bytes"),
        ("private writable memory at the end, GiB", "data_bytes"),
    ):
        pair = (getattr(one, figure) / _GIB for one in (on_nvme, in_memory))
        lines.append(f"| {words} | {' | '.join(f'{value:.2f}' for value in pair)} |")
    lines += [
        f"| seconds for {options.steps} steps, compiling and filling included "
        f"| {on_nvme.seconds:.0f} | {in_memory.seconds:.0f} |",
        "",
        f"Limit {options.limit_gib:g} GiB (RLIMIT_DATA of the run on NVMe), "
        f"{on_nvme.state_bytes / limit:.2f} times that in state: resident memory "
        f"{'stayed below' if below else 'EXCEEDED'} it.",
        "",
        f"Losses and gradient norms {'are the same, bit for bit' if same else 'DIFFER'}: "
        + ", ".join(f"{loss:.6f}" for loss, _ in on_nvme.recorded)
        + ("" if same else f" against {', '.join(f'{loss:.6f}' for loss, _ in in_memory.recorded)}"),
    ]
    print("\n".join(lines))
    if options.save:
        RESULT.write_text("\n".join(lines) + "\n")
    raise SystemExit(not (same and below))


if __name__ == "__main__":
    main()
