"""Does the executor overlap what the simulator says? Plans of 27B on an emulated device, without a GPU.

The executor runs each plan on queues that only take time (`experiments.emulation`), with a thread's own time
and, scaled, with real time. Beside each other: the simulated period, both emulated ones, seconds that each
resource was busy, and whether operations ended in the order of the schedule and after what they wait for.

    python -m experiments.benchmarks.emulated_device [--profile h800-paper] [--scale 0.05] [--save]
    python -m experiments.benchmarks.emulated_device --profile h100-sxm --devices 4 [--hosts 2]

Nothing here is measured on a device: rates are those of the profiles, times the emulated machine's.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.benchmarks.provenance import provenance
from experiments.emulation import Clock, ThreadClock, WallClock, blank_batch, emulated_executor
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.seconds import Costs, template_costs
from lazyjax.planning.plan.baselines import lazytrain, megatrain
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan
from lazyjax.planning.planner.request import build_request
from lazyjax.planning.planner.search import find_plan
from lazyjax.planning.program.schedule import Schedule, build_schedule
from lazyjax.planning.program.simulate import Simulation, simulate
from lazyjax.specs import Tier
from lazyjax.timeline import Resource, Timeline

RESULTS = pathlib.Path(__file__).parent / "results"
SOURCES = ("lazyjax/execution", "lazyjax/planning", "experiments/emulation.py")
LENGTH = 1024
#: Rows of each device and microbatches by machine.
MACHINES = {"h800-paper": (72, 1), "rtx3090": (32, 8), "h100-sxm": (72, 1)}
#: Steps before the steady state, and steps that are timed; a pattern may span several steps.
WARM_UP, TIMED = 4, 4
#: The difference that is allowed between the executor's wall time and the simulated period.
ALLOWED = 0.03


class Case(NamedTuple):
    """A plan on a machine; `name` says whose rules it follows."""

    name: str
    profile: HardwareProfile
    plan: Plan


class Emulated(NamedTuple):
    """What the executor did with a plan: seconds a step, busy seconds a step, and what was out of order."""

    period_seconds: float
    busy_seconds: dict[Resource, float]
    out_of_order: list[str]


def names_of(template: ModelTemplate) -> list[tuple[str, ...]]:
    """Residual names of every layer."""
    return [template.kind(index).residual_names for index in range(len(template.spec.layers))]


def on_nvme(template: ModelTemplate, rows: int, microbatches: int) -> Plan:
    """Every boundary, the first residual of every fourth block and the state of every second on NVMe."""
    names, last = names_of(template), len(template.spec.layers) - 1
    layers = []
    for index in range(last + 1):
        inner = 0 < index < last
        layers.append(
            LayerPlan(
                boundary=Boundary.NVME if inner else Boundary.DEVICE,
                saved={names[index][0]: Tier.NVME} if inner and index % 4 == 0 else {},
                state="nvme" if index % 2 else "host",
            )
        )
    return Plan(
        model=template.spec.name, planner="NVMe", batch_rows=rows, sequence_length=LENGTH,
        microbatches=microbatches, reload_ahead=2, layers=tuple(layers),
    )  # fmt: skip


def cases(template: ModelTemplate, profiles: Sequence[HardwareProfile], chosen: Sequence[str]) -> list[Case]:
    """The plans that are asked for."""
    found = []
    for profile in profiles:
        rows, microbatches = MACHINES[profile.name]
        rows *= profile.devices
        if "LazyJAX" in chosen:
            request = build_request(template, profile, batch_rows=rows, sequence_length=LENGTH)
            plan = find_plan(request, time_limit_seconds=60).plan
            assert plan is not None
            found.append(Case("LazyJAX", profile, plan))
        rules: dict[str, Callable[..., Plan]] = {"LazyTrain": lazytrain, "MegaTrain": megatrain}
        for name, rule in rules.items():
            if name in chosen:
                plan = rule(
                    template.spec, names_of(template),
                    batch_rows=rows, sequence_length=LENGTH, microbatches=microbatches,
                )  # fmt: skip
                found.append(Case(name, profile, plan))
        if "NVMe" in chosen:
            found.append(Case("NVMe", profile, on_nvme(template, rows, 8)))
    return found


def costs_of(template: ModelTemplate, case: Case) -> Costs:
    """The profile's costs for the plan's microbatches."""
    return template_costs(
        template,
        case.profile,
        microbatch_rows=case.plan.microbatch_rows,
        sequence_length=case.plan.sequence_length,
        optimizer=make_host_optimizer("hybrid8bit", threads=1, path="pure"),
    )


def simulated(plan: Plan, costs: Costs) -> Simulation:
    """The simulator's answer for the same schedule and costs."""
    return simulate(build_schedule(plan, costs.sizes), costs.operation_seconds, costs.contention)


def emulate(template: ModelTemplate, plan: Plan, costs: Costs, clock: Clock) -> Emulated:
    """Runs a few steps of `plan` and times the last ones."""
    with emulated_executor(template, plan, costs, clock) as (executor, device):
        batch = blank_batch(plan)
        for _ in range(WARM_UP):
            executor.train_step(batch, 1e-3)
        executor.timeline()  # waits until all work of the step is in its queue
        begun, served = clock.now(), {resource: len(jobs) for resource, jobs in device.jobs.items()}
        for _ in range(TIMED):
            executor.train_step(batch, 1e-3)
        period = (clock.now() - begun) / TIMED
        disorder = out_of_order(executor.schedule, executor.timeline())
        busy = {
            resource: sum(job.end - job.begin for job in jobs[served[resource] :]) / TIMED
            for resource, jobs in device.jobs.items()
        }
        return Emulated(period, busy, disorder)


def out_of_order(schedule: Schedule, timeline: Timeline) -> list[str]:
    """Operations that ended before one ahead of them in their queue, or before what they wait for."""
    ends = {event.operation: event.end_seconds for event in timeline.events}
    slack = 1e-6 * max(ends.values())
    latest: dict[Resource, float] = {}
    found = []
    for operation in schedule.operations:
        end = ends[operation.index]
        if end < latest.get(operation.resource, end) - slack:
            found.append(f"operation {operation.index} ended before one ahead of it")
        latest[operation.resource] = max(latest.get(operation.resource, end), end)
        found += [
            f"operation {operation.index} ended before operation {wait}"
            for wait in operation.waits
            if ends[wait] > end + slack
        ]
    return found


def row(template: ModelTemplate, case: Case, scale: float) -> str:
    """A line of the table."""
    costs = costs_of(template, case)
    expected = simulated(case.plan, costs)
    own_time = emulate(template, case.plan, costs, ThreadClock())
    wall = emulate(template, case.plan, costs, WallClock(scale)) if scale else None
    busy = max(
        abs(own_time.busy_seconds[resource] - expected.busy_seconds.get(resource, 0.0))
        for resource in Resource
    )
    period = expected.period_seconds
    links = ", ".join(
        f"{resource.value} {seconds / period:.0%}"
        for resource, seconds in own_time.busy_seconds.items()
        if seconds and resource is not Resource.COMPUTE
    )
    differences = [own_time.period_seconds / period - 1]
    if wall is not None:
        differences.append(wall.period_seconds / period - 1)
    in_real_time = "-" if wall is None else f"{wall.period_seconds:.2f} ({differences[1]:+.2%})"
    order = "right" if not own_time.out_of_order else own_time.out_of_order[0]
    return (
        f"| {case.name}, {case.profile.name}, {case.plan.batch_rows} rows in {case.plan.microbatches} "
        f"| {period:.2f} | {own_time.period_seconds:.2f} ({differences[0]:+.2%}) | {in_real_time} "
        f"| {'yes' if max(map(abs, differences)) <= ALLOWED else 'no'} | {order} | {busy:.3f} s | {links} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--scale", type=float, default=0.05, help="real seconds to an emulated one; 0: no real time"
    )
    parser.add_argument("--profile", choices=tuple(MACHINES), default="h800-paper")
    parser.add_argument("--devices", type=int, default=1, help="in all; each takes the rows of the machine")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--case", action="append", choices=("LazyJAX", "LazyTrain", "MegaTrain", "NVMe"))
    parser.add_argument("--save", action="store_true", help="write results/emulated_device_PROFILE.md")
    options = parser.parse_args()
    asked = "--devices and --hosts"
    profile = load_profile(options.profile).spread(options.devices, options.hosts, source=asked)
    machine = options.profile + (f", {options.devices} devices" if options.devices > 1 else "")
    machine += f" in {options.hosts} hosts" if options.hosts > 1 else ""
    template = build_template(architecture("Qwen3.6-27B"))
    lines = [
        f"# The executor on an emulated device, Qwen3.6-27B, {machine}",
        "",
        provenance(*SOURCES).replace("Measured", "Emulated", 1),
        "",
        "Nothing is computed or moved: kernels, links, drives and updates take the time that the profile\n"
        "gives them; walk, host threads and waits are the executor's own. Seconds a step: simulated;\n"
        f"emulated with each thread's own time; emulated in real time, {options.scale:g} s to a second.\n"
        "Of several devices one is emulated: all do the same at the same time.\n"
        "Busy: the largest difference of any resource's seconds from the simulated ones; links in parts of\n"
        "the period.",
        "",
        "| plan | simulated | own time | real time | within 3 % | order | busy | links, drive, CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    chosen = options.case or ("LazyJAX", "LazyTrain", "MegaTrain", "NVMe")
    for case in cases(template, [profile], chosen):
        lines.append(row(template, case, options.scale))
        print(lines[-1], flush=True)
    if options.save:
        suffix = f"_{options.devices}x{options.hosts}" if options.devices > 1 else ""
        (RESULTS / f"emulated_device_{options.profile}{suffix}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
