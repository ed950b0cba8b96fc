"""AdamW with fp32 state over host slabs: the exact baseline.

Arithmetic is that of `optax.adamw` (Kingma and Ba 2015, algorithm 1; decoupled decay of Loshchilov
and Hutter 2019, algorithm 2) in fp32. The bias corrections are computed in double precision and
then rounded, where optax computes them in fp32.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator

import numpy as np

from lazyjax.optim.base import (
    VERSION,
    VERSION_BYTES,
    HostState,
    StateDescription,
    check_update,
    create_described,
)
from lazyjax.specs import SlabLayout
from lazyjax.storage.host import LayerSlabs
from lazyjax.storage.master import join_master, split_master

#: Elements per pass: gradient, masters, m, v and four temporaries fit into a core's L2 cache.
BLOCK_LENGTH = 16384


@dataclasses.dataclass(frozen=True, slots=True)
class Fp32AdamW:
    """Exact AdamW: fp32 m and v, fp32 master weights split in two halves (16 host bytes per parameter)."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    threads: int = 1

    @property
    def name(self) -> str:
        return "fp32_adamw"

    @property
    def state_version(self) -> str:
        return "fp32-adamw/1"

    def describe_state(self, layout: SlabLayout) -> StateDescription:
        """Arrays m and v [N] in float32."""
        return {
            "m": ((layout.length,), "float32"),
            "v": ((layout.length,), "float32"),
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
        scalars = dict(learning_rate=learning_rate, count=count, scale=scale)
        blocks = [(slice(a, b), decay) for a, b, decay in decay_blocks(slabs.layout, BLOCK_LENGTH)]

        def run(block: tuple[slice, bool]) -> None:
            part, decay = block
            self._update_block(slabs, state, part, decay, **scalars)

        if self.threads == 1 or len(blocks) == 1:
            for block in blocks:
                run(block)
            return
        with concurrent.futures.ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(run, blocks))

    def _update_block(
        self,
        slabs: LayerSlabs,
        state: HostState,
        part: slice,
        decay: bool,
        *,
        learning_rate: float,
        count: int,
        scale: float,
    ) -> None:
        f32 = np.float32
        gradient = slabs.gradient[part].astype(f32) * f32(scale)
        m, v = state["m"][part], state["v"][part]
        m *= f32(self.b1)
        m += f32(1 - self.b1) * gradient
        v *= f32(self.b2)
        np.square(gradient, out=gradient)
        gradient *= f32(1 - self.b2)
        v += gradient
        step = m / f32(1 - self.b1**count)
        root = np.sqrt(v / f32(1 - self.b2**count))
        root += f32(self.eps)
        step /= root
        master = join_master(slabs.hi[part], slabs.lo[part])
        if decay and self.weight_decay:
            step += f32(self.weight_decay) * master
        step *= f32(learning_rate)
        master -= step
        split_master(master, slabs.hi[part], slabs.lo[part])


def decay_blocks(layout: SlabLayout, block_length: int) -> Iterator[tuple[int, int, bool]]:
    """Cuts a slab into parts (begin, end, decay) of at most `block_length` elements.

    Gaps between segments and the tail are left out: they are zero and stay zero.
    """
    for segment in layout.segments:
        end = segment.offset + segment.elements
        for begin in range(segment.offset, end, block_length):
            yield begin, min(begin + block_length, end), segment.decay
