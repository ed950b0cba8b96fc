"""Speed of host updates: ours per path, their memory bound, and what others offer.

    python -m experiments.benchmarks.host_update --peer-python PATH/python
    python -m experiments.benchmarks.host_update --elements 1048576 --rounds 3   # a quick look

Every method updates the same number of elements; rounds are interleaved, so that a disturbance meets
all of them, and medians are compared. `--peer-python` names an interpreter with torch and deepspeed.
Ours read bf16 gradients and stream bf16 halves of fp32 master weights (14 bytes per element); the
others update fp32 parameters with fp32 gradients and state (28 bytes), as those systems do. Threads are
bound to CPUs, the peers' too.

The memory bound is an in-place addition over 7 bytes per element (14 bytes read and written), in the
same number of threads. The cache-resident run repeats one chunk per thread that stays in the cache:
what is left is arithmetic. The instructions of the kernel's loops are read from the library with objdump,
where that exists.

Takes about two minutes and 4 GB of memory; wants a machine without other load.
Expected on two AVX-512 cores: ours at least 1.5 times torch and DeepSpeed with clipping.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from experiments.benchmarks.loop_instructions import KERNELS, instructions_per_element
from experiments.benchmarks.provenance import provenance
from lazyjax.optim.adamw import Bf16AdamW, Fp32AdamW
from lazyjax.optim.base import VERSION, HostOptimizer
from lazyjax.optim.chunks import coded_chunks
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.optim.native.library import HYBRID_8BIT, StepScalars, library_file, load_library
from lazyjax.specs import SlabLayout, TensorSpec, slab_layout
from lazyjax.storage.host import LayerSlabs, aligned_zeros

#: Before every measurement: threads of the method before (OpenMP's, XLA's) spin for a while.
PAUSE_SECONDS = 0.1
PEER = pathlib.Path(__file__).with_name("peer_update.py")


@dataclasses.dataclass(frozen=True)
class Method:
    """`run` performs one update and returns its seconds."""

    name: str
    run: Callable[[], float]


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cpus(threads: int) -> tuple[int, ...]:
    """As many CPUs of this process as there are threads, if it has them; else none are bound."""
    usable = tuple(sorted(os.sched_getaffinity(0)))
    return usable[:threads] if len(usable) >= threads else ()


def one_matrix(elements: int) -> SlabLayout:
    """A slab of one matrix of 1024 columns."""
    return slab_layout((TensorSpec("matrix", (elements // 1024, 1024), "float32"),))


def make_slabs(layout: SlabLayout) -> LayerSlabs:
    """Slabs with normal masters and gradients."""
    slabs = LayerSlabs(
        layout,
        aligned_zeros(layout.length, "uint16", purpose="benchmark"),
        aligned_zeros(layout.length, "int16", purpose="benchmark"),
        aligned_zeros(layout.length, "bfloat16", purpose="benchmark"),
    )
    rng = np.random.default_rng(0)
    for begin in range(0, layout.length, 1 << 20):
        part = slice(begin, min(begin + (1 << 20), layout.length))
        values = rng.standard_normal(part.stop - part.start, dtype=np.float32)
        slabs.hi[part] = values.view(np.uint32) >> np.uint32(16)
        slabs.gradient[part] = rng.standard_normal(values.size, dtype=np.float32)
    return slabs


def our_method(name: str, optimizer: HostOptimizer, slabs: LayerSlabs) -> Method:
    """One of the host optimizers; its own state, shared slabs."""
    state = optimizer.create_state(slabs.layout)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        optimizer.update(slabs, state, learning_rate=1e-5, count=count, scale=1e-4)

    step()
    return Method(name, lambda: timed(step))


def xla_method(elements: int) -> Method:
    """optax's clip and adamw, jitted with donated buffers."""
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, weight_decay=0.01))
    gradient = jax.random.normal(jax.random.key(0), (elements // 1024, 1024))
    params = gradient + 1
    state = jax.jit(transform.init)(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: jax.Array, state: Any, gradient: jax.Array) -> tuple[jax.Array, Any]:
        updates, state = transform.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    def run() -> None:
        nonlocal params, state
        params, state = jax.block_until_ready(step(params, state, gradient))

    run()
    return Method("XLA, optax clip + adamw", lambda: timed(run))


def memory_method(elements: int, threads: int) -> Method:
    """In-place addition over 7 bytes per element."""
    words = aligned_zeros(elements * 7 // 4, "float32", purpose="benchmark")
    words[:] = 1.0
    parts = np.array_split(words, threads * 16)
    unbound = list(cpus(threads))

    def bind() -> None:
        if unbound:
            os.sched_setaffinity(0, {unbound.pop()})

    pool = concurrent.futures.ThreadPoolExecutor(threads, initializer=bind)
    one = np.float32(1e-3)

    def run() -> None:
        list(pool.map(lambda part: np.add(part, one, out=part), parts))

    run()
    return Method("memory bound (14 B per element)", lambda: timed(run))


class Peer:
    """torch and DeepSpeed in their own interpreter."""

    def __init__(self, python: pathlib.Path, elements: int, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "true"}
        command = [str(python), str(PEER), str(elements), str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        while True:
            line = self._read()
            if line.startswith("ready "):
                *self._names, self.torch_version = line.split()[1:]
                return

    def _read(self) -> str:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"the peer interpreter stopped with code {self._process.wait()}")
        return line

    def methods(self) -> list[Method]:
        """With and without clipping, for each optimizer that the interpreter has."""
        titles = {"torch": "torch fused AdamW", "deepspeed": "DeepSpeed CPUAdam"}
        return [
            Method(
                titles[name] + (" + clip_grad_norm_" if clip == "clip" else ""),
                functools.partial(self._step, f"{name} {clip}\n"),
            )
            for name in self._names
            for clip in ("clip", "plain")
        ]

    def _step(self, line: str) -> float:
        self._process.stdin.write(line)  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        return float(self._read())

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


def cache_resident_rate(path: str, threads: int) -> float:
    """Elements per second of the 8-bit kernel; each thread repeats 16384 elements of its own."""
    library = load_library()
    assert library is not None
    layout = one_matrix(16384)
    optimizer = Hybrid8bit(path=path)
    scalars = StepScalars.of(
        b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01, learning_rate=1e-5, count=10, scale=1e-4
    )
    repeats = 2000
    chunks = np.tile(coded_chunks(layout, 4096, 1.0).chunks, repeats)
    bound = cpus(threads)

    def repeat(thread: int) -> None:
        if threads > 1 and bound:
            os.sched_setaffinity(0, {bound[thread]})
        slabs, state = make_slabs(layout), optimizer.create_state(layout)
        arrays = {name: array for name, array in state.items() if name != VERSION}
        run = functools.partial(
            library.run, pool=None, path=path, method=HYBRID_8BIT, slabs=slabs, state=arrays, scalars=scalars
        )
        run(chunks=chunks[:10])
        start.wait()
        seconds[thread] = min(timed(lambda: run(chunks=chunks)) for _ in range(5))

    start = threading.Barrier(threads)
    seconds = [0.0] * threads
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(repeat, range(threads)))
    return sum(layout.length * repeats / elapsed for elapsed in seconds)


def report(arguments: argparse.Namespace) -> str:
    """Measures everything; returns Markdown."""
    elements, threads = arguments.elements, arguments.threads
    library = load_library()
    if library is None:
        raise SystemExit("the native kernels are not built; install the package again with a C++ compiler")
    slabs = make_slabs(one_matrix(elements))
    ours = {
        f"ours, 8-bit state, {path}": Hybrid8bit(threads=threads, cpus=cpus(threads), path=path)
        for path in library.paths[::-1]
    }
    best = next(iter(ours))
    others: dict[str, HostOptimizer] = {
        "ours, fp32 state": Fp32AdamW(threads=threads, cpus=cpus(threads)),
        "ours, bf16 parameters with fp32 state": Bf16AdamW(threads=threads, cpus=cpus(threads)),
    }
    methods = [our_method(name, optimizer, slabs) for name, optimizer in {**ours, **others}.items()]
    methods += [memory_method(elements, threads), xla_method(elements)]
    peer = Peer(arguments.peer_python, elements, threads) if arguments.peer_python else None
    if peer:
        methods += peer.methods()

    seconds: dict[str, list[float]] = {method.name: [] for method in methods}
    for round_number in range(arguments.rounds + 1):
        for method in methods:
            time.sleep(PAUSE_SECONDS)
            elapsed = method.run()
            if round_number:  # the first round warms up
                seconds[method.name].append(elapsed)
    if peer:
        peer.close()

    rate = {name: elements / statistics.median(values) / 1e6 for name, values in seconds.items()}
    spread = {name: elements / max(values) / 1e6 for name, values in seconds.items()}
    lines = [
        "# Host updates",
        "",
        provenance("lazyjax/optim", "lazyjax/storage", "experiments/benchmarks/host_update.py")
        + (f" torch {peer.torch_version}." if peer else ""),
        f"{elements} elements, {threads} threads, medians of {arguments.rounds} interleaved rounds.",
        "",
        f"| method | Melem/s | slowest round | {best} is faster by |",
        "|---|---|---|---|",
    ]
    for name, value in rate.items():
        lines.append(f"| {name} | {value:.0f} | {spread[name]:.0f} | {rate[best] / value:.2f} |")
    return "\n".join(lines + arithmetic_report(threads)) + "\n"


def arithmetic_report(threads: int) -> list[str]:
    """The 8-bit kernel without memory traffic, and the length of its loops."""
    library, file = load_library(), library_file()
    assert library is not None
    assert file is not None
    lines = ["", "The 8-bit kernel without memory traffic (one chunk per thread, in the cache):", ""]
    lines += [
        f"| path | Melem/s, 1 thread | Melem/s, {threads} threads | instructions per element |",
        "|---" * 4 + "|",
    ]
    for path in library.paths[::-1]:
        single, several = (cache_resident_rate(path, n) / 1e6 for n in (1, threads))
        counts = instructions_per_element(file, path) if path in KERNELS else None
        words = f"{counts[0]:.1f}, of them {counts[1]:.1f} on vectors" if counts else "not counted"
        lines.append(f"| {path} | {single:.0f} | {several:.0f} | {words} |")
    return lines


def main() -> None:
    """Prints the report, and writes it where asked to."""
    parser = argparse.ArgumentParser(description="Speed of host updates.")
    parser.add_argument("--elements", type=int, default=64_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peer-python", type=pathlib.Path, help="interpreter with torch and deepspeed")
    parser.add_argument("--output", type=pathlib.Path, help="Markdown file to write")
    arguments = parser.parse_args()
    text = report(arguments)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
