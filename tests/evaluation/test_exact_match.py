"""Answers found in worked solutions, and what counts as equal."""

from __future__ import annotations

import fractions

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.evaluation.exact_match import (
    ExactMatch,
    answers_match,
    exact_match,
    extract_answer,
    numeric_value,
)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("2 + 2 = 4\nThe answer is: 4", "4"),
        ("2 + 2 = 4\n#### 4\nThe answer is: 4", "4"),
        ("The answer is: $1,234.50.", "$1,234.50"),
        ("So the final answer is 7/8.", "7/8"),
        ("The answer is: \\frac{1}{2}", "\\frac{1}{2}"),
        ("Thus $x = \\boxed{\\frac{3}{4}}$.", "\\frac{3}{4}"),
        ("The answer is: $\\boxed{12}$.", "12"),
        ("first \\boxed{1}, then \\boxed{2}", "2"),
        ("an unclosed \\boxed{1", None),
        ("text\n#### 18", "18"),
        ("The answer is: 5\nThe answer is: 6", "6"),
        ("The answer is: 5\n#### 6", "6"),
        ("THE ANSWER IS: x = 5", "x = 5"),
        ("The answer is: 2 * 2 * 5", "2 * 2 * 5"),
        ("The answer is:", None),
        ("It is 4", None),
        ("", None),
    ],
)
def test_extracts_the_last_answer(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1,234", "1234"),
        ("$1,234,567.00", "1234567"),
        ("18.0", "18"),
        ("18.", "18"),
        ("+5", "5"),
        ("1/2", "0.5"),
        ("\\frac{1}{2}", ".5"),
        ("\\dfrac12", "1/2"),
        ("-\\frac{3}{4}", "-0.75"),
        ("1 1/2", "1.5"),
        ("1\\frac{1}{2}", "3/2"),
        ("50%", "50"),
        ("50\\%", "0.5"),
        ("\\text{Monday}", "monday"),
        ("x = 5", "5"),
        ("(1, 2)", "(1,2)"),
        ("2 \\cdot 3", "2*3"),
        ("2 × 2 × 5", "2 * 2 * 5"),
        ("−3", "-3"),
        ("1e3", "1000"),
        ("**42**", "42"),
        ("0.1", "1/10"),
    ],
)
def test_equal_answers(first: str, second: str) -> None:
    assert answers_match(first, second)
    assert answers_match(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("12", "13"),
        ("1,23", "123"),
        ("1/3", "0.333"),
        ("0.5", "50"),
        ("50%", "5%"),
        ("1/0", "0"),
        ("monday", "tuesday"),
        ("2*3", "6"),
        ("(1,2)", "(2,1)"),
        ("5", "-5"),
        ("1 2", "12"),
        ("", "0"),
    ],
)
def test_different_answers(first: str, second: str) -> None:
    assert not answers_match(first, second)
    assert not answers_match(second, first)


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_equals_its_own_spelling(value: fractions.Fraction) -> None:
    assert numeric_value(str(value)) == value
    sign = "-" if value < 0 else ""
    assert answers_match(f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}", str(value))


@given(st.integers(), st.integers(0, 99))
def test_grouped_currency_equals_plain(dollars: int, cents: int) -> None:
    assert answers_match(f"${dollars:,}.{cents:02d}", f"{dollars}.{cents:02d}")


@given(st.text(max_size=40))
def test_any_text_is_handled_and_equals_itself(text: str) -> None:
    extract_answer(text)
    numeric_value(text)
    assert answers_match(text, text)


def test_score_counts_wrong_and_missing_answers() -> None:
    responses = ["The answer is: 4", "The answer is: 5", "no idea", "#### 0.5"]
    references = ["1 + 3\nThe answer is: 4", "The answer is: 6", "The answer is: 1", "1/2"]
    result = exact_match(responses, references)
    assert result == ExactMatch(rows=4, correct=2, unanswered=1)
    assert result.score == 0.5
    assert exact_match([], []).score == 0.0


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="shorter"):
        exact_match(["The answer is: 4"], [])
