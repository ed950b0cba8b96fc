"""A run that is killed (SIGKILL) again and again, and resumed each time, against one that is not.

Command:  python -m experiments.benchmarks.kill_resume [--kills 50] [--seed 0] [--save]
A small model with boundaries and all that layers own on NVMe and a checkpoint after every step. Each process
kills itself at a moment drawn by the seed: at the n-th operation of a step, update, spill, array written
to a checkpoint, rename that commits one, or deletion of an old one. Then the run is resumed, until all
kills are used up and it finishes. Expected: the same records, once each, and the same parameters bit for
bit as the run that was never killed; about 5 s a kill on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.benchmarks.provenance import provenance

RESULT = pathlib.Path(__file__).parent / "results" / "kill_resume.md"
SOURCES = ("lazyjax", "experiments/benchmarks/kill_resume.py")
#: Where a process kills itself, and about how often a process of this run comes there in one step.
POINTS = {"operation": 40, "update": 3, "spill": 20, "array": 3, "commit": 1, "deletion": 1}
#: What may differ between two runs of the same arithmetic.
TIMES = (
    "step_seconds", "compile_seconds", "other_cpu_seconds", "tokens_per_second", "model_tflops", "host_bytes",
    "seconds",
)  # fmt: skip
ARCHITECTURE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 2048, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


class Moment(NamedTuple):
    """A process kills itself when it comes to `point` for the `visit`-th time."""

    point: str
    visit: int


def draw_moments(kills: int, seed: int) -> list[Moment]:
    """So many moments: every kind of point in turn, at a visit drawn from the first few steps."""
    rng = random.Random(seed)
    points = [list(POINTS)[number % len(POINTS)] for number in range(kills)]
    rng.shuffle(points)
    return [Moment(point, rng.randint(1, 5 * POINTS[point])) for point in points]


def arguments(folder: pathlib.Path, name: str, steps: int) -> list[str]:
    """The command line of the run; writes the files that it names."""
    (folder / "model.json").write_text(json.dumps(ARCHITECTURE))
    rows = [
        {"query": "What is " + " plus ".join(map(str, range(i % 7 + 2))) + "?", "response": f"It is {i}."}
        for i in range(40)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "model.architecture": folder / "model.json", "model.compute-dtype": "float32",
        "data.source": folder / "data.jsonl", "data.sequence-length": 64, "data.rows": 4,
        "data.batching": "padded", "data.train-fraction": 0.8, "optimizer.threads": 1,
        "optimizer.learning-rate": 1e-2, "plan.file": folder / "plan.json",
        "plan.nvme-folder": folder / "nvme",
        "training.steps": steps, "training.evaluate-rows": 4, "training.evaluate-every": 3,
        "checkpoints.every-steps": 1, "checkpoints.keep-last": 2,
        "run.folder": folder / "runs", "run.name": name, "run.save-model": "false",
    }  # fmt: skip
    return [str(word) for key, value in keys.items() for word in (f"--{key}", value)]


def write_plan(folder: pathlib.Path) -> None:
    """A plan with boundaries and all that layers own on the drive, for the run of `arguments`."""
    from lazyjax.config import load_config
    from lazyjax.models.registry import build_template
    from lazyjax.planning.plan.document import Boundary
    from lazyjax.specs import Part
    from lazyjax.training.inputs import read_architecture
    from lazyjax.training.start_plan import choose_plan

    words = arguments(folder, "plan", 1)
    for key in ("--plan.file", "--plan.nvme-folder"):
        del words[words.index(key) : words.index(key) + 2]
    config = load_config(None, [*words, "--plan.planner", "recompute_all", "--plan.microbatches", "2"])
    plan = choose_plan(config, build_template(read_architecture(config)[0]))
    layers = [layer.with_on_nvme(frozenset(Part)) for layer in plan.layers]
    layers[1:-1] = [layer.model_copy(update={"boundary": Boundary.NVME}) for layer in layers[1:-1]]
    plan.model_copy(update={"layers": tuple(layers), "prediction": None}).save(folder / "plan.json")


def process(folder: pathlib.Path, name: str, steps: int, moment: Moment | None) -> None:
    """One process of the run: begins it or goes on, and kills itself at `moment`; else leaves a digest."""
    import jax
    from rich.console import Console

    from lazyjax.config import load_config
    from lazyjax.training import setup
    from lazyjax.training.resume import ResumeError, read_resume

    # Every process compiles the same kernels.
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    run = folder / "runs" / name
    config, resume = load_config(None, arguments(folder, name, steps)), None
    if (run / "config.yaml").exists():
        try:
            config, resume = read_resume(run)
        except ResumeError:
            # Killed before its first checkpoint: begun again.
            run.rename(run.with_name(f"{name}-without-checkpoint-{os.getpid()}"))
    console = Console(file=io.StringIO(), width=200)
    with setup.prepare(config, console, resume) as prepared:
        if moment is not None:
            _arm(prepared.executor, moment)
        prepared.trainer.run()
        digest = hashlib.sha256()
        for layer, slabs in enumerate(prepared.store.layers):
            state = prepared.executor.updates.read_state(layer)
            for array in (slabs.hi, slabs.lo, *state.values()):
                digest.update(array.tobytes())
    (folder / f"{name}.digest").write_text(digest.hexdigest())


def _arm(executor: Any, moment: Moment) -> None:
    """Makes this process kill itself at the moment."""
    from lazyjax.storage.nvme import NvmeStore
    from lazyjax.training import checkpoints

    left = moment.visit

    def counted(action: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return action(*arguments, **keywords)

        return act

    match moment.point:
        case "operation":
            executor.on_operation = counted(executor.on_operation)
        case "update":
            executor.updates.update = counted(executor.updates.update)
        case "spill":
            NvmeStore.write = counted(NvmeStore.write)  # type: ignore[method-assign]
        case "array":
            checkpoints._save_arrays = counted(checkpoints._save_arrays)
        case "commit":
            checkpoints._sync_tree = counted(checkpoints._sync_tree)
        case "deletion":
            checkpoints._delete = counted(checkpoints._delete)


class Outcome(NamedTuple):
    """What a run recorded, without times, its parameters' digest, and what happened at each process."""

    records: list[dict[str, Any]]
    digest: str
    log: tuple[str, ...]


def drive(folder: pathlib.Path, name: str, steps: int, moments: Sequence[Moment]) -> Outcome:
    """Runs with one process after the other until it finishes.

    Raises:
        RuntimeError: a process ended otherwise than killed or finished.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lazyjax.training.setup", "lazyjax.training.resume"])
    log, run = [], folder / "runs" / name
    for moment in (*moments, None):
        child = context.Process(target=process, args=(folder, name, steps, moment))
        child.start()
        child.join()
        saved = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
        words = "to the end" if moment is None else f"{moment.point} {moment.visit}"
        log.append(f"{words}: exit {child.exitcode}, checkpoints {', '.join(saved) or 'none'}")
        if child.exitcode == 0:
            break
        if child.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"{name}: {log[-1]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
    return Outcome(records, (folder / f"{name}.digest").read_text(), tuple(log))


def compare(folder: pathlib.Path, moments: Sequence[Moment], steps: int) -> tuple[bool, Outcome]:
    """Whether the killed run equals the other in all that was recorded and trained."""
    write_plan(folder)
    whole = drive(folder, "whole", steps, ())
    killed = drive(folder, "killed", steps, moments)
    return killed.records == whole.records and killed.digest == whole.digest, killed


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    moments = draw_moments(options.kills, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        # Every process gets about three steps further, and saves them.
        equal, killed = compare(pathlib.Path(folder), moments, steps=4 * options.kills)
    kills = sum("exit -9" in line for line in killed.log)
    verdict = "equal bit for bit" if equal else "NOT EQUAL"
    summary = f"{kills} kills; records and parameters against the run that was not killed: {verdict}"
    text = "\n".join([summary, "", *(f"- {line}" for line in killed.log)])
    print(text)
    if options.save:
        title = "# A run killed and resumed"
        RESULT.write_text(f"{title}\n\n{provenance(*SOURCES)} Seed {options.seed}.\n\n{text}\n")
    return 0 if equal and kills == options.kills else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
