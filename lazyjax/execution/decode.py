"""Decoding: one pass over the layers serves one token of every row, and the prompts of new ones.

A decode step needs every parameter once, however many rows there are. Layers that the plan keeps on the
device stay there; the others stream through it, and their copies run ahead into the next pass. Rows live in
slots, each with its state in every block; a row that enters is prepared beside them and put into its slot.

The embedding never crosses the link: the host looks up the few rows of its table that a pass needs.

This module decides nothing: which rows there are is the business of `lazyjax.evaluation.generate`, what stays
on the device that of `lazyjax.planning.planner.decode`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Array, Int32

from lazyjax.execution.decode_kernels import Draw, Parameters, State, decode_kernels
from lazyjax.execution.forward import fetch
from lazyjax.execution.kernels import DeviceSlab, Kernels
from lazyjax.execution.transfers import Transfers
from lazyjax.models.decode import Span
from lazyjax.planning.plan.decode import DecodePlan
from lazyjax.planning.plan.document import PlanError
from lazyjax.storage.host import HostStore
from lazyjax.storage.master import join_master

#: Prompts pass a block in chunks of at most so many tokens: their scores are chunks x all tokens.
CHUNK_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """What a pass has to do for some rows.

    Attributes:
        tokens_BT: the tokens that follow those the state holds; filling after `counts_B`.
        starts_B, counts_B: see `lazyjax.models.decode.Span`. A row with count 0 is left alone.
        numbers_B: of the rows, see `lazyjax.execution.decode_kernels.Draw`.
    """

    tokens_BT: Int32[np.ndarray, "B T"]
    starts_B: Int32[np.ndarray, " B"]
    counts_B: Int32[np.ndarray, " B"]
    numbers_B: Int32[np.ndarray, " B"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: the most likely one (temperature 0), or drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: draw from the most likely tokens that have so much probability together; 1: from all.
        seed: equal seeds give equal texts.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: {self.temperature}; must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p}; must be above 0 and at most 1")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed: {self.seed}; must be from 0 to {2**31 - 1}")


class Decoder:
    """The rows that are being decoded, and passes over the model for them.

    The slabs of `store` must not change while a decoder is open. Not thread-safe.
    """

    def __init__(self, kernels: Kernels, store: HostStore, plan: DecodePlan, sampling: Sampling) -> None:
        """Puts the resident layers on the device.

        Raises:
            PlanError: the plan is for another model, or its rows cannot be split over the mesh.
        """
        template = kernels.template
        self._kernels, self._store, self.plan = kernels, store, plan
        self._decode_kernels = decode_kernels(kernels)
        self.head = len(template.spec.layers) - 1
        #: Layers whose parameters a pass needs, in order; a tied table comes last, with the head.
        self.uses = (*range(1, self.head + 1), *((0,) if template.spec.tied else ()))
        unknown = sorted(set(plan.resident) - set(self.uses))
        if unknown:
            raise PlanError(
                f"resident: layer {unknown[0]} takes no part in decoding ({template.spec.name} has "
                f"{self.uses[0]} to {self.head})"
            )
        if plan.batch_rows % kernels.mesh.size:
            raise PlanError(f"rows: {plan.batch_rows} cannot be split over {kernels.mesh.size} devices")
        self.sampling = sampling
        self._parameters = _LayerParameters(kernels, store, plan, self.uses)
        self.streams = self._parameters.streams
        self._states: dict[int, State] = {
            layer: self._decode_kernels.empty(template.kind(layer), plan.batch_rows, plan.tokens)()
            for layer in range(1, self.head)
        }
        self.passes = 0

    def run(
        self, going: Rows | None, entering: Rows | None = None, slots_R: Int32[np.ndarray, " R"] | None = None
    ) -> tuple[Int32[np.ndarray, " B"] | None, Int32[np.ndarray, " R"] | None]:
        """One pass: the next token of all slots, and the first one of rows that enter.

        Args:
            going: one token for every slot of the plan.
            entering: prompts from their first token on.
            slots_R: where they go; the plan's number of rows, or more, drops a row that only fills up.

        Returns:
            The next tokens of both; what a row with count 0 gets means nothing.
        """
        self.passes += 1
        entered = 0 if entering is None else len(entering.counts_B)
        if entering is not None and slots_R is not None:
            entering, slots_R = self._even(entering, slots_R)
        work = None if going is None else _Work(self, going)
        prompts = None if entering is None else _Work(self, entering)
        slots = None if slots_R is None else self._put(slots_R)
        tail: dict[int, Parameters] = {}
        for layer, params in self._parameters.in_order():
            if not 1 <= layer < self.head:
                tail[layer] = params
                continue
            kind = self._kernels.template.kind(layer)
            if work is not None:
                self._states[layer] = work.block(kind, params, self._states[layer])
            if prompts is not None:
                new = self._decode_kernels.empty(kind, prompts.rows, prompts.tokens)()
                new = prompts.block(kind, params, new)
                self._states[layer] = self._decode_kernels.place()(self._states[layer], new, slots)
            self._parameters.used_by(part.token for part in (work, prompts) if part is not None)
        head_params = tail[self.head]
        table_params = tail[0] if 0 in tail else None
        chosen = [
            None if part is None else part.choose(head_params, table_params) for part in (work, prompts)
        ]
        next_B, first_R = jax.device_get(chosen)
        self._parameters.all_ran()
        return next_B, None if first_R is None else first_R[:entered]

    def _even(self, rows: Rows, slots_R: Int32[np.ndarray, " R"]) -> tuple[Rows, Int32[np.ndarray, " more"]]:
        """Rows that only fill up, so that every device has as many."""
        missing = -len(slots_R) % self._kernels.mesh.size
        if not missing:
            return rows, slots_R
        parts = (rows.tokens_BT, rows.starts_B, rows.counts_B, rows.numbers_B)
        padded = [np.pad(part, ((0, missing), *((0, 0),) * (part.ndim - 1))) for part in parts]
        return Rows(*padded), np.pad(slots_R, (0, missing), constant_values=self.plan.batch_rows)

    def describe(self) -> str:
        """The plan in words."""
        resident, used = len(self.plan.resident), len(self.uses)
        where = "every layer resident" if resident == used else f"{resident} of {used} layers resident"
        return f"{self.plan.batch_rows} rows of at most {self.plan.tokens} tokens decoded together, {where}"

    def close(self) -> None:
        """Gives the device memory back."""
        self._parameters.clear()
        self._states.clear()

    def _embed(self, tokens_BT: Int32[np.ndarray, "B T"]) -> Array:
        """x_BTD of tokens; their rows of the table are looked up on the host."""
        slabs = self._store.layers[0]
        (segment,) = slabs.layout.segments
        part = slice(segment.offset, segment.offset + segment.elements)
        tokens = tokens_BT.reshape(-1)
        hi_UD = slabs.hi[part].reshape(segment.shape)[tokens]
        rows_UD: np.ndarray
        if self._kernels.compute_dtype == "bfloat16":
            rows_UD = hi_UD.view(ml_dtypes.bfloat16)
        else:
            rows_UD = join_master(hi_UD, slabs.lo[part].reshape(segment.shape)[tokens])
        index_BT = np.arange(tokens.size, dtype=np.int32).reshape(tokens_BT.shape)
        return self._decode_kernels.embed()(self._put(rows_UD), self._put(index_BT))

    def _put(self, array: Any) -> Array:
        return jax.device_put(array, self._kernels.placement.replicated)

    def _draw(self, numbers_B: Int32[np.ndarray, " B"]) -> Draw | None:
        if self.sampling.temperature == 0:
            return None
        return Draw(
            seed=self._put(np.int32(self.sampling.seed)),
            temperature=self._put(np.float32(self.sampling.temperature)),
            top_p=self._put(np.float32(self.sampling.top_p)),
            rows_B=self._put(numbers_B),
        )


class _LayerParameters:
    """Parameters for pass after pass: of layers that stay on the device, and of those that stream through it.

    Args:
        uses: layers whose parameters a pass needs, in order.
    """

    def __init__(self, kernels: Kernels, store: HostStore, plan: DecodePlan, uses: tuple[int, ...]) -> None:
        self._kernels, self._store, self._uses, self._prefetch = kernels, store, uses, plan.prefetch
        self._transfers = Transfers(kernels.sharded, kernels.compute_dtype)
        self._resident: dict[int, Parameters] = {}
        for layer in plan.resident:
            self._resident[layer] = self._unpack(layer, fetch(self._transfers, store, layer))[0]
            jax.block_until_ready(self._resident[layer])
        streamed = [layer for layer in uses if layer not in self._resident]
        self.streams = bool(streamed)
        self._fetches = itertools.cycle(streamed) if streamed else iter(())
        self._coming: collections.deque[tuple[int, DeviceSlab]] = collections.deque()
        self._running: collections.deque[Array] = collections.deque()

    def in_order(self) -> Iterator[tuple[int, Parameters]]:
        """Layers in the order of use, with their parameters."""
        self._fetch_ahead()
        for layer in self._uses:
            if layer in self._resident:
                yield layer, self._resident[layer]
                continue
            fetched, slab = self._coming.popleft()
            assert fetched == layer
            params, token = self._unpack(layer, slab)
            del slab
            self._running.append(token)
            # Before this layer computes: on a GPU a buffer is usable once what was enqueued then is done.
            self._fetch_ahead()
            yield layer, params

    def used_by(self, tokens: Iterable[Array]) -> None:
        """Takes note of kernels that use the parameters given last."""
        self._running.extend(tokens)

    def all_ran(self) -> None:
        """Says that all kernels of the pass have run."""
        self._running.clear()

    def clear(self) -> None:
        """Gives the device memory back."""
        self._coming.clear()
        self._running.clear()
        self._resident.clear()

    def _unpack(self, layer: int, slab: DeviceSlab) -> tuple[Parameters, Array]:
        return self._kernels.parameters(self._kernels.template.kind(layer))(slab)

    def _fetch_ahead(self) -> None:
        """Starts copies until the plan's number of slabs is on its way."""
        while len(self._coming) < self._prefetch:
            layer = next(self._fetches, None)
            if layer is None:
                return
            # At most one layer's work may be outstanding: slabs that were used are then free again.
            while len(self._running) > 1:
                jax.block_until_ready(self._running.popleft())
            self._coming.append((layer, fetch(self._transfers, self._store, layer)))


class _Work:
    """Some rows on their way through the layers."""

    def __init__(self, decoder: Decoder, rows: Rows) -> None:
        self.decoder = decoder
        self.rows, self.tokens = rows.tokens_BT.shape
        chunks = range(0, self.tokens, CHUNK_TOKENS)
        self.spans = []
        self.x_BTD = []
        for start in chunks:
            tokens_BT = rows.tokens_BT[:, start : start + CHUNK_TOKENS]
            counts_B = np.clip(rows.counts_B - start, 0, tokens_BT.shape[1]).astype(np.int32)
            starts_B = (rows.starts_B + start).astype(np.int32)
            self.spans.append(Span(decoder._put(starts_B), decoder._put(counts_B)))
            self.x_BTD.append(decoder._embed(tokens_BT))
        self.whole = Span(decoder._put(rows.starts_B), decoder._put(rows.counts_B))
        self.draw = decoder._draw(rows.numbers_B)
        self.token: Array = self.whole.counts_B

    def block(self, kind: Any, params: Parameters, state: State) -> State:
        """Passes one block; returns the state behind it."""
        step = self.decoder._decode_kernels.step(kind)
        for index, span in enumerate(self.spans):
            self.x_BTD[index], state, self.token = step(params, self.x_BTD[index], state, span)
        return state

    def choose(self, head_params: Parameters, table_params: Parameters | None) -> Array:
        """The tokens that follow."""
        return self.decoder._decode_kernels.choose()(
            head_params, table_params, tuple(self.x_BTD), self.whole, self.draw
        )
