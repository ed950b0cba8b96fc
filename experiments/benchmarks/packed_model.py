"""Packed against padded rows with real weights: the same loss of every row, and tokens per second of both.

    python -m experiments.benchmarks.packed_model FOLDER [--length 2048] [--rounds 2] [--save]

FOLDER is a Hugging Face folder, e.g. of SmolLM2-135M (`experiments.convert_smollm2` makes one). Rows of
random tokens with lengths like MetaMathQA's (`experiments.benchmarks.packing`) fill sequences of 2048 tokens,
several to a sequence or one. First the loss of every row of one packed sequence is compared with that of the
row alone; then steps of one sequence each are timed in turns, float32. Takes about four minutes on two cores.
Expected: losses equal to 1e-5, and packed close to 2048 / 250 times as many tokens that are not padding a
second.
"""

from __future__ import annotations

import argparse
import pathlib
import time

import jax
import numpy as np

from experiments.benchmarks.packing import RATE, rows
from experiments.benchmarks.provenance import provenance
from lazyjax.batch import Batch
from lazyjax.data.loader import Batching, Loader, Settings
from lazyjax.data.tokens import TokenizedRows
from lazyjax.execution.build import executor_of
from lazyjax.execution.executor import Executor
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.huggingface.checkpoint import load_into, open_checkpoint
from lazyjax.models.registry import build_template, parse_hf_config
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.storage.host import allocate_host_store

BATCHINGS: tuple[Batching, ...] = ("padded", "packed")
#: Sequences of rows alone are multiples of this, so that few shapes are compiled.
_ALONE = 256
RESULT = pathlib.Path(__file__).parent / "results" / "packed_model.md"


def make_executor(folder: pathlib.Path, length: int) -> Executor:
    """The model of a folder, one sequence a step."""
    checkpoint = open_checkpoint(folder)
    template = build_template(parse_hf_config(checkpoint.config, name=folder.name))
    store = allocate_host_store(template.spec, gradient_dtype="float32")
    load_into(checkpoint, template, store)
    kernels = Kernels(template, data_mesh(), compute_dtype="float32", gradient_dtype="float32")
    plan = recompute_all(template.spec, [], batch_rows=1, sequence_length=length)
    return executor_of(
        kernels, plan, store, make_host_optimizer("hybrid8bit"), clip=ClipRule("global_norm", 1.0)
    )


def losses_of_rows(executor: Executor, packed: Batch) -> list[tuple[float, float]]:
    """Of each row of a packed sequence, the mean loss in it and alone."""
    logits_TV = executor.logits(packed)[0]
    segments_T, found = packed.segment_ids_BT[0], []
    for segment in range(1, int(segments_T.max()) + 1):
        inside = np.flatnonzero(segments_T == segment)
        counted = inside[packed.loss_mask_BT[0, inside] != 0]
        shifted = logits_TV[counted].astype(np.float64)
        shifted -= shifted.max(axis=-1, keepdims=True)
        targets = packed.targets_BT[0, counted]
        chosen = np.take_along_axis(shifted, targets[:, None], axis=-1)[:, 0]
        together = float(np.mean(np.log(np.exp(shifted).sum(axis=-1)) - chosen))
        total, weight = executor.evaluate(_alone(packed, inside))
        found.append((together, total / weight))
    return found


def _alone(packed: Batch, inside: np.ndarray) -> Batch:
    """One row of a packed sequence in a sequence of its own, padded to a multiple of `_ALONE`."""
    filling = -len(inside) % _ALONE

    def cut(array: np.ndarray) -> np.ndarray:
        return np.pad(array[:, inside], ((0, 0), (0, filling)))

    segments = cut(np.ones_like(packed.segment_ids_BT))
    return Batch(
        cut(packed.tokens_BT), cut(packed.targets_BT), cut(packed.loss_mask_BT), segments,
        cut(packed.positions_BT),
    )  # fmt: skip


def rates(
    executor: Executor, data: TokenizedRows, length: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Tokens that are not padding per second, and seconds a step; the first round is not counted."""
    loaders = {
        batching: Loader(data, np.arange(len(data)), Settings(1, length, batching), padding_token=0)
        for batching in BATCHINGS
    }
    tokens, seconds = dict.fromkeys(BATCHINGS, 0), dict.fromkeys(BATCHINGS, 0.0)
    for number in range(1 + rounds):
        for batching, loader in loaders.items():
            batch = next(loader)
            start = time.perf_counter()
            executor.train_step(batch, RATE)
            executor.flush()
            if number:
                seconds[batching] += time.perf_counter() - start
                tokens[batching] += batch.real_tokens
    return {key: (tokens[key] / seconds[key], seconds[key] / rounds) for key in BATCHINGS}


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULT.name}")
    options = parser.parse_args()
    data = rows(200)
    executor = make_executor(options.folder, options.length)
    packed = next(
        Loader(data, np.arange(len(data)), Settings(1, options.length, "packed", seed=1), padding_token=0)
    )
    losses = losses_of_rows(executor, packed)
    worst = max(abs(together / alone - 1) for together, alone in losses)
    print(f"{len(losses)} rows of one sequence: losses differ by at most {worst:.1e} of their value")
    jax.clear_caches()
    found = rates(executor, data, options.length, options.rounds)
    executor.close()
    lines = [
        f"# Packed and padded rows, {options.folder.name}, sequences of {options.length} tokens, float32",
        "",
        provenance("lazyjax", "experiments/benchmarks/packed_model.py"),
        "`python -m experiments.benchmarks.packed_model FOLDER --save`",
        f"{options.rounds} steps of one sequence of each batching in turns.",
        "",
        f"Mean loss of each of the {len(losses)} rows of a packed sequence against the row alone: they "
        f"differ by at most {worst:.1e} of their value ({', '.join(f'{alone:.4f}' for _, alone in losses)}).",
        "",
        "| batching | tokens/s | x padded | seconds a step |",
        "|---|---|---|---|",
        *(
            f"| {name} | {rate:,.1f} | {rate / found['padded'][0]:.2f} | {step:.1f} |"
            for name, (rate, step) in found.items()
        ),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.save:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
