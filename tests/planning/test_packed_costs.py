"""Packed rows: the pairs of blocks that costs count are those that attention visits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyjax.hardware.profile import load_profile
from lazyjax.models import attention
from lazyjax.models.architecture import Qwen2Architecture, Rope
from lazyjax.models.backend import SKIPPABLE, for_accelerator
from lazyjax.models.registry import build_template
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.layers import CallShape, backward_graph, forward_graph
from lazyjax.planning.costs.packing import Packing, packing_of, positions_of, uniform_packing
from lazyjax.planning.costs.seconds import Costs, template_costs
from lazyjax.planning.costs.trace import UnknownCostError, Visits, trace
from lazyjax.planning.planner.request import build_request, request_key
from lazyjax.planning.program.schedule import Action, Operation
from lazyjax.timeline import Resource

HEADS, KEY_HEADS, HEAD_DIM, HIDDEN = 4, 2, 16, 64
TOKENS = 4096
BLOCK = attention.BLOCK_TOKENS
PAIRS = len(attention.layout_of(TOKENS).pairs)


def model(form: str = "blockwise") -> ModelTemplate:
    return build_template(
        Qwen2Architecture(
            name="packed-costs", vocab_size=64, hidden_size=HIDDEN, intermediate_size=96,
            num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS,
            head_dim=HEAD_DIM, rms_norm_eps=1e-6, tie_word_embeddings=True, rope=Rope(theta=1e4),
            qkv_bias=True,
        ),
        form,
    )  # fmt: skip


def costs(
    packing: Packing | None, *, rows: int = 2, tokens: int = TOKENS, form: str = "blockwise",
    platform: str = "gpu", devices: int = 1,
) -> Costs:  # fmt: skip
    profile = load_profile("h100-sxm").model_copy(update={"platform": platform})
    return template_costs(
        model(form), profile.spread(devices, source="test"), microbatch_rows=rows, sequence_length=tokens,
        optimizer=make_host_optimizer("hybrid8bit", threads=1, path="pure"), packing=packing,
    )  # fmt: skip


def flops(found: Costs, action: Action) -> int:
    return found.operation_flops(Operation(0, action, Resource.COMPUTE, 1, None, 0))


def random_ids(seed: int, rows: int, tokens: int, segments: int, padding: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    ids_BT = np.sort(random.integers(1, segments + 1, (rows, tokens)), axis=1).astype(np.int32)
    ids_BT[:, tokens - min(padding, tokens) :] = 0
    return ids_BT


@functools.cache
def counting(tokens: int, block: int, window: int | None):
    """Segment ids -> pairs that the compiled loops visit, forward and backward."""
    visits = {"forward": 0, "backward": 0}

    def count(which: str) -> None:
        visits[which] += 1

    forward, backward = attention._visit, attention._visit_backward

    def counted_forward(*arguments):
        jax.debug.callback(count, "forward")
        return forward(*arguments)

    def counted_backward(*arguments):
        jax.debug.callback(count, "backward")
        return backward(*arguments)

    @jax.jit
    def run(ids_BT, x_BTNH):
        def attend(x_BTNH):
            return attention.blockwise_attention(x_BTNH, x_BTNH, x_BTNH, ids_BT, 1.0, window, block)

        out, pullback = jax.vjp(attend, x_BTNH)
        return pullback(out)

    def visited(ids_BT: np.ndarray) -> dict[str, int]:
        visits.update(forward=0, backward=0)
        with pytest.MonkeyPatch.context() as patch, for_accelerator():
            patch.setattr(attention, "_visit", counted_forward)
            patch.setattr(attention, "_visit_backward", counted_backward)
            jax.block_until_ready(run(jnp.asarray(ids_BT), jnp.ones((*ids_BT.shape, 1, 2))))
        jax.effects_barrier()
        return dict(visits)

    return visited


@settings(max_examples=40)
@given(
    shape=st.sampled_from([(60, 16, None), (33, 8, None), (48, 8, 20)]),
    rows=st.sampled_from([1, 3]),
    segments=st.sampled_from([1, 2, 5, 12, 40]),
    padding=st.sampled_from([0, 1, 9, 30, 60]),
    seed=st.integers(0, 2**31),
)
def test_pairs_are_counted_as_the_compiled_loops_visit_them(shape, rows, segments, padding, seed) -> None:
    tokens, block, window = shape
    ids_BT = random_ids(seed, rows, tokens, segments, padding)
    counted = attention.visited_pairs(ids_BT, attention.layout_of(tokens, window, block))
    assert counting(tokens, block, window)(ids_BT) == {"forward": counted, "backward": counted}


@given(
    lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=20),
    rows=st.integers(1, 3),
    saved=st.sampled_from([(), ("attention_out", "attention_lse")]),
)
def test_packed_rows_cost_the_pairs_that_are_visited(lengths, rows, saved) -> None:
    """A pair is two products forward, and five back; whatever else a turn does stays."""
    ends = np.minimum(np.cumsum(lengths), TOKENS)
    packing = packing_of([[[n for n in np.diff([0, *ends]).tolist() if n]] * rows])
    visits = packing.visits(TOKENS, rows)
    kind, shape = model().kinds["full_attention"], CallShape(HIDDEN, TOKENS, "bfloat16")
    product = 2 * BLOCK**2 * HEADS * HEAD_DIM * rows
    for graph_of, products in ((forward_graph, 2), (backward_graph, 7 if not saved else 5)):
        whole = graph_of(kind, shape, rows, saved).work()
        packed = graph_of(kind, shape._replace(visits=visits), rows, saved).work()
        skipped = PAIRS - visits.visited
        assert whole.flops - packed.flops == skipped * products * product
        assert (packed.bytes < whole.bytes) == (skipped > 0)
        assert (packed == whole) == (skipped == 0)
        assert all(count > 0 for count in packed.kernels.values())


def test_one_segment_costs_what_an_unpacked_row_does() -> None:
    whole = packing_of([[[TOKENS], [TOKENS]]])
    assert whole.visits(TOKENS, 2) == Visits(PAIRS, PAIRS)
    for action in (Action.FORWARD, Action.RECOMPUTE, Action.BACKWARD):
        assert flops(costs(whole), action) == flops(costs(None), action)
        assert flops(costs(uniform_packing(300, 2, TOKENS)), action) < flops(costs(None), action)


def test_a_call_visits_what_any_of_its_rows_needs() -> None:
    """Rows of one microbatch on one device are one call; rows of padding see each other."""
    halves, whole = [TOKENS // 2] * 2, [TOKENS]
    half = 2 * len(attention.layout_of(TOKENS // 2).pairs)
    packing = packing_of([[halves, whole, halves, halves]])
    assert packing.visits(TOKENS, 4).visited == PAIRS
    assert packing.visits(TOKENS, 2).visited == round((PAIRS + half) / 2)
    assert packing.visits(TOKENS, 1).visited == round((PAIRS + 3 * half) / 4)
    assert packing.visits(TOKENS, 4, devices=2) == packing.visits(TOKENS, 2)
    assert packing_of([[halves] * 3]).visits(TOKENS, 2).visited == round((half + PAIRS) / 2)


def test_forms_that_skip_nothing_cost_all_pairs() -> None:
    packing = uniform_packing(300, 2, TOKENS)
    for form in ("dense", "cudnn"):
        for action in (Action.FORWARD, Action.BACKWARD):
            assert flops(costs(packing, form=form), action) == flops(costs(None, form=form), action)
    # On a CPU pairs of up to 2048 tokens are written out; longer rows run as a loop there, too.
    for tokens, skips in ((2048, False), (TOKENS, True)):
        short = uniform_packing(300, 2, tokens)
        packed, whole = (
            flops(costs(each, tokens=tokens, platform="cpu"), Action.FORWARD) for each in (short, None)
        )
        assert (packed < whole) == skips
        assert flops(costs(short, tokens=tokens), Action.FORWARD) < whole


def test_loops_that_may_skip_are_told_from_others() -> None:
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    turn_flops = 2 * 16**3

    def loop(a: jax.Array, scope: str) -> jax.Array:
        def turn(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope(scope):
                return jax.lax.cond(x[0] > 0, lambda: carry @ a, lambda: carry + a) @ a, None

        return jax.lax.scan(turn, a, a)[0]

    named = trace(functools.partial(loop, scope=SKIPPABLE), square)
    assert named.work().flops == 32 * turn_flops
    assert named.visiting(Visits(5, 16)).work().flops == (16 + 5) * turn_flops
    assert named.visiting(Visits(16, 16)).work() == named.work()
    other = trace(functools.partial(loop, scope="other"), square)
    assert other.visiting(Visits(5, 16)).work() == other.work()
    with pytest.raises(UnknownCostError, match="16 turns that may be skipped, not 10"):
        named.visiting(Visits(5, 10))


@pytest.mark.parametrize(("segment_tokens", "rows"), [(1, 2), (300, 1), (512, 3), (5000, 2)])
def test_uniform_rows_are_full_of_segments_that_begin_anywhere(segment_tokens: int, rows: int) -> None:
    packing = uniform_packing(segment_tokens, rows, TOKENS)
    for batch in packing.batches:
        assert len(batch) == rows
        for row in batch:
            assert sum(row) == TOKENS
            assert all(length == segment_tokens for length in row[1:-1])
            assert all(0 < length <= segment_tokens for length in row)
    if segment_tokens == BLOCK:
        # Were rows cut at blocks, only the diagonal would be visited.
        assert packing.visits(TOKENS, 1).visited > 1.5 * TOKENS / BLOCK


def test_the_representative_microbatch_is_like_the_mean() -> None:
    random = np.random.default_rng(0)
    rows = [np.diff([0, *np.sort(random.choice(TOKENS, 8)), TOKENS]).tolist() for _ in range(32)]
    packing = packing_of([[[n for n in row if n] for row in rows], [[TOKENS]] * 32])
    for microbatch_rows, devices in ((1, 1), (4, 1), (8, 2)):
        ids_BT = packing.representative(TOKENS, microbatch_rows, devices)
        assert ids_BT.shape == (microbatch_rows, TOKENS)
        mean = packing.visits(TOKENS, microbatch_rows, devices).visited
        found = [
            attention.visited_pairs(part, attention.layout_of(TOKENS)) for part in np.split(ids_BT, devices)
        ]
        assert abs(np.mean(found) - mean) <= 5


def test_positions_begin_anew_in_every_segment() -> None:
    ids_BT = np.asarray([[1, 1, 1, 2, 3, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2]], np.int32)
    expected = [[0, 1, 2, 0, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert positions_of(ids_BT).tolist() == expected


def test_questions_about_other_packings_are_others() -> None:
    def request(packing: Packing | None):
        return build_request(
            model(), load_profile("h100-sxm"), batch_rows=2, sequence_length=TOKENS, packing=packing
        )

    packings = [None, uniform_packing(300, 2, TOKENS), uniform_packing(301, 2, TOKENS)]
    keys = {request_key(request(packing)) for packing in packings}
    assert len(keys) == 3
    block = Operation(0, Action.BACKWARD, Resource.COMPUTE, 1, None, 0)
    whole, packed = (request(packing).costs(1).operation_seconds(block) for packing in packings[:2])
    assert packed < whole
    # Chunks of tokens leave attention as it is.
    chunked = [request(packing).chunked(2048).costs(1) for packing in packings[:2]]
    assert chunked[1].operation_flops(block) < chunked[0].operation_flops(block)
