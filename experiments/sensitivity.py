"""What the headline depends on: 27B on the H800, each constant of the machine changed by itself.

Command:  python -m experiments.reproduce sensitivity
Every row is planned anew for the changed machine. LazyTrain is simulated on the same machine.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping

from experiments import published
from experiments.fit import HOST, MATMUL, MEMORY
from experiments.ours import planned
from experiments.sheet import Sheet, simulated_cell
from experiments.systems import LAZYTRAIN, simulated
from lazyjax.hardware.profile import HardwareProfile, load_profile

MODEL, MACHINE, ROWS = "Qwen3.6-27B", "h800-paper", 72
_DATASHEET_MEMORY = 3.35e12


def changes(profile: HardwareProfile) -> Iterator[tuple[str, Mapping[str, float | int]]]:
    """What is changed, by name; nothing first."""
    yield "nothing", {}
    for share in (0.5, 2.0):
        host = share * profile.host_bandwidth_bytes_per_second
        yield f"host memory (and so the update) x {share:g}", {HOST: host}
    for rate in (25e9, 50e9):
        link = {"h2d_bytes_per_second": rate, "d2h_bytes_per_second": rate}
        yield f"links {rate / 1e9:g} GB/s", link
    yield "both directions share the link (duplex 0.5)", {"duplex_factor": 0.5}
    for share in (0.7, 1.0):
        yield f"device memory {share:g} of the datasheet", {MEMORY: share * _DATASHEET_MEMORY}
    yield "373 TFLOPS and 1.27 TB/s, which fit slightly better", {MATMUL: 373e12, MEMORY: 1.27e12}
    yield "products 10 % slower", {MATMUL: 0.9 * profile.matmul_flops_per_second}
    yield "10 us more per kernel", {"kernel_launch_seconds": 1e-5}
    yield "10 GB less device memory (larger working sets)", {"device_bytes": profile.device_bytes - 10**10}


def sensitivity(folder: pathlib.Path) -> Sheet:
    """One row per change."""
    columns = ("changed", "LazyJAX tokens/s", "LazyTrain tokens/s", "against LazyTrain's row", "simulated")
    sheet = Sheet("Sensitivities: 27B, H800, 72 rows", columns)
    row = next(r for r in published.TABLE_3 if (r.model, r.profile) == (MODEL, MACHINE))
    theirs = row.lazytrain.tokens_per_second
    assert theirs is not None
    base = load_profile(MACHINE)
    for name, figures in changes(base):
        sources = {**base.sources, **dict.fromkeys(figures, "changed to see what it does")}
        profile = base.model_copy(update={**figures, "sources": sources})
        ours, lazy = planned(MODEL, profile, ROWS), simulated(LAZYTRAIN, MODEL, profile, ROWS)
        if ours is None:
            sheet.add(name, "does not fit", simulated_cell(lazy.tokens_per_second, 0), "", "")
            continue
        rate = ours.tokens_per_second
        sheet.add(
            name, simulated_cell(rate, 0), simulated_cell(lazy.tokens_per_second, 0),
            f"{rate / theirs:.2f}x paper", f"{rate / lazy.tokens_per_second:.2f}x simulated",
        )  # fmt: skip
        print(" | ".join(sheet.rows[-1]), flush=True)
    sheet.notes.append(
        "Only the first row is this machine as fitted; the others ask how much a wrong constant would "
        "matter. Of the last column the constants that both share cancel in part. Rate and memory are told "
        "apart badly by the rows they are fitted on: what one loses the other gains. LazyTrain's kernels are "
        "costed fused and ours as XLA fuses them, so that device memory weighs more on ours: the chunks of "
        "the delta rule pass through it."
    )
    sheet.write(folder, "sensitivity")
    return sheet
