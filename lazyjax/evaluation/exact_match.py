"""Answers in worked solutions, and whether two answers are the same.

Understands what MetaMathQA, GSM8K, MATH and their relatives write: `The answer is: X`, `Answer: X`, `#### X`,
`\boxed{X}`, and solutions that name none and end with a number. Two answers agree when their normalised texts
do, or when both are numbers of equal value, also where only one of them has a unit (so `1/2`, `0.5`, `50%`,
`\frac{1}{2}` agree, and so do `18`, `$18.00` and `18 dollars`; `5 cm` and `5 m` do not). Numbers are compared
exactly, as fractions. What is equal as a number counts as equal: `50/130` passes for `5/13`.

This module knows nothing about models, tokenizers or datasets.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

#: How an answer was marked; `plain`: not at all, it is the last number of the text.
Form = Literal["phrase", "hashes", "boxed", "plain"]

_PHRASE = re.compile(
    r"(?:(?:final\s+)?answer\s+is\s*:?|\banswer\s*\**\s*:)[ \t]*\**[ \t]*(?=([^\s:*][^\n]*))", re.IGNORECASE
)
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BOXED_BARE = re.compile(r"\\boxed\s+([^\s${}\\.,]+)")
#: The rest of a line after the answer's own sentence: `5. I hope it is correct.`
_NEXT_SENTENCE = re.compile(r"(?<=[^.])[.;]\s+(?=[A-Z])|,?\s+(?:because|since|as required)\b")

_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_WRAPPED = re.compile(r"\\(?:text|textit|textrm|mathrm|mathbf|textbf|mbox|operatorname)\s*\{([^{}]*)\}")
_DRESSING = re.compile(r"\\[()\[\]]|\$|\\!|\\,|\\;|\\:|\\ |\\left(?![a-z])|\\right(?![a-z])|[*_`]{2,}|`|~")
_CURRENCY = re.compile(r"[€£¥₹]|\b(?:usd|eur|gbp)\b", re.IGNORECASE)
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\?circ\s*\}?|°)")
_POWER_OF_TEN = re.compile(r"\*10\^\{?([+-]?\d{1,3})\}?(?!\d)")

_DIGITS = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = rf"[+-]?{_DIGITS}(?:e[+-]?\d{{1,3}})?"
_VALUE = re.compile(rf"({_NUMBER})(?:/({_NUMBER}))?(%?)")
_MIXED = re.compile(r"([+-]?)(\d+) (?:and )?(\d+)/(\d+)")
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
#: One to four words, or a symbol with an exponent, behind a number.
_UNIT = re.compile(
    r"(?P<number>[^a-z]*\d[^a-z]*?)\s*(?P<unit>[a-z]+(?:[ /-][a-z]+){0,3}(?:\^\{?[23]\}?)?)\.?"
)
#: Words that make more than a unit of what follows a number.
_NO_UNIT = frozenset("and or to by than over plus minus times x y z n k i of remainder r".split())
#: Units that mean nothing to a bare number beside them.
_SAME_UNITS = {"percent": "%", "per cent": "%", "percents": "%"}

_LAST_NUMBER = re.compile(
    r"-?\\[dt]?frac\s*\{-?\d+\}\s*\{\d+\}"
    r"|(?<![\w.])-?[$€£]?\d+(?:,\d{3})+(?:\.\d+)?(?![\d])%?"
    r"|(?<![\w.])-?[$€£]?\d+(?:\.\d+)?(?:/\d+)?\\?%?"
    r"|(?<![\w.])-?[$€£]?\.\d+\\?%?"
)


class Answer(NamedTuple):
    """An answer as written, and how it was marked."""

    text: str
    form: Form


def _braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and its partner; None if that is missing."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start + 1 : index]
    return None


def marked_answer(response: str) -> Answer | None:
    """The answer that a worked solution marks as such, or None.

    The last marker in the text wins, of any kind: `answer is: X` and `answer: X` (to the end of the line or
    sentence), `#### X`, `\\boxed{X}` (braces may nest). A box inside an `answer is` or `####` line is opened.
    The text is returned as written, without surrounding blanks or a closing full stop.
    """
    marks: list[tuple[int, str, Form]] = []
    for match in _PHRASE.finditer(response):
        marks.append((match.start(), _sentence(match[1]), "phrase"))
    for match in _HASHES.finditer(response):
        marks.append((match.start(), match[1], "hashes"))
    for match in _BOXED.finditer(response):
        inside = _braced(response, match.end())
        if inside is not None:
            marks.append((match.start(), inside, "boxed"))
    for match in _BOXED_BARE.finditer(response):
        marks.append((match.start(), match[1], "boxed"))
    marks = [mark for mark in marks if _trim(mark[1])]
    if not marks:
        return None
    _, text, form = max(marks)
    return Answer(_trim(text), form)


def extract_answer(response: str) -> str | None:
    """The text of `marked_answer`."""
    found = marked_answer(response)
    return None if found is None else found.text


def find_answer(response: str) -> Answer | None:
    """The answer that is marked, or else the last number of the text; None where there is neither."""
    found = marked_answer(response)
    if found is not None:
        return found
    numbers = _LAST_NUMBER.findall(response)
    return Answer(_trim(numbers[-1]), "plain") if numbers else None


def expected_answer(reference: str) -> str | None:
    """The answer of a reference solution: marked, or the whole of a single short line.

    None for a text that names no answer: with such a reference nothing can be scored.
    """
    found = marked_answer(reference)
    if found is not None:
        return found.text
    text = reference.strip()
    return text if text and "\n" not in text and len(text.split()) <= 6 else None


def _sentence(rest: str) -> str:
    """The first sentence of what follows the marker."""
    if rest.startswith("$"):
        inline = re.match(r"\$([^$]+)\$(?!\d)", rest)
        if inline is not None:
            return inline[1]
    return _NEXT_SENTENCE.split(rest, maxsplit=1)[0]


def _trim(answer: str) -> str:
    return re.sub(r"(?<!\.)\.$", "", answer.strip()).strip()


def normalise(answer: str) -> str:
    """One spelling per answer: no currency, grouping commas, LaTeX dressing, spaces or capitals."""
    text = _trim(answer).replace("{,}", ",")
    text = re.sub(r"(?<=\d)(?:\\,|\\!|\\ |[\u00a0\u202f])(?=\d{3}(?!\d))", "", text)
    text = _DRESSING.sub("", text.replace("\\$", ""))
    text = _CURRENCY.sub("", text)
    text = text.replace("\\%", "%").replace("\\cdot", "*").replace("\\times", "*").replace("×", "*")
    text = text.replace("−", "-").replace("–", "-").replace("÷", "/").replace("\\div", "/")
    text = _DEGREES.sub(" degrees", text)
    text = _WRAPPED.sub(r" \1 ", text)
    text = _FRACTION.sub(lambda match: f" {match[1] or match[2]}/{match[3] or match[4]} ", text)
    text = re.sub(r"^\s*[a-zA-Z]\s*=\s*(?=\S)", "", text)  # "x = 5" answers "5"
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\s*([/*^+=(),%])\s*", r"\1", text)
    return _trim(" ".join(text.split())).casefold()


def numeric_value(answer: str) -> fractions.Fraction | None:
    """The exact value of a number, fraction, mixed number or percentage; None for anything else."""
    return _value(normalise(answer))


def _value(text: str) -> fractions.Fraction | None:
    """The value of a normalised text."""
    text = re.sub(r"^([+-]) (?=[\d.])", r"\1", text)
    text = _POWER_OF_TEN.sub(r"e\1", text)
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


def _measured(text: str) -> tuple[fractions.Fraction, str] | None:
    """Value and unit of a normalised text; the unit is empty for a bare number."""
    value = _value(text)
    if value is not None:
        return value, "%" if text.endswith("%") else ""
    match = _UNIT.fullmatch(text)
    if match is None:
        return None
    words = match["unit"].split()
    scale = 1
    if words and words[0] in _SCALES:
        scale = _SCALES[words.pop(0)]
    value = _value(match["number"].strip())
    if value is None or not _NO_UNIT.isdisjoint(words):
        return None
    unit = " ".join(words)
    if unit in _SAME_UNITS:
        return value / 100, "%"
    return value * scale, unit


def _same_unit(first: str, second: str) -> bool:
    """Whether units agree: equal but for the plural, or one is missing."""
    return not first or not second or first.rstrip("s") == second.rstrip("s")


def answers_match(predicted: str, expected: str) -> bool:
    """Whether two answers are equal as text or as numbers.

    Where only one side has a per cent sign, `5%` equals `5` too, since solutions often drop the unit.
    """
    first_text, second_text = normalise(predicted), normalise(expected)
    if first_text == second_text:
        return True
    first, second = _measured(first_text), _measured(second_text)
    if first is None or second is None:
        return False
    (first_value, first_unit), (second_value, second_unit) = first, second
    first_percent, second_percent = first_unit == "%", second_unit == "%"
    if first_percent != second_percent:
        if first_unit and second_unit:
            return False
        if first_value == second_value:
            return True
        return first_value * 100 == second_value if first_percent else first_value == second_value * 100
    return first_value == second_value and _same_unit(first_unit, second_unit)


@dataclasses.dataclass(frozen=True, slots=True)
class ExactMatch:
    """Score of a set of responses.

    Attributes:
        rows: responses scored.
        correct: those whose answer matches the expected one.
        unanswered: those in which no answer could be found (they count as wrong).
    """

    rows: int
    correct: int
    unanswered: int

    @property
    def score(self) -> float:
        """Share of correct responses, 0 to 1; 0 for no rows."""
        return self.correct / self.rows if self.rows else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the score (Wilson 1927); (0, 1) for no rows."""
        return wilson_interval(self.correct, self.rows)


def wilson_interval(correct: int, rows: int, deviations: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share; it stays inside 0 to 1 and is right near both ends.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    if not rows:
        return 0.0, 1.0
    share, square = correct / rows, deviations**2
    centre = share + square / (2 * rows)
    spread = deviations * math.sqrt(share * (1 - share) / rows + square / (4 * rows**2))
    low, high = (centre - spread) / (1 + square / rows), (centre + spread) / (1 + square / rows)
    return max(0.0, low), min(1.0, high)


def exact_match(responses: Sequence[str], references: Sequence[str]) -> ExactMatch:
    """Scores generated responses against worked reference solutions.

    A reference without a marker is taken as the bare answer. Raises ValueError when the lengths differ.
    """
    correct = unanswered = 0
    for response, reference in zip(responses, references, strict=True):
        predicted = find_answer(response)
        if predicted is None:
            unanswered += 1
            continue
        expected = extract_answer(reference)
        correct += answers_match(predicted.text, reference if expected is None else expected)
    return ExactMatch(len(responses), correct, unanswered)
