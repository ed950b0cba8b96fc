"""Which models can be fine-tuned on what: host memory that the leanest plan needs, by GPU memory.

    python -m experiments.what_fits      # about ten minutes; writes experiments/results/what_fits.md

For every model and GPU size the planner's memory rows are solved for the plan that needs least of the host
(8 rows of 1024 tokens, 8-bit optimizer, bfloat16), without NVMe and with a drive that holds the optimizer
state. Everything is `simulated`: the rows count every buffer, and XLA's working sets as they are estimated;
Python, JAX and the data take about 2 GB of the host besides.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from lazyjax.cli import guarded, quiet_libraries
from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.planning.planner.leanest import least_missing
from lazyjax.planning.planner.question import Request, problem_of, settings_of
from lazyjax.planning.planner.request import build_request
from lazyjax.specs import Part, Tier

OUTPUT = pathlib.Path(__file__).parent / "results" / "what_fits.md"
MODELS = (
    "Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen3.6-27B", "Qwen2.5-32B", "Qwen2.5-72B",
)  # fmt: skip
GPU_GB = (12, 24, 80)
ROWS, SEQUENCE_LENGTH = 8, 1024
#: Of a GPU's memory that a plan may use; the rest is the driver's and the allocator's.
_USABLE = 0.95
#: Enough to prove each cell, also on a busy machine.
_SOLVER_SECONDS = 60.0


class Need(NamedTuple):
    """Host and NVMe bytes of the leanest plan."""

    host: int
    nvme: int


def request_for(template: ModelTemplate, gpu_bytes: int, *, nvme: bool) -> Request:
    """The memory question on a GPU of that size; rates do not matter. With a drive, the state is on it."""
    request = build_request(
        template,
        load_profile("h200"),
        batch_rows=ROWS,
        sequence_length=SEQUENCE_LENGTH,
        device_bytes=int(_USABLE * gpu_bytes),
        host_bytes=0,
        nvme_bytes=2**60 if nvme else 0,
    )
    return dataclasses.replace(request, on_nvme=frozenset([Part.STATE]) if nvme else None)


def least_host(request: Request) -> Need | None:
    """What the leanest plan takes of the host; None where no plan fits the device.

    Args:
        request: with no host memory at all, so that everything the host must hold is missing.
    """
    finest = dataclasses.replace(request, microbatches=request.batch_rows)
    problems = [problem_of(request, settings, lean=True) for settings in settings_of(finest)]
    needs = [least_missing(each, Tier.HOST, time_limit_seconds=_SOLVER_SECONDS) for each in problems]
    fitting = [need for need in needs if need is not None]
    if not fitting:
        return None
    nvme = request.capacity[Tier.NVME] > 0
    state = sum(layer.state_bytes for layer in request.sizes(request.devices).layers)
    return Need(min(fitting), state if nvme else 0)


def table(models: Sequence[str], gpu_gb: Sequence[int]) -> list[str]:
    """Markdown lines: a row a model, a column a GPU size; host GB, and host + NVMe GB with a drive."""
    heads = [f"GPU {size} GB" for size in gpu_gb]
    lines = [f"| model | parameters | {' | '.join(heads)} |", "|---" * (2 + len(gpu_gb)) + "|"]
    for name in models:
        template = build_template(architecture(name))
        cells = []
        for size in gpu_gb:
            needs = [least_host(request_for(template, size * 10**9, nvme=nvme)) for nvme in (False, True)]
            cells.append("; ".join(_cell(need) for need in needs) if needs[0] else "-")
        lines.append(f"| {name} | {template.spec.parameter_count / 1e9:.1f} B | {' | '.join(cells)} |")
    return lines


def _cell(need: Need | None) -> str:
    if need is None:
        return "-"
    host = math.ceil(need.host / 1e9)
    return f"{host} + {math.ceil(need.nvme / 1e9)} NVMe" if need.nvme else f"{host}"


def run() -> None:
    """Computes the table, prints it and writes it."""
    lines = [
        f"# Host memory that fine-tuning takes, GB ({ROWS} rows x {SEQUENCE_LENGTH} tokens, hybrid8bit)",
        "",
        f"Simulated {datetime.date.today().isoformat()}: the least that any plan needs; after the semicolon "
        "with a drive for the optimizer state. Add 2 GB for Python, JAX and data; `-`: no plan fits.",
        "",
        *table(MODELS, GPU_GB),
    ]
    text = "\n".join(lines) + "\n"
    OUTPUT.write_text(text)
    print(text)


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(guarded(run))
