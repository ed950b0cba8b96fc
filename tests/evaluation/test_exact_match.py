"""Answers found in worked solutions, and what counts as equal."""

from __future__ import annotations

import fractions

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.evaluation.exact_match import (
    Answer,
    ExactMatch,
    answers_match,
    exact_match,
    expected_answer,
    extract_answer,
    find_answer,
    numeric_value,
)
from tests.evaluation.answer_forms import FORMS


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


def test_the_table_of_forms() -> None:
    """Responses scored against references, written for this test."""
    assert len(FORMS) >= 150
    assert len({form[:2] for form in FORMS}) == len(FORMS)
    wrong = [
        (response, reference, right)
        for response, reference, right in FORMS
        if bool(exact_match([response], [reference]).correct) != right
    ]
    assert not wrong


def test_how_an_answer_was_marked() -> None:
    assert find_answer("#### 5") == Answer("5", "hashes")
    assert find_answer("The answer is: 5") == Answer("5", "phrase")
    assert find_answer("\\boxed{5}") == Answer("5", "boxed")
    assert find_answer("first 4, then 5") == Answer("5", "plain")
    assert find_answer("none") is None


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("work\n#### 5", "5"),
        ("5", "5"),
        ("(1, 2)", "(1, 2)"),
        ("A poem has many lines\nand no answer", None),
        ("Seven words are too many to compare.", None),
        ("", None),
    ],
)
def test_a_reference_names_its_answer_or_is_refused(reference: str, answer: str | None) -> None:
    assert expected_answer(reference) == answer


@given(st.integers(0, 500), st.integers(1, 500))
def test_the_interval_holds_the_share(correct: int, more: int) -> None:
    result = ExactMatch(correct + more, correct, 0)
    low, high = result.interval
    assert 0 <= low <= result.score <= high <= 1


def test_the_interval_is_wilsons() -> None:
    """With z = 1.96: 0.5 +- z / (2 sqrt(n + z^2)) at one half, and z^2 / (n + z^2) above none of n."""
    assert ExactMatch(100, 50, 0).interval == pytest.approx((0.5 - 0.0961683, 0.5 + 0.0961683), abs=1e-6)
    assert ExactMatch(10, 0, 0).interval == pytest.approx((0.0, 3.8414588 / 13.8414588), abs=1e-6)
    assert ExactMatch(0, 0, 0).interval == (0.0, 1.0)
