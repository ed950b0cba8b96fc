"""How many tokens' logits exist at once: costs of the traced head, the decision, what fits."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from experiments.benchmarks.planner_exactness import best_by_force, random_problem, used_bytes_of
from experiments.benchmarks.solving import solve
from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.planning.plan.document import HEAD_CHUNK, PlanError, load_plan
from lazyjax.planning.planner.choices import Choices
from lazyjax.planning.planner.leanest import memory_shortfall
from lazyjax.planning.planner.question import HEAD_CHUNKS, problem_of, settings_of
from lazyjax.planning.planner.request import build_request, request_key
from lazyjax.planning.planner.search import find_plan
from lazyjax.planning.planner.service import verify_for
from lazyjax.planning.program.operations import Action, Operation
from lazyjax.specs import Tier
from lazyjax.timeline import Resource
from tests import tiny

SMALL = build_template(architecture("Qwen2.5-0.5B"))
HEAD = len(SMALL.spec.layers) - 1


@pytest.fixture(scope="module")
def request_():
    """Microbatches of 1 to 8 rows of 1024 tokens."""
    return build_request(SMALL, load_profile("h800-paper"), batch_rows=8, sequence_length=1024, nvme_bytes=0)


def loss(head_chunk):
    return Operation(0, Action.LOSS, Resource.COMPUTE, HEAD, 0, 0, head_chunk=head_chunk)


def test_more_logits_take_memory_and_spare_traffic(request_):
    """A chunk reads the table twice and passes over the float32 sum of its gradient, whatever its length."""
    costs = request_.costs(8)
    tokens, elements = 8 * 1024, SMALL.spec.vocabulary_size * SMALL.spec.hidden_size
    works = [costs.source.work("head", Action.LOSS, (), chunk) for chunk in HEAD_CHUNKS]
    assert len({work.flops for work in works}) == 1
    for (few, one), (more, other) in itertools.pairwise(zip(works, HEAD_CHUNKS, strict=True)):
        fewer_chunks = tokens // one - -(-tokens // other)
        # Table in bfloat16 twice, the sum in float32 read and written.
        assert few.bytes - more.bytes >= fewer_chunks * elements * (2 * 2 + 2 * 4)
        assert costs.operation_seconds(loss(one)) > costs.operation_seconds(loss(other))
        # The gradient of the logits in bfloat16, at the moment that takes most.
        gradient_bytes = 2 * (min(other, tokens) - one) * SMALL.spec.vocabulary_size
        assert costs.working_bytes(Action.LOSS, HEAD, (), other) >= (
            costs.working_bytes(Action.LOSS, HEAD, (), one) + gradient_bytes
        )


def test_only_numbers_that_make_a_difference_are_open(request_):
    """Of a microbatch of one row all tokens are a chunk of 1024; the usual number stays, to start from."""
    chunks = {
        8 // setting.microbatches: problem_of(request_, setting).head_chunks
        for setting in settings_of(request_)
    }
    assert chunks[8] == (256, 1024, 4096, 16384)
    assert chunks[2] == (256, 1024, 4096)
    assert chunks[1] == (256, 1024)
    fixed = dataclasses.replace(request_, head_chunks=(2048,))
    assert problem_of(fixed, settings_of(fixed)[0]).head_chunks == (2048,)
    assert request_key(fixed) != request_key(request_)


def with_head_chunks(seed):
    """A random problem whose loss is faster with more tokens, which take memory."""
    problem = random_problem(seed, most_plans=60, most_blocks=2)
    seconds = problem.seconds
    return dataclasses.replace(
        problem,
        head_chunks=(1, 4, 16),
        seconds=lambda operation: seconds(operation) * (1 + 1 / (operation.head_chunk or 1e9)),
        working_bytes=lambda action, layer, saved, head_chunk: 12 * (head_chunk or 0),
    )


@pytest.mark.parametrize(("seed", "tokens"), [(0, 1), (3, 4), (4, 16)])
def test_the_best_number_is_found(seed, tokens):
    """As brute force finds it: the most on a chain that has room for it, fewer on others."""
    problem = with_head_chunks(seed)
    solution = solve(problem, relative_gap=1e-9, time_limit_seconds=600.0)
    assert solution.plan.head_chunk == tokens
    assert solution.period_seconds == pytest.approx(best_by_force(problem), rel=1e-6)
    peaks = used_bytes_of(problem, solution.plan)
    assert all(peaks[tier] <= problem.capacity[tier] for tier in Tier)


def test_a_plan_with_another_number_is_not_one_of_the_problem():
    choices = Choices(with_head_chunks(0))
    plan = choices.decode(choices.plainest(), "milp")
    assert plan.head_chunk == 1
    with pytest.raises(PlanError, match="head_chunk: 1024 is not open in this problem"):
        choices.encode(plan.model_copy(update={"head_chunk": HEAD_CHUNK}))


def test_plans_are_no_slower_and_fit_what_they_fitted(request_):
    """With room the number is larger than the usual one; at the least memory for that one it is not."""
    usual = dataclasses.replace(request_, head_chunks=(HEAD_CHUNK,))
    roomy = find_plan(request_, time_limit_seconds=1.0).plan
    before = find_plan(usual, time_limit_seconds=1.0).plan
    assert roomy.head_chunk > HEAD_CHUNK == before.head_chunk
    assert roomy.prediction.period_seconds < before.prediction.period_seconds
    assert verify_for(request_, roomy).period_seconds == pytest.approx(roomy.prediction.period_seconds)
    assert verify_for(usual, before).period_seconds == pytest.approx(before.prediction.period_seconds)


def test_at_the_least_memory_for_the_usual_number_there_is_a_plan(request_):
    """Of one microbatch of 8 rows; more logits do not fit there."""
    usual = dataclasses.replace(
        request_, head_chunks=(HEAD_CHUNK,), microbatches=1, prefetch=1, backward_prefetch=1,
        capacity={**request_.capacity, Tier.DEVICE: 0},
    )  # fmt: skip
    (settings,) = settings_of(usual)
    least = memory_shortfall(problem_of(usual, settings, lean=True))[Tier.DEVICE]
    tight = dataclasses.replace(
        usual, head_chunks=HEAD_CHUNKS, capacity={**request_.capacity, Tier.DEVICE: least}
    )
    plan = find_plan(tight, time_limit_seconds=1.0).plan
    assert plan.head_chunk <= HEAD_CHUNK
    assert verify_for(tight, plan).peak_bytes[Tier.DEVICE] <= least
    assert find_plan(dataclasses.replace(tight, head_chunks=(4096, 16384))).plan is None


def test_a_plan_from_before_has_the_number_that_it_ran_with(tmp_path):
    template = tiny.template("qwen2", tied=True)
    names = [template.kind(index).residual_names for index in range(len(template.spec.layers))]
    plan = recompute_all(template.spec, names, batch_rows=4, sequence_length=8)
    document = plan.model_dump(mode="json")
    del document["head_chunk"]
    (tmp_path / "plan.json").write_text(json.dumps(document | {"version": 5}))
    assert load_plan(tmp_path / "plan.json").head_chunk == 1024
    (tmp_path / "plan.json").write_text(json.dumps(document | {"version": 5, "head_chunk": 0}))
    with pytest.raises(PlanError, match=r"plan.json: head_chunk: "):
        load_plan(tmp_path / "plan.json")
