"""What long rows take: temporary bytes of a block, time of attention, plans.

    python -m experiments.benchmarks.long_sequences memory      # compiles, runs nothing: 3 minutes on 2 cores
    python -m experiments.benchmarks.long_sequences attention   # times both forms on this CPU: 2 minutes
    python -m experiments.benchmarks.long_sequences plans       # simulated: 5 minutes
    python -m experiments.benchmarks.long_sequences row         # one streamed step, 65,536 tokens in one row

`memory` prints the temporary bytes of the forward and the backward program of one Qwen2.5-7B block, bfloat16,
one row, by XLA's own analysis for this backend, with dense attention, blockwise, and blockwise in chunks of
2048 tokens. Expected: the dense form grows with the square; blockwise attention at most with T; in chunks
only with what is as long as the row (the residual stream, queries, keys, values and their gradients).
`attention` prints seconds of the dense and of the blockwise form, forward and backward, and their ratio.
`plans` prints simulated plans of the largest batch that fits.
`row` trains a small model for one step within 4 GiB of address space, with two chunk lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.provenance import provenance
from lazyjax.batch import Batch
from lazyjax.execution.build import build_executor
from lazyjax.hardware.profile import load_profile
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.attention import blockwise_attention, dense_attention
from lazyjax.models.registry import architecture, build_template, init_parameters
from lazyjax.models.residuals import backward_from
from lazyjax.models.template import LayerKind, ModelTemplate
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.planning.costs.layers import CallShape, kind_inputs
from lazyjax.planning.costs.seconds import model_flops
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.planning.planner.feasibility import feasible
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.service import InfeasibleError, solve_cached, verify_for
from lazyjax.storage.host import allocate_host_store

MEMORY_TOKENS = (1024, 4096, 16384, 65536)
CHUNK = 2048
#: (model, profile, tokens of a row).
PLANS = [
    *(("Qwen2.5-7B", "gh200", tokens) for tokens in (1024, 8192, 32768, 131072, 262144, 524288)),
    *(("Qwen3.6-27B", name, tokens) for name in ("h800-paper", "rtx4090") for tokens in (32768, 131072)),
]


def temporary_bytes(kind: LayerKind, shape: CallShape) -> tuple[int, int]:
    """Of the forward and of the backward program on one row, by XLA."""
    inputs = kind_inputs(kind, shape.hidden_size, 1, shape.sequence_length, shape.compute_dtype)

    def backward(params: Any, x: Any, context: Any, y_gradient: Any) -> Any:
        return backward_from(kind.apply, (), params, x, context, (), y_gradient)

    programs = (
        jax.jit(lambda p, x, c: kind.apply(p, x, c)).lower(*inputs),
        jax.jit(backward).lower(*inputs, inputs[1]),
    )
    found = []
    for program in programs:
        analysis = program.compile().memory_analysis()
        assert analysis is not None, "this backend gives no memory analysis"
        found.append(int(analysis.temp_size_in_bytes))
    return found[0], found[1]


def memory(model: str = "Qwen2.5-7B") -> None:
    """See the module."""
    print(f"{model}, one block, one row, bfloat16: temporary MiB forward / backward\n")
    print("| tokens | dense | blockwise | blockwise, chunks of 2048 |\n|---|---|---|---|")
    for tokens in MEMORY_TOKENS:
        cells = []
        for attention, width in (("dense", None), ("blockwise", None), ("blockwise", CHUNK)):
            template = build_template(architecture(model), attention).in_chunks(width)
            shape = CallShape(template.spec.hidden_size, tokens, "bfloat16")
            forward, backward = temporary_bytes(template.kinds["full_attention"], shape)
            cells.append(f"{forward / 2**20:,.0f} / {backward / 2**20:,.0f}")
        print(f"| {tokens:,} | {' | '.join(cells)} |", flush=True)


def attention(repeats: int = 3) -> None:
    """See the module."""
    print("8 query heads, 2 key/value heads of 64, float32, one row: seconds forward and backward\n")
    print("| tokens | dense | blockwise | ratio |\n|---|---|---|---|")
    for tokens in (1024, 2048, 4096, 8192):
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, gradient = (
            jax.random.normal(key, (1, tokens, heads, 64))
            for key, heads in zip(keys, (8, 2, 2, 8), strict=True)
        )
        segments = jnp.ones((1, tokens), jnp.int32)
        times = []
        for form in (dense_attention, blockwise_attention):
            times.append(_fastest(_both_passes(form, segments), (q, k, v, gradient), repeats))
        print(f"| {tokens:,} | {times[0]:.3f} | {times[1]:.3f} | {times[1] / times[0]:.2f} |", flush=True)


def _both_passes(form: Callable[..., Any], segments: Any) -> Callable[..., Any]:
    @jax.jit
    def run(q: Any, k: Any, v: Any, gradient: Any) -> Any:
        out, pullback = jax.vjp(lambda q, k, v: form(q, k, v, segments, 0.125), q, k, v)
        return out, pullback(gradient)

    return run


def _fastest(function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> float:
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def plans(seconds: float = 10.0) -> None:
    """See the module."""
    print("| model | profile | tokens | rows | chunk | step, s | model TFLOPS | executed TFLOPS |")
    print("|---|---|---|---|---|---|---|---|")
    for model, hardware, tokens in PLANS:
        cells = _plan_cells(model, hardware, tokens, seconds)
        print(f"| {model} | {hardware} | {tokens:,} | {cells} |", flush=True)


def _plan_cells(model: str, hardware: str, tokens: int, seconds: float) -> str:
    """The planner's plan for the most rows of 2^n that fit, up to 2^19 tokens, with fused attention."""
    template, profile = build_template(architecture(model), "cudnn"), load_profile(hardware)
    for rows in (2**power for power in range(max(0, (2**19 // tokens).bit_length() - 1), -1, -1)):
        request = build_request(template, profile, batch_rows=rows, sequence_length=tokens)
        if not feasible(request):
            continue
        with contextlib.suppress(InfeasibleError):
            plan, _ = solve_cached(request, None, time_limit_seconds=seconds)
            request = request.at(plan)
            period = verify_for(request, plan).simulation.period_seconds
            useful = model_flops(template.spec, rows, tokens) / period / 1e12
            executed = _executed_flops(request, plan) / period / 1e12
            chunk = plan.token_chunk or "whole row"
            return f"{rows} | {chunk} | {period:.1f} | {useful:.0f} | {executed:.0f}"
    return "none fits | | | |"


def _executed_flops(request: Any, plan: Any) -> int:
    from lazyjax.planning.program.schedule import build_schedule

    schedule = build_schedule(plan, request.sizes(plan.microbatch_rows))
    flops: int = request.costs(plan.microbatch_rows).executed_flops(schedule)
    return flops


def small_model() -> ModelTemplate:
    """Two blocks of hidden size 128, with narrow heads: 65,536 x 65,536 scores take a while."""
    return build_template(
        Qwen2Architecture(
            name="small-long",
            vocab_size=512,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            rope=Rope(theta=1e6),
            qkv_bias=True,
        )
    )


def row(tokens: int, limit_bytes: int) -> None:
    """See the module."""
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    template = small_model()
    random = np.random.default_rng(0)
    ids = random.integers(0, 512, (1, tokens + 1), dtype=np.int32)
    here = np.arange(tokens, dtype=np.int32)[None]
    ones = np.ones((1, tokens), np.int32)
    batch = Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), ones.astype(bool), ones, here)
    losses = []
    for width in (tokens // 8, tokens // 64):
        names = [
            template.in_chunks(width).kind(index).residual_names for index in range(len(template.spec.layers))
        ]
        plan = recompute_all(template.spec, names, batch_rows=1, sequence_length=tokens, token_chunk=width)
        store = allocate_host_store(template.spec, gradient_dtype="bfloat16")
        for index, slabs in enumerate(store.layers):
            for name, value in init_parameters(template, index, jax.random.key(0)).items():
                slabs.set_master(name, value)
        executor = build_executor(
            template, plan, store, Hybrid8bit(), compute_dtype="float32", clip=ClipRule("global_norm", 1.0)
        )
        start = time.perf_counter()
        result = executor.train_step(batch, 1e-4)
        executor.close()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        losses.append(result.loss)
        print(
            f"{tokens:,} tokens in one row, chunks of {width:,}: loss {result.loss:.6f}, gradient norm "
            f"{result.gradient_norm:.5f}, {time.perf_counter() - start:.0f} s, most resident {peak:.2f} GiB, "
            f"limit {limit_bytes / 2**30:.1f} GiB",
            flush=True,
        )
    print(f"losses differ by {abs(losses[0] - losses[1]):.1e}")


def main() -> None:
    """Runs the part that the command line names."""
    parser = argparse.ArgumentParser(description="Long rows: memory, attention, plans, one step.")
    parser.add_argument("part", choices=("memory", "attention", "plans", "row"))
    parser.add_argument("--tokens", type=int, default=65536, help="of the row")
    parser.add_argument("--limit-gib", type=float, default=4.0, help="address space of `row`")
    options = parser.parse_args()
    print(provenance())
    match options.part:
        case "memory":
            memory()
        case "attention":
            attention()
        case "plans":
            plans()
        case _:
            row(options.tokens, int(options.limit_gib * 2**30))


if __name__ == "__main__":
    main()
