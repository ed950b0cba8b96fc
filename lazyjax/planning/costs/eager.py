"""Work of an executor that runs layers operation by operation and differentiates them with autograd.

Published systems (MegaTrain, LazyTrain) call modules of Transformers eagerly: every operation outside
the mixers reads its operands from device memory and writes its result there; of an MLP's gate,
PyTorch has one kernel for silu, one for the product, and three for their gradients. Mixers are fused
kernels (FlashAttention 2, flash-linear-attention): between their projections nothing reaches memory.
A backward pass runs the layer forward again and then back, with nothing left out as unused; gradients
stay bf16. Before each call the streamed slab is copied into the layer's own parameters.

For comparisons with what was published; plans of this library are costed by `TemplateWork`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping

from lazyjax.planning.costs.layers import SaveSet, backward_graph, forward_graph, named_bytes
from lazyjax.planning.costs.seconds import TemplateWork
from lazyjax.planning.costs.trace import VIEWS, Graph, Kernel, Work
from lazyjax.planning.program.operations import Action
from lazyjax.specs import item_bytes


@dataclasses.dataclass(frozen=True)
class EagerWork:
    """See the module; a `lazyjax.planning.costs.seconds.WorkSource`.

    Attributes:
        compiled: the same layers as this library compiles them, for embedding and loss.
    """

    compiled: TemplateWork

    def work(self, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None = None) -> Work:
        """Nothing is ever saved inside a layer, whatever `saved` says."""
        return _eager(self, kind, phase, head_chunk)[0]

    def working_bytes(
        self, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None = None
    ) -> int:
        """What autograd holds at its peak, and the layer's own copy of its parameters."""
        return _eager(self, kind, phase, head_chunk)[1]

    def save_sets(self, kind: str, seconds: Callable[[Work], float]) -> tuple[SaveSet, ...]:
        """Only the empty set."""
        return (SaveSet((), 0, seconds(self.work(kind, Action.BACKWARD, ()))),)


@functools.lru_cache(maxsize=1024)
def _eager(source: EagerWork, kind: str, phase: Action, head_chunk: int | None) -> tuple[Work, int]:
    compiled = source.compiled
    layer_kind = compiled.template.kinds[kind]
    if phase is Action.LOSS or not layer_kind.residual_names:
        work = compiled.work(kind, phase, (), head_chunk)
        return work, compiled.working_bytes(kind, phase, (), head_chunk)
    elements = sum(tensor.elements for tensor in layer_kind.parameters)
    slab_bytes = elements * item_bytes(compiled.shape.compute_dtype)
    copy = Work({Kernel(0, 2 * slab_bytes): 1})
    forward = _on_chip(forward_graph(layer_kind, compiled.shape, compiled.device_rows))
    named = named_bytes(layer_kind, compiled.shape, compiled.device_rows)
    hidden = compiled.device_rows * compiled.shape.sequence_length * compiled.shape.hidden_size
    forward_bytes, backward_bytes = _part_bytes(hidden, named)
    forward_work = products(forward) + Work({Kernel(0, forward_bytes): 1})
    if phase is not Action.BACKWARD:
        return forward_work + copy, forward.peak_bytes() + slab_bytes
    names = layer_kind.residual_names
    pure = _on_chip(backward_graph(layer_kind, compiled.shape, compiled.device_rows, names))
    back = products(pure) + Work({Kernel(0, backward_bytes): 1})
    # Autograd holds every result of the forward pass until the backward pass has used it.
    held = sum(
        forward.sizes[value]
        for node in forward.nodes
        if node.primitive not in VIEWS
        for value in node.outputs
    )
    return forward_work + back + copy, held + _held_parts(named) + 2 * slab_bytes


#: Bytes per element of the residual stream that a block's two norms and two additions move, as
#: Transformers writes them (bf16 2, fp32 4 bytes). A norm: to fp32 (2+4), square (4+4), mean (4), times the
#: inverse root (4+4), to bf16 (4+2), times the weight (2+2). Back: weight (6+2) and input (2+2) of that
#: product, to fp32 (2+4), of the product with the root (4+4), of the root (8+4, 4), of the mean's square
#: (4+4), their sum (8+4), to bf16 (4+2). An addition: 4+2, and its gradient's 4+2.
_STREAM_BYTES, _STREAM_GRADIENT_BYTES = 2 * 36 + 2 * 6, 2 * 68 + 2 * 6


def _part_bytes(hidden_elements: int, named: Mapping[str, int]) -> tuple[int, int]:
    """Bytes that everything but products moves, forward and back.

    The gate's: silu reads and writes, the product reads two and writes; three kernels for gradients
    that read two and write one. Of flash-linear-attention's, counted from its list of kernels, what
    each writes and the next one reads: convolution, w, u, new values, states (bf16), output, gated
    norm; back the same again, and their gradients.
    """
    gate = named["gate"]
    forward = _STREAM_BYTES * hidden_elements + 5 * gate
    backward = _STREAM_GRADIENT_BYTES * hidden_elements + 9 * gate
    if "delta_states" in named:
        qkv, out, states = named["delta_qkv"], named["delta_out"], named["delta_states"]
        forward += 3 * qkv + 10 * out + 2 * states
        backward += 5 * qkv + 16 * out + 4 * states
    return forward, backward


def _held_parts(named: Mapping[str, int]) -> int:
    """Bytes that autograd holds of an MLP's gate (silu and product) and of a delta rule."""
    held = 2 * named["gate"]
    if "delta_states" in named:
        held += named["delta_qkv"] + 4 * named["delta_out"] + named["delta_states"]
    return held


def _on_chip(graph: Graph) -> Graph:
    """The graph where what is inside mixers and MLPs takes no memory. A loop is a mixer's: one kernel."""
    sizes = tuple(0 if value in graph.inside else size for value, size in enumerate(graph.sizes))
    nodes = []
    for node in graph.nodes:
        flops = sum(kernel.flops * count for kernel, count in node.inner)
        inner = ((Kernel(flops, 0), 1),) if node.inner else ()
        nodes.append(node._replace(inner=inner, inner_peak_bytes=0))
    return dataclasses.replace(graph, nodes=tuple(nodes), sizes=sizes)


def products(graph: Graph) -> Work:
    """The matrix products of a graph, each with its operands and result."""
    kernels: Counter[Kernel] = Counter()
    for node in graph.nodes:
        for kernel, count in node.inner:
            if kernel.flops:
                kernels[kernel] += count
        if node.flops:
            moved = sum(graph.sizes[value] for value in (*node.inputs, *node.outputs))
            kernels[Kernel(node.flops, moved)] += 1
    return Work(kernels)
