"""What a layer's forward and backward pass cost, read off their traced programs.

A traced function is flattened to a `Graph`; dead code is removed first, so that a recomputed
layer pays only for what its gradients need. From the graph come matrix FLOPs, an estimate of
memory traffic (element-wise chains count as one kernel that reads its sources and writes its
result, as XLA fuses them), and an estimate of the working set (values that have to exist in
memory between kernels). Nothing is compiled or allocated.

Where data decide which turns of a loop compute anything, all are counted, unless `Graph.visiting` is told how
many do.

Time is the roofline of each kernel, see `Work.seconds`. This module knows no hardware, plan or
model family.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from lazyjax.models.backend import SKIPPABLE

#: Calls whose body runs once, in place.
_INLINED = frozenset(
    "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr custom_lin eval_jaxpr".split()
)
#: Reinterpretations of a value that cost nothing or are folded into whoever reads it.
VIEWS = frozenset(
    "reshape transpose squeeze expand_dims broadcast_in_dim name copy copy_p stop_gradient "
    "optimization_barrier sharding_constraint reduce_precision bitcast_convert_type".split()
)
#: Kernels of their own: operands and results lie in memory.
_STANDALONE = frozenset(
    "dot_general conv_general_dilated ragged_dot triangular_solve gather dynamic_slice scatter scatter-add "
    "scatter_add scatter_mul scatter_min scatter_max sort cumsum cumprod cummax cummin cumlogsumexp top_k "
    "scan cond dynamic_update_slice custom_call pallas_call fused".split()
)
#: Kernels that may write over their first operand.
_IN_PLACE = frozenset(
    "scatter scatter-add scatter_add scatter_mul scatter_min scatter_max dynamic_update_slice".split()
)
#: Their bodies say how two elements are combined.
_ELEMENT_BODIES = frozenset(
    "reduce reduce_window select_and_scatter select_and_scatter_add scatter scatter-add scatter_add "
    "scatter_mul scatter_min scatter_max".split()
)
#: Functions that a library's kernel stands for: operands and results lie in memory, nothing else does.
_ONE_KERNEL = ("fused_attention_forward", "fused_attention_backward")
_ROOTS_PREFIX = ("reduce_", "argm")


class UnknownCostError(ValueError):
    """A traced program contains a construct whose work cannot be read off."""


class Kernel(NamedTuple):
    """Matrix FLOPs of one kernel and the bytes it reads and writes."""

    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Kernels that run one after another, with how often each runs."""

    kernels: Mapping[Kernel, int]

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products and convolutions (2 per multiply-add)."""
        return sum(kernel.flops * count for kernel, count in self.kernels.items())

    @property
    def bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(kernel.bytes * count for kernel, count in self.kernels.items())

    def seconds(self, flops_per_second: float, bytes_per_second: float, launch_seconds: float = 0.0) -> float:
        """Sum over the kernels of launch + max(flops / rate, bytes / bandwidth)."""
        return sum(
            count * (launch_seconds + max(kernel.flops / flops_per_second, kernel.bytes / bytes_per_second))
            for kernel, count in self.kernels.items()
        )

    def __add__(self, other: Work) -> Work:
        return Work(Counter(self.kernels) + Counter(other.kernels))


class Visits(NamedTuple):
    """Of loops that may skip turns: how many turns compute, and how many there are."""

    visited: int
    turns: int


#: Kernels with how often each runs.
_Counts = tuple[tuple[Kernel, int], ...]


class Skippable(NamedTuple):
    """Turns of a loop that may compute nothing, by what the data say (`lazyjax.models.backend.SKIPPABLE`).

    Attributes:
        turns: of the loop.
        visited, skipped: kernels of one turn that computes, and of one that does not, besides those that
            every turn runs.
    """

    turns: int
    visited: _Counts
    skipped: _Counts


class Node(NamedTuple):
    """One primitive of a flattened program; values are numbered.

    Attributes:
        name: the tensor's name, for `checkpoint_name`.
        flops: matrix FLOPs; for loops and branches see `inner`.
        inner: what the body of a loop or branch costs, all iterations together.
        inner_peak_bytes: working set of one iteration.
        skippable: the turns in `inner` that may be skipped.
        aliases: (input, output) pairs that share one buffer: updates in place, carries of loops.
    """

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str = ""
    flops: int = 0
    inner: _Counts = ()
    inner_peak_bytes: int = 0
    skippable: Skippable | None = None
    aliases: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Graph:
    """A flattened program: nodes in execution order over numbered values of known size.

    `inside` are values that `trace` was told to mark.
    """

    nodes: tuple[Node, ...]
    sizes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    inside: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def needed(self, values: Iterable[int], *, saved: Collection[str] = ()) -> Graph:
        """The part that computes `values`, given the inputs and the tensors named in `saved`."""
        wanted = set(values)
        targets = tuple(dict.fromkeys(values))
        kept: list[Node] = []
        given: list[int] = []
        for node in reversed(self.nodes):
            if wanted.isdisjoint(node.outputs):
                continue
            if node.primitive == "name" and node.name in saved:
                given.append(node.outputs[0])
                continue
            kept.append(node)
            wanted.update(node.inputs)
        outputs = tuple(value for value in targets if value not in given)
        return Graph(tuple(reversed(kept)), self.sizes, (*self.inputs, *given), outputs, self.inside)

    def name_of(self, value: int) -> str:
        """The name given to a value, looking through what is wrapped around it; empty: none."""
        makers = {output: node for node in self.nodes for output in node.outputs}
        while value in makers:
            node = makers[value]
            if node.primitive == "name":
                return node.name
            if len(node.inputs) != 1:
                break
            value = node.inputs[0]
        return ""

    def visiting(self, visits: Visits) -> Graph:
        """The same program on data that let loops skip turns.

        Raises:
            UnknownCostError: a loop that may skip has another number of turns.
        """
        nodes = tuple(node if node.skippable is None else _visiting(node, visits) for node in self.nodes)
        return dataclasses.replace(self, nodes=nodes)

    def work(self) -> Work:
        """Kernels after fusion."""
        kernels: Counter[Kernel] = Counter()
        source, fused, materialised = self._fusion
        for node in self.nodes:
            for kernel, count in node.inner:
                kernels[kernel] += count
            if node.primitive in _STANDALONE:
                if node.primitive in ("scan", "cond"):
                    continue
                if node.primitive in _IN_PLACE:
                    # In place on the first operand: reads and writes what the updates touch.
                    moved = 3 * sum(self.sizes[value] for value in node.inputs[1:])
                elif node.primitive in ("gather", "dynamic_slice"):
                    moved = 2 * sum(self.sizes[value] for value in node.outputs)
                else:
                    moved = sum(self.sizes[source[value]] for value in node.inputs)
                    moved += sum(self.sizes[value] for value in node.outputs)
                kernels[Kernel(node.flops, moved)] += 1
                continue
            written = [value for value in node.outputs if value in materialised]
            if not written or node.primitive in VIEWS:
                continue
            read = frozenset().union(*(fused[value] for value in written))
            moved = sum(self.sizes[value] for value in (*read, *written))
            kernels[Kernel(node.flops, moved)] += 1
        return Work(kernels)

    def peak_bytes(self) -> int:
        """Most bytes of materialised values at once, without the program's inputs and outputs."""
        source, fused, materialised = self._fusion
        last_use: dict[int, int] = {}
        for position, node in enumerate(self.nodes):
            if node.primitive in _STANDALONE:
                used: set[int] = {source[value] for value in node.inputs}
            elif any(value in materialised for value in node.outputs):
                used = set().union(*(fused[value] for value in node.outputs))
            else:
                continue
            for value in used:
                last_use[value] = position
        outside = {source.get(value, value) for value in (*self.inputs, *self.outputs)}
        for node in reversed(self.nodes):
            outside.update(source[before] for before, after in node.aliases if after in outside)
        ending: dict[int, list[int]] = {}
        for value, position in last_use.items():
            if value not in outside:
                ending.setdefault(position, []).append(value)
        live = peak = 0
        for position, node in enumerate(self.nodes):
            dying = set(ending[position]) if position in ending else set()
            inherited = {after for before, after in node.aliases if source[before] in dying}
            born = [
                value
                for value in node.outputs
                if value in materialised and source[value] == value and value not in outside
            ]
            live += sum(self.sizes[value] for value in born if value in last_use and value not in inherited)
            peak = max(peak, live + node.inner_peak_bytes)
            live -= sum(self.sizes[value] for value in dying)
            live += sum(self.sizes[value] for value in born if value in last_use and value in inherited)
        return peak

    @functools.cached_property
    def _fusion(self) -> tuple[dict[int, int], dict[int, set[int]], set[int]]:
        """Per value: what it is a view of, and which materialised values its kernel reads."""
        source: dict[int, int] = {value: value for value in self.inputs}
        for node in self.nodes:
            for value in node.outputs:
                viewed = node.primitive in VIEWS and node.inputs
                source[value] = source[node.inputs[0]] if viewed else value
        materialised = {*self.inputs, *(source[value] for value in self.outputs)}
        for node in self.nodes:
            if node.primitive in _STANDALONE:
                materialised.update(node.outputs)
                materialised.update(source[value] for value in node.inputs)
            elif node.primitive.startswith(_ROOTS_PREFIX):
                materialised.update(node.outputs)
        fused: dict[int, set[int]] = {value: {value} for value in self.inputs}
        for node in self.nodes:
            reads: set[int] = set()
            for value in node.inputs:
                if source[value] in materialised:
                    reads.add(source[value])
                else:
                    reads |= fused[value]
            fused.update(dict.fromkeys(node.outputs, reads))
        return source, fused, materialised


#: Tells what a value is inside of, from the operation that makes it and its shape; empty: nothing.
Marking = Callable[[str, tuple[int, ...]], str]


def trace(function: Callable[..., Any], *arguments: Any, marking: Marking | None = None) -> Graph:
    """The graph of `function` on abstract arguments, without dead code.

    Args:
        marking: fills `Graph.inside`.

    Raises:
        UnknownCostError: for a loop whose trip count is not known.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return _flatten(jaxpr, marking)


def between(low: Graph, high: Graph, low_rows: int, high_rows: int, device_rows: int) -> Graph:
    """The graph at `device_rows`, from those at two other row counts: every size is affine in the rows.

    Raises:
        UnknownCostError: the two programs differ by more than their sizes.
    """

    def affine(a: int, b: int) -> int:
        return a + (b - a) * (device_rows - low_rows) // (high_rows - low_rows)

    def kernels(low: _Counts, high: _Counts) -> _Counts:
        return tuple(
            (Kernel(affine(a.flops, b.flops), affine(a.bytes, b.bytes)), count)
            for (a, count), (b, _) in zip(low, high, strict=True)
        )

    def turns(a: Skippable | None, b: Skippable | None) -> Skippable | None:
        if a is None or b is None:
            return None
        return Skippable(a.turns, kernels(a.visited, b.visited), kernels(a.skipped, b.skipped))

    if len(low.nodes) != len(high.nodes) or low.outputs != high.outputs:
        raise UnknownCostError(f"the program changes between {low_rows} and {high_rows} rows")
    nodes = []
    for a, b in zip(low.nodes, high.nodes, strict=True):
        if _structure(a) != _structure(b):
            raise UnknownCostError(f"the program changes between {low_rows} and {high_rows} rows")
        nodes.append(
            a._replace(
                flops=affine(a.flops, b.flops),
                inner=kernels(a.inner, b.inner),
                inner_peak_bytes=affine(a.inner_peak_bytes, b.inner_peak_bytes),
                skippable=turns(a.skippable, b.skippable),
            )
        )
    sizes = tuple(affine(a, b) for a, b in zip(low.sizes, high.sizes, strict=True))
    return Graph(tuple(nodes), sizes, low.inputs, low.outputs, low.inside)


def _structure(node: Node) -> tuple[Any, ...]:
    """What does not depend on the rows."""
    skippable = node.skippable
    turns = None if skippable is None else (skippable.turns, len(skippable.visited), len(skippable.skipped))
    return node.primitive, node.inputs, len(node.inner), turns


def _visiting(node: Node, visits: Visits) -> Node:
    """See `Graph.visiting`."""
    assert node.skippable is not None
    turns, visited, skipped = node.skippable
    if turns != visits.turns:
        raise UnknownCostError(f"a loop has {turns} turns that may be skipped, not {visits.turns}")
    left_out = turns - visits.visited
    inner = Counter(dict(node.inner))
    for kernel, count in visited:
        inner[kernel] -= left_out * count
    for kernel, count in skipped:
        inner[kernel] += left_out * count
    return node._replace(inner=tuple((kernel, count) for kernel, count in inner.items() if count))


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval.dtype, "itemsize") else 0


def _flatten(jaxpr: Any, marking: Marking | None = None) -> Graph:
    nodes: list[Node] = []
    sizes: list[int] = []
    constants: list[int] = []
    inside: dict[int, str] = {}

    def new(aval: Any) -> int:
        sizes.append(_bytes(aval))
        return len(sizes) - 1

    def walk(body: Any, numbers: dict[Any, int]) -> list[int]:
        def read(atom: Any) -> int:
            if isinstance(atom, jex_core.Literal):
                constants.append(new(atom.aval))
                return constants[-1]
            return numbers[atom]

        for equation in body.eqns:
            inputs = tuple(read(atom) for atom in equation.invars if not isinstance(atom, jex_core.Literal))
            primitive = equation.primitive.name
            if primitive in _INLINED and not _is_one_kernel(equation):
                inner = _body(equation)
                arguments = [read(atom) for atom in equation.invars]
                # Calls with closed-over constants pass them first.
                bound = dict(zip((*inner.constvars, *inner.invars), arguments, strict=True))
                for variable, number in zip(equation.outvars, walk(inner, bound), strict=True):
                    numbers[variable] = number
                continue
            _refuse_unknown_body(equation)
            outputs = tuple(new(variable.aval) for variable in equation.outvars)
            numbers.update(zip(equation.outvars, outputs, strict=True))
            for number, variable in zip(outputs, equation.outvars, strict=True):
                if marking is not None and (mark := marking(primitive, variable.aval.shape)):
                    inside[number] = mark
            nodes.append(_node(equation, inputs, outputs, numbers))
        return [read(atom) for atom in body.outvars]

    numbers = {variable: new(variable.aval) for variable in (*jaxpr.constvars, *jaxpr.invars)}
    given = tuple(numbers.values())
    outputs = tuple(walk(jaxpr, numbers))
    return Graph(tuple(nodes), tuple(sizes), (*given, *constants), outputs, inside)


def _node(
    equation: Any, inputs: tuple[int, ...], outputs: tuple[int, ...], numbers: Mapping[Any, int]
) -> Node:
    primitive, params = equation.primitive.name, equation.params
    match primitive:
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            flops = 2 * math.prod(equation.outvars[0].aval.shape) * depth
            return Node(primitive, inputs, outputs, flops=flops)
        case "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
            flops = 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // out_features
            return Node(primitive, inputs, outputs, flops=flops)
        case "triangular_solve":
            flops = math.prod(equation.outvars[0].aval.shape) * equation.invars[0].aval.shape[-1]
            return Node(primitive, inputs, outputs, flops=flops)
        case "name":
            return Node(primitive, inputs, outputs, name=params["name"])
        case "jit" | "pjit":
            return Node("fused", inputs, outputs, flops=_flatten(_body(equation)).work().flops)
        case "scan":
            graph = _flatten(params["jaxpr"].jaxpr)
            inner = tuple((k, count * params["length"]) for k, count in graph.work().kernels.items())
            return Node(
                primitive, inputs, outputs, inner=inner, inner_peak_bytes=graph.peak_bytes(),
                skippable=_skippable_turns(graph, params["length"]),
                aliases=_carries(equation, outputs, numbers),
            )  # fmt: skip
        case "cond":
            graphs = [_flatten(branch.jaxpr) for branch in params["branches"]]
            graphs.sort(key=lambda graph: (graph.work().flops, graph.work().bytes))
            cheapest, costliest = (tuple(graph.work().kernels.items()) for graph in (graphs[0], graphs[-1]))
            may_skip = SKIPPABLE in str(equation.source_info.name_stack)
            return Node(
                primitive, inputs, outputs, inner=costliest, inner_peak_bytes=graphs[-1].peak_bytes(),
                skippable=Skippable(1, costliest, cheapest) if may_skip else None,
            )  # fmt: skip
        case "while":
            raise UnknownCostError("a while loop has no known trip count; use lax.scan or lax.fori_loop")
        case _ if primitive in _IN_PLACE:
            return Node(primitive, inputs, outputs, aliases=((inputs[0], outputs[0]),))
        case _:
            return Node(primitive, inputs, outputs)


def _skippable_turns(body: Graph, length: int) -> Skippable | None:
    """The turns of a loop of `length` turns that its body may skip."""
    found = [node.skippable for node in body.nodes if node.skippable is not None]
    if not found:
        return None
    if len(found) > 1 or found[0].turns > 1:
        raise UnknownCostError("a loop's turn may be skipped in one place only")
    return found[0]._replace(turns=length)


def _carries(
    equation: Any, outputs: tuple[int, ...], numbers: Mapping[Any, int]
) -> tuple[tuple[int, int], ...]:
    """(first value, last value) of a loop's carries, told from what is stacked by their shapes."""
    body = equation.params["jaxpr"].jaxpr
    carries = sum(
        outer.aval.shape == inner.aval.shape
        for outer, inner in zip(equation.outvars, body.outvars, strict=True)
    )
    stacked = sum(
        outer.aval.shape != inner.aval.shape
        for outer, inner in zip(equation.invars, body.invars, strict=True)
    )
    first = len(equation.invars) - stacked - carries
    return tuple(
        (numbers[atom], outputs[i])
        for i, atom in enumerate(equation.invars[first : first + carries])
        if not isinstance(atom, jex_core.Literal)
    )


def _is_one_kernel(equation: Any) -> bool:
    return equation.primitive.name in ("jit", "pjit") and equation.params["name"] in _ONE_KERNEL


def _refuse_unknown_body(equation: Any) -> None:
    """A call that is passed over would cost nothing.

    Raises:
        UnknownCostError: naming the primitive.
    """
    if equation.primitive.name in ("scan", "cond", "while") or equation.primitive.name in _ELEMENT_BODIES:
        return
    if _is_one_kernel(equation):
        return
    if any(isinstance(value, jex_core.Jaxpr | jex_core.ClosedJaxpr) for value in equation.params.values()):
        raise UnknownCostError(f"{equation.primitive.name}: it is not known how often its body runs")


def _body(equation: Any) -> Any:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in equation.params:
            body = equation.params[key]
            return body.jaxpr if isinstance(body, jex_core.ClosedJaxpr) else body
    raise UnknownCostError(f"{equation.primitive.name}: a call without a body")


def saved_in_order(names: Sequence[str], saved: Collection[str]) -> tuple[str, ...]:
    """`saved` in the order of `names`.

    Raises:
        KeyError: a saved name that is not in `names`.
    """
    unknown = set(saved) - set(names)
    if unknown:
        raise KeyError(f"unknown tensors {sorted(unknown)}; known: {list(names)}")
    return tuple(name for name in names if name in saved)
