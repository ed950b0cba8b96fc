"""How far 27B scales over H100s, simulated: weak and strong, one host and two, with what binds each step."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from experiments.ours import Ours, request_for
from experiments.sheet import Sheet, simulated_cell
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.planning.plan import cache
from lazyjax.planning.planner.service import InfeasibleError, solve_cached
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.planning.program.simulate import Simulation, simulate
from lazyjax.specs import Tier
from lazyjax.timeline import Resource

MODEL, PROFILE = "Qwen3.6-27B", "h100-sxm"
#: Devices in all, and hosts.
MACHINES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 2))
#: Rows of each device where the batch grows with them, and of all where it does not.
WEAK_ROWS, STRONG_ROWS = 32, 128
#: Seconds for the search of one row.
TIME_LIMIT_SECONDS = 20.0


class Scaled(NamedTuple):
    """A plan on some devices, replayed.

    Attributes:
        beside_seconds: what a step would take if collectives ran beside kernels without holding them up.
    """

    profile: HardwareProfile
    ours: Ours
    simulation: Simulation
    beside_seconds: float

    @property
    def binding(self) -> str:
        """The resource that is busy longest, and its share of the step."""
        busy = self.simulation.busy_seconds
        most = max(busy, key=lambda resource: busy[resource])
        return f"{most.value} {busy[most] / self.simulation.period_seconds:.0%}"

    def share(self, resource: Resource) -> str:
        """Of the step, in which the resource is busy."""
        return f"{self.simulation.busy_seconds[resource] / self.simulation.period_seconds:.0%}"


def scaled(profile: HardwareProfile, rows: int, model: str = MODEL) -> Scaled | None:
    """The plan for a batch on a machine; None where nothing fits."""
    request = request_for(model, profile, rows)
    try:
        plan, _ = solve_cached(request, cache.default_folder(), time_limit_seconds=TIME_LIMIT_SECONDS)
    except InfeasibleError:
        return None
    assert plan.prediction is not None
    ours, request = Ours(plan, plan.prediction), request.at(plan)
    costs = request.costs(plan.microbatch_rows)
    schedule = build_schedule(plan, request.sizes(plan.microbatch_rows))
    simulation = simulate(schedule, costs.operation_seconds, costs.contention)
    beside = costs.contention._replace(collectives=0.0)
    return Scaled(
        profile, ours, simulation, simulate(schedule, costs.operation_seconds, beside).period_seconds
    )


def scaling(
    folder: pathlib.Path, machines: Sequence[tuple[int, int]] = MACHINES, model: str = MODEL
) -> Sheet:
    """Weak and strong scaling; every figure is simulated."""
    columns = ["scaling", "devices", "hosts", "rows", "step s", "tokens/s", "efficiency", "binds", "link in"]
    columns += [
        "between devices",
        "updates",
        "step s, collectives beside kernels",
        "GB a device",
        "GB a host",
    ]
    sheet = Sheet(f"{model} over several H100, simulated", columns)
    for name, weak in (("weak", True), ("strong", False)):
        first: Scaled | None = None
        for devices, hosts in machines:
            profile = load_profile(PROFILE).spread(devices, hosts, source="experiments.scaling")
            rows = WEAK_ROWS * devices if weak else STRONG_ROWS
            found = scaled(profile, rows, model)
            first = first or found
            cells = ["does not fit", *[""] * 9] if found is None or first is None else _cells(found, first)
            sheet.add(name, str(devices), str(hosts), str(rows), *cells)
            print(" | ".join(sheet.rows[-1]), flush=True)
    sheet.notes += [
        f"Rows of 1024 tokens; weak: {WEAK_ROWS} rows a device, strong: {STRONG_ROWS} in all. Efficiency: "
        "tokens/s over those of one device times the devices. Binds: the resource that is busy longest, and "
        "its part of the step; then the parts of others. Nothing here was measured: rates are those of the "
        f"profile {PROFILE}, on several devices most of them assumptions.",
        "Compute includes what it loses to collectives (`collective_contention` 1: JAX runs the programs of "
        "a device one after another). The last columns: what a step of the same plan would take if "
        "collectives ran beside kernels, and the memory of one device and of one host.",
    ]
    sheet.write(folder, "scaling")
    return sheet


def _cells(found: Scaled, first: Scaled) -> list[str]:
    prediction, rate = found.ours.prediction, found.ours.tokens_per_second
    devices, sharing = found.profile.devices, found.profile.devices_per_host
    return [
        simulated_cell(found.simulation.period_seconds),
        simulated_cell(rate, 0),
        f"{rate / first.ours.tokens_per_second / devices * first.profile.devices:.0%} (simulated)",
        f"{found.binding} (simulated)",
        found.share(Resource.H2D),
        found.share(Resource.INTERCONNECT),
        found.share(Resource.CPU),
        simulated_cell(found.beside_seconds),
        simulated_cell(prediction.peak_bytes[Tier.DEVICE.value] / 1e9, 1),
        simulated_cell(prediction.peak_bytes[Tier.HOST.value] * sharing / 1e9, 1),
    ]
