"""One set of constants per machine, fitted on published tokens per second.

Command:  python -m experiments.reproduce fit
MegaTrain's rows are fitted (least squares of their step seconds), LazyTrain's are predicted. Model
TFLOPS of the paper are not used: they divide by rounded parameter counts. Rates stay within the
datasheet; what the rows do not tell keeps the profile's assumption. The profiles `h800-paper` and
`rtx3090` carry the result, which a test compares with a fit of its own.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from experiments import published
from experiments.sheet import Sheet, paper, simulated_cell
from experiments.systems import LAZYTRAIN, MEGATRAIN, System, simulated, template_of
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.specs import Tier

MATMUL, MEMORY, HOST = (
    "matmul_flops_per_second",
    "device_bandwidth_bytes_per_second",
    "host_bandwidth_bytes_per_second",
)


class Machine(NamedTuple):
    """What is fitted of one machine.

    Attributes:
        limits: figure -> (least, most), the most by datasheet.
        left_out: models whose MegaTrain row no physical constants explain.
    """

    gpu: str
    profile: str
    limits: Mapping[str, tuple[float, float]]
    left_out: tuple[str, ...] = ()


MACHINES = (
    Machine("H800", "h800-paper", {MATMUL: (50e12, 989.4e12)}),
    Machine(
        "RTX 3090", "rtx3090",
        {MATMUL: (10e12, 71e12), HOST: (50e9, 460e9)},
        ("Qwen3.6-27B",),
    ),
)  # fmt: skip


def rows_of(machine: Machine) -> list[published.Row]:
    """The published rows of a machine."""
    return [row for row in published.TABLE_3 if row.gpu == machine.gpu]


def published_figures(row: published.Row, system: System) -> published.Figures:
    """Of one system in one row."""
    return row.megatrain if system is MEGATRAIN else row.lazytrain


def residual(row: published.Row, system: System, profile: HardwareProfile) -> float:
    """Simulated over published tokens per second, less 1."""
    figures = published_figures(row, system)
    assert figures.tokens_per_second is not None
    outcome = simulated(system, row.model, profile, figures.rows)
    return outcome.tokens_per_second / figures.tokens_per_second - 1


def fitted(machine: Machine, **assumed: float) -> HardwareProfile:
    """The machine's profile with the constants that fit best.

    Args:
        assumed: figures in place of the profile's, which are not fitted.
    """
    profile = load_profile(machine.profile).model_copy(update=assumed)
    names = list(machine.limits)
    rows = [row for row in rows_of(machine) if row.model not in machine.left_out]
    seconds = np.array(
        [
            row.megatrain.rows * published.SEQUENCE_LENGTH / _positive(row.megatrain.tokens_per_second)
            for row in rows
        ]
    )

    def at(logarithms: Sequence[float]) -> HardwareProfile:
        values = dict(zip(names, map(math.exp, logarithms), strict=True))
        return profile.model_copy(update=values)

    def excess_seconds(logarithms: Sequence[float]) -> np.ndarray:
        ratios = np.array([1 + residual(row, MEGATRAIN, at(logarithms)) for row in rows])
        return seconds / ratios - seconds

    low, high = np.log(list(machine.limits.values())).T
    start = np.clip(np.log([getattr(profile, name) for name in names]), low + 1e-3, high - 1e-3)
    found = least_squares(excess_seconds, start, bounds=(low, high), diff_step=1e-3)
    return at(found.x)


def _positive(value: float | None) -> float:
    assert value is not None
    return value


def fit_table(folder: pathlib.Path) -> Sheet:
    """Constants, residuals, device memory, and what the rows do not tell."""
    columns = ["GPU", "model", "system", "rows"]
    columns += ["tokens/s", "tokens/s", "deviation", "device GB", "device GB"]
    sheet = Sheet("One set of constants per machine", columns)
    for machine in MACHINES:
        profile, found = load_profile(machine.profile), fitted(machine)
        for system in (MEGATRAIN, LAZYTRAIN):
            for row in rows_of(machine):
                figures = published_figures(row, system)
                outcome = simulated(system, row.model, profile, figures.rows)
                predicted = system is LAZYTRAIN or row.model in machine.left_out
                sheet.add(
                    row.gpu, row.model, system.name, str(figures.rows), paper(figures.tokens_per_second, 0),
                    simulated_cell(outcome.tokens_per_second, 0),
                    f"{residual(row, system, profile):+.1%}, {'predicted' if predicted else 'fitted'}",
                    paper(figures.device_gb), simulated_cell(outcome.peak_bytes[Tier.DEVICE] / 1e9),
                )  # fmt: skip
        constants = ", ".join(
            f"{name} {getattr(profile, name):.4g} (a fit now gives {getattr(found, name):.4g})"
            for name in machine.limits
        )
        sheet.notes.append(f"{machine.gpu}, profile {machine.profile}: {constants}.")
        sheet.notes.append(_what_rows_do_not_tell(machine, profile))
    sheet.notes.append(_inconsistent_row())
    sheet.write(folder, "fit")
    return sheet


def _what_rows_do_not_tell(machine: Machine, profile: HardwareProfile) -> str:
    """How the largest residual of the fitted rows changes with constants that were not fitted."""
    rows = [row for row in rows_of(machine) if row.model not in machine.left_out]

    def worst(**figures: float) -> float:
        changed = profile.model_copy(update=figures)
        return max(abs(residual(row, MEGATRAIN, changed)) for row in rows)

    link = profile.h2d_bytes_per_second
    links = ", ".join(
        f"{rate / 1e9:g} GB/s {worst(h2d_bytes_per_second=rate, d2h_bytes_per_second=rate):.1%}"
        for rate in (link / 2, link, 2 * link, 4 * link)
    )
    host = profile.host_bandwidth_bytes_per_second
    hosts = ", ".join(
        f"{rate / 1e9:.0f} GB/s {worst(**{HOST: rate}):.1%}" for rate in (host / 2, host, 2 * host)
    )
    share = profile.device_bandwidth_bytes_per_second
    memories = []
    for rate in (0.65 * share, share, 1.25 * share):
        found = fitted(machine, **{MEMORY: rate})
        off = max(abs(residual(row, MEGATRAIN, found)) for row in rows)
        product = found.matmul_flops_per_second / 1e12
        memories.append(f"{rate / 1e12:.2f} TB/s with {product:.0f} TFLOPS {off:.1%}")
    return (
        f"{machine.gpu}: device memory is assumed, and told badly: fitted anew, {', '.join(memories)}. "
        f"{machine.gpu}: largest deviation of MegaTrain's fitted rows with other links: {links}; with other "
        f"host memory: {hosts} (simulated). What hardly changes it is not told by these rows."
    )


def _inconsistent_row() -> str:
    machine = MACHINES[1]
    row = next(row for row in rows_of(machine) if row.model in machine.left_out)
    figures, profile = row.megatrain, load_profile(machine.profile)
    outcome = simulated(MEGATRAIN, row.model, profile, figures.rows)
    seconds = figures.rows * published.SEQUENCE_LENGTH / _positive(figures.tokens_per_second)
    busy = {resource.value: value for resource, value in outcome.simulation.busy_seconds.items()}
    parameters = template_of(row.model).spec.parameter_count
    left = seconds - max(busy["compute"], busy["h2d"])
    needed = parameters * MEGATRAIN.update_bytes / left
    per_parameter = _positive(figures.host_gb) * 1e9 / parameters
    return (
        f"RTX 3090, MegaTrain's 27B row ({seconds:.1f} s a step, paper) is left out of the fit: its loads "
        f"({busy['h2d']:.1f} s simulated) and its compute beside them ({busy['compute']:.1f} s) leave "
        f"{left:.1f} s for the host update of {parameters / 1e9:.1f} G parameters, which would take "
        f"{needed / 1e9:.0f} GB/s of host traffic, where the other rows give "
        f"{profile.host_bandwidth_bytes_per_second / 1e9:.0f}. Its host memory, {figures.host_gb} GB "
        f"(paper), is {per_parameter:.1f} bytes per parameter, where bf16 weights and gradients and two fp32 "
        "moments take 12, and the H800's row has 12.6."
    )
