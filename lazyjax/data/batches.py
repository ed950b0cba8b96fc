"""From the data keys of a configuration to the batches of a run.

Also the words that say what became of every row: none disappears without being counted.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64, Int64

from lazyjax.batch import Batch
from lazyjax.config import DataConfig
from lazyjax.data import chat, mixture
from lazyjax.data.loader import Loader, Settings
from lazyjax.data.sources import open_source
from lazyjax.data.split import sample_rows, split_rows
from lazyjax.data.tokens import TokenizedRows, tokenize

_REASONS_SHOWN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Fate:
    """The fate of the rows of a source; the last four add up to `read`.

    Attributes:
        name: the source's.
        read: rows of the source.
        training, held_out: rows to train on and to evaluate on.
        dropped: rows over the length limit, or without a response inside it.
        bad: rows that could not be read or written (`data.bad_rows skip`).
        truncated: rows among the first two that were cut to the length limit.
        reasons: what was wrong with the first bad rows.
        unused: columns that nothing reads.
    """

    name: str
    read: int
    training: int
    held_out: int
    dropped: int
    bad: int
    truncated: int
    reasons: tuple[str, ...]
    unused: tuple[str, ...]

    def lines(self, held_out_hint: str = "") -> list[str]:
        """The counts as one sum, and what else is worth knowing."""
        terms = {
            "for training": self.training,
            f"held out{held_out_hint}": self.held_out,
            "dropped (over the length limit, or no response within it)": self.dropped,
            "skipped": self.bad,
        }
        total = " + ".join(f"{count:,} {words}" for words, count in terms.items() if count)
        cut = f"; {self.truncated:,} of them truncated" if self.truncated else ""
        lines = [f"{self.name}: {self.read:,} rows read = {total}{cut}"]
        if self.bad:
            shown = self.reasons[:_REASONS_SHOWN]
            more = f"; and {self.bad - len(shown):,} more" if self.bad > len(shown) else ""
            lines.append(f"skipped: {'; '.join(shown)}{more}")
        if self.unused:
            lines.append(f"columns that nothing reads: {', '.join(self.unused)}")
        return lines


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """Training batches without end, and the held-out rows (None: nothing is evaluated).

    Attributes:
        report: what to tell about the data, one sentence a line.
        warnings: what is probably not meant.
        sides: the rows that these are batches of.
    """

    training: Loader
    evaluation: Loader | None
    sides: Sides
    report: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def evaluation_batches(self) -> Iterator[Batch]:
        """The same held-out batches at every call."""
        return iter(()) if self.evaluation is None else self.evaluation.epoch_batches()


@dataclasses.dataclass(frozen=True, slots=True)
class Sides:
    """The rows of a configuration, and which of them are on which side.

    Attributes:
        rows: everything that was read from `data.source`.
        weights_R: how often an epoch meets each of its rows.
        train_R: indices of rows to train on.
        held_out_rows, held_out_R: the same for evaluation; other rows where `data.validation` is set.
        fates: of every source, in the order of the configuration, `data.validation` last.
    """

    rows: TokenizedRows
    weights_R: Float64[np.ndarray, " R"]
    train_R: Int64[np.ndarray, " train"]
    held_out_rows: TokenizedRows
    held_out_R: Int64[np.ndarray, " held_out"]
    fates: tuple[Fate, ...]


def load_data_tokenizer(config: DataConfig, folder: pathlib.Path | str | None) -> chat.Tokenizer:
    """The tokenizer of `folder`, with the chat template that the configuration chooses.

    Raises CheckpointError or DataError.
    """
    tokenizer = chat.load_tokenizer(folder)
    if config.chat_template is not None:
        chat.choose_template(tokenizer, config.chat_template)
    return tokenizer


def read_sides(config: DataConfig, tokenizer: chat.Tokenizer) -> Sides:
    """Reads, tokenizes and splits the data.

    Raises DataError, or ValueError where a side is left without rows.
    """
    parts = [
        _read(config, tokenizer, one.source, one.take if one.take is not None else config.take)
        for one in config.sources
    ]
    rows = mixture.join(parts)
    weights_R = mixture.row_weights(parts, [one.weight for one in config.sources])
    train_R, held_out_R = split_rows(rows, train_fraction=config.training_share, seed=config.seed)
    fates = []
    first = 0
    for one, part in zip(config.sources, parts, strict=True):
        train, held_out = (
            _distinct(rows, side_R, first, first + part.rows_read) for side_R in (train_R, held_out_R)
        )
        fates.append(_fate(one.source, part, train, held_out))
        first += part.rows_read
    held_out_rows = rows
    if config.validation is not None:
        held_out_rows = _read(config, tokenizer, config.validation, None)
        held_out_R = np.arange(len(held_out_rows), dtype=np.int64)
        count = _distinct(held_out_rows, held_out_R, 0, held_out_rows.rows_read)
        fates.append(_fate(config.validation, held_out_rows, 0, count))
    return Sides(rows, weights_R, train_R, held_out_rows, held_out_R, tuple(fates))


def read_batches(config: DataConfig, tokenizer: chat.Tokenizer, evaluate_rows: int) -> Batches:
    """Batches to train on, and of at most `evaluate_rows` held-out rows (0: none).

    Raises as `read_sides` does, and ValueError where the rows make no batch.
    """
    sides = read_sides(config, tokenizer)
    settings = Settings(config.rows, config.sequence_length, config.batching, seed=config.seed)
    padding_token = chat.padding_token_id(tokenizer)
    training = Loader(
        sides.rows,
        sides.train_R,
        settings,
        padding_token=padding_token,
        weights_R=sides.weights_R[sides.train_R],
    )
    evaluation = None
    if evaluate_rows and len(sides.held_out_R):
        held_out = dataclasses.replace(settings, shuffle=False, partial="pad")
        sample_R = sample_rows(sides.held_out_R, evaluate_rows, seed=config.seed)
        evaluation = Loader(sides.held_out_rows, sample_R, held_out, padding_token=padding_token)
    report = [*describe(config, sides), f"one epoch: {training.describe()}"]
    if evaluation is not None:
        report.append(f"each evaluation: {len(sample_R):,} of {len(sides.held_out_R):,} held-out rows")
    return Batches(training, evaluation, sides, tuple(report), tuple(find_warnings(sides, tokenizer)))


def describe(config: DataConfig, sides: Sides) -> list[str]:
    """The fate of every row, source by source, in sentences."""
    hint = ""
    if config.validation is None and config.training_share < 1:
        hint = f" (data.train_fraction {config.training_share:g}; 1 trains on all)"
    lines = []
    for fate in sides.fates:
        lines += fate.lines(hint)
        hint = ""
    return lines


def find_warnings(sides: Sides, tokenizer: chat.Tokenizer) -> list[str]:
    """Things that can be done but are probably not meant."""
    found = []
    if not tokenizer.chat_template:
        found.append(
            "the tokenizer has no chat template: turns are written under ### Instruction and ### Response, "
            "and the trained model's folder gets that template; data.chat_template names another"
        )
    rows = sides.rows
    ends_R = rows.tokens_N[rows.starts_S[1:] - 1]
    if rows.truncated < len(rows) and not any(chat.is_special(tokenizer, int(end)) for end in set(ends_R)):
        found.append(
            "no row ends with a special token: the chat template writes nothing that ends a turn, so the "
            "trained model will not know where to stop"
        )
    return found


def _read(
    config: DataConfig, tokenizer: chat.Tokenizer, name: str, take: int | float | None
) -> TokenizedRows:
    source = open_source(name, split=config.hub_split)
    if take is not None:
        source = source.part(take, seed=config.seed)
    return tokenize(
        source,
        tokenizer,
        sequence_length=config.sequence_length,
        too_long=config.too_long,
        bad_rows=config.bad_rows,
        cache_folder=config.cache_folder,
    )


def _fate(name: str, rows: TokenizedRows, training: int, held_out: int) -> Fate:
    return Fate(
        name,
        rows.rows_read,
        training,
        held_out,
        rows.dropped,
        rows.bad,
        rows.truncated,
        rows.reasons,
        rows.unused,
    )


def _distinct(rows: TokenizedRows, indices_R: Int64[np.ndarray, " R"], start: int, stop: int) -> int:
    """Rows of the source among `indices_R` with numbers in [start, stop); a long text is several rows."""
    numbers_R = np.unique(rows.source_R[indices_R])
    return int(((numbers_R >= start) & (numbers_R < stop)).sum())
