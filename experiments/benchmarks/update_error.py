"""How far 8-bit optimizer state moves AdamW's update from that of fp32 state.

    python -m experiments.benchmarks.update_error
    python -m experiments.benchmarks.update_error --gradients gradients.npz   # array `gradients` [steps, n]

Prints, for every candidate code, the relative RMS error of the update (root of the summed squared
differences over the summed squares of the exact updates, all steps and elements) for

- synthetic gradients: normal, each element times its own log-normal factor of spread sigma, 120 steps;
- a change of scale: sigma 0.5, after 1000 of 4000 steps half the elements' gradients fall to a tenth;
  error over the last 1000 steps, and the geometric mean of v over exact v, which is 1 for a code that
  follows (rounding to nearest sticks when changes are below half a level);
- recorded gradients, if given.

Takes about a minute on one core. Expected: the chosen code below bitsandbytes' map at every spread.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.provenance import provenance
from lazyjax.optim import codes
from lazyjax.specs import BLOCK_ELEMENTS

B1, B2, EPS = 0.9, 0.999, 1e-8
SPREADS = (0.5, 1.5, 3.0)
Store = Callable[[np.ndarray, int], np.ndarray]  # moment [blocks, block], count -> what decoding returns


@dataclasses.dataclass(frozen=True)
class Candidate:
    """How m and v come back from 8 bits; called once per step, in order."""

    name: str
    store_m: Store
    store_v: Store


def power_levels(largest: int, exponent: float) -> np.ndarray:
    """Magnitudes of codes 0..largest relative to the block's largest: (code / largest)^exponent."""
    return (np.arange(largest + 1) / largest) ** exponent


def small_float_levels(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Magnitudes of an unsigned float of the given split, with denormals, relative to its largest."""
    code = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = code >> mantissa_bits, (code % 2**mantissa_bits) / 2**mantissa_bits
    value = np.where(exponent == 0, 2 * mantissa, (1 + mantissa) * 2.0**exponent)
    return value / value[-1]


def dynamic_levels(signed: bool) -> np.ndarray:
    """The dynamic map of bitsandbytes (Dettmers et al. 2022, section 1.3): decades, finer upwards."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        means = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += list(means) + (list(-means) if signed else [])
    return np.sort(values)


def rounding_offset(mode: str, shape: tuple[int, ...], count: int) -> np.ndarray:
    """Added to the position between two levels before rounding down."""
    if mode == "nearest":
        return np.full(shape[-1], 0.5)
    if mode == "random":
        return np.random.default_rng(count).random(shape)
    if mode == "r2":
        return np.asarray(codes.rounding_offsets(jnp.int32(count), shape[-1]))
    raise ValueError(mode)


def unsigned(levels: np.ndarray, mode: str, *, never_zero: bool = True) -> Store:
    """Stores non-negative values; `never_zero`: a value above 0 gets code 1 at least."""

    def store(values: np.ndarray, count: int) -> np.ndarray:
        scale = values.max(axis=1, keepdims=True)
        relative = values / np.where(scale == 0, 1, scale)
        position = np.interp(relative, levels, np.arange(levels.size))
        code = np.floor(position + rounding_offset(mode, values.shape, count)).astype(int)
        if never_zero:
            code = np.where(values > 0, np.maximum(code, 1), 0)
        return (levels[np.minimum(code, levels.size - 1)] * scale).astype(np.float32)

    return store


def signed(levels: np.ndarray, mode: str = "nearest") -> Store:
    """Stores signs and magnitudes."""
    store_magnitude = unsigned(levels, mode, never_zero=False)
    return lambda values, count: np.sign(values) * store_magnitude(np.abs(values), count)


def signed_map(levels: np.ndarray) -> Store:
    """Stores with a table of signed levels, to nearest."""

    def store(values: np.ndarray, count: int) -> np.ndarray:
        scale = np.abs(values).max(axis=1, keepdims=True)
        relative = values / np.where(scale == 0, 1, scale)
        code = np.rint(np.interp(relative, levels, np.arange(levels.size))).astype(int)
        return (levels[code] * scale).astype(np.float32)

    return store


@jax.jit
def _chosen_m(values: jax.Array) -> jax.Array:
    return codes.decode_m(codes.encode_m(values))


@jax.jit
def _chosen_v(values: jax.Array, count: jax.Array) -> jax.Array:
    return codes.decode_v(codes.encode_v(values, count))


def candidates() -> list[Candidate]:
    """Everything that was considered; the last is what `lazyjax.optim.codes` does."""
    m_of = {
        "linear": signed(power_levels(127, 1)),
        "power 3": signed(power_levels(127, 3)),
        "power 4": signed(power_levels(127, 4)),
        "E4M3": signed(small_float_levels(4, 3)),
        "E5M2": signed(small_float_levels(5, 2)),
    }

    def pair(m: str, v_name: str, v_levels: np.ndarray, mode: str) -> Candidate:
        return Candidate(f"m {m}, v {v_name}, {mode}", m_of[m], unsigned(v_levels, mode))

    power8, e4m4_root, e5m3 = power_levels(255, 8), small_float_levels(4, 4) ** 2, small_float_levels(5, 3)
    return [
        Candidate(
            "bitsandbytes dynamic map",
            signed_map(dynamic_levels(signed=True)),
            unsigned(dynamic_levels(signed=False), "nearest", never_zero=False),
        ),
        pair("linear", "linear of root", power_levels(255, 2), "nearest"),
        pair("power 3", "power 6", power_levels(255, 6), "nearest"),
        pair("power 4", "power 8", power8, "nearest"),
        pair("power 4", "power 8", power8, "random"),
        pair("power 4", "power 8", power8, "r2"),
        pair("E4M3", "E4M4 of root", e4m4_root, "nearest"),
        pair("E4M3", "E4M4 of root", e4m4_root, "r2"),
        pair("power 4", "E4M4 of root", e4m4_root, "r2"),
        pair("power 4", "E5M3", e5m3, "r2"),
        pair("E5M2", "E5M3 of root", e5m3**2, "nearest"),
        Candidate(
            f"**{codes.CODES_VERSION}** (bit-pattern roots)",
            lambda values, count: np.asarray(_chosen_m(values)),
            lambda values, count: np.asarray(_chosen_v(values, jnp.int32(count))),
        ),
    ]


class Error(NamedTuple):
    """Of a walk's counted steps, and of v at its end."""

    relative_rms: float
    v_ratio: float


def walk(candidate: Candidate, gradients: Iterator[np.ndarray], count_from: int = 1) -> Error:
    """Runs both updates over the same gradients [blocks, block]; counts errors from `count_from` on."""
    f32 = np.float32
    m: np.ndarray = np.zeros((1, 1), np.float32)
    m_exact = v = v_exact = m
    difference = size = 0.0
    for count, gradient in enumerate(gradients, start=1):
        m, m_exact = [f32(B1) * x + f32(1 - B1) * gradient for x in (m, m_exact)]
        v, v_exact = [f32(B2) * x + f32(1 - B2) * gradient**2 for x in (v, v_exact)]
        if count >= count_from:
            update, exact = (
                a / f32(1 - B1**count) / (np.sqrt(b / f32(1 - B2**count)) + f32(EPS))
                for a, b in ((m, v), (m_exact, v_exact))
            )
            difference += float(np.sum((update - exact).astype(np.float64) ** 2))
            size += float(np.sum(exact.astype(np.float64) ** 2))
        m, v = candidate.store_m(m, count), candidate.store_v(v, count)
    both = (v > 0) & (v_exact > 0)
    return Error((difference / size) ** 0.5, float(np.exp(np.mean(np.log(v[both] / v_exact[both])))))


def synthetic(
    spread: float, steps: int, blocks: int, *, falls_after: int | None = None, seed: int = 0
) -> Iterator[np.ndarray]:
    """Gradients whose elements have fixed log-normal sizes; half of them fall tenfold at a step."""
    rng = np.random.default_rng(seed)
    shape = (blocks, BLOCK_ELEMENTS)
    sizes = 1e-3 * np.exp(spread * rng.normal(size=shape))
    falls = rng.random(shape) < 0.5
    for step in range(steps):
        now = np.where(falls, sizes / 10, sizes) if falls_after is not None and step >= falls_after else sizes
        yield (now * rng.normal(size=shape)).astype(np.float32)


def recorded(file: pathlib.Path) -> Iterator[np.ndarray]:
    """Rows of the array `gradients` [steps, n], cut to whole blocks."""
    with np.load(file) as archive:
        gradients_TN = archive["gradients"].astype(np.float32)
    blocks = gradients_TN.shape[1] // BLOCK_ELEMENTS
    for gradient_N in gradients_TN:
        yield gradient_N[: blocks * BLOCK_ELEMENTS].reshape(blocks, BLOCK_ELEMENTS)


def table(gradient_file: pathlib.Path | None, *, steps: int = 120, blocks: int = 64) -> str:
    """The measurements as a Markdown table."""
    columns = [f"sigma {spread}" for spread in SPREADS] + ["fall: error", "fall: v / exact"]
    columns += ["recorded"] if gradient_file else []
    lines = ["| code | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for candidate in candidates():
        cells = [f"{walk(candidate, synthetic(s, steps, blocks)).relative_rms:.3f}" for s in SPREADS]
        fall = walk(candidate, synthetic(0.5, 4000, 4, falls_after=1000), count_from=3001)
        cells += [f"{fall.relative_rms:.3f}", f"{fall.v_ratio:.2f}"]
        if gradient_file:
            cells.append(f"{walk(candidate, recorded(gradient_file)).relative_rms:.3f}")
        lines.append(f"| {candidate.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table, and writes it where asked to."""
    parser = argparse.ArgumentParser(description="Error of AdamW's update with 8-bit state.")
    parser.add_argument("--gradients", type=pathlib.Path, help="npz with an array `gradients` [steps, n]")
    parser.add_argument("--output", type=pathlib.Path, help="Markdown file to write")
    arguments = parser.parse_args()
    source = provenance("lazyjax/optim", "experiments/benchmarks/update_error.py")
    with np.errstate(over="ignore", under="ignore"):
        text = f"# Error of AdamW's update with 8-bit state\n\n{source}\n\n{table(arguments.gradients)}\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
