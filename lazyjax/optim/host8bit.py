"""AdamW with 8-bit state over host slabs: 8.03 bytes per parameter with its bf16 gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazyjax.optim.base import (
    VERSION,
    VERSION_BYTES,
    HostState,
    StateDescription,
    check_hyperparameters,
    check_update,
    create_described,
)
from lazyjax.optim.chunks import CHUNK_ELEMENTS, ChunkTable, coded_chunks
from lazyjax.optim.codes import CODES_VERSION, CodedMoment, decode_m, decode_v, encode_m, encode_v
from lazyjax.optim.hybrid8bit import MIN_8BIT_SIZE, AdamScalars, adam_step
from lazyjax.optim.native.library import (
    HYBRID_8BIT,
    StepScalars,
    choose_path,
    load_library,
    shared_pool,
)
from lazyjax.specs import BLOCK_ELEMENTS, SlabLayout
from lazyjax.storage.host import LayerSlabs
from lazyjax.storage.master import join_master, split_master


@dataclasses.dataclass(frozen=True, slots=True)
class Hybrid8bit:
    """8-bit m and v in blocks of 256, fp32 master weights split in two halves.

    Attributes:
        min_8bit_size: tensors with fewer elements (norms, biases) keep fp32 m and v.
        eight_bit_fraction: share of every other tensor's blocks that is stored as codes.
        threads: of the update; the result does not depend on it.
        cpus: thread i is bound to cpus[i % len(cpus)]; empty: not bound.
        path: `auto`, `pure`, `portable`, `avx2` or `avx512`; all native paths give the same bits.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    min_8bit_size: int = MIN_8BIT_SIZE
    eight_bit_fraction: float = 1.0
    threads: int = 1
    cpus: tuple[int, ...] = ()
    path: str = "auto"

    def __post_init__(self) -> None:
        check_hyperparameters(self.b1, self.b2, self.eps, self.weight_decay, self.threads)
        if not 0 <= self.eight_bit_fraction <= 1:
            raise ValueError(f"eight_bit_fraction is {self.eight_bit_fraction}, not within [0, 1]")

    @property
    def name(self) -> str:
        """As in configurations."""
        if self.eight_bit_fraction == 1:
            return "hybrid8bit"
        return f"hybrid8bit_{100 * self.eight_bit_fraction:g}percent"

    @property
    def master_bytes(self) -> int:
        """See `base.HostOptimizer`."""
        return 4

    @property
    def state_version(self) -> str:
        """Format of the state: codes, rounding, and which tensors are coded."""
        return f"hybrid8bit/1,{CODES_VERSION},{self.min_8bit_size},{self.eight_bit_fraction:g}"

    def describe_state(self, layout: SlabLayout) -> StateDescription:
        """Codes and scales of coded tensors, m32 and v32 of the others, each packed in slab order."""
        table = self._table(layout)
        blocks = table.coded_elements // BLOCK_ELEMENTS
        return {
            "m_codes": ((table.coded_elements,), "int8"),
            "v_codes": ((table.coded_elements,), "uint8"),
            "m_scales": ((blocks,), "float32"),
            "v_scales": ((blocks,), "float32"),
            "m32": ((table.fp32_elements,), "float32"),
            "v32": ((table.fp32_elements,), "float32"),
            VERSION: ((VERSION_BYTES,), "uint8"),
        }

    def create_state(self, layout: SlabLayout) -> HostState:
        """Zeros, with the version tag."""
        return create_described(self.describe_state(layout), self.state_version)

    def update(
        self, slabs: LayerSlabs, state: HostState, *, learning_rate: float, count: int, scale: float
    ) -> None:
        """See `HostOptimizer.update`."""
        check_update(
            slabs,
            state,
            self.describe_state(slabs.layout),
            self.state_version,
            learning_rate=learning_rate,
            count=count,
            scale=scale,
        )
        scalars = StepScalars.of(
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            learning_rate=learning_rate,
            count=count,
            scale=scale,
        )
        arrays = {name: array for name, array in state.items() if name != VERSION}
        chunks = self._table(slabs.layout).chunks
        path = choose_path(self.path)
        library = load_library() if path != "pure" else None
        if library is None:
            _update_pure(slabs, arrays, chunks, scalars)
            return
        library.run(
            pool=shared_pool(self.threads, self.cpus),
            path=path,
            method=HYBRID_8BIT,
            slabs=slabs,
            state=arrays,
            chunks=chunks,
            scalars=scalars,
        )

    def _table(self, layout: SlabLayout) -> ChunkTable:
        return coded_chunks(layout, self.min_8bit_size, self.eight_bit_fraction)


def _update_pure(slabs: LayerSlabs, state: HostState, chunks: np.ndarray, scalars: StepScalars) -> None:
    """The kernels' update through XLA on the CPU, chunk by chunk."""
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        traced = AdamScalars(
            b1=jnp.float32(scalars.b1),
            b2=jnp.float32(scalars.b2),
            m_share=jnp.float32(scalars.m_share),
            step=jnp.float32(scalars.step),
            root_scale=jnp.float32(scalars.root_scale),
            eps=jnp.float32(scalars.eps),
            decay_step=jnp.float32(scalars.decay_step),
            gradient_scale=jnp.float32(scalars.gradient_scale),
            step_number=jnp.int32(scalars.count),
        )
        for begin, length, offset, decay, eight_bit in chunks.tolist():
            part = slice(begin, begin + length)
            master = join_master(slabs.hi[part], slabs.lo[part])
            gradient = slabs.gradient[part].astype(np.float32)
            decay_step = traced.decay_step if decay else jnp.float32(0)
            update = _update_coded if eight_bit else _update_fp32
            step = update(gradient, master, state, offset, traced, decay_step)
            split_master(master - step, slabs.hi[part], slabs.lo[part])


def _blocks(array: np.ndarray) -> np.ndarray:
    """[blocks of a whole chunk, BLOCK_ELEMENTS], padded with zeros so that one shape is compiled."""
    padding = CHUNK_ELEMENTS - array.size
    return np.pad(array, (0, padding)).reshape(-1, BLOCK_ELEMENTS)


def _update_fp32(
    gradient: np.ndarray, master: np.ndarray, state: HostState, offset: int, scalars: Any, decay_step: Any
) -> np.ndarray:
    part = slice(offset, offset + gradient.size)
    arrays = (gradient, master, state["m32"][part], state["v32"][part])
    step, m, v = _jitted_fp32()(*(_blocks(array) for array in arrays), scalars, decay_step)
    state["m32"][part] = np.asarray(m).reshape(-1)[: gradient.size]
    state["v32"][part] = np.asarray(v).reshape(-1)[: gradient.size]
    return np.asarray(step).reshape(-1)[: gradient.size]


def _update_coded(
    gradient: np.ndarray, master: np.ndarray, state: HostState, offset: int, scalars: Any, decay_step: Any
) -> np.ndarray:
    part = slice(offset, offset + gradient.size)
    blocks = gradient.size // BLOCK_ELEMENTS
    first = offset // BLOCK_ELEMENTS
    scales = slice(first, first + blocks)
    missing = CHUNK_ELEMENTS // BLOCK_ELEMENTS - blocks

    def coded(name: str) -> CodedMoment:
        scale_K = np.pad(state[f"{name}_scales"][scales], (0, missing))
        return CodedMoment(jnp.asarray(_blocks(state[f"{name}_codes"][part])), jnp.asarray(scale_K))

    step, m, v = _jitted_coded()(
        _blocks(gradient), _blocks(master), coded("m"), coded("v"), scalars, decay_step
    )
    for name, moment in (("m", m), ("v", v)):
        state[f"{name}_codes"][part] = np.asarray(moment.codes_KS).reshape(-1)[: gradient.size]
        state[f"{name}_scales"][scales] = np.asarray(moment.scale_K)[:blocks]
    return np.asarray(step).reshape(-1)[: gradient.size]


@functools.cache
def _jitted_fp32() -> Any:
    return jax.jit(adam_step)


@functools.cache
def _jitted_coded() -> Any:
    def update(gradient, parameter, m, v, scalars, decay_step):  # type: ignore[no-untyped-def]
        step, m_new, v_new = adam_step(gradient, parameter, decode_m(m), decode_v(v), scalars, decay_step)
        return step, encode_m(m_new), encode_v(v_new, scalars.step_number)

    return jax.jit(update)
