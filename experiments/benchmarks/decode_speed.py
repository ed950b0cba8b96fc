"""Batched decoding: against Transformers' generate, and against its own cost model.

    python -m experiments.benchmarks.decode_speed --model SMOLLM2_FOLDER --peer-python PATH/python
    python -m experiments.benchmarks.decode_speed --model SMOLLM2_FOLDER --only streamed --save

First every layer resident, the same batch as the peer's: prompts of one length, all rows to their last
token, float32 greedy in both; rounds alternate and medians are compared. Then every layer streamed, 64 rows:
seconds of a step against what the cost model says from the timed parts (`lazyjax.execution.decode_timing`),
parts and steps in turns.
Wants a machine without other load; takes about three minutes on 2 cores with SmolLM2-135M. CPU seconds
are printed beside: under other load they still compare, with one thread each (`taskset -c 0`).
Expected: at least as many tokens per second as Transformers; the streamed step within 10 % of its prediction.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np

from experiments.benchmarks.provenance import provenance
from lazyjax.evaluation.generate import Prompt, generate
from lazyjax.evaluation.model import Model, open_folder
from lazyjax.execution.decode import Decoder, Rows, Sampling
from lazyjax.execution.decode_timing import time_decoding
from lazyjax.planning.costs.decode import DecodeSizes, period_seconds
from lazyjax.planning.plan.decode import DecodePlan

PEER = pathlib.Path(__file__).with_name("peer_generate.py")
RESULT = pathlib.Path(__file__).parent / "results" / "decode_speed.md"
STREAMED_ROWS = 64


class Peer:
    """A process with Transformers that generates when told to."""

    def __init__(self, python: str, words: list[str]) -> None:
        self._process = subprocess.Popen(
            [python, str(PEER), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline().split()
        if not ready:
            raise RuntimeError(f"{python}: the peer did not start")
        self.versions = " ".join(ready[1:])

    def seconds(self) -> tuple[float, float]:
        """Of one batch: wall and CPU."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        wall, cpu = map(float, self._process.stdout.readline().split())
        return wall, cpu

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def own_seconds(model: Model, rows: int, prompt_tokens: int, new_tokens: int) -> tuple[float, float]:
    """One batch with every layer resident, prompts and all, as a user has it: wall and CPU seconds."""
    rng = np.random.default_rng(0)
    vocabulary = model.template.spec.vocabulary_size
    prompts = [
        Prompt(row, rng.integers(100, vocabulary, prompt_tokens, dtype=np.int32)) for row in range(rows)
    ]
    tokens = prompt_tokens + new_tokens
    uses = DecodeSizes(model.template, tokens).uses
    decoder = Decoder(model.kernels, model.store, DecodePlan(rows, tokens, uses), Sampling())
    start, used = time.perf_counter(), time.process_time()
    list(generate(decoder, prompts, stop_tokens=(), new_tokens=new_tokens))
    seconds = time.perf_counter() - start, time.process_time() - used
    decoder.close()
    return seconds


def streamed(model: Model, rounds: int, steps: int = 4) -> str:
    """Seconds of single streamed steps of 64 rows beside the cost model's, medians over rounds."""
    tokens = 128
    decoder = Decoder(model.kernels, model.store, DecodePlan(STREAMED_ROWS, tokens), Sampling())
    ones = np.ones(STREAMED_ROWS, np.int32)
    uses = DecodeSizes(model.template, tokens).uses
    measured, predicted = list[float](), list[float]()
    for _ in range(rounds):
        timed = time_decoding(model.kernels, model.store, rows=STREAMED_ROWS, tokens=tokens)
        costs = [timed[model.template.spec.layers[layer].kind] for layer in uses]
        predicted.append(period_seconds(costs, [True] * len(costs), prefetch=2))
        for step in range(steps + 1):
            rows = Rows(ones[:, None] * 200, ones * (tokens // 2 + step), ones, ones)
            start = time.perf_counter()
            decoder.run(rows)
            if step:  # the first one compiles, and follows other work
                measured.append(time.perf_counter() - start)
    decoder.close()
    found, expected = statistics.median(measured), statistics.median(predicted)
    return (
        f"{STREAMED_ROWS} rows, every layer streamed: {found * 1e3:.1f} ms a step measured (median of "
        f"{len(measured)}), {expected * 1e3:.1f} ms by the cost model (median of {rounds}): measured over "
        f"predicted {found / expected:.3f}"
    )


def _rate(name: str, rounds: list[tuple[float, float]], tokens: int) -> str:
    wall, cpu = (statistics.median(one[i] for one in rounds) for i in (0, 1))
    return f"{name}: {tokens / wall:.1f} tokens/s, {cpu:.2f} CPU seconds a batch"


def resident(model: Model, options: argparse.Namespace) -> list[str]:
    """Tokens per second with every layer resident, beside the peer's where there is one."""
    shape = (options.rows, options.prompt_tokens, options.new_tokens)
    words = [str(options.model), *map(str, shape), str(len(os.sched_getaffinity(0)))]
    peer = None if options.peer_python is None else Peer(options.peer_python, words)
    own_seconds(model, *shape)  # compiles
    own, others = [], []
    for _ in range(options.rounds):
        own.append(own_seconds(model, *shape))
        if peer is not None:
            others.append(peer.seconds())
    tokens = options.rows * options.new_tokens
    lines = [f"{shape[0]} rows, {shape[1]} prompt and {shape[2]} new tokens, float32, {words[-1]} thread(s)"]
    lines.append(_rate("lazyjax, all resident", own, tokens))
    if peer is not None:
        ratios = [
            statistics.median(one[i] for one in others) / statistics.median(one[i] for one in own)
            for i in (0, 1)
        ]
        lines.append(_rate(f"Transformers ({peer.versions})", others, tokens))
        lines.append(f"tokens per second {ratios[0]:.2f} times theirs; by CPU seconds {ratios[1]:.2f}")
        peer.close()
    return lines


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="model folder")
    parser.add_argument("--peer-python", help="interpreter with torch and transformers")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("resident", "streamed"), help="one of the two")
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULT.name}")
    options = parser.parse_args()
    model = open_folder(options.model, compute_dtype="float32").load()
    lines = []
    if options.only != "streamed":
        lines += resident(model, options)
    if options.only != "resident":
        lines.append(streamed(model, options.rounds))
    lines.append(provenance("lazyjax", "experiments/benchmarks/decode_speed.py"))
    print("\n".join(lines))
    if options.save:
        command = f"`python -m experiments.benchmarks.decode_speed {' '.join(sys.argv[1:])}`"
        text = "\n\n".join(["# Batched decoding, SmolLM2-135M-Instruct", *lines, command])
        RESULT.write_text(text.replace(str(options.model), "SMOLLM2_FOLDER") + "\n")


if __name__ == "__main__":
    main()
