"""Answers in worked solutions, and whether two answers are the same.

Understands what MetaMathQA and its relatives write: `The answer is: X`, `\\boxed{X}` and `#### X`.
Two answers agree when their normalised texts do, or when both are numbers of equal value (so
`1/2`, `0.5`, `50%` and `\\frac{1}{2}` agree). Numbers are compared exactly, as fractions.

This module knows nothing about models, tokenizers or datasets.
"""

from __future__ import annotations

import dataclasses
import fractions
import re
from collections.abc import Sequence

_PHRASE = re.compile(r"(?:final\s+)?answer\s+is\s*:?[ \t]*([^\s:][^\n]*)", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,3})?"
_VALUE = re.compile(rf"({_NUMBER})(?:/({_NUMBER}))?(%?)")
_MIXED = re.compile(r"([+-]?)(\d+) (\d+)/(\d+)")


def _braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and its partner; None if that is missing."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start + 1 : index]
    return None


def extract_answer(response: str) -> str | None:
    """The final answer of a worked solution, or None when it names none.

    The last marker in the text wins, of whichever kind: `answer is: X` (to the end of the line),
    `#### X`, `\\boxed{X}` (braces may nest). A box inside an `answer is` or `####` line is opened. The text
    is returned as written, without surrounding blanks or a closing full stop.
    """
    marks = [
        (match.start(), match[1]) for pattern in (_PHRASE, _HASHES) for match in pattern.finditer(response)
    ]
    for match in _BOXED.finditer(response):
        inside = _braced(response, match.end())
        if inside is not None:
            marks.append((match.start(), inside))
    if not marks:
        return None
    return _trim(max(marks)[1])


def _trim(answer: str) -> str:
    return re.sub(r"(?<!\.)\.$", "", answer.strip()).strip()


def normalise(answer: str) -> str:
    """One spelling per answer: no currency, grouping commas, LaTeX dressing, spaces or capitals."""
    text = _trim(answer)
    text = re.sub(r"\\[()\[\]]|\$|\\!|\\,|\\;|\\left|\\right|[*_`]{2,}", "", text.replace("\\$", ""))
    text = text.replace("\\%", "%").replace("\\cdot", "*").replace("\\times", "*").replace("×", "*")
    text = text.replace("−", "-").replace("÷", "/")
    text = _WRAPPED.sub(r" \1 ", text)
    text = _FRACTION.sub(lambda match: f" {match[1] or match[2]}/{match[3] or match[4]} ", text)
    text = re.sub(r"^\s*[a-z]\s*=\s*(?=\S)", "", text)  # "x = 5" answers "5"
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\s*([/*^+=(),%])\s*", r"\1", text)
    return _trim(" ".join(text.split())).casefold()


def numeric_value(answer: str) -> fractions.Fraction | None:
    """The exact value of a number, fraction, mixed number or percentage; None for anything else."""
    text = re.sub(r"^([+-]) (?=[\d.])", r"\1", normalise(answer))
    mixed = _MIXED.fullmatch(text)
    if mixed is not None and int(mixed[4]):
        value = int(mixed[2]) + fractions.Fraction(int(mixed[3]), int(mixed[4]))
        return -value if mixed[1] == "-" else value
    match = _VALUE.fullmatch(text)
    if match is None:
        return None
    value, divisor = fractions.Fraction(match[1]), fractions.Fraction(match[2] or 1)
    if not divisor:
        return None
    return value / divisor / (100 if match[3] else 1)


def answers_match(predicted: str, expected: str) -> bool:
    """Whether two answers are equal as text or as numbers.

    `expected` decides how a per cent sign is read: where only one side has it, `5%` equals `5` too, since
    solutions often drop the unit.
    """
    if normalise(predicted) == normalise(expected):
        return True
    first, second = numeric_value(predicted), numeric_value(expected)
    if first is None or second is None:
        return False
    if first == second:
        return True
    first_percent, second_percent = "%" in predicted, "%" in expected
    return first_percent != second_percent and (
        first * 100 == second if first_percent else first == second * 100
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ExactMatch:
    """Score of a set of responses.

    Attributes:
        rows: responses scored.
        correct: those whose extracted answer matches the expected one.
        unanswered: those in which no answer could be found (they count as wrong).
    """

    rows: int
    correct: int
    unanswered: int

    @property
    def score(self) -> float:
        """Share of correct responses, 0 to 1; 0 for no rows."""
        return self.correct / self.rows if self.rows else 0.0


def exact_match(responses: Sequence[str], references: Sequence[str]) -> ExactMatch:
    """Scores generated responses against worked reference solutions.

    A reference without a marker is taken as the bare answer. Raises ValueError when the lengths differ.
    """
    correct = unanswered = 0
    for response, reference in zip(responses, references, strict=True):
        predicted = extract_answer(response)
        if predicted is None:
            unanswered += 1
            continue
        expected = extract_answer(reference)
        correct += answers_match(predicted, reference if expected is None else expected)
    return ExactMatch(len(responses), correct, unanswered)
