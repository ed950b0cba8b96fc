"""What decoding takes: bytes on the device and seconds of a step.

A decode step reads every parameter once and gives one token per row. What limits it is the slowest of three:
the link, for layers that are streamed; device memory, which reads parameters and the rows' states; matrix
products. Work comes from the template's own decode steps, traced; seconds from a hardware
profile, or measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from lazyjax.hardware.profile import HardwareProfile
from lazyjax.models.decode import Span
from lazyjax.models.template import Context, LayerKind, ModelTemplate
from lazyjax.planning.costs.layers import CallShape, at_rows, forward_graph
from lazyjax.planning.costs.trace import Graph, Kernel, Work, trace
from lazyjax.planning.plan.decode import DecodePlan
from lazyjax.specs import item_bytes, slab_layout

#: Passes after which a simulated pipeline repeats itself.
_SETTLED_PASSES = 4


class DecodeMemoryError(ValueError):
    """Not even one row fits; the message says what is short."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer of a decode step: seconds to fetch it, to make its parameters of it, and to compute."""

    fetch_seconds: float
    unpack_seconds: float
    compute_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePrediction:
    """What a plan is expected to do (simulated).

    Attributes:
        step_seconds: from one token of a row to its next.
        device_bytes: parameters on the device, states of all rows, and what a step works with.
    """

    step_seconds: float
    device_bytes: int


def period_seconds(costs: Sequence[LayerCost], streamed: Sequence[bool], prefetch: int) -> float:
    """Seconds of a decode step once the pipeline repeats itself.

    Fetches follow one another on the link, `prefetch` ahead of the layer in use, into the next step; a layer
    computes when its predecessor has and its parameters are there.

    Args:
        costs: of every layer in order of use.
        streamed: which of them are.
        prefetch: see `DecodePlan`.
    """
    link_free = compute_free = 0.0
    finished: list[float] = []
    ends = []
    for _ in range(_SETTLED_PASSES):
        for cost, is_streamed in zip(costs, streamed, strict=True):
            start = compute_free
            if is_streamed:
                # Its place was taken by the slab that was used `prefetch` slabs earlier.
                place_free = finished[-prefetch] if len(finished) >= prefetch else 0.0
                link_free = max(link_free, place_free) + cost.fetch_seconds
                start = max(start, link_free) + cost.unpack_seconds
            compute_free = start + cost.compute_seconds
            if is_streamed:
                finished.append(start)
        ends.append(compute_free)
    return ends[-1] - ends[-2]


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
    """Device bytes of decoding one model.

    Attributes:
        tokens: see `DecodePlan`.
        devices: rows are split over them; parameters that are resident or in use are whole on each.
    """

    template: ModelTemplate
    tokens: int
    compute_dtype: str = "bfloat16"
    devices: int = 1

    @property
    def uses(self) -> tuple[int, ...]:
        """Layers whose parameters a step needs, in order (the embedding is looked up on the host)."""
        spec = self.template.spec
        return (*range(1, len(spec.layers)), *((0,) if spec.tied else ()))

    def parameter_bytes(self, layer: int) -> int:
        """Of one layer on the device."""
        kind = self.template.kind(layer)
        return _slab_elements(kind, self.devices) * item_bytes(self.compute_dtype)

    @functools.cached_property
    def row_state_bytes(self) -> int:
        """What all blocks remember of one row with `tokens` tokens."""
        return sum(self._state_bytes(layer.kind) for layer in self.template.spec.layers[1:-1])

    def _state_bytes(self, kind: str) -> int:
        return _state_bytes(self.template.kinds[kind], self.tokens, self.compute_dtype)

    def device_bytes(self, plan: DecodePlan) -> int:
        """Parameters on a device, states of its rows, and what a step works with."""
        spec = self.template.spec
        device_rows = plan.batch_rows // self.devices
        resident = sum(self.parameter_bytes(layer) for layer in plan.resident)
        streamed = [self.parameter_bytes(layer) for layer in self.uses if layer not in plan.resident]
        # Slabs on their way, and the unpacked parameters of the layer in use and of the one before.
        window = (plan.prefetch + 2) * max(streamed, default=0)
        # A block's new state may stand beside the old one; rows that enter are prepared beside the slots.
        spare = 2 * device_rows * max(self._state_bytes(layer.kind) for layer in spec.layers[1:-1])
        logits = 2 * device_rows * spec.vocabulary_size * 4
        return resident + window + device_rows * self.row_state_bytes + spare + logits

    def too_large(self, device_bytes: int, batch_rows: int) -> DecodeMemoryError:
        """Says why not even `batch_rows` rows fit into `device_bytes`."""
        need = self.device_bytes(DecodePlan(batch_rows, self.tokens))
        return DecodeMemoryError(
            f"decoding {batch_rows} row(s) of {self.tokens} tokens takes {need / 1e9:.2f} GB of device "
            f"memory with every layer streamed, {device_bytes / 1e9:.2f} GB may be used; take fewer rows "
            "or tokens"
        )


@dataclasses.dataclass(frozen=True)
class DecodeCosts:
    """Seconds of decoding one model on one machine.

    Attributes:
        measured: seconds of one layer's step by kind of layer, for the rows that were timed, in place of
            predictions.
    """

    sizes: DecodeSizes
    profile: HardwareProfile
    measured: Mapping[str, LayerCost] = dataclasses.field(default_factory=dict)

    def layer_cost(self, layer: int, batch_rows: int) -> LayerCost:
        """Seconds of one layer in a decode step of `batch_rows` rows."""
        kind = self.sizes.template.spec.layers[layer].kind
        if kind in self.measured:
            return self.measured[kind]
        profile, size = self.profile, self.sizes.parameter_bytes(layer)
        fetch = size / profile.devices / profile.slab_rate(alone=True)
        if profile.devices > 1 and profile.interconnect_bytes_per_second is not None:
            fetch += profile.collective_seconds(size)
        unpack = 2 * size / profile.device_bandwidth_bytes_per_second
        return LayerCost(fetch, unpack, self._seconds(self._work(layer, batch_rows // profile.devices)))

    def predict(self, plan: DecodePlan) -> DecodePrediction:
        """Time and memory of a plan."""
        layers = self.sizes.template.spec.layers
        of_kind = {
            layers[layer].kind: self.layer_cost(layer, plan.batch_rows) for layer in self._first_uses()
        }
        costs = [of_kind[layers[layer].kind] for layer in self.sizes.uses]
        streamed = [layer not in plan.resident for layer in self.sizes.uses]
        return DecodePrediction(period_seconds(costs, streamed, plan.prefetch), self.sizes.device_bytes(plan))

    def _first_uses(self) -> tuple[int, ...]:
        """One layer of every kind."""
        layers = self.sizes.template.spec.layers
        return tuple({layers[layer].kind: layer for layer in self.sizes.uses}.values())

    def prompt_seconds(self, prompt_tokens: int, batch_rows: int) -> float:
        """Device seconds of the prompts of `batch_rows` rows, computed while the layers are there anyway."""
        template, devices = self.sizes.template, self.profile.devices
        shape = CallShape(template.spec.hidden_size, prompt_tokens, self.sizes.compute_dtype)
        return sum(
            self._seconds(forward_graph(template.kinds[layer.kind], shape, -(-batch_rows // devices)).work())
            for layer in template.spec.layers[1:-1]
        )

    def _seconds(self, work: Work) -> float:
        profile = self.profile
        return work.seconds(profile.matmul_flops_per_second, profile.device_bandwidth_bytes_per_second)

    def _work(self, layer: int, device_rows: int) -> Work:
        template, dtype = self.sizes.template, self.sizes.compute_dtype
        if layer == len(template.spec.layers) - 1:
            return _head_work(template, device_rows, dtype)
        if layer == 0:
            return Work({Kernel(0, 0): 1})  # the tied table: its product is the head's
        return _step_work(
            template.kind(layer), template.spec.hidden_size, device_rows, self.sizes.tokens, dtype
        )


def decode_costs(
    template: ModelTemplate, profile: HardwareProfile, *, tokens: int, compute_dtype: str = "bfloat16"
) -> DecodeCosts:
    """Costs of decoding rows of `tokens` tokens with the profile's rates."""
    return DecodeCosts(DecodeSizes(template, tokens, compute_dtype, profile.devices), profile)


@functools.lru_cache(maxsize=512)
def _slab_elements(kind: LayerKind, devices: int) -> int:
    return slab_layout(kind.parameters, devices=devices).length


@functools.lru_cache(maxsize=512)
def _state_bytes(kind: LayerKind, tokens: int, dtype: str) -> int:
    """What a block remembers of one row."""
    assert kind.decoding is not None
    shapes = kind.decoding.state_shapes(1, tokens, dtype)
    return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)


@functools.lru_cache(maxsize=512)
def _step_work(kind: LayerKind, hidden_size: int, device_rows: int, tokens: int, dtype: str) -> Work:
    decoding = kind.decoding
    assert decoding is not None
    params = tuple(jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(dtype)) for tensor in kind.parameters)
    step: Callable[..., object] = decoding.step

    def at(count: int) -> Graph:
        x = jax.ShapeDtypeStruct((count, 1, hidden_size), jnp.dtype(dtype))
        counts = jax.ShapeDtypeStruct((count,), jnp.int32)
        state = decoding.state_shapes(count, tokens, dtype)
        return trace(lambda p, x, s, a, b: step(p, x, s, Span(a, b)), params, x, state, counts, counts)

    return at_rows(at, ("decode", kind, hidden_size, tokens, dtype), device_rows).work()


@functools.lru_cache(maxsize=512)
def _head_work(template: ModelTemplate, device_rows: int, dtype: str) -> Work:
    spec = template.spec
    head = template.kind(len(spec.layers) - 1)
    params = tuple(jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(dtype)) for tensor in head.parameters)
    table = jax.ShapeDtypeStruct((spec.vocabulary_size, spec.hidden_size), jnp.dtype(dtype))

    def choose(params: tuple[jax.Array, ...], table_VD: jax.Array, x: jax.Array, i: jax.Array) -> jax.Array:
        normed = head.apply(params, x, Context(i, i))
        logits = jnp.einsum("btd,vd->btv", normed, table_VD, preferred_element_type=jnp.float32)
        return jnp.argmax(logits, axis=-1)

    def at(count: int) -> Graph:
        x = jax.ShapeDtypeStruct((count, 1, spec.hidden_size), jnp.dtype(dtype))
        return trace(choose, params, table, x, jax.ShapeDtypeStruct((count, 1), jnp.int32))

    return at_rows(at, ("choose", template, dtype), device_rows).work()
