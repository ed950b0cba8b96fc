"""Memory traffic inside the kernels of a 27B block, by XLA's own count. Compiles, runs nothing.

    python -m experiments.benchmarks.kernel_traffic            # about 20 seconds on two cores
    python -m experiments.benchmarks.kernel_traffic --model Qwen2.5-7B --rows 1 --tokens 512

The optimised program of XLA:CPU, float32, one microbatch of 2 x 1024 tokens, nothing saved, a gradient that
is added to those of earlier microbatches. For each kind of block:

- *bytes accessed*: XLA's cost analysis. It counts a fusion's operands whole, also where a slice is read, and
  the body of a loop once.
- *passes over the parameters*: bytes of arrays as large as one of the layer's matrices, its slab or its
  accumulator that are read and written, in units of the layer's float32 parameters; those of matrix products
  (which have to read every matrix twice and write its gradient once), and all others. A slice counts what it
  takes.

Then the delta rule alone (forward and backward, from queries, keys, values, decays and strengths): bytes
accessed for each token; and, since XLA:CPU computes bfloat16 in float32, what the cost model counts in the
traced program of an accelerator, with queries, keys and values in float32 and in bfloat16.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.benchmarks.provenance import provenance
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.models.architecture import Qwen35Architecture
from lazyjax.models.backend import for_description
from lazyjax.models.delta_net import chunked_gated_delta_rule
from lazyjax.models.registry import architecture, build_template
from lazyjax.models.template import Context, LayerKind, ModelTemplate
from lazyjax.planning.costs.trace import trace
from lazyjax.specs import slab_layout

_ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u16": 2, "s16": 2, "pred": 1, "s8": 1, "u8": 1}
_ARRAY = re.compile(r"\b(" + "|".join(_ITEM_BYTES) + r")\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
#: Instructions that touch no memory of their own.
_FREE = frozenset({"parameter", "tuple", "get-tuple-element", "bitcast", "constant"})
#: Smaller arrays than this are no matrices.
_LEAST_ELEMENTS = 2**20


class Passes(NamedTuple):
    """Passes over parameter-sized arrays, in units of the layer's float32 parameters."""

    products: float
    others: float


def compiled_backward(kernels: Kernels, kind: LayerKind, rows: int, tokens: int) -> Any:
    """The backward kernel that adds to an accumulator and saves nothing."""
    hidden = kernels.template.spec.hidden_size
    params = tuple(jax.ShapeDtypeStruct(tensor.shape, jnp.float32) for tensor in kind.parameters)
    x_BTD = jax.ShapeDtypeStruct((rows, tokens, hidden), jnp.float32)
    row_BT: Any = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    kernel: Any = kernels.backward(kind, (), True, False)
    accumulator = kernels.placement.gathering.shapes(kind)
    return kernel.lower(accumulator, params, x_BTD, Context(row_BT, row_BT), (), x_BTD).compile()


def delta_rule(
    config: Qwen35Architecture, rows: int, tokens: int, dtype: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The rule forward and backward, with the sizes of `config`, and its abstract arguments."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_shape = (rows, tokens, keys, config.linear_key_head_dim)
    value_shape = (rows, tokens, keys, values // keys, config.linear_value_head_dim)

    def both(q: Any, k: Any, v: Any, g: Any, beta: Any, segments: Any, gradient: Any) -> Any:
        rule = jax.checkpoint(lambda q, k, v, g, beta: chunked_gated_delta_rule(q, k, v, g, beta, segments))
        out, pullback = jax.vjp(rule, q, k, v, g, beta)
        return out, pullback(gradient)

    shapes = (key_shape, key_shape, value_shape, value_shape[:-1], value_shape[:-1])
    dtypes = (dtype, dtype, dtype, "float32", "float32")
    inputs = [jax.ShapeDtypeStruct(shape, jnp.dtype(own)) for shape, own in zip(shapes, dtypes, strict=True)]
    segments = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    return both, (*inputs, segments, jax.ShapeDtypeStruct(value_shape, jnp.dtype(dtype)))


def compiled_delta_rule(config: Qwen35Architecture, rows: int, tokens: int) -> Any:
    """Compiled for the CPU, in float32."""
    rule, arguments = delta_rule(config, rows, tokens, "float32")
    return jax.jit(rule).lower(*arguments).compile()


def traced_bytes(config: Qwen35Architecture, rows: int, tokens: int, dtype: str) -> int:
    """Bytes that the cost model counts, of the program that an accelerator gets."""
    rule, arguments = delta_rule(config, rows, tokens, dtype)
    with for_description():
        return trace(rule, *arguments).work().bytes


def passes(compiled: Any, kind: LayerKind) -> Passes:
    """Counted in the entry of the optimised program."""
    bodies, entry = _computations(compiled.as_text())
    matrices = {tensor.elements for tensor in kind.parameters if tensor.elements >= _LEAST_ELEMENTS}
    large = matrices | {slab_layout(kind.parameters).length}
    whole = 4 * sum(tensor.elements for tensor in kind.parameters)
    types: dict[str, str] = {}
    totals = {True: 0, False: 0}
    for line in entry:
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        name, result, opcode, rest = found.groups()
        types[name] = result
        if opcode in _FREE:
            continue
        called = re.search(r"calls=%([\w.\-]+)", rest)
        product = opcode == "dot" or (called is not None and " dot(" in bodies[called.group(1)])
        operands = [types[operand] for operand in re.findall(r"%([\w.\-]+)", rest) if operand in types]
        written = _arrays(result, large)
        # What is neither a product nor as large as a matrix takes a slice, if anything.
        if product or written:
            most = sum(large) if product else max(elements for elements, _ in written)
            moved = sum(elements * item for elements, item in written)
            for operand in operands:
                moved += sum(min(elements, most) * item for elements, item in _arrays(operand, large))
            totals[product] += moved
    return Passes(totals[True] / whole, totals[False] / whole)


def _arrays(text: str, sizes: set[int]) -> list[tuple[int, int]]:
    """(elements, bytes of one) of the arrays of these sizes in a type."""
    found = []
    for dtype, axes in _ARRAY.findall(text):
        elements = math.prod(int(axis) for axis in axes.split(",") if axis)
        if elements in sizes:
            found.append((elements, _ITEM_BYTES[dtype]))
    return found


def _computations(text: str) -> tuple[dict[str, str], list[str]]:
    """Bodies by name, and the lines of the entry."""
    bodies: dict[str, str] = {}
    entry: list[str] = []
    for block in text.split("\n\n"):
        head = block.strip().split("\n", 1)[0]
        name = re.match(r"(ENTRY )?%([\w.\-]+) ", head)
        if name is None:
            continue
        bodies[name.group(2)] = block
        if name.group(1):
            entry = block.strip().splitlines()
    return bodies, entry


def _bytes_accessed(compiled: Any) -> float:
    analysis = compiled.cost_analysis()
    return float(analysis["bytes accessed"])


def report(template: ModelTemplate, rows: int, tokens: int) -> str:
    """The tables."""
    kernels = Kernels(template, data_mesh(), compute_dtype="float32", gradient_dtype="float32")
    blocks = [kind for kind in template.kinds.values() if kind.name not in ("embed", "head")]
    lines = [
        f"# Traffic of the backward kernel, {template.spec.name}, {rows} x {tokens} tokens, float32",
        "",
        provenance(),
        "",
        "| block | parameters, GB | bytes accessed, GB | KB a token | passes of products | other passes |"
        " temporary, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in blocks:
        compiled = compiled_backward(kernels, kind, rows, tokens)
        found, accessed = passes(compiled, kind), _bytes_accessed(compiled)
        temporary = compiled.memory_analysis().temp_size_in_bytes
        size = 4 * sum(tensor.elements for tensor in kind.parameters)
        token_kilobytes = accessed / rows / tokens / 1e3
        lines.append(
            f"| {kind.name} | {size / 1e9:.2f} | {accessed / 1e9:.1f} | {token_kilobytes:,.0f} | "
            f"{found.products:.2f} | {found.others:.2f} | {temporary / 1e9:.2f} |"
        )
    if isinstance(template.config, Qwen35Architecture):
        accessed = _bytes_accessed(compiled_delta_rule(template.config, rows, tokens))
        lines += [
            "",
            f"Delta rule alone, forward and backward: {accessed / 1e9:.2f} GB, "
            f"{accessed / rows / tokens / 1e3:,.0f} KB a token and layer.",
        ]
        for dtype in ("float32", "bfloat16"):
            traced = traced_bytes(template.config, rows, tokens, dtype) / rows / tokens / 1e3
            lines.append(f"As the cost model counts it, {dtype}: {traced:,.0f} KB a token and layer.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen3.6-27B")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    text = report(build_template(architecture(options.model)), options.rows, options.tokens)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
