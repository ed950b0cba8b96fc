"""The published systems, simulated: their rules, their executor, their update.

MegaTrain (arXiv 2604.05091) keeps one boundary in four, recomputes every segment whole and runs each
layer forward again under autograd: five forward-units per layer (forward, recomputation, forward,
and a backward pass worth two). Its loads of the backward pass wait for events, not for compute, so
they overlap with it like those of the forward pass. LazyTrain (arXiv 2608.11919) is the same
executor under its own placement, without the recomputation of what was kept. Both update on the
host after everything else. See `lazyjax.planning.costs.eager` for how their layers are costed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

from experiments import published
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.eager import EagerWork
from lazyjax.planning.costs.seconds import Costs, TemplateWork, template_costs
from lazyjax.planning.plan.baselines import lazytrain, megatrain
from lazyjax.planning.plan.document import Plan
from lazyjax.planning.program.operations import Action, Operation, Schedule
from lazyjax.planning.program.schedule import build_schedule
from lazyjax.planning.program.simulate import Simulation, simulate
from lazyjax.planning.program.verify import used_bytes
from lazyjax.specs import Tier

#: Bytes that a serial update touches per parameter: DeepSpeed's AdamW on bf16 parameters with
#: fp32 moments (2+2 parameter, 2 gradient, 8+8 moments), the copy of the new weights into pinned
#: slabs (2+2), and clipping, which reads every gradient for its norm, then reads and writes it to
#: scale it (2, 2+2).
MEGATRAIN_UPDATE_BYTES = 22 + 4 + 6
#: Hybrid 8-bit keeps the moments of 2 % of the parameters in a quarter of the bytes. It also moves
#: clipping, which saves next to nothing by the paper's own ablation (table 5: 0.3 % in all).
LAZYTRAIN_UPDATE_BYTES = MEGATRAIN_UPDATE_BYTES - 0.02 * 16 * 3 / 4


class System(NamedTuple):
    """A published system.

    Attributes:
        rules: its plan of a step.
        update_bytes: per parameter.
    """

    name: str
    rules: Callable[..., Plan]
    update_bytes: float


MEGATRAIN = System("MegaTrain", megatrain, MEGATRAIN_UPDATE_BYTES)
LAZYTRAIN = System("LazyTrain", lazytrain, LAZYTRAIN_UPDATE_BYTES)


class Outcome(NamedTuple):
    """One simulated step of a published system."""

    plan: Plan
    simulation: Simulation
    peak_bytes: dict[Tier, int]

    @property
    def tokens_per_second(self) -> float:
        """Padding counted, as published."""
        return self.plan.batch_rows * self.plan.sequence_length / self.simulation.period_seconds


def template_of(model: str) -> ModelTemplate:
    """The template of a packaged architecture."""
    return build_template(architecture(model))


def simulated(system: System, model: str, profile: HardwareProfile, rows: int) -> Outcome:
    """A step of `system` on the machine `profile`, the whole batch at once."""
    schedule = _schedule(system, model, rows)
    costs = _eager_costs(model, profile, rows)

    def seconds(operation: Operation) -> float:
        if operation.action is not Action.UPDATE:
            return costs.operation_seconds(operation)
        elements = costs.sizes.layers[operation.layer].accumulator_bytes // 4
        return elements * system.update_bytes / profile.host_bandwidth_bytes_per_second

    peak = used_bytes(schedule, costs.working_bytes)
    return Outcome(schedule.plan, simulate(schedule, seconds), peak)


def _eager_costs(model: str, profile: HardwareProfile, rows: int) -> Costs:
    compiled = template_costs(
        template_of(model),
        profile,
        microbatch_rows=rows,
        sequence_length=published.SEQUENCE_LENGTH,
        optimizer=make_host_optimizer("bf16_adamw", threads=1, path="pure"),
    )
    assert isinstance(compiled.source, TemplateWork)
    return dataclasses.replace(compiled, source=EagerWork(compiled.source), _known={}, _known_sets={})


@functools.lru_cache(maxsize=64)
def _schedule(system: System, model: str, rows: int) -> Schedule:
    template = template_of(model)
    names = [template.kind(index).residual_names for index in range(len(template.spec.layers))]
    plan = system.rules(template.spec, names, batch_rows=rows, sequence_length=published.SEQUENCE_LENGTH)
    # Sizes do not depend on the machine.
    return build_schedule(plan, _eager_costs(model, load_profile("h800-paper"), rows).sizes)
