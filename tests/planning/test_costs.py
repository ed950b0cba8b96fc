"""Costs: each operation by hand arithmetic, measured values, and a whole model against 2 N tokens."""

from __future__ import annotations

import dataclasses

import pytest

from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.registry import architecture, build_template
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.layers import MOST_SAVE_SETS
from lazyjax.planning.costs.seconds import (
    CostError,
    Costs,
    MeasuredKey,
    model_flops,
    static_host_bytes,
    template_costs,
)
from lazyjax.planning.plan.baselines import keep_all, recompute_all
from lazyjax.planning.program.contention import NO_CONTENTION, Contention
from lazyjax.planning.program.schedule import (
    Action,
    Allocation,
    Buffer,
    BufferRole,
    Operation,
    Place,
    build_schedule,
)
from lazyjax.planning.program.simulate import simulate
from lazyjax.specs import Tier, slab_layout
from lazyjax.timeline import Resource

ROWS, TOKENS = 4, 64


def _architecture(tied: bool = False) -> Qwen2Architecture:
    return Qwen2Architecture(
        name="costs-test",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        rope=Rope(theta=10000.0),
        qkv_bias=True,
    )


def _costs(
    profile: HardwareProfile | None = None,
    *,
    optimizer: str = "hybrid8bit",
    rows: int = ROWS,
    inner_size: int = 192,
) -> Costs:
    return template_costs(
        build_template(_architecture().model_copy(update={"intermediate_size": inner_size})),
        profile or load_profile("h800-paper"),
        microbatch_rows=rows,
        sequence_length=TOKENS,
        optimizer=make_host_optimizer(optimizer),
    )


def _operation(action: Action, resource: Resource, layer: int = 1, **fields: object) -> Operation:
    return Operation(0, action, resource, layer, None, 0, **fields)  # type: ignore[arg-type]


def test_transfers_are_bytes_over_rate() -> None:
    costs = _costs()
    moved = 12_000_000
    for kind, resource, rate in (
        (Action.FETCH, Resource.H2D, 12e9),
        (Action.RELOAD, Resource.H2D, 12e9),
        (Action.OFFLOAD, Resource.D2H, 12e9),
        (Action.GRADIENT_OUT, Resource.D2H, 12e9),
        (Action.LOAD, Resource.NVME_READ, 2.83e9),
        (Action.SPILL, Resource.NVME_WRITE, 3.35e9),
    ):
        assert costs.operation_seconds(_operation(kind, resource, bytes=moved)) == pytest.approx(moved / rate)
    slower = costs.with_profile(load_profile("h800-paper").model_copy(update={"duplex_factor": 0.5}))
    fetch = _operation(Action.FETCH, Resource.H2D, bytes=moved)
    assert slower.operation_seconds(fetch) == pytest.approx(2 * moved / 12e9)


def test_a_drive_that_shares_its_rate_halves_it_for_what_is_both_read_and_written() -> None:
    shared = {"nvme_shared_bytes_per_second": 4e9}
    costs = _costs(load_profile("h800-paper").model_copy(update=shared))
    for action, resource in (
        (Action.LOAD_STATE, Resource.NVME_READ),
        (Action.LOAD_PARAMETERS, Resource.NVME_READ),
        (Action.SPILL_STATE, Resource.NVME_WRITE),
        (Action.SPILL_GRADIENT, Resource.NVME_WRITE),
    ):
        assert costs.operation_seconds(_operation(action, resource, bytes=10**6)) == pytest.approx(1e6 / 2e9)
    # A gradient is not written back.
    gradient = Allocation(Place(Buffer(BufferRole.GRADIENT, 1), Tier.HOST), 10**6)
    load = _operation(Action.LOAD_STATE, Resource.NVME_READ, bytes=3 * 10**6, allocates=(gradient,))
    assert costs.operation_seconds(load) == pytest.approx(2e6 / 2e9 + 1e6 / 2.83e9)
    fast = _costs(load_profile("h800-paper").model_copy(update={"nvme_shared_bytes_per_second": 1e10}))
    spill = _operation(Action.SPILL_STATE, Resource.NVME_WRITE, bytes=10**6)
    assert fast.operation_seconds(spill) == pytest.approx(1e6 / 3.35e9)  # never faster than alone


def test_update_is_slab_elements_over_rate() -> None:
    costs = _costs()
    layout = slab_layout(costs.spec.layers[1].parameters)
    seconds = costs.operation_seconds(_operation(Action.UPDATE, Resource.CPU))
    # hi, lo, m and v are read and written, with two fp32 scales per 256 elements; the bf16 gradient is read.
    touched = 2 * (2 + 2 + 1 + 1 + 8 / 256) + 2
    assert costs.update_bytes == pytest.approx(touched)
    assert seconds == pytest.approx(layout.length * touched / costs.profile.host_bandwidth_bytes_per_second)
    measured = costs.profile.model_copy(update={"host_update_parameters_per_second": {"hybrid8bit": 1e9}})
    update = _operation(Action.UPDATE, Resource.CPU)
    assert costs.with_profile(measured).operation_seconds(update) == pytest.approx(layout.length / 1e9)


def test_missing_figures_are_named() -> None:
    profile = load_profile("h800-paper")
    no_nvme = profile.model_copy(update={"nvme_read_bytes_per_second": None})
    with pytest.raises(CostError, match="nvme_read_bytes_per_second is missing"):
        _costs(no_nvme).operation_seconds(_operation(Action.LOAD, Resource.NVME_READ, bytes=1))


@pytest.mark.parametrize(("optimizer", "state_bytes"), [("hybrid8bit", 2 + 8 / 256), ("fp32_adamw", 8)])
def test_host_bytes_per_parameter(optimizer: str, state_bytes: float) -> None:
    """hi 2 + lo 2 + gradient 2, and m 1 + v 1 + two fp32 scales per 256 elements; fp32 state is 8."""
    template = build_template(architecture("Qwen2.5-7B"))
    costs = template_costs(
        template, load_profile("h800-paper"), microbatch_rows=1, sequence_length=TOKENS,
        optimizer=make_host_optimizer(optimizer),
    )  # fmt: skip
    assert static_host_bytes(template.spec) == pytest.approx(6 * template.spec.parameter_count, rel=1e-3)
    state = sum(layer.state_bytes for layer in costs.sizes.layers)
    assert state == pytest.approx(state_bytes * template.spec.parameter_count, rel=1e-2)


@pytest.mark.parametrize("tied", [False, True])
def test_block_and_head_flops(tied: bool) -> None:
    """Blocks: 2 N tokens forward plus attention; head: three products of the table."""
    template = build_template(_architecture(tied))
    costs = template_costs(
        template, load_profile("h800-paper"), microbatch_rows=ROWS, sequence_length=TOKENS,
        optimizer=make_host_optimizer("hybrid8bit"),
    )  # fmt: skip
    tokens = ROWS * TOKENS
    matrices = sum(t.elements for t in template.spec.layers[1].parameters if len(t.shape) == 2)
    attention = 2 * 2 * TOKENS * 4 * 16 * tokens
    forward = costs.operation_flops(_operation(Action.FORWARD, Resource.COMPUTE))
    assert forward == 2 * matrices * tokens + attention
    loss = costs.operation_flops(_operation(Action.LOSS, Resource.COMPUTE, layer=4, head_chunk=16))
    assert loss == 6 * tokens * 512 * 64


def test_keeping_tensors_costs_bytes_and_saves_seconds() -> None:
    costs = _costs()
    sets = costs.save_sets("full_attention")
    assert sets[0].names == ()
    assert len(sets) <= MOST_SAVE_SETS
    recompute = costs.operation_seconds(_operation(Action.BACKWARD, Resource.COMPUTE))
    for found in sets:
        backward = _operation(Action.BACKWARD, Resource.COMPUTE, saved=tuple(sorted(found.names)))
        assert costs.operation_seconds(backward) == pytest.approx(found.backward_seconds)
        assert costs.operation_seconds(backward) <= recompute
        residual_bytes = costs.sizes.layers[1].residual_bytes
        assert found.bytes == sum(residual_bytes[name] for name in found.names)
    assert [found.bytes for found in costs.save_sets("embed")] == [0]


def test_recompute_costs_a_forward_and_accumulation_reads_the_accumulator() -> None:
    costs = _costs()
    forward = costs.operation_seconds(_operation(Action.FORWARD, Resource.COMPUTE))
    assert costs.operation_seconds(_operation(Action.RECOMPUTE, Resource.COMPUTE)) == forward
    plain = costs.operation_seconds(_operation(Action.BACKWARD, Resource.COMPUTE))
    adding = costs.operation_seconds(_operation(Action.BACKWARD, Resource.COMPUTE, accumulates=True))
    bandwidth = costs.profile.device_bandwidth_bytes_per_second
    assert adding - plain == pytest.approx(costs.sizes.layers[1].accumulator_bytes / bandwidth)


def test_measured_seconds_replace_and_scale_predictions() -> None:
    costs = _costs()
    backward = _operation(Action.BACKWARD, Resource.COMPUTE)
    saving = _operation(Action.BACKWARD, Resource.COMPUTE, saved=("gate", "up"))
    forward = _operation(Action.FORWARD, Resource.COMPUTE)
    before = [costs.operation_seconds(operation) for operation in (backward, saving, forward)]
    kind = costs.spec.layers[1].kind
    timed = costs.with_measured({MeasuredKey(kind, Action.BACKWARD): 10 * before[0]})
    after = [timed.operation_seconds(operation) for operation in (backward, saving, forward)]
    assert after == pytest.approx([10 * before[0], 10 * before[1], before[2]])
    assert [costs.operation_seconds(operation) for operation in (backward, saving, forward)] == before


def test_several_devices_share_work_and_pay_for_the_interconnect() -> None:
    profile = load_profile("h100-sxm")
    two = profile.spread(2, source="test")
    forward = _operation(Action.FORWARD, Resource.COMPUTE)
    one_device, pair, half = _costs(profile), _costs(two), _costs(profile, rows=ROWS // 2)
    assert pair.operation_flops(forward) == one_device.operation_flops(forward)
    assert pair.operation_seconds(forward) == half.operation_seconds(forward)
    whole = Buffer(BufferRole.WHOLE, 1)
    assert pair.sizes.of(whole) == 2 * pair.sizes.layers[1].parameter_bytes
    gather = _operation(Action.GATHER, Resource.INTERCONNECT, bytes=pair.sizes.of(whole))
    assert two.interconnect_bytes_per_second is not None
    # A ring of two passes half of it.
    expected = pair.sizes.layers[1].parameter_bytes / two.interconnect_bytes_per_second
    assert pair.operation_seconds(gather) == pytest.approx(expected)


def test_devices_of_a_host_share_its_memory_drives_and_updates() -> None:
    profile = load_profile("h100-sxm")
    spread = {
        (n, h): _costs(profile.spread(n, h, source="test")) for n, h in ((1, 1), (4, 1), (4, 2), (4, 4))
    }
    update = {key: costs.update_seconds(1) for key, costs in spread.items()}
    write = _operation(Action.SPILL_STATE, Resource.NVME_WRITE, bytes=10**9)
    drive = {key: costs.operation_seconds(write) for key, costs in spread.items()}
    # Slabs of 4 devices have padding of up to 4 pages.
    padded = (
        spread[4, 1].sizes.layers[1].accumulator_bytes * 4 / spread[1, 1].sizes.layers[1].accumulator_bytes
    )
    assert update[4, 1] == pytest.approx(padded * update[1, 1])
    assert update[4, 2] == pytest.approx(update[4, 1] / 2)
    assert update[4, 4] == pytest.approx(update[4, 1] / 4)
    assert drive[4, 1] == pytest.approx(4 * drive[1, 1])
    assert drive[4, 2] == pytest.approx(2 * drive[1, 1])


def test_links_share_a_switch_and_what_the_hosts_memory_takes() -> None:
    profile = load_profile("h100-sxm")
    alone = profile.h2d_rate()
    assert alone == profile.h2d_bytes_per_second * profile.duplex_factor
    assert profile.spread(2, source="test").h2d_rate() == alone
    assert profile.spread(8, 8, source="test").h2d_rate() == alone
    eight = profile.spread(8, source="test")
    assert eight.h2d_rate() == pytest.approx(profile.host_bandwidth_bytes_per_second / 16)
    assert eight.h2d_rate() < alone
    sources = {**profile.sources, "link_devices": "test"}
    switched = profile.model_copy(update={"link_devices": 2, "sources": sources})
    assert switched.h2d_rate() == alone
    assert switched.spread(2, source="test").d2h_rate() == pytest.approx(alone / 2)


def test_a_collective_takes_what_the_slower_way_takes() -> None:
    profile = load_profile("h100-sxm")
    near, far = profile.interconnect_bytes_per_second, profile.network_bytes_per_second
    assert near is not None
    assert far is not None
    whole = 10**9
    assert profile.collective_seconds(whole) == 0
    assert profile.spread(8, source="test").collective_seconds(whole) == pytest.approx(7 / 8 * whole / near)
    two_hosts = profile.spread(16, 2, source="test")
    assert two_hosts.collective_seconds(whole) == pytest.approx(max(15 / 16 * whole / near, whole / 2 / far))
    slow = two_hosts.model_copy(update={"network_bytes_per_second": 1e9})
    assert slow.collective_seconds(whole) == pytest.approx(whole / 2 / 1e9)
    assert profile.spread(2, 2, source="test").collective_seconds(whole) == pytest.approx(whole / 2 / far)


def test_copies_of_the_other_devices_slow_updates_down() -> None:
    profile = load_profile("h100-sxm")
    assert _costs(profile).contention == NO_CONTENTION
    assert _costs(profile.spread(2, 2, source="test")).contention == Contention(collectives=1.0)
    four = profile.spread(4, source="test")
    contention = _costs(four).contention
    assert contention.updates_to_h2d == pytest.approx(
        3 * four.h2d_rate() / four.host_bandwidth_bytes_per_second
    )
    assert contention.collectives == four.collective_contention == 1.0


def test_whole_step_simulates_and_keeping_all_executes_fewer_flops() -> None:
    costs = _costs()
    template = build_template(_architecture())
    names = [template.kind(index).residual_names for index in range(len(template.spec.layers))]
    flops = {}
    for planner in (recompute_all, keep_all):
        plan = planner(template.spec, names, batch_rows=ROWS, sequence_length=TOKENS)
        schedule = build_schedule(plan, costs.sizes)
        assert simulate(schedule, costs.operation_seconds).period_seconds > 0
        flops[planner] = costs.executed_flops(schedule)
    assert flops[keep_all] < flops[recompute_all]
    assert model_flops(template.spec, ROWS, TOKENS) == 6 * template.spec.parameter_count * ROWS * TOKENS


def test_working_set_shrinks_with_what_is_saved() -> None:
    """With an MLP so wide that its backward pass, and not that of the attention, needs most."""
    costs = _costs(inner_size=1024)
    nothing = costs.working_bytes(Action.BACKWARD, 1, ())
    everything = costs.working_bytes(Action.BACKWARD, 1, tuple(costs.sizes.layers[1].residual_bytes))
    assert 0 < everything < nothing
    more_rows = dataclasses.replace(_costs(rows=2 * ROWS, inner_size=1024))
    assert more_rows.working_bytes(Action.BACKWARD, 1, ()) > nothing
