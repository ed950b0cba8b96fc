"""Gain of packing: tokens that are not padding per second, packed against padded to 1024.

    python -m experiments.benchmarks.packing [--save]

Rows with lengths like MetaMathQA's (log-normal, median 220 tokens, sigma 0.5: mean about 250, a few over
800) become batches of 4 sequences of 1024 tokens in each batching. One small model, float32, trains on them
through the executor in one process, rounds of the batchings taking turns; rates are of all measured steps
together. Takes about two minutes on two cores; expected: packed at least 2.5 times padded.

Padded rows waste what packing saves: at a mean of 250 tokens a sequence of 1024 holds 4.1 rows, so 4.1 is
the most that can be gained, less what the attention of other segments costs.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import get_args

import jax
import numpy as np

from experiments.benchmarks.provenance import provenance
from lazyjax.data.loader import Batching, Loader, Settings
from lazyjax.data.tokens import TokenizedRows
from lazyjax.execution.build import executor_of
from lazyjax.execution.executor import Executor
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.storage.host import allocate_host_store

ROWS, LENGTH, VOCABULARY = 4, 1024, 4096
MEDIAN_TOKENS, SIGMA = 220, 0.5
RATE = 1e-4
#: Rounds before the clock counts: every shape compiles in its first.
WARM_UP = 2
RESULT = pathlib.Path(__file__).parent / "results" / "packing.md"


def model() -> ModelTemplate:
    """A Qwen2-type model of about 6 M parameters."""
    return build_template(
        Qwen2Architecture(
            name="packing",
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=64,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            rope=Rope(theta=1e4),
            qkv_bias=True,
        )
    )


def rows(count: int, *, seed: int = 0) -> TokenizedRows:
    """Rows of random tokens; the second half of each is its response."""
    random = np.random.default_rng(seed)
    lengths_R = np.exp(random.normal(np.log(MEDIAN_TOKENS), SIGMA, count)).round().astype(np.int64)
    lengths_R = np.clip(lengths_R, 16, LENGTH)
    within = [np.arange(length) * 2 >= length for length in lengths_R]
    return TokenizedRows(
        tokens_N=random.integers(0, VOCABULARY, int(lengths_R.sum()), dtype=np.int32),
        response_N=np.concatenate(within),
        starts_S=np.concatenate([[0], np.cumsum(lengths_R)]),
        source_R=np.arange(count),
        rows_read=count,
        truncated=0,
        dropped=0,
    )


def make_executor(template: ModelTemplate) -> Executor:
    """A fresh model of its own for each batching."""
    store = allocate_host_store(template.spec, gradient_dtype="float32")
    for index, slabs in enumerate(store.layers):
        for name, value in init_parameters(template, index, jax.random.key(0)).items():
            slabs.set_master(name, value)
    kernels = Kernels(template, data_mesh(), compute_dtype="float32", gradient_dtype="float32")
    plan = recompute_all(template.spec, [], batch_rows=ROWS, sequence_length=LENGTH)
    optimizer = make_host_optimizer("hybrid8bit")
    return executor_of(kernels, plan, store, optimizer, clip=ClipRule("global_norm", 1.0))


def measure(rounds: int) -> list[tuple[str, float, float, float]]:
    """(batching, tokens that are not padding per second, padding share, seconds a step)."""
    template, data = model(), rows(2000)
    executors, loaders = {}, {}
    for batching in get_args(Batching):
        executors[batching] = make_executor(template)
        settings = Settings(ROWS, LENGTH, batching)
        loaders[batching] = Loader(data, np.arange(len(data)), settings, padding_token=0)
    tokens = dict.fromkeys(loaders, 0)
    slots = dict.fromkeys(loaders, 0)
    seconds = dict.fromkeys(loaders, 0.0)
    for round_number in range(WARM_UP + rounds):
        for batching, loader in loaders.items():
            batch = next(loader)
            start = time.perf_counter()
            executors[batching].train_step(batch, RATE)
            executors[batching].flush()
            if round_number >= WARM_UP:
                seconds[batching] += time.perf_counter() - start
                tokens[batching] += batch.real_tokens
                slots[batching] += batch.tokens_BT.size
        print(f"round {round_number}: " + ", ".join(f"{k} {v:.1f} s" for k, v in seconds.items()))
    for executor in executors.values():
        executor.close()
    return [
        (key, tokens[key] / seconds[key], 1 - tokens[key] / slots[key], seconds[key] / rounds)
        for key in loaders
    ]


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULT.name}")
    options = parser.parse_args()
    found = measure(options.rounds)
    padded = next(rate for batching, rate, *_ in found if batching == "padded")
    lines = [
        f"# Packing, {ROWS} sequences of {LENGTH} tokens, lengths like MetaMathQA's",
        "",
        provenance("lazyjax", "experiments/benchmarks/packing.py"),
        "`python -m experiments.benchmarks.packing --save`",
        f"{options.rounds} steps of each batching in turns; rates count tokens that are not padding.",
        "",
        "| batching | tokens/s | x padded | padding | seconds a step |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {rate:,.0f} | {rate / padded:.2f} | {share:.1%} | {step:.2f} |"
            for name, rate, share, step in found
        ),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.save:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
