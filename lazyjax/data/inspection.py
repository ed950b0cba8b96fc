"""Looking at data before anything is trained: `lazyjax inspect-data`.

Shows a few rows of a configuration as the model will read them, with the learned tokens marked; how long
rows are; the padding of each batching; and every row that is refused, with the reason. Reads the tokenizer
and the data and nothing else: no weights, no device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
from jaxtyping import Int64
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazyjax.config import Config, ConfigError, load_command_line
from lazyjax.data import chat
from lazyjax.data.batches import Sides, describe, find_warnings, load_data_tokenizer, read_sides
from lazyjax.data.formats import BadRow, DataError, Row
from lazyjax.data.loader import Batching, Loader, Settings
from lazyjax.data.sources import open_source

USAGE = """usage: lazyjax inspect-data [CONFIG.yaml] [--model FOLDER] [--data FILE]
                            [--show ROWS] [--GROUP.KEY VALUE ...]

Shows what training would make of the data; nothing is trained. Takes every key
of `lazyjax train`.

  --show ROWS   rows that are written out (default 3)"""
_SHOWN = 3
_REASONS_SHOWN = 20
_BINS = 12
_BAR = 30
#: Characters that are shown of one piece of the template's text.
_PIECE = 120
#: The one thing that is said in colour is also said in signs, for pipes and for those who see no colour.
_LEARNED = ("⟦", "⟧")


def inspect_command(arguments: Sequence[str]) -> None:
    """Parses a command line and prints the inspection."""
    if any(word in ("-h", "--help") for word in arguments):
        print(USAGE)
        return
    words, show = _take_show(arguments)
    inspect(_load(words), Console(), show)


def _load(words: Sequence[str]) -> Config:
    """The configuration; of the model nothing is read but its tokenizer, so it need not be named."""
    try:
        return load_command_line(words)
    except ConfigError as error:
        try:
            return load_command_line([*words, "--model.architecture", "unnamed"])
        except ConfigError:
            raise error from None


def _take_show(arguments: Sequence[str]) -> tuple[list[str], int]:
    words = list(arguments)
    if "--show" not in words:
        return words, _SHOWN
    at = words.index("--show")
    value = words[at + 1] if at + 1 < len(words) else ""
    if not value.isdecimal():
        raise ConfigError(f"command line: --show needs a number of rows, it is {value!r}")
    return words[:at] + words[at + 2 :], int(value)


def inspect(config: Config, console: Console, show: int = _SHOWN) -> None:
    """Prints what training would make of the data.

    Raises DataError, CheckpointError or ConfigError where nothing of the data can be used.
    """
    folder = config.data.tokenizer or config.model.folder
    tokenizer = load_data_tokenizer(config.data, folder)
    # Every bad row is wanted, not only the first.
    sides = read_sides(config.data.model_copy(update={"bad_rows": "skip"}), tokenizer)
    template = config.data.chat_template or ("its own" if tokenizer.chat_template else "none, plain headers")
    where = folder or "the package's"
    _print(console, f"tokenizer: {where}, {len(tokenizer):,} tokens; chat template: {template}")
    for line in describe(config.data, sides):
        _print(console, line)
    for warning in find_warnings(sides, tokenizer):
        _print(console, f"warning: {warning}", style="yellow")
    _print_rows(console, config, tokenizer, show)
    _print_lengths(console, sides, config.data.sequence_length)
    _print_batchings(console, config, sides, chat.padding_token_id(tokenizer))
    _print_refused(console, config, sides)


def _print(console: Console, text: str, style: str | None = None) -> None:
    # A terminal breaks lines between words; what is piped stays one line.
    console.print(text, highlight=False, markup=False, style=style, soft_wrap=not console.is_terminal)


def _print_rows(console: Console, config: Config, tokenizer: chat.Tokenizer, show: int) -> None:
    begin, end = _LEARNED
    note = f"green, {begin}so{end}: learned; plain: the row's own words; dim: written by the template"
    if show:
        _print(console, f"\n{note}")
    for number, row in itertools.islice(_usable_rows(config, tokenizer), show):
        rendered = chat.render_row(tokenizer, row)
        [encoded] = chat.encode(tokenizer, [rendered])
        kept = config.data.sequence_length if row.text is None else len(encoded.tokens_T)
        text, counts = colored(tokenizer, row, encoded, kept)
        words = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        _print(console, f"\nrow {number}: {len(encoded.tokens_T):,} tokens ({words})", style="bold")
        console.print(text, highlight=False, soft_wrap=False)
        _print(console, f"written by the template: {', '.join(_written(text)) or 'nothing'}", style="dim")


def _usable_rows(config: Config, tokenizer: chat.Tokenizer) -> Iterator[tuple[int, Row]]:
    """The first rows of the first source that can be written, by number from 1."""
    name = config.data.sources[0].source
    for number, row in enumerate(open_source(name, split=config.data.hub_split).rows(), start=1):
        if isinstance(row, BadRow):
            continue
        try:
            chat.render_row(tokenizer, row)
        except DataError:
            continue
        yield number, row


def colored(
    tokenizer: chat.Tokenizer, row: Row, encoded: chat.Encoded, limit: int
) -> tuple[Text, dict[str, int]]:
    """A row's text as the tokens say it, with what is learned marked, and tokens counted by kind.

    Args:
        limit: tokens that are kept; what comes after is left out and said.
    """
    begin, end = _LEARNED
    text = Text()
    own = _own_words(row)
    learned = 0
    tokens = list(zip(encoded.tokens_T[:limit].tolist(), encoded.response_T[:limit].tolist(), strict=True))
    for is_learned, group in itertools.groupby(tokens, key=lambda pair: pair[1] != 0):
        ids = [token for token, _ in group]
        piece = tokenizer.decode(ids)
        if is_learned:
            learned += len(ids)
            text.append(f"{begin}{piece}{end}", style="green")
            continue
        position = 0
        for start, stop in _spans(piece, own):
            text.append(piece[position:start], style="dim")
            text.append(piece[start:stop])
            position = stop
        text.append(piece[position:], style="dim")
    counts = {"learned": learned, "context": len(tokens) - learned}
    if len(encoded.tokens_T) > limit:
        counts["cut off"] = len(encoded.tokens_T) - limit
        text.append(" ... cut off", style="red")
    return text, counts


def _written(text: Text) -> list[str]:
    """The template's own pieces of text that are not learned, each once and in order."""
    pieces = [text.plain[span.start : span.end] for span in text.spans if span.style == "dim"]
    return [_shortened(piece) for piece in dict.fromkeys(pieces)]


def _shortened(piece: str) -> str:
    words = repr(piece)
    return words if len(words) <= _PIECE else f"{words[: _PIECE // 2]} ... {words[-_PIECE // 2 :]}"


def _own_words(row: Row) -> list[str]:
    """The texts of a row's messages, in order."""
    return [message.content.strip() for message in row.messages if message.content.strip()]


def _spans(text: str, parts: Sequence[str]) -> list[tuple[int, int]]:
    """Where parts are found in the text, one after the other; parts that are not there are passed over."""
    spans = []
    position = 0
    for part in parts:
        start = text.find(part, position)
        if start >= 0:
            position = start + len(part)
            spans.append((start, position))
    return spans


def _print_lengths(console: Console, sides: Sides, limit: int) -> None:
    """A histogram of all rows before any was cut, and what there is to learn from."""
    lengths_K = sides.rows.full_lengths_K
    tokens, learned = len(sides.rows.tokens_N), int(sides.rows.learned_R.sum())
    _print(console, f"\n{tokens:,} tokens, {learned:,} to learn from ({learned / tokens:.1%})")
    _print(
        console,
        f"tokens of a row before anything is cut: median {int(np.median(lengths_K)):,}, 95 % up to "
        f"{int(np.quantile(lengths_K, 0.95)):,}, longest {int(lengths_K.max()):,}",
    )
    most = max(count for *_, count in histogram(lengths_K))
    for first, last, count in histogram(lengths_K):
        bar = "█" * round(_BAR * count / most) or ("▏" if count else "")
        over = "  over data.sequence_length" if first > limit else ""
        _print(console, f"  {first:>7,} - {last:>7,} {count:>9,} {bar}{over}")


def histogram(lengths_K: Int64[np.ndarray, " K"]) -> list[tuple[int, int, int]]:
    """(first, last, count) of at most twelve ranges of equal, round width, from the first that holds any."""
    longest = int(lengths_K.max())
    width = next(
        step * 10**power
        for power in itertools.count()
        for step in (1, 2, 5)
        if step * 10**power * _BINS >= longest
    )
    counts = np.bincount((lengths_K - 1) // width)
    first = int(np.flatnonzero(counts)[0])
    return [
        (index * width + 1, (index + 1) * width, int(counts[index])) for index in range(first, len(counts))
    ]


def _print_batchings(console: Console, config: Config, sides: Sides, padding_token: int) -> None:
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("data.batching", "batches", "padding", "tokens/batch", "lengths"):
        table.add_column(heading, justify="left" if heading in ("data.batching", "lengths") else "right")
    for batching in get_args(Batching):
        settings = Settings(
            config.data.rows, config.data.sequence_length, batching, seed=config.data.seed, partial="pad"
        )
        loader = Loader(
            sides.rows,
            sides.train_R,
            settings,
            padding_token=padding_token,
            weights_R=sides.weights_R[sides.train_R],
        )
        summary = loader.describe()
        count = sum(summary.batches.values())
        chosen = " (chosen)" if batching == config.data.batching else ""
        table.add_row(
            batching + chosen,
            f"{count:,}",
            f"{summary.padding_share:.1%}",
            f"{summary.tokens / count:,.0f}",
            ", ".join(map(str, sorted(summary.batches))),
        )
    _print(console, f"\none epoch in batches of {config.data.rows} sequences:")
    console.print(table)


def _print_refused(console: Console, config: Config, sides: Sides) -> None:
    bad = sum(fate.bad for fate in sides.fates)
    dropped = sum(fate.dropped for fate in sides.fates)
    if not bad and not dropped:
        _print(console, "\nno row is refused")
        return
    if bad:
        stops = "; training stops at the first (data.bad_rows skip leaves them out)"
        ends = stops if config.data.bad_rows == "error" else ", skipped"
        _print(console, f"\n{_count(bad, 'bad row')}{ends}:")
        reasons = [reason for fate in sides.fates for reason in fate.reasons]
        _print_some(console, reasons, bad)
    if dropped:
        _print(console, f"\n{_count(dropped, 'row')} dropped:")
        others = () if sides.held_out_rows is sides.rows else sides.held_out_rows.drops
        _print_some(console, [*sides.rows.drops, *others], dropped)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _print_some(console: Console, reasons: Sequence[str], total: int) -> None:
    for reason in reasons[:_REASONS_SHOWN]:
        _print(console, f"  {reason}")
    if total > _REASONS_SHOWN:
        _print(console, f"  and {total - min(len(reasons), _REASONS_SHOWN):,} more")
