"""Exact match during training: held-out rows answered by the weights as they are at that moment."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from lazyjax.config import Config, ConfigError
from lazyjax.data.batches import Sides
from lazyjax.data.chat import Tokenizer
from lazyjax.data.split import sample_rows
from lazyjax.evaluation.answers_file import AnswersFile
from lazyjax.evaluation.generate import generate
from lazyjax.evaluation.model import make_decoder, stop_tokens
from lazyjax.evaluation.problems import Problem, problems_of, scores, total
from lazyjax.execution.decode import Sampling
from lazyjax.execution.kernels import Kernels
from lazyjax.storage.host import HostStore

#: When rows are answered: before the first step, at intervals, and once the trained model is saved.
Stage = Literal["before", "during", "after"]


@dataclasses.dataclass(frozen=True, slots=True)
class ExactMatchMetrics:
    """Exact match on held-out rows after `step` steps.

    Attributes:
        exact_match: share of right answers; `low` and `high` bound it with 95 % confidence.
        rows, correct, unanswered: counted; those without any answer are wrong.
        answer_tokens: written for them all.
    """

    step: int
    exact_match: float
    low: float
    high: float
    rows: int
    correct: int
    unanswered: int
    answer_tokens: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Questions:
    """What is asked at each stage, and how answers end."""

    problems: Mapping[Stage, Sequence[Problem]]
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    new_tokens: int


class ExactMatchEvaluation:
    """Answers the same rows at every call of a stage.

    Args:
        flush: applies pending updates; the slabs then hold the weights that are scored.
        folder: gets a file of answers per call.
    """

    def __init__(
        self,
        questions: Questions,
        kernels: Kernels,
        store: HostStore,
        flush: Callable[[], None],
        folder: pathlib.Path,
    ) -> None:
        self._questions, self._kernels, self._store = questions, kernels, store
        self._flush, self._folder = flush, folder

    def run(self, stage: Stage, step: int, stopped: Callable[[], bool]) -> ExactMatchMetrics | None:
        """Scores the weights after `step` steps; None without rows, or where the run is `stopped` meanwhile.

        A part of the rows would be a sample by length, not by chance: it is kept in the file of answers and
        given no score.
        """
        asked = self._questions
        problems = asked.problems[stage]
        if not problems or stopped():
            return None
        start = time.perf_counter()
        self._flush()
        decoder = make_decoder(
            self._kernels,
            self._store,
            tokens=max(len(problem.tokens_T) for problem in problems) + asked.new_tokens,
            rows=len(problems),
            sampling=Sampling(),
        )
        path = self._folder / f"answers-{stage}-step-{step}.jsonl"
        path.unlink(missing_ok=True)  # of a run that was resumed: the weights may be others
        answers = AnswersFile(path, {"stage": stage, "step": step, "new_tokens": asked.new_tokens})
        with contextlib.closing(decoder), contextlib.closing(answers):
            completions = generate(
                decoder,
                (problem.prompt for problem in problems),
                stop_tokens=asked.stop_tokens,
                new_tokens=asked.new_tokens,
            )
            for one in scores(problems, completions, asked.tokenizer):
                answers.add(one)
                if stopped():
                    return None
            scored = list(answers.answered.values())
            result = total(scored)
            low, high = result.interval
            metrics = ExactMatchMetrics(
                step=step,
                exact_match=result.score,
                low=low,
                high=high,
                rows=result.rows,
                correct=result.correct,
                unanswered=result.unanswered,
                answer_tokens=sum(one.tokens for one in scored),
                seconds=time.perf_counter() - start,
            )
            answers.finish(dataclasses.asdict(metrics))
        return metrics


def read_questions(config: Config, sides: Sides, tokenizer: Tokenizer) -> Questions | None:
    """The rows that each stage answers, the smaller samples within the larger ones; None: no rows at all.

    Raises:
        ConfigError: rows are asked for where none are held out.
        DataError: the held-out rows name no answers, or no token ends one.
    """
    keys = config.training
    counts: dict[Stage, int] = {
        "before": keys.evaluate_exact_match_rows,
        "during": keys.evaluate_exact_match_rows,
        "after": keys.evaluate_exact_match_rows,
    }
    if keys.exact_match_rows_before is not None:
        counts["before"] = keys.exact_match_rows_before
    if keys.exact_match_rows_after is not None:
        counts["after"] = keys.exact_match_rows_after
    most = max(counts.values())
    if not most:
        return None
    if not len(sides.held_out_R):
        raise ConfigError(
            "training.evaluate_exact_match_rows: no rows are held out; set data.validation, or a "
            "data.train_fraction below 1"
        )
    name = f"held-out rows of {config.data.validation or config.data.source}"
    found: dict[Stage, list[Problem]] = {}
    for stage, count in counts.items():
        if not count:
            found[stage] = []
            continue
        chosen_R = sample_rows(sides.held_out_R, min(count, len(sides.held_out_R)), seed=config.data.seed)
        found[stage], _ = problems_of(sides.held_out_rows, np.asarray(chosen_R), tokenizer, name=name)
    stops = stop_tokens(tokenizer, config.model.folder)
    return Questions(found, tokenizer, stops, keys.exact_match_new_tokens)
