"""The command `lazyjax evaluate`: exact match and loss of a model on rows with known answers."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64
from rich.console import Console

from lazyjax.config import Config
from lazyjax.config.arguments import Parser
from lazyjax.data.batches import read_sides
from lazyjax.data.chat import Tokenizer, padding_token_id
from lazyjax.data.loader import Loader, Settings
from lazyjax.data.sources import open_source
from lazyjax.data.split import sample_rows
from lazyjax.data.tokens import TokenizedRows, tokenize
from lazyjax.evaluation.answers_file import AnswersFile, fingerprint
from lazyjax.evaluation.exact_match import ExactMatch
from lazyjax.evaluation.generate import generate
from lazyjax.evaluation.model import Model, make_decoder, open_folder
from lazyjax.evaluation.options import add_decoding_options, sampling_of
from lazyjax.evaluation.problems import Problem, Scored, problems_of, scores, total
from lazyjax.evaluation.progress import EvaluationProgress
from lazyjax.execution.decode import Sampling
from lazyjax.execution.forward import ForwardPass
from lazyjax.execution.transfers import Transfers
from lazyjax.hardware.profile import HardwareProfile, load_profile
from lazyjax.planning.commands.plan import number
from lazyjax.planning.plan.baselines import recompute_all

#: Sequences of a batch for the loss.
_LOSS_ROWS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationRows:
    """What is evaluated: a name for it, all rows, and which of them."""

    name: str
    rows: TokenizedRows
    indices_R: Int64[np.ndarray, " R"]


def evaluate_command(arguments: Sequence[str]) -> None:
    """Scores a model: lazyjax evaluate RUN|FOLDER --data FILE [--rows N] [--seed S]."""
    options = _parser().parse_args(list(arguments))
    console = Console()
    sampling = sampling_of(options)
    profile = None if options.hardware is None else load_profile(options.hardware)
    opened = open_folder(options.model, compute_dtype=options.dtype)
    chosen = read_rows(options.data, opened.config, opened.tokenizer, tokens=options.tokens)
    if options.rows is not None:
        chosen = dataclasses.replace(
            chosen, indices_R=sample_rows(chosen.indices_R, options.rows, seed=options.seed)
        )
    problems, unnamed = problems_of(chosen.rows, chosen.indices_R, opened.tokenizer, name=chosen.name)
    if unnamed:
        _say(console, f"{unnamed} of {len(chosen.indices_R)} rows name no answer and are left out")
    facts = {
        "model": fingerprint(opened.folder),
        "data": chosen.name,
        "data_fingerprint": chosen.rows.fingerprint,
        "problems": len(problems),
        "rows": options.rows,
        "seed": options.seed,
        "new_tokens": options.new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "compute_dtype": opened.compute_dtype,
    }
    out = options.out or default_file(options.model, chosen.name)
    with contextlib.closing(AnswersFile(out, facts)) as answers:
        model = opened.load()
        score_model(
            model,
            problems,
            answers,
            new_tokens=options.new_tokens,
            sampling=sampling,
            console=console,
            batch=options.batch,
            profile=profile,
        )
        scored = list(answers.answered.values())
        loss, target_tokens = (None, 0) if options.no_loss else mean_loss(model, chosen)
        answers.finish(result_record(total(scored), scored, loss))
    _say(console, result_text(total(scored), scored))
    if loss is not None:
        _say(console, f"loss {loss:.4f} over {target_tokens} target tokens")
    _say(console, f"answers: {out}")


def score_model(
    model: Model,
    problems: Sequence[Problem],
    answers: AnswersFile,
    *,
    new_tokens: int,
    sampling: Sampling,
    console: Console,
    batch: int | None = None,
    profile: HardwareProfile | None = None,
) -> ExactMatch:
    """Answers the problems that `answers` has no answer to, and scores all of them."""
    waiting = [problem for problem in problems if problem.row not in answers.answered]
    if len(waiting) < len(problems):
        _say(console, f"{len(problems) - len(waiting)} rows are answered in {answers.path} already")
    if waiting:
        decoder = make_decoder(
            model.kernels,
            model.store,
            tokens=max(len(problem.tokens_T) for problem in waiting) + new_tokens,
            rows=batch or len(waiting),
            sampling=sampling,
            profile=profile,
            fixed_rows=batch is not None,
        )
        _say(console, f"{decoder.describe()}, answers go to {answers.path}")
        completions = generate(
            decoder,
            (problem.prompt for problem in waiting),
            stop_tokens=model.stop_tokens,
            new_tokens=new_tokens,
        )
        before = list(answers.answered.values())
        with contextlib.closing(decoder), EvaluationProgress(console, len(problems), before) as progress:
            try:
                for one in scores(waiting, completions, model.tokenizer):
                    answers.add(one)
                    progress.row(one)
            except KeyboardInterrupt:
                done = f"{len(answers.answered)} of {len(problems)} rows are in {answers.path}"
                _say(console, f"{done}; the same command goes on from there")
                raise
    return total(list(answers.answered.values()))


def read_rows(
    data: str | None, config: Config | None, tokenizer: Tokenizer, *, tokens: int
) -> EvaluationRows:
    """The rows of a file or data set; without one the held-out rows of the run.

    Raises:
        DataError: no such data, unusable rows, or nothing named and no run to take rows from.
    """
    if data is None:
        if config is None:
            raise ValueError("--data: name a file; only a run's folder has held-out rows of its own")
        sides = read_sides(config.data, tokenizer)
        held_out = f"held-out rows of {config.data.validation or config.data.source}"
        if not len(sides.held_out_R):
            raise ValueError("--data: name a file; the run trained on all of its rows")
        return EvaluationRows(held_out, sides.held_out_rows, sides.held_out_R)
    rows = tokenize(open_source(data), tokenizer, sequence_length=tokens, too_long="drop")
    return EvaluationRows(data, rows, np.arange(len(rows), dtype=np.int64))


def mean_loss(model: Model, chosen: EvaluationRows) -> tuple[float, int]:
    """Mean -log p over the responses of the rows, by their weights, and how many tokens these are."""
    longest = int(chosen.rows.lengths_R[chosen.indices_R].max())
    settings = Settings(_LOSS_ROWS, longest, "bucketed", shuffle=False, partial="pad")
    loader = Loader(chosen.rows, chosen.indices_R, settings, padding_token=padding_token_id(model.tokenizer))
    kernels = model.kernels
    forward = ForwardPass(kernels, model.store, Transfers(kernels.sharded, kernels.compute_dtype))
    plan = recompute_all(model.template.spec, (), batch_rows=_LOSS_ROWS, sequence_length=longest)
    loss_sum, weight, target_tokens = 0.0, 0.0, 0
    for batch in loader.epoch_batches():
        loss_sum += forward.loss_sum(batch, plan)
        weight += batch.target_weight
        target_tokens += batch.target_tokens
    return loss_sum / weight, target_tokens


def result_record(result: ExactMatch, rows: Sequence[Scored], loss: float | None) -> dict[str, Any]:
    """What the last line of the file says."""
    low, high = result.interval
    return {
        "rows": result.rows,
        "correct": result.correct,
        "unanswered": result.unanswered,
        "exact_match": result.score,
        "interval_95": [low, high],
        "stopped": sum(one.stopped for one in rows),
        "loss": loss,
    }


def result_text(result: ExactMatch, rows: Sequence[Scored]) -> str:
    """The result in words."""
    low, high = result.interval
    forms: dict[str, int] = {}
    for one in rows:
        forms[one.form or "none"] = forms.setdefault(one.form or "none", 0) + 1
    found = ", ".join(f"{count} {form}" for form, count in sorted(forms.items(), key=lambda item: -item[1]))
    cut = sum(not one.stopped for one in rows)
    return (
        f"exact match {result.score:.1%} ({low:.1%} to {high:.1%}, 95 %): {result.correct} of {result.rows} "
        f"rows; how answers were marked: {found}; {cut} were cut off at the limit"
    )


def default_file(model: pathlib.Path, data: str) -> pathlib.Path:
    """Where answers go unless a file is named."""
    words = [re.sub(r"[^A-Za-z0-9_.+-]+", "-", word).strip("-.") for word in (model.resolve().name, data)]
    return pathlib.Path("evaluations") / f"{'-'.join(words)}.jsonl"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _parser() -> Parser:
    parser = Parser(
        prog="lazyjax evaluate", description="Exact match and loss of a model on rows with known answers."
    )
    positive = number(1, int)
    parser.add_argument("model", type=pathlib.Path, metavar="RUN|FOLDER", help="a run or a model folder")
    parser.add_argument("--data", help="file or data set; default: the run's own held-out rows")
    parser.add_argument("--rows", type=positive, help="at most so many rows, drawn by seed")
    parser.add_argument("--out", type=pathlib.Path, help="file of answers; one that was begun is continued")
    parser.add_argument(
        "--tokens", type=positive, default=2048, help="rows of more tokens are left out (default 2048)"
    )
    parser.add_argument("--no-loss", action="store_true", help="exact match only")
    add_decoding_options(parser, new_tokens=512)
    return parser
