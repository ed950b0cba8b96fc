"""Generates the dataset and the tokenizer that ship in `lazyjax/data/problems/`.

    python -m experiments.make_problems

takes a few seconds, needs `pip install reasoning-gym` and writes

    problems.jsonl.gz                        word and arithmetic problems with worked answers
    tokenizer.json, tokenizer_config.json    a byte-level BPE tokenizer trained on them (and
                                             on a short public domain story, for common English words)

Rows have MetaMathQA's keys (query, response, type, original_question) and every response ends with
`The answer is: X`. The numbers come from reasoning-gym's generators; the worked answers are written
here, from the numbers, and every `a op b = c` in them is recomputed before a row is kept. Same seed,
same bytes.
"""

from __future__ import annotations

import argparse
import fractions
import gzip
import json
import math
import pathlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import reasoning_gym
import reasoning_gym.data
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lazyjax.evaluation import exact_match

DEFAULT_FOLDER = pathlib.Path(__file__).parent.parent / "lazyjax" / "data" / "problems"
SEED = 42
VOCABULARY_SIZE = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: Qwen's pre-tokenizer: digits stand alone, so that arithmetic is spelled digit by digit.
PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Qwen's turn format without tools and without a thinking block.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

NAMES = (
    "Ada Ben Carla David Emma Farid Grace Hugo Ines Jonas Kira Liam Mia Noah Olga Paul Rosa Sam Tara "
    "Umar Vera Wendy Xavier Yara Zoe"
).split()
THINGS = "apples books coins pencils stickers marbles cards shells stamps beads cookies buttons".split()
GOODS = "pens notebooks tickets mugs scarves lamps plates brushes candles balls".split()
PLACES = "hall theatre classroom cinema garden stadium library".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


class Problem(NamedTuple):
    """One problem before it becomes a row: two wordings, the steps and the answer."""

    question: str
    rephrased: str
    steps: list[str]
    answer: str


def _items(name: str, seed: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """Endless metadata of a reasoning-gym generator."""
    while True:
        for item in reasoning_gym.create_dataset(name, size=500, seed=seed, **settings):
            yield item["metadata"] | {"answer": item["answer"]}
        seed += 500  # reasoning-gym seeds item i with seed + i


def _numbers(expression: str) -> list[int]:
    """The terms of `12 + 7 - 5` as signed numbers."""
    return [int(term.replace(" ", "")) for term in re.findall(r"[+-]? ?\d+", expression)]


def _running_sum(terms: list[int]) -> list[str]:
    """Adds signed terms one at a time."""
    steps, total = [], terms[0]
    for term in terms[1:]:
        steps.append(f"{total} {'+' if term >= 0 else '-'} {abs(term)} = {total + term}")
        total += term
    return steps


def _product_steps(a: int, b: int) -> list[str]:
    """a times b, the second factor split into tens and ones."""
    tens, ones = b - b % 10, b % 10
    if a < 10 or not (tens and ones):
        return [f"{a} * {b} = {a * b}"]
    return [f"{a} * {tens} = {a * tens}", f"{a} * {ones} = {a * ones}", f"{a * tens} + {a * ones} = {a * b}"]


def chain_sum(rng: random.Random, seed: int) -> Iterator[Problem]:
    """12 + 7 - 5."""
    for item in _items("chain_sum", seed, min_terms=3, max_terms=4, min_digits=1, max_digits=2):
        terms = _numbers(item["expression"])
        yield Problem(
            f"What is {item['expression']}?",
            rng.choice(("Calculate {}.", "Find the value of {}.", "Work out {}.")).format(item["expression"]),
            ["We add and subtract from left to right.", *_running_sum(terms)],
            item["answer"],
        )


def product(rng: random.Random, seed: int) -> Iterator[Problem]:
    """34 * 12."""
    for item in _items("products", seed, min_terms=2, max_terms=2, min_digits=2, max_digits=2):
        a, b = _numbers(item["expression"].replace("*", " "))
        yield Problem(
            f"What is {a} * {b}?",
            rng.choice(("Calculate {} * {}.", "Multiply {} by {}.", "Find {} times {}.")).format(a, b),
            ["We split the second number into tens and ones.", *_product_steps(a, b)],
            item["answer"],
        )


def decimal_sum(rng: random.Random, seed: int) -> Iterator[Problem]:
    """Prices added up."""
    settings = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    for item in _items("decimal_chain_sum", seed, **settings, min_decimal_places=2, max_decimal_places=2):
        cents = [round(float(term) * 100) for term in re.findall(r"\d+\.\d\d", item["expression"])]
        name = rng.choice(NAMES)
        goods = rng.sample(GOODS, len(cents))
        steps, total = [], cents[0]
        for price in cents[1:]:
            steps.append(f"{total / 100:.2f} + {price / 100:.2f} = {(total + price) / 100:.2f}")
            total += price
        listed = " and ".join(
            f"{good} for ${price / 100:.2f}" for good, price in zip(goods, cents, strict=True)
        )
        yield Problem(
            f"{name} buys {listed}. How many dollars does {name} pay?",
            f"In a shop, {name} takes {listed}. What is the total price in dollars?",
            ["We add the prices.", *steps],
            f"{total / 100:.2f}",
        )


def equation(rng: random.Random, seed: int) -> Iterator[Problem]:
    """3*x + 5 = 20."""
    for item in _items("simple_equations", seed, min_terms=2, max_terms=2, min_value=1, max_value=20):
        match = re.fullmatch(r"(\d+)\*(\w) ([+-]) (\d+) = (-?\d+)", item["equation"])
        if match is None or int(match[1]) < 2:
            continue
        a, variable, sign, b, c = int(match[1]), match[2], match[3], int(match[4]), int(match[5])
        moved = c - b if sign == "+" else c + b
        inverse, verb = ("-", "subtract") if sign == "+" else ("+", "add")
        yield Problem(
            f"Solve for {variable}: {a}{variable} {sign} {b} = {c}",
            f"If {a}{variable} {sign} {b} = {c}, what is {variable}?",
            [
                f"We {verb} {b} on both sides: {c} {inverse} {b} = {moved}",
                f"So {a}{variable} is {moved}. We divide by {a}: {moved} / {a} = {moved // a}",
            ],
            item["answer"],
        )


def _euclid(a: int, b: int) -> list[str]:
    """Remainders until zero."""
    steps = []
    a, b = max(a, b), min(a, b)
    while b:
        steps.append(f"{a} mod {b} = {a % b}")
        a, b = b, a % b
    return steps


def greatest_divisor(rng: random.Random, seed: int) -> Iterator[Problem]:
    """The greatest common divisor by Euclid."""
    for item in _items("gcd", seed, min_value=6, max_value=150):
        a, b = item["numbers"]
        steps = _euclid(a, b)
        if a == b or len(steps) > 5:
            continue
        yield Problem(
            f"What is the greatest common divisor of {a} and {b}?",
            f"Find the largest number that divides both {a} and {b}.",
            ["We take remainders until one is 0.", *steps, "The last divisor is the greatest one."],
            item["answer"],
        )


def least_multiple(rng: random.Random, seed: int) -> Iterator[Problem]:
    """The least common multiple through the greatest common divisor."""
    for item in _items("lcm", seed, min_value=4, max_value=60):
        a, b = item["numbers"]
        if a == b:
            continue
        divisor = math.gcd(a, b)
        yield Problem(
            f"What is the least common multiple of {a} and {b}?",
            f"Find the smallest number that both {a} and {b} divide.",
            [
                f"The greatest common divisor of {a} and {b} is {divisor}.",
                f"{a} / {divisor} = {a // divisor}",
                f"{a // divisor} * {b} = {item['result']}",
            ],
            item["answer"],
        )


def fraction(rng: random.Random, seed: int) -> Iterator[Problem]:
    """24/36 in lowest terms."""
    settings = {"min_value": 1, "max_value": 15, "min_factor": 2, "max_factor": 15}
    for item in _items("fraction_simplification", seed, **settings, styles=("plain",)):
        top, bottom, divisor = item["numerator"], item["denominator"], item["reduction_factor"]
        if divisor < 2 or divisor == bottom:
            continue
        yield Problem(
            f"Simplify the fraction {top}/{bottom}.",
            f"Write {top}/{bottom} in lowest terms.",
            [
                f"Both numbers can be divided by {divisor}.",
                f"{top} / {divisor} = {top // divisor}",
                f"{bottom} / {divisor} = {bottom // divisor}",
            ],
            item["answer"],
        )


def factors(rng: random.Random, seed: int) -> Iterator[Problem]:
    """Prime factors by repeated division."""
    for item in _items("prime_factorization", seed, min_value=12, max_value=400):
        if not 2 <= len(item["factors"]) <= 6:
            continue
        steps, rest = [], item["number"]
        for prime in item["factors"][:-1]:
            steps.append(f"{rest} / {prime} = {rest // prime}")
            rest //= prime
        yield Problem(
            f"What are the prime factors of {item['number']}?",
            f"Write {item['number']} as a product of primes.",
            ["We divide by the smallest prime that fits.", *steps, f"{rest} is prime."],
            " * ".join(map(str, item["factors"])),
        )


def legs(rng: random.Random, seed: int) -> Iterator[Problem]:
    """Legs of animals."""
    counts = {"chicken": 2, "duck": 2, "bird": 2, "dog": 4, "cat": 4, "cow": 4, "horse": 4, "lion": 4}
    counts |= {"elephant": 4, "giraffe": 4, "tiger": 4, "ant": 6, "bee": 6, "beetle": 6, "wasp": 6}
    counts |= {"cricket": 6, "spider": 8, "scorpion": 8, "crab": 10, "lobster": 10}
    settings = {"min_animals": 2, "max_animals": 3, "min_instances": 2, "max_instances": 15}
    for item in _items("leg_counting", seed, **settings):
        animals = item["animals"]
        if not animals.keys() <= counts.keys():
            continue
        groups = [f"{number} {animal}s" for animal, number in animals.items()]
        sums = [number * counts[animal] for animal, number in animals.items()]
        steps = [
            f"{group} have {number} * {counts[animal]} = {total} legs."
            for group, (animal, number), total in zip(groups, animals.items(), sums, strict=True)
        ]
        listed = ", ".join(groups[:-1]) + " and " + groups[-1]
        yield Problem(
            f"How many legs do {listed} have in total?",
            f"A farm keeps {listed}. How many legs are there?",
            [*steps, *_running_sum(sums)],
            item["answer"],
        )


def story_chain(rng: random.Random, seed: int) -> Iterator[Problem]:
    """Things gained and given away."""
    for item in _items("chain_sum", seed, min_terms=3, max_terms=4, min_digits=1, max_digits=2):
        terms = _numbers(item["expression"])
        if any(sum(terms[:count]) < 0 for count in range(1, len(terms) + 1)):
            continue
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        days = rng.sample(DAYS, len(terms) - 1)
        gains, losses = ("finds", "buys", "wins", "gets"), ("loses", "sells", "gives away", "uses")
        events = " ".join(
            f"On {day} {name} {rng.choice(gains if term >= 0 else losses)} {abs(term)}."
            for day, term in zip(days, terms[1:], strict=True)
        )
        yield Problem(
            f"{name} has {terms[0]} {thing}. {events} How many {thing} does {name} have now?",
            f"{name} starts with {terms[0]} {thing}. {events} How many {thing} are left?",
            [f"{name} starts with {terms[0]} {thing}.", *_running_sum(terms)],
            item["answer"],
        )


def story_product(rng: random.Random, seed: int) -> Iterator[Problem]:
    """Stories around one product: shopping, reading, seats, sharing, comparing, travel."""
    tellers = (_shopping, _reading, _seats, _sharing, _comparing, _travel)
    for item in _items("products", seed, min_terms=2, max_terms=2, min_digits=1, max_digits=2):
        a, b = _numbers(item["expression"].replace("*", " "))
        if a < 2 or b < 2:
            continue
        yield rng.choice(tellers)(rng, max(a, b), min(a, b))


def _shopping(rng: random.Random, a: int, b: int) -> Problem:
    name, good, total = rng.choice(NAMES), rng.choice(GOODS), a * b
    paid = -(-(total + 1) // 50) * 50
    return Problem(
        f"{name} buys {b} {good} for ${a} each and pays with ${paid}. How much change does {name} get?",
        f"One of the {good} costs ${a}. {name} takes {b} and gives the seller ${paid}. What is the change?",
        [
            f"{name} pays for {b} {good}.",
            *_product_steps(a, b),
            f"The change is {paid} - {total} = {paid - total}",
        ],
        str(paid - total),
    )


def _reading(rng: random.Random, a: int, b: int) -> Problem:
    name, left, total = rng.choice(NAMES), rng.randrange(5, 95), a * b
    return Problem(
        f"{name} reads {a} pages a day for {b} days and then has {left} pages left. How long is the book?",
        f"After {b} days with {a} pages each, {name} still has {left} pages to read. How long is it?",
        [
            f"{name} reads {a} pages on {b} days.",
            *_product_steps(a, b),
            f"With the rest {total} + {left} = {total + left}",
        ],
        str(total + left),
    )


def _seats(rng: random.Random, a: int, b: int) -> Problem:
    place, total = rng.choice(PLACES), a * b
    taken = rng.randrange(1, total)
    return Problem(
        f"A {place} has {b} rows of {a} seats. {taken} seats are taken. How many seats are free?",
        f"There are {b} rows with {a} seats each in a {place}. If {taken} are taken, how many are free?",
        [
            f"The {place} has {b} rows of {a} seats.",
            *_product_steps(a, b),
            f"Free seats: {total} - {taken} = {total - taken}",
        ],
        str(total - taken),
    )


def _sharing(rng: random.Random, a: int, b: int) -> Problem:
    name, thing, total, kept = rng.choice(NAMES), rng.choice(THINGS), a * b, rng.randrange(2, 20)
    return Problem(
        f"{name} has {total + kept} {thing}, keeps {kept} and shares the rest among {b} friends. "
        f"How many {thing} does each friend get?",
        f"{b} friends share the {thing} of {name} equally. {name} has {total + kept} and keeps {kept}. "
        f"How many does each get?",
        [
            f"{name} shares {total + kept} - {kept} = {total} {thing}.",
            f"Each friend gets {total} / {b} = {a}",
        ],
        str(a),
    )


def _comparing(rng: random.Random, a: int, b: int) -> Problem:
    (first, second), thing, total = rng.sample(NAMES, 2), rng.choice(THINGS), a * b
    return Problem(
        f"{first} has {a} {thing}. {second} has {b} times as many. How many {thing} do they have together?",
        f"{second} owns {b} times as many {thing} as {first}, who owns {a}. How many are there in total?",
        [f"{second} has {b} times {a}.", *_product_steps(a, b), f"Together {a} + {total} = {a + total}"],
        str(a + total),
    )


def _travel(rng: random.Random, a: int, b: int) -> Problem:
    name, more, total = rng.choice(NAMES), rng.randrange(5, 95), a * b
    return Problem(
        f"{name} drives {b} hours at {a} km per hour and then {more} km more. How many km is the trip?",
        f"A trip of {name} takes {b} hours at {a} km per hour, then {more} km more. How many km is it?",
        [
            f"{name} drives {b} hours at {a} km per hour.",
            *_product_steps(a, b),
            f"The trip is {total} + {more} = {total + more}",
        ],
        str(total + more),
    )


def percent(rng: random.Random, seed: int) -> Iterator[Problem]:
    """A price lowered by a percentage; whole dollars throughout."""
    while True:
        name, good = rng.choice(NAMES), rng.choice(GOODS)
        rate, price = rng.choice((5, 10, 20, 25, 50)), 20 * rng.randrange(1, 41)
        off = price * rate // 100
        yield Problem(
            f"A set of {good} costs ${price}. {name} gets {rate}% off. How much does {name} pay?",
            f"{name} buys a set of {good}. The price of ${price} falls by {rate}%. What is the new price?",
            [
                f"{price} * {rate} = {price * rate}",
                f"{price * rate} / 100 = {off}",
                f"{name} pays {price} - {off} = {price - off}",
            ],
            str(price - off),
        )


#: type -> (generator, rows)
KINDS: dict[str, tuple[Callable[[random.Random, int], Iterator[Problem]], int]] = {
    "arithmetic_chain": (chain_sum, 500),
    "arithmetic_product": (product, 500),
    "arithmetic_gcd": (greatest_divisor, 300),
    "arithmetic_lcm": (least_multiple, 300),
    "arithmetic_factors": (factors, 250),
    "algebra_equation": (equation, 350),
    "fraction_lowest": (fraction, 300),
    "word_legs": (legs, 400),
    "word_prices": (decimal_sum, 400),
    "word_chain": (story_chain, 500),
    "word_product": (story_product, 900),
    "word_percent": (percent, 300),
}


def check_steps(response: str) -> None:
    """Recomputes every `a op b = c`; raises ValueError on a wrong one or when there is none."""
    operations = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
    operations |= {"/": lambda a, b: a / b, "mod": lambda a, b: a % b}
    found = re.findall(r"(-?[\d.]*\d) (\+|-|\*|/|mod) ([\d.]*\d) = (-?[\d.]*\d)", response)
    if not found:
        raise ValueError(f"no step in {response!r}")
    for left, operator, right, result in found:
        if operations[operator](fractions.Fraction(left), fractions.Fraction(right)) != fractions.Fraction(
            result
        ):
            raise ValueError(f"{left} {operator} {right} is not {result}")


def make_rows(seed: int) -> list[dict[str, str]]:
    """All rows, shuffled; no query occurs twice, and every worked answer has been recomputed."""
    rows, queries = [], set()
    for number, (kind, (generator, count)) in enumerate(KINDS.items()):
        rng = random.Random(f"{seed}/{kind}")
        kept = 0
        for problem in generator(rng, seed + 1_000_000 * number):
            query = problem.question if rng.random() < 0.5 else problem.rephrased
            if query in queries:
                continue
            queries.add(query)
            response = "\n".join([*problem.steps, f"The answer is: {problem.answer}"])
            check_steps(response)
            if exact_match.extract_answer(response) != problem.answer:
                raise ValueError(f"the answer of {response!r} cannot be read back")
            row = {"query": query, "response": response, "type": kind, "original_question": problem.question}
            rows.append(row)
            kept += 1
            if kept == count:
                break
    random.Random(f"{seed}/order").shuffle(rows)
    return rows


def write_rows(rows: list[dict[str, str]], path: pathlib.Path) -> None:
    """One JSON object a line, compressed without a time stamp."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def train_tokenizer(rows: list[dict[str, str]], folder: pathlib.Path) -> None:
    """Byte-level BPE with Qwen's special tokens, pre-tokenizer and chat format."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PRE_TOKENIZER_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for row in rows for text in (f"user\n{row['query']}", f"assistant\n{row['response']}")]
    # The problems alone hold fewer than 900 distinct tokens; a public domain story fills the rest.
    story = reasoning_gym.data.read_data_file("in_the_year_2889.txt").split("***")[2]
    tokenizer.train_from_iterator(
        [*texts, "system\nYou are a helpful assistant.", *story.split("\n\n")], trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens")


def main() -> None:
    """Writes the three files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--folder", type=pathlib.Path, default=DEFAULT_FOLDER)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = make_rows(arguments.seed)
    path = arguments.folder / "problems.jsonl.gz"
    write_rows(rows, path)
    print(f"{len(rows)} rows, {path.stat().st_size} bytes")
    train_tokenizer(rows, arguments.folder)


if __name__ == "__main__":
    main()
