"""Answers to prompts: rows enter, get token after token, and leave when they are done.

All rows in a decoder's slots move on together, one token a pass. A row that has written a stop token or as
much as it may leaves its slot, and the next prompt takes it (continuous batching): one stream of the
parameters is the cost of a pass, and serves as many rows as there are slots.

What a row writes depends on its own prompt, its number and the sampling, never on the rows beside it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from lazyjax.execution.decode import Rows
from lazyjax.planning.plan.decode import DecodePlan

#: Widths that prompts are filled up to: one compiled program each.
_WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)


class GenerationError(ValueError):
    """A prompt that cannot be answered; the message names the row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A row to answer.

    Attributes:
        number: identifies the row, and seeds what it draws.
        tokens_T: at least one token.
    """

    number: int
    tokens_T: Int32[np.ndarray, " T"]


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """A row's answer.

    Attributes:
        number: of the prompt.
        tokens: what was written, without the stop token.
        stopped: a stop token ended it; otherwise it came to the limit.
    """

    number: int
    tokens: tuple[int, ...]
    stopped: bool


@runtime_checkable
class PassRunner(Protocol):
    """What is needed of `lazyjax.execution.decode.Decoder`."""

    plan: DecodePlan
    streams: bool

    def run(
        self,
        going: Rows | None,
        entering: Rows | None = None,
        slots_R: Int32[np.ndarray, " R"] | None = None,
    ) -> tuple[Int32[np.ndarray, " B"] | None, Int32[np.ndarray, " R"] | None]:
        """One pass over the layers."""
        ...


@dataclasses.dataclass(slots=True)
class _Row:
    """A row in its slot; `written` has not all reached the state: its last token comes next."""

    prompt: Prompt
    limit: int
    written: list[int]

    @property
    def held(self) -> int:
        """Tokens that the state holds."""
        return len(self.prompt.tokens_T) + len(self.written) - 1


def generate(
    decoder: PassRunner,
    prompts: Iterable[Prompt],
    *,
    stop_tokens: Collection[int],
    new_tokens: int,
    on_token: Callable[[int, int], None] | None = None,
) -> Iterator[Completion]:
    """Answers prompts, in the order in which the answers are finished.

    Args:
        prompts: read as slots become free.
        stop_tokens: end an answer, and are no part of it.
        new_tokens: the most that an answer has; the plan's tokens of a row limit it too.
        on_token: called with a row's number and each token of its answer, as it is written.

    Raises:
        GenerationError: a prompt is empty or leaves no room for an answer.
    """
    if new_tokens < 1:
        raise GenerationError(f"new_tokens: {new_tokens}; an answer needs at least 1")
    slots: list[_Row | None] = [None] * decoder.plan.batch_rows
    queue = _Queue(prompts, decoder.plan, new_tokens, streams=decoder.streams)
    while True:
        free = [slot for slot, row in enumerate(slots) if row is None]
        entering = queue.take(free, len(slots) - len(free))
        if not entering and len(free) == len(slots):
            return
        going = None if len(free) == len(slots) else _going(slots)
        prompt_rows, slots_R = _entering(entering, decoder.plan) if entering else (None, None)
        next_B, first_R = decoder.run(going, prompt_rows, slots_R)
        told: list[tuple[int, int]] = []
        if next_B is not None:
            told += [(slot, int(next_B[slot])) for slot, row in enumerate(slots) if row is not None]
        for index, (slot, row) in enumerate(entering):
            assert first_R is not None
            slots[slot] = row
            told.append((slot, int(first_R[index])))
        for slot, token in told:
            written = slots[slot]
            assert written is not None
            stopped = token in stop_tokens
            if not stopped:
                written.written.append(token)
                if on_token is not None:
                    on_token(written.prompt.number, token)
            if stopped or len(written.written) == written.limit:
                slots[slot] = None
                yield Completion(written.prompt.number, tuple(written.written), stopped)


class _Queue:
    """Prompts that wait for a slot.

    Where every layer is resident a prompt's pass costs as much as a step, so rows enter together, once a
    quarter of the slots is free. Where layers are streamed they come anyway, and rows enter at once.
    """

    def __init__(
        self, prompts: Iterable[Prompt], plan: DecodePlan, new_tokens: int, *, streams: bool
    ) -> None:
        self._prompts, self._plan, self._new_tokens = iter(prompts), plan, new_tokens
        self._together = 1 if streams else max(1, plan.batch_rows // 4)
        self._waiting: collections.deque[Prompt] = collections.deque()

    def take(self, free: list[int], active: int) -> list[tuple[int, _Row]]:
        """Rows that enter now, with their slots."""
        while len(self._waiting) < len(free):
            prompt = next(self._prompts, None)
            if prompt is None:
                break
            self._waiting.append(self._checked(prompt))
        if not self._waiting or (active and len(free) < min(self._together, len(self._waiting))):
            return []
        rows = []
        for slot in free[: len(self._waiting)]:
            prompt = self._waiting.popleft()
            limit = min(self._new_tokens, self._plan.tokens - len(prompt.tokens_T))
            rows.append((slot, _Row(prompt, limit, [])))
        return rows

    def _checked(self, prompt: Prompt) -> Prompt:
        tokens, room = len(prompt.tokens_T), self._plan.tokens
        if not tokens:
            raise GenerationError(f"row {prompt.number}: the prompt has no tokens")
        if tokens >= room:
            raise GenerationError(
                f"row {prompt.number}: the prompt has {tokens} tokens, a row may come to {room} with its "
                "answer; allow longer rows or shorten the prompt"
            )
        return prompt


def _going(slots: list[_Row | None]) -> Rows:
    """The last written token of every row; empty slots are left alone."""
    tokens_B1 = np.zeros((len(slots), 1), np.int32)
    starts_B, counts_B, numbers_B = (np.zeros(len(slots), np.int32) for _ in range(3))
    for slot, row in enumerate(slots):
        if row is not None:
            tokens_B1[slot, 0] = row.written[-1]
            starts_B[slot], counts_B[slot], numbers_B[slot] = row.held, 1, row.prompt.number
    return Rows(tokens_B1, starts_B, counts_B, numbers_B)


def _entering(rows: list[tuple[int, _Row]], plan: DecodePlan) -> tuple[Rows, Int32[np.ndarray, " R"]]:
    """Prompts side by side, filled up to one of few widths and numbers of rows, and their slots."""
    longest = max(len(row.prompt.tokens_T) for _, row in rows)
    width = min(plan.tokens, next((w for w in _WIDTHS if w >= longest), -(-longest // 512) * 512))
    count = plan.batch_rows
    while count // 2 >= len(rows) and count % 2 == 0:
        count //= 2
    tokens_RT = np.zeros((count, width), np.int32)
    counts_R, numbers_R = np.zeros(count, np.int32), np.zeros(count, np.int32)
    slots_R = np.full(count, plan.batch_rows, np.int32)  # beyond the last: dropped
    for index, (slot, row) in enumerate(rows):
        tokens_T = row.prompt.tokens_T
        tokens_RT[index, : len(tokens_T)] = tokens_T
        counts_R[index], numbers_R[index], slots_R[index] = len(tokens_T), row.prompt.number, slot
    return Rows(tokens_RT, np.zeros(count, np.int32), counts_R, numbers_R), slots_R
