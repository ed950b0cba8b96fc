"""The data set and tokenizer in the package."""

from __future__ import annotations

import fractions
import gzip
import json
import operator
import re

from lazyjax.data import chat
from lazyjax.data.sources import PROBLEMS, open_source, problems_folder
from lazyjax.evaluation.exact_match import exact_match, extract_answer

OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "mod": operator.mod,
}


def _rows() -> list[dict[str, str]]:
    with gzip.open(problems_folder() / "problems.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def test_rows_are_metamathqa_rows() -> None:
    rows = _rows()
    assert 4000 <= len(rows) <= 6000
    assert (problems_folder() / "problems.jsonl.gz").stat().st_size < 500_000
    assert all(row.keys() == {"query", "response", "type", "original_question"} for row in rows)
    assert len({row["query"] for row in rows}) == len(rows)
    assert len({row["type"] for row in rows}) >= 10
    assert len(list(open_source(PROBLEMS).conversations())) == len(rows)


def test_every_answer_can_be_extracted_and_every_step_is_right() -> None:
    rows = _rows()
    for row in rows:
        last_line = row["response"].splitlines()[-1]
        assert last_line == f"The answer is: {extract_answer(row['response'])}"
        steps = re.findall(r"(-?[\d.]*\d) (\+|-|\*|/|mod) ([\d.]*\d) = (-?[\d.]*\d)", row["response"])
        assert steps, row
        for left, sign, right, result in steps:
            computed = OPERATIONS[sign](fractions.Fraction(left), fractions.Fraction(right))
            assert computed == fractions.Fraction(result), row
    responses = [row["response"] for row in rows]
    assert exact_match(responses, responses).score == 1.0


def test_the_tokenizer_keeps_every_text_and_spells_numbers() -> None:
    tokenizer = chat.load_tokenizer()
    assert len(tokenizer) == 2048
    for text in ("a b  c\n\n d", "äöü 中文 \U0001f600", "12345", *(row["response"] for row in _rows()[:50])):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12345")) == 5
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(special)) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    assert chat.padding_token_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_rows_are_short() -> None:
    tokenizer = chat.load_tokenizer()
    rendered = [chat.render(tokenizer, one) for one in open_source(PROBLEMS).conversations()]
    lengths = [len(one.tokens_T) for one in chat.encode(tokenizer, rendered)]
    assert max(lengths) <= 128
    assert 60 <= sum(lengths) / len(lengths) <= 100
