"""`--dry-run`: what each variant of a sweep is expected to take, without training anything.

Machines that a configuration asks to be measured are measured once, by their rates; kernels are not timed
(a run with `plan.hardware: calibrate` does that), so these predictions are the coarser ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.table import Table

from experiments.sweeping.document import Sweep, Trial
from experiments.sweeping.folder import SweepFolder
from lazyjax.config import Config
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.planning.plan.document import Plan
from lazyjax.planning.planner.search import predict
from lazyjax.planning.planner.service import InfeasibleError, solve_cached
from lazyjax.training.calibration import AUTO, CALIBRATE, measured_profile, profile_request
from lazyjax.training.display import format_bytes, format_seconds
from lazyjax.training.inputs import disk_bytes, make_optimizer, read_architecture
from lazyjax.training.start_plan import fixed_plan, given_fields, is_solved

#: The profile of the machine that a configuration names, or of this one.
ProfileOf = Callable[[Config, ModelTemplate], HardwareProfile]


@dataclasses.dataclass(frozen=True)
class Predicted:
    """What one trial is expected to take (simulated).

    Attributes:
        step_seconds: of one step with full rows.
        total_seconds: of all steps; without compiling, calibrating and evaluating. None where the number
            of steps follows from the data.
        host_bytes: of parameters, gradients, optimizer state and activations.
        disk_bytes: of the model and the checkpoints.
    """

    step_seconds: float
    total_seconds: float | None
    host_bytes: int
    disk_bytes: int


def print_predictions(sweep: Sweep, folder: SweepFolder, console: Console) -> None:
    """Prints one line per trial, and the sum of what is still to do."""
    answers = predictions(sweep, machine_profiles(sweep, console))
    console.print(predictions_table(sweep, folder, answers))
    for name, found in answers.items():
        if isinstance(found, str):
            console.print(f"{name}: {found}", highlight=False, markup=False)
    left = [trial for trial in sweep.trials if folder.outcome(trial) is None]
    seconds = [
        found.total_seconds
        for trial in left
        if isinstance(found := answers[trial.name], Predicted) and found.total_seconds is not None
    ]
    console.print(
        f"{len(left)} of {len(sweep.trials)} trials are left: {format_seconds(sum(seconds))} of steps by one "
        "worker; compiling, timing kernels and evaluating come on top",
        highlight=False,
    )


def predictions(sweep: Sweep, profile_of: ProfileOf) -> dict[str, Predicted | str]:
    """Variant -> what a trial of it takes, or why it cannot run; seeds change none of it."""
    answers: dict[str, Predicted | str] = {}
    for trial in sweep.trials:
        if trial.name not in answers:
            answers[trial.name] = _predicted(trial, profile_of)
    return answers


def machine_profiles(sweep: Sweep, console: Console) -> ProfileOf:
    """Profiles by name; this machine is measured once for each dtype."""
    configs = [trial.config for trial in sweep.trials if trial.config is not None]
    optimizers = list(dict.fromkeys(config.optimizer.name for config in configs))
    measured: dict[str, HardwareProfile] = {}

    def profile_of(config: Config, template: ModelTemplate) -> HardwareProfile:
        if config.plan.hardware not in (AUTO, CALIBRATE):
            return load_profile(config.plan.hardware)
        dtype = config.model.compute_dtype
        if dtype not in measured:
            measured[dtype] = measured_profile(config, template, console, optimizers)
        return measured[dtype]

    return profile_of


def _predicted(trial: Trial, profile_of: ProfileOf) -> Predicted | str:
    config = trial.config
    if config is None:
        return f"cannot run: {trial.problem}"
    try:
        template = build_template(read_architecture(config)[0]).in_chunks(config.plan.token_chunk)
        plan = _plan(config, template, profile_of(config, template))
    except InfeasibleError as error:
        return f"infeasible: {error}"
    except ValueError as error:
        return f"cannot run: {error}"
    assert plan.prediction is not None
    steps, seconds = config.training.steps, plan.prediction.period_seconds
    disk = disk_bytes(config, template.spec, make_optimizer(config))
    return Predicted(
        step_seconds=seconds,
        total_seconds=None if steps is None else steps * seconds,
        host_bytes=plan.prediction.peak_bytes["host"],
        disk_bytes=sum(size for _, size in disk.values()),
    )


def _plan(config: Config, template: ModelTemplate, profile: HardwareProfile) -> Plan:
    """The plan at a profile's rates, with its prediction."""
    request = profile_request(config, template, profile)
    if not is_solved(config):
        plan = fixed_plan(config, template)
        return plan.model_copy(update={"prediction": predict(request, plan)})
    request = dataclasses.replace(request, **given_fields(config))
    # Rates that were just measured never come back exactly: nothing to keep in a cache.
    plan, _ = solve_cached(request, None, time_limit_seconds=config.plan.time_limit_seconds)
    return plan


def predictions_table(sweep: Sweep, folder: SweepFolder, answers: Mapping[str, Predicted | str]) -> Table:
    """One line per trial; all figures are simulated."""
    table = Table(title=f"{sweep.name}: {len(sweep.trials)} trials (simulated)", title_justify="left")
    table.add_column("trial", overflow="fold")
    table.add_column("seed", justify="right")
    table.add_column("state", no_wrap=True)
    for heading in ("s a step", "all steps", "host", "disk"):
        table.add_column(heading, justify="right", overflow="fold")
    for trial in sweep.trials:
        found = answers[trial.name]
        about = [trial.name, str(trial.seed), folder.state(trial).value]
        if isinstance(found, str):
            table.add_row(*about, found.partition(":")[0], "", "", "")
            continue
        total = "by the data" if found.total_seconds is None else format_seconds(found.total_seconds)
        sizes = [format_bytes(size) for size in (found.host_bytes, found.disk_bytes)]
        table.add_row(*about, f"{found.step_seconds:.4g}", total, *sizes)
    return table
