"""Decoding with caches against the whole model at once, with every layer resident, streamed, and mixed."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from lazyjax.batch import Batch
from lazyjax.evaluation.generate import Completion, GenerationError, Prompt, generate
from lazyjax.execution import decode
from lazyjax.execution.decode import Decoder, Sampling
from lazyjax.execution.decode_timing import time_decoding
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.models.template import ModelTemplate
from lazyjax.planning.plan.decode import DecodePlan
from lazyjax.planning.plan.document import PlanError
from lazyjax.storage.host import HostStore
from tests import reference, tiny

TOKENS = 32
#: Prompts of different lengths, more of them than slots.
LENGTHS = (5, 1, 17, 9, 2, 12, 7)
NEW_TOKENS = 8
GREEDY = Sampling()


def prompts(lengths: Sequence[int] = LENGTHS) -> list[Prompt]:
    rng = np.random.default_rng(1)
    return [
        Prompt(number, rng.integers(0, tiny.VOCABULARY, length, dtype=np.int32))
        for number, length in enumerate(lengths)
    ]


def resident_layers(model: ModelTemplate, which: str) -> tuple[int, ...]:
    uses = (*range(1, len(model.spec.layers)), *((0,) if model.spec.tied else ()))
    return {"resident": uses, "streamed": (), "mixed": uses[1::2]}[which]


def answers(
    kernels: Kernels,
    store: HostStore,
    *,
    which: str = "resident",
    rows: int = 3,
    sampling: Sampling = GREEDY,
    given: Sequence[Prompt] | None = None,
    stop_tokens: tuple[int, ...] = (),
) -> dict[int, Completion]:
    plan = DecodePlan(rows, TOKENS, resident_layers(kernels.template, which))
    decoder = Decoder(kernels, store, plan, sampling)
    with jax.transfer_guard("disallow"):
        found = {
            one.number: one
            for one in generate(
                decoder,
                prompts() if given is None else given,
                stop_tokens=stop_tokens,
                new_tokens=NEW_TOKENS,
            )
        }
    decoder.close()
    return found


def most_likely(model: ModelTemplate, parameters: reference.Parameters, rows: list[np.ndarray]) -> np.ndarray:
    """The token that the whole model, without any cache, finds most likely after every token of `rows`."""
    tokens = np.zeros((len(rows), TOKENS), np.int32)
    inside = np.zeros((len(rows), TOKENS), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)], inside[index, : len(row)] = row, 1
    positions = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), tokens.shape).copy()
    batch = Batch(tokens, tokens, inside > 0, inside, positions)
    logits = jax.jit(lambda p: reference.model_logits(model, p, batch))(parameters)
    return np.asarray(logits.argmax(-1))


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2", True), ("qwen2", False), ("qwen3", False), ("qwen3_5", False)]
)
def test_cached_greedy_equals_the_whole_model_and_does_not_depend_on_residency(
    family: str, tied: bool
) -> None:
    model = tiny.template(family, tied=tied, blocks=4)
    parameters = reference.random_parameters(model, seed=0)
    store = tiny.filled_store(model, parameters)
    kernels = Kernels(model, data_mesh(), compute_dtype="float32")
    found = answers(kernels, store)
    assert sorted(found) == list(range(len(LENGTHS)))
    rows = [np.concatenate([one.tokens_T, found[one.number].tokens]) for one in prompts()]
    expected = most_likely(model, parameters, rows)
    for index, length in enumerate(LENGTHS):
        assert found[index].tokens == tuple(expected[index, length - 1 : length - 1 + NEW_TOKENS])
        assert not found[index].stopped
    assert answers(kernels, store, which="streamed") == found
    assert answers(kernels, store, which="mixed") == found
    assert answers(kernels, store, rows=1, which="mixed", given=prompts()[:2]) == {
        number: found[number] for number in (0, 1)
    }


def test_logits_are_bit_equal_whether_a_layer_is_resident_or_streamed() -> None:
    """Drawn tokens at a high temperature hang on the last bits of the logits' order; states do directly."""
    model = tiny.template("qwen3_5", tied=False, blocks=4)
    store = tiny.filled_store(model, reference.random_parameters(model, seed=2))
    kernels = Kernels(model, data_mesh(), compute_dtype="bfloat16")
    states = {}
    for which in ("resident", "streamed", "mixed"):
        decoder = Decoder(kernels, store, DecodePlan(4, TOKENS, resident_layers(model, which)), GREEDY)
        list(generate(decoder, prompts(), stop_tokens=(), new_tokens=NEW_TOKENS))
        states[which] = jax.device_get(decoder._states)
        decoder.close()
    for which in ("streamed", "mixed"):
        jax.tree.map(np.testing.assert_array_equal, states[which], states["resident"])


def test_rows_are_split_over_devices() -> None:
    model = tiny.template("qwen3_5", tied=False, blocks=4)
    parameters = reference.random_parameters(model, seed=0)
    one = answers(
        Kernels(model, data_mesh(), compute_dtype="float32"), tiny.filled_store(model, parameters), rows=4
    )
    devices = jax.devices()[:2]
    two = answers(
        Kernels(model, data_mesh(devices), compute_dtype="float32"),
        tiny.filled_store(model, parameters, devices=2),
        rows=4,
        which="mixed",
    )
    assert one == two


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_batch() -> None:
    model = tiny.template("qwen2", tied=True, blocks=2)
    store = tiny.filled_store(model, reference.random_parameters(model, seed=0))
    kernels = Kernels(model, data_mesh(), compute_dtype="float32")
    drawn = answers(kernels, store, sampling=Sampling(1.5, 0.95, seed=7))
    assert drawn == answers(kernels, store, sampling=Sampling(1.5, 0.95, seed=7), rows=1, which="streamed")
    assert drawn != answers(kernels, store, sampling=Sampling(1.5, 0.95, seed=8))
    greedy = answers(kernels, store)
    assert drawn != greedy
    assert greedy == answers(kernels, store, sampling=Sampling(1.5, 1e-9, seed=7))


def test_a_stop_token_ends_an_answer_and_frees_its_slot() -> None:
    model = tiny.template("qwen2", tied=True, blocks=2)
    store = tiny.filled_store(model, reference.random_parameters(model, seed=0))
    kernels = Kernels(model, data_mesh(), compute_dtype="float32")
    whole = answers(kernels, store)
    stop = whole[2].tokens[3]
    cut = answers(kernels, store, stop_tokens=(stop,))
    for number, completion in whole.items():
        tokens = completion.tokens
        if stop in tokens:
            expected = Completion(number, tokens[: tokens.index(stop)], True)
        else:
            expected = completion
        assert cut[number] == expected


def test_what_does_not_fit_is_refused_by_name() -> None:
    model = tiny.template("qwen2", tied=False, blocks=2)
    store = tiny.filled_store(model, reference.random_parameters(model, seed=0))
    kernels = Kernels(model, data_mesh(), compute_dtype="float32")
    with pytest.raises(GenerationError, match="row 1: the prompt has 32 tokens"):
        answers(kernels, store, given=[prompts()[0], Prompt(1, np.zeros(TOKENS, np.int32))])
    with pytest.raises(GenerationError, match="row 0: the prompt has no tokens"):
        answers(kernels, store, given=[Prompt(0, np.zeros(0, np.int32))])
    with pytest.raises(PlanError, match="layer 0 takes no part"):
        Decoder(kernels, store, DecodePlan(2, TOKENS, (0,)), GREEDY)
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Sampling(**bad)  # type: ignore[arg-type]


def test_long_prompts_in_chunks_and_any_prefetch_give_the_same_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.template("qwen3_5", tied=False, blocks=4)
    store = tiny.filled_store(model, reference.random_parameters(model, seed=0))
    kernels = Kernels(model, data_mesh(), compute_dtype="float32")
    whole = answers(kernels, store)
    monkeypatch.setattr(decode, "CHUNK_TOKENS", 8)
    assert answers(kernels, store) == whole
    for prefetch in (1, 3):
        decoder = Decoder(kernels, store, DecodePlan(3, TOKENS, (2,), prefetch), GREEDY)
        found = generate(decoder, prompts(), stop_tokens=(), new_tokens=NEW_TOKENS)
        assert {one.number: one for one in found} == whole
        decoder.close()


def test_every_part_of_a_step_is_timed() -> None:
    model = tiny.template("qwen3_5", tied=True, blocks=4)
    store = tiny.filled_store(model, reference.random_parameters(model, seed=0))
    kernels = Kernels(model, data_mesh(), compute_dtype="float32")
    timed = time_decoding(kernels, store, rows=2, tokens=16, rounds=1)
    assert set(timed) == {"embed", "full_attention", "linear_attention", "head"}
    for kind, cost in timed.items():
        assert cost.fetch_seconds > 0
        assert cost.unpack_seconds > 0
        assert (cost.compute_seconds > 0) == (kind != "embed")
