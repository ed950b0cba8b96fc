"""The operation list in the docstring of `schedule` is the one that the plan it describes has."""

import textwrap

from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan
from lazyjax.planning.program import schedule
from lazyjax.planning.program.schedule import LayerSizes, ModelSizes, Operation, Place, build_schedule
from lazyjax.specs import Tier

#: As in the docstring; residuals have names of their own.
WORDS = {"parameters": "slab", "input": "x", "input_gradient": "dx"}


def line(operation: Operation) -> str:
    waits = [*map(str, operation.waits), *(f"({index})" for index in operation.waits_previous)]
    comes = ", ".join(name(allocation.place) for allocation in operation.allocates)
    goes = ", ".join(name(place) for place in operation.frees)
    does = f"{operation.index:2}  {operation.resource.value:7}  {operation.action.value} {operation.layer}"
    changes = " ".join(part for part in (comes and f"+ {comes}", goes and f"- {goes}") if part)
    return (does.ljust(29) + " ".join(waits).ljust(15) + changes).rstrip()


def name(place: Place) -> str:
    buffer = place.buffer
    role = WORDS[buffer.role.value] if buffer.role.value in WORDS else buffer.role.value
    tier = "" if place.tier is Tier.DEVICE else f" ({place.tier.value})"
    return f"{buffer.name or role} {buffer.layer}{tier}"


def test_the_docstring_shows_the_schedule_of_two_blocks() -> None:
    layers = [LayerSizes(4, 8, 4, 2 if layer else 0, {"gate": 1} if layer == 2 else {}) for layer in range(4)]
    plan = Plan(
        model="two blocks", planner="by hand", batch_rows=1, sequence_length=1,
        layers=(
            LayerPlan(),
            LayerPlan(boundary=Boundary.HOST),
            LayerPlan(saved={"gate": Tier.DEVICE}),
            LayerPlan(),
        ),
    )  # fmt: skip
    lines = map(line, build_schedule(plan, ModelSizes(tuple(layers), 1, False)).operations)
    listing = textwrap.indent("\n".join(lines), "    ")
    assert schedule.__doc__ is not None
    assert listing in schedule.__doc__, "\n" + listing
