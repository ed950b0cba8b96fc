"""The executor overlaps what the simulator says, on a device that only takes time.

Each thread has a time of its own that moves when it waits, so that results do not depend on the machine.
"""

from __future__ import annotations

import functools

import pytest

from experiments.benchmarks.emulated_device import emulate, simulated
from experiments.emulation import ThreadClock
from lazyjax.execution.copy_work import CopyWork
from lazyjax.execution.host_work import HostWork
from lazyjax.hardware.profile import load_profile
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.seconds import Costs, template_costs
from lazyjax.planning.plan.document import Boundary, LayerPlan, Plan
from lazyjax.specs import Part, Tier
from lazyjax.timeline import Resource

BLOCKS, ROWS, LENGTH = 12, 16, 1024


@functools.cache
def model() -> ModelTemplate:
    return build_template(
        Qwen2Architecture(
            name="emulated", vocab_size=8000, hidden_size=2048, intermediate_size=6144,
            num_hidden_layers=BLOCKS, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
            rms_norm_eps=1e-6, tie_word_embeddings=False, rope=Rope(theta=1e4), qkv_bias=True,
        )
    )  # fmt: skip


def plan_of(home: str, microbatches: int = 4, state: str = "host", **settings: object) -> Plan:
    """Boundaries and a residual of every other block on one tier, the state of every third on another.

    Args:
        state: also "everything": all that every layer owns is on NVMe.
    """
    layers = [LayerPlan()]
    for index in range(1, BLOCKS + 1):
        saved = {"gate": Tier(home)} if index % 2 else {}
        there = "nvme" if state == "nvme" and index % 3 == 0 else "host"
        layers.append(LayerPlan(boundary=Boundary(home), saved=saved, state=there))
    layers.append(LayerPlan())
    if state == "everything":
        layers = [layer.with_on_nvme(frozenset(Part)) for layer in layers]
    return Plan(
        model="emulated", planner=home, batch_rows=ROWS, sequence_length=LENGTH, microbatches=microbatches,
        reload_ahead=2, layers=tuple(layers), **settings,
    )  # fmt: skip


@functools.cache
def costs(rows: int, devices: int = 1, hosts: int = 1) -> Costs:
    """A fast link and drive, so that compute is the longest and every pause of it shows."""
    profile = load_profile("h800-paper").spread(devices, hosts, source="test")
    faster = {"h2d_bytes_per_second": 5e10, "d2h_bytes_per_second": 5e10}
    faster |= {"nvme_read_bytes_per_second": 2e10, "nvme_write_bytes_per_second": 2e10}
    return template_costs(
        model(), profile.model_copy(update=faster), microbatch_rows=rows, sequence_length=LENGTH,
        optimizer=make_host_optimizer("hybrid8bit", threads=1, path="pure"),
    )  # fmt: skip


def ratio(plan: Plan) -> float:
    """Emulated over simulated period."""
    machine = costs(plan.microbatch_rows)
    return (
        emulate(model(), plan, machine, ThreadClock()).period_seconds
        / simulated(plan, machine).period_seconds
    )


PLANS = [
    plan_of("device"),
    plan_of("host"),
    plan_of("host", interlayer_home="host"),
    plan_of("host", update="immediate"),
    plan_of("host", state="nvme"),
    plan_of("host", state="nvme", update="immediate"),
    plan_of("host", state="everything"),
    plan_of("host", state="everything", update="immediate"),
]


def name_of(plan: Plan) -> str:
    owned = len({*plan.layers[3].on_nvme, *plan.layers[4].on_nvme})
    return f"{plan.planner}-{plan.interlayer_home}-{plan.update}-{owned}"


@pytest.mark.parametrize("plan", PLANS, ids=name_of)
def test_the_emulated_step_takes_the_simulated_time(plan: Plan) -> None:
    """Order and busy seconds too."""
    machine = costs(plan.microbatch_rows)
    expected, found = simulated(plan, machine), emulate(model(), plan, machine, ThreadClock())
    assert found.period_seconds == pytest.approx(expected.period_seconds, rel=0.03)
    assert not found.out_of_order
    for resource, seconds in expected.busy_seconds.items():
        assert found.busy_seconds[resource] == pytest.approx(seconds, rel=1e-6), resource


@pytest.mark.parametrize(("devices", "hosts"), [(4, 1), (4, 2)])
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2], PLANS[4], PLANS[7]], ids=name_of)
def test_several_emulated_devices_take_the_simulated_time(plan: Plan, devices: int, hosts: int) -> None:
    """Collectives have a queue of their own; what they and a host's devices cost each other counts."""
    plan = plan.model_copy(update={"batch_rows": plan.batch_rows * devices})
    machine = costs(plan.microbatch_rows, devices, hosts)
    expected, found = simulated(plan, machine), emulate(model(), plan, machine, ThreadClock())
    assert expected.busy_seconds[Resource.INTERCONNECT] > 0
    assert found.period_seconds == pytest.approx(expected.period_seconds, rel=0.05)
    assert not found.out_of_order
    for resource, seconds in expected.busy_seconds.items():
        assert found.busy_seconds[resource] == pytest.approx(seconds, rel=1e-6), resource


@pytest.mark.parametrize("between_devices", [1e11, 2e10])
def test_kernels_wait_for_the_sums_that_make_room(between_devices: float) -> None:
    """Also where collectives are slower than kernels, no more gradients wait than the schedule counts."""
    plan = plan_of("host").model_copy(update={"batch_rows": 4 * ROWS})
    machine = costs(plan.microbatch_rows, 4)
    slow = machine.profile.model_copy(update={"interconnect_bytes_per_second": between_devices})
    machine = machine.with_profile(slow.model_copy(update={"collective_contention": 0.0}))
    expected, found = simulated(plan, machine), emulate(model(), plan, machine, ThreadClock())
    busy = expected.busy_seconds
    assert (busy[Resource.INTERCONNECT] > busy[Resource.COMPUTE]) == (between_devices < 1e11)
    assert not found.out_of_order
    assert found.period_seconds == pytest.approx(expected.period_seconds, rel=0.05)


@pytest.mark.parametrize("handler", ["fetch", "offload", "reload", "gradient_out"])
def test_a_copy_that_the_walk_waits_for_is_seen(handler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a kernel costs nothing here: dispatching the next one takes no time."""
    dispatch = getattr(CopyWork, handler)

    def waiting(self, operation, *after):
        pending = dispatch(self, operation, *after)
        pending.wait()
        return pending

    plan = plan_of("host", interlayer_home="host")
    before = ratio(plan)
    monkeypatch.setattr(CopyWork, handler, waiting)
    assert ratio(plan) > 1.02 * before


@pytest.mark.parametrize(("handler", "own"), [("spill", False), ("load", True), ("update", False)])
def test_host_work_that_the_walk_waits_for_is_seen(
    handler: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to NVMe once waited there for the offload of the kernel just dispatched."""
    queue = getattr(HostWork, handler)

    def waiting(self, operation, after):
        for pending in after:
            pending.wait()
        task = queue(self, operation, after)
        if task is not None and own:
            task.wait()
        return task

    plan = plan_of("host", state="nvme") if handler == "update" else plan_of("nvme")
    before = ratio(plan)
    monkeypatch.setattr(HostWork, handler, waiting)
    assert ratio(plan) > 1.02 * before
