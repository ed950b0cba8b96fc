"""AdamW with fp32 state over host slabs: the exact baseline, and bf16 parameters as others keep them.

Kingma and Ba 2015, algorithm 1, with the decoupled decay of Loshchilov and Hutter 2019, algorithm 2,
in fp32; equal to `optax.adamw` up to rounding. Bias corrections are computed in double precision
(optax: in fp32). The native kernels and the numpy path here give the same bits, denormals aside,
which the kernels flush to zero.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float32, Num, UInt16

from lazyjax.optim.base import (
    VERSION,
    VERSION_BYTES,
    HostState,
    StateDescription,
    check_hyperparameters,
    check_update,
    create_described,
)
from lazyjax.optim.chunks import fp32_chunks
from lazyjax.optim.native.library import (
    BF16,
    FP32_STATE,
    StepScalars,
    choose_path,
    load_library,
    shared_pool,
)
from lazyjax.specs import SlabLayout
from lazyjax.storage.host import LayerSlabs
from lazyjax.storage.master import join_master, split_master

ChunkUpdate = Callable[[LayerSlabs, HostState, slice, StepScalars, float], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Fp32AdamW:
    """fp32 m and v, fp32 master weights split in two halves.

    14 host bytes per parameter with a bf16 gradient.

    Attributes:
        threads: of the update; the result does not depend on it.
        cpus: thread i is bound to cpus[i % len(cpus)]; empty: not bound. Native paths only.
        path: `auto`, `pure` (numpy), `portable`, `avx2` or `avx512`.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    threads: int = 1
    cpus: tuple[int, ...] = ()
    path: str = "auto"

    def __post_init__(self) -> None:
        check_hyperparameters(self.b1, self.b2, self.eps, self.weight_decay, self.threads)

    @property
    def name(self) -> str:
        """As in configurations."""
        return "fp32_adamw"

    @property
    def master_bytes(self) -> int:
        """See `base.HostOptimizer`."""
        return 4

    @property
    def state_version(self) -> str:
        """Format of the state."""
        return "fp32-adamw/1"

    def describe_state(self, layout: SlabLayout) -> StateDescription:
        """Arrays m32 and v32 [N] in float32."""
        return _describe(layout)

    def create_state(self, layout: SlabLayout) -> HostState:
        """Zeros, with the version tag."""
        return create_described(_describe(layout), self.state_version)

    def update(
        self, slabs: LayerSlabs, state: HostState, *, learning_rate: float, count: int, scale: float
    ) -> None:
        """See `HostOptimizer.update`."""
        _update(
            self,
            FP32_STATE,
            _update_split,
            slabs,
            state,
            learning_rate=learning_rate,
            count=count,
            scale=scale,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Bf16AdamW:
    """bf16 parameters without fp32 master weights, fp32 m and v (MegaTrain's host update).

    The halves `hi` are the parameters, rounded to nearest even after every step. `lo` is not part of
    the method and is set to zero by the first step. Attributes as in `Fp32AdamW`.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    threads: int = 1
    cpus: tuple[int, ...] = ()
    path: str = "auto"

    def __post_init__(self) -> None:
        check_hyperparameters(self.b1, self.b2, self.eps, self.weight_decay, self.threads)

    @property
    def name(self) -> str:
        """As in configurations."""
        return "bf16_adamw"

    @property
    def master_bytes(self) -> int:
        """See `base.HostOptimizer`."""
        return 2

    @property
    def state_version(self) -> str:
        """Format of the state."""
        return "bf16-adamw/1"

    def describe_state(self, layout: SlabLayout) -> StateDescription:
        """Arrays m32 and v32 [N] in float32."""
        return _describe(layout)

    def create_state(self, layout: SlabLayout) -> HostState:
        """Zeros, with the version tag."""
        return create_described(_describe(layout), self.state_version)

    def update(
        self, slabs: LayerSlabs, state: HostState, *, learning_rate: float, count: int, scale: float
    ) -> None:
        """See `HostOptimizer.update`."""
        _update(self, BF16, _update_bf16, slabs, state, learning_rate=learning_rate, count=count, scale=scale)
        if count == 1:
            slabs.lo[:] = 0


def _describe(layout: SlabLayout) -> StateDescription:
    return {
        "m32": ((layout.length,), "float32"),
        "v32": ((layout.length,), "float32"),
        VERSION: ((VERSION_BYTES,), "uint8"),
    }


def _update(
    optimizer: Fp32AdamW | Bf16AdamW,
    method: int,
    update_chunk: ChunkUpdate,
    slabs: LayerSlabs,
    state: HostState,
    *,
    learning_rate: float,
    count: int,
    scale: float,
) -> None:
    check_update(
        slabs,
        state,
        _describe(slabs.layout),
        optimizer.state_version,
        learning_rate=learning_rate,
        count=count,
        scale=scale,
    )
    scalars = StepScalars.of(
        b1=optimizer.b1,
        b2=optimizer.b2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        learning_rate=learning_rate,
        count=count,
        scale=scale,
    )
    chunks = fp32_chunks(slabs.layout).chunks
    path = choose_path(optimizer.path)
    library = load_library() if path != "pure" else None
    if library is not None:
        library.run(
            pool=shared_pool(optimizer.threads, optimizer.cpus),
            path=path,
            method=method,
            slabs=slabs,
            state={"m32": state["m32"], "v32": state["v32"]},
            chunks=chunks,
            scalars=scalars,
        )
        return

    def run(chunk: tuple[int, int, int, int, int]) -> None:
        begin, length, _, decay, _ = chunk
        part = slice(begin, begin + length)
        update_chunk(slabs, state, part, scalars, scalars.decay_step if decay else 0.0)

    if optimizer.threads == 1:
        for chunk in chunks.tolist():
            run(chunk)
    else:
        with concurrent.futures.ThreadPoolExecutor(optimizer.threads) as pool:
            list(pool.map(run, chunks.tolist()))


def _update_split(
    slabs: LayerSlabs, state: HostState, part: slice, scalars: StepScalars, decay_step: float
) -> None:
    hi, lo = slabs.hi[part], slabs.lo[part]
    master = join_master(hi, lo)
    master -= _step(slabs.gradient[part], master, state["m32"][part], state["v32"][part], scalars, decay_step)
    split_master(master, hi, lo)


def _update_bf16(
    slabs: LayerSlabs, state: HostState, part: slice, scalars: StepScalars, decay_step: float
) -> None:
    parameter = (slabs.hi[part].astype(np.uint32) << np.uint32(16)).view(np.float32)
    parameter -= _step(
        slabs.gradient[part], parameter, state["m32"][part], state["v32"][part], scalars, decay_step
    )
    slabs.hi[part] = _round_to_bf16(parameter)


def _round_to_bf16(values: Float32[np.ndarray, "n"]) -> UInt16[np.ndarray, "n"]:
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def _step(
    gradient: Num[np.ndarray, "n"],
    parameter: Float32[np.ndarray, "n"],
    m: Float32[np.ndarray, "n"],
    v: Float32[np.ndarray, "n"],
    scalars: StepScalars,
    decay_step: float,
) -> Float32[np.ndarray, "n"]:
    """What is to be subtracted from the parameter; m and v become the new ones."""
    f32 = np.float32
    g = gradient.astype(f32)
    g *= f32(scalars.gradient_scale)
    m *= f32(scalars.b1)
    m += f32(scalars.m_share) * g
    np.square(g, out=g)
    v *= f32(scalars.b2)
    v += g
    root = np.sqrt(v, out=g)
    root *= f32(scalars.root_scale)
    root += f32(scalars.eps)
    step = m * f32(scalars.step)
    step /= root
    step += f32(decay_step) * parameter
    return step
