"""Rows with a known answer: what is asked, what should come out, and whether it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from lazyjax.data.chat import Tokenizer
from lazyjax.data.formats import DataError
from lazyjax.data.tokens import TokenizedRows
from lazyjax.evaluation.exact_match import ExactMatch, Form, answers_match, expected_answer, find_answer
from lazyjax.evaluation.generate import Completion, Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A row to answer.

    Attributes:
        row: its number in the data, from 1.
        tokens_T: the prompt.
        expected: the answer of the reference.
    """

    row: int
    tokens_T: Int32[np.ndarray, " T"]
    expected: str

    @property
    def prompt(self) -> Prompt:
        """What to generate from; the row's number seeds what is drawn."""
        return Prompt(self.row, self.tokens_T)


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """A row that was answered.

    Attributes:
        row: as in `Problem`.
        prompt, answer: as text.
        extracted: the answer that was found in it, and `form` how it was marked; None: there is none.
        expected: of the reference.
        right: whether the two agree.
        tokens: of the answer; `stopped`: it ended by itself, not at the limit.
    """

    row: int
    prompt: str
    answer: str
    extracted: str | None
    form: Form | None
    expected: str
    right: bool
    tokens: int
    stopped: bool

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return dataclasses.asdict(self)


def problems_of(
    rows: TokenizedRows, indices_R: Int64[np.ndarray, " R"], tokenizer: Tokenizer, *, name: str
) -> tuple[list[Problem], int]:
    """Problems of some rows, longest prompt first, and how many rows name no answer.

    Prompts of like length fill each other up least, and with the longest first whatever does not fit shows
    at once.

    Raises:
        DataError: none of the rows names an answer: this is no file to score exact match on.
    """
    problems: list[Problem] = []
    for index in indices_R:
        prompt_T, response_T = rows.prompt_and_response(int(index))
        expected = expected_answer(tokenizer.decode(response_T, skip_special_tokens=True))
        if expected is not None and len(prompt_T):
            problems.append(Problem(int(rows.source_R[index]) + 1, prompt_T, expected))
    if not problems:
        first = f", e.g. row {int(rows.source_R[indices_R[0]]) + 1}" if len(indices_R) else ""
        raise DataError(
            f"{name}: none of {len(indices_R)} rows names an answer{first}: exact match needs references "
            "with 'The answer is: ...', '#### ...', '\\boxed{...}', or the bare answer in one short line"
        )
    problems.sort(key=lambda problem: (-len(problem.tokens_T), problem.row))
    return problems, len(indices_R) - len(problems)


def score(problem: Problem, completion: Completion, tokenizer: Tokenizer) -> Scored:
    """Reads an answer and compares it."""
    text = tokenizer.decode(list(completion.tokens), skip_special_tokens=True)
    found = find_answer(text)
    return Scored(
        row=problem.row,
        prompt=tokenizer.decode(problem.tokens_T),
        answer=text,
        extracted=None if found is None else found.text,
        form=None if found is None else found.form,
        expected=problem.expected,
        right=found is not None and answers_match(found.text, problem.expected),
        tokens=len(completion.tokens),
        stopped=completion.stopped,
    )


def scores(
    problems: Sequence[Problem], completions: Iterator[Completion], tokenizer: Tokenizer
) -> Iterator[Scored]:
    """Every completion with its score."""
    by_row = {problem.row: problem for problem in problems}
    for completion in completions:
        yield score(by_row[completion.number], completion, tokenizer)


def total(scored: Sequence[Scored]) -> ExactMatch:
    """The score of all rows."""
    return ExactMatch(
        rows=len(scored),
        correct=sum(one.right for one in scored),
        unanswered=sum(one.extracted is None for one in scored),
    )
