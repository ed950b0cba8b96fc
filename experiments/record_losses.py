"""Records the losses of a short smoke run, and how far rounding alone moves them.

    python -m experiments.record_losses      # about three minutes; writes tests/golden/smoke_losses.json

CPUs differ in their vector units, and so in the order of sums and in what is rounded to bfloat16. How much
that changes a loss depends on the step: each starts from weights that already differ. So the same arithmetic
is run in other ways that round otherwise: in float32, cut into other microbatches, with other tensors saved,
without LLVM's optimizations, and with narrower vector units. `spread` is the largest relative difference of
any of them from the run as it is configured; the test allows a few times that.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.benchmarks.provenance import ROOT, provenance

OUTPUT = ROOT / "tests" / "golden" / "smoke_losses.json"
#: Fewer steps, and a rule in place of the planner, whose plan depends on the machine.
SHORT = (
    "--training.steps", "6", "--training.evaluate-every", "0", "--training.evaluate-rows", "16",
    "--plan.planner", "recompute_all", "--plan.device-bytes", "null", "--run.save-model", "false",
)  # fmt: skip
#: Name -> what is changed in the command line, and XLA's flags.
VARIANTS: dict[str, tuple[tuple[str, ...], str]] = {
    "as configured": ((), ""),
    "float32": (("--model.compute-dtype", "float32"), ""),
    "eight microbatches": (("--plan.microbatches", "8"), ""),
    "everything kept": (("--plan.planner", "keep_all"), ""),
    "unoptimized": ((), "--xla_backend_optimization_level=0"),
    "AVX2": ((), "--xla_cpu_max_isa=AVX2"),
}


def curve(changes: Sequence[str], folder: pathlib.Path) -> dict[str, list[float]]:
    """Losses and gradient norms of the smoke run's steps, and its evaluations; records go to `folder`."""
    from rich.console import Console

    from lazyjax.config import load_config
    from lazyjax.training import setup

    words = [*SHORT, "--run.folder", str(folder), "--run.name", "smoke", *changes]
    config = load_config(ROOT / "experiments" / "configs" / "qwen27b_smoke.yaml", words)
    setup.train(config, Console(quiet=True))
    lines = [json.loads(line) for line in (folder / "smoke" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    return {
        "losses": [step["loss"] for step in steps],
        "gradient_norms": [step["gradient_norm"] for step in steps],
        "evaluations": [line["loss"] for line in lines if line["kind"] == "evaluation"],
    }


def spread(figures: Sequence[Sequence[float]]) -> float:
    """The largest relative difference of a point from the first curve's."""
    first, *others = (np.asarray(curve) for curve in figures)
    return float(np.abs(np.stack(others) / first - 1).max())


def main() -> None:
    """Runs every variant in a process of its own and writes the file."""
    curves = {}
    for name, (changes, flags) in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            program = "import json, pathlib; from experiments.record_losses import curve; "
            program += f"print(json.dumps(curve({changes}, pathlib.Path({folder!r}))))"
            environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(
                [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
            )
        if done.returncode:
            sys.exit(f"{name}: {done.stderr}")
        curves[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, [round(loss, 4) for loss in curves[name]["losses"]], flush=True)
    kinds = curves["as configured"]
    document: dict[str, Any] = {
        "recorded": provenance("lazyjax", "experiments/record_losses.py"),
        "variants": list(VARIANTS),
        **kinds,
        "spread": {kind: spread([found[kind] for found in curves.values()]) for kind in kinds},
    }
    OUTPUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
