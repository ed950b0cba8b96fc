"""The report of a sweep: one HTML page with its table and figures, beside a Markdown and a CSV table.

    python -m analysis.report SWEEP_FOLDER [--out FOLDER] [--mixed]

The page needs nothing but itself: figures are embedded, and nothing is loaded or run.
"""

from __future__ import annotations

import argparse
import base64
import csv
import functools
import html
import io
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

from analysis.pictures import (
    evaluation_figure,
    loss_figure,
    memory_figure,
    metric_figure,
    prediction_figure,
)
from analysis.sweeps import (
    SweepError,
    SweepRecords,
    csv_lines,
    loss_sentences,
    markdown_table,
    read_sweep,
    readable,
)

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --head: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; }
body { box-sizing: border-box; max-width: 80rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; } li { overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left; vertical-align: top; }
th { background: var(--head); } td:first-child { min-width: 9rem; }
figure { margin: 1rem 0; } img { background: #fff; max-width: 100%; height: auto; }
figcaption { font-size: .875rem; opacity: .8; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
"""


def write_report(records: SweepRecords, folder: pathlib.Path) -> pathlib.Path:
    """Writes report.html, report.md and trials.csv into `folder`; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    page.write_text(report_page(records), encoding="utf-8")
    words = "\n".join(f"- {line}" for line in remarks(records))
    text = f"# {records.name}\n\n{markdown_table(records)}\n\n{words}\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    with (folder / "trials.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(csv_lines(records))
    return page


def remarks(records: SweepRecords) -> list[str]:
    """Where and from which source the figures are, what is missing, and how well orders agree."""
    lines = []
    summaries = [trial.run.summary for trial in records.trials if trial.run is not None and trial.run.summary]
    for key, words in (("device", "Device"), ("commit", "Commit"), ("date", "Date")):
        values = sorted({str(summary[key]) for summary in summaries if key in summary})
        if values:
            lines.append(f"{words}: {', '.join(values)}.")
    counts: dict[str, int] = {}
    for trial in records.trials:
        counts[trial.state] = counts[trial.state] + 1 if trial.state in counts else 1
    lines.append("Trials: " + ", ".join(f"{count} {state}" for state, count in counts.items()) + ".")
    rows = records.step_seconds()
    if len(rows) > 1:
        worst = max(abs(simulated / measured - 1) for _, simulated, measured in rows)
        lines.append(
            f"Order of {len(rows)} variants by step time, simulated against measured: Kendall's tau "
            f"{records.order_agreement():.2f}; largest deviation {worst:.1%}."
        )
    lines += loss_sentences(records)
    lines.append("Measured figures are means over seeds with their standard error.")
    lines.append(
        f"Command: python -m experiments.sweep {records.file}; digests of every plan and configuration are "
        "in trials.csv."
    )
    return lines


def report_page(records: SweepRecords) -> str:
    """The page as text."""
    figures = "\n".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{png}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, png in _figures(records)
    )
    words = "".join(f"<li>{html.escape(line)}</li>" for line in remarks(records))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(records.name)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(records.name)}</h1><ul>{words}</ul>"
        f'<h2>Variants</h2><div class="wide">{_html_table(markdown_table(records))}</div>'
        f'<h2>Figures</h2><div class="figures">{figures}</div></body></html>\n'
    )


def _html_table(markdown: str) -> str:
    rows = [
        [html.escape(cell.strip().replace("\\|", "|")) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in markdown.splitlines()
    ]
    head = "".join(f"<th>{cell}</th>" for cell in rows[0])
    body = "".join(f"<tr>{_html_cells(row)}</tr>" for row in rows[2:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_cells(row: Sequence[str]) -> str:
    """Cells of a row; the last one that says something takes the place of the empty ones after it."""
    filled = max(number for number, cell in enumerate(row) if cell or not number) + 1
    cells = [f"<td>{cell}</td>" for cell in row[: filled - 1]]
    span = len(row) - filled + 1
    last = f'<td colspan="{span}">' if span > 1 else "<td>"
    return "".join([*cells, f"{last}{row[filled - 1]}</td>"])


def _figures(records: SweepRecords) -> Iterator[tuple[str, str]]:
    makers: list[tuple[str, Callable[[io.BytesIO], bool]]] = [
        (readable(metric)[0], functools.partial(metric_figure, records, metric)) for metric in records.metrics
    ]
    makers += [
        ("Training loss over steps", lambda file: loss_figure(records, "step", file)),
        ("Loss of held-out rows over steps", lambda file: evaluation_figure(records, file)),
        ("Training loss over tokens", lambda file: loss_figure(records, "tokens", file)),
        ("Training loss over time", lambda file: loss_figure(records, "seconds", file)),
        ("Throughput against device memory", lambda file: memory_figure(records, file)),
        ("Seconds of a step, simulated against measured", lambda file: prediction_figure(records, file)),
    ]
    for caption, make in makers:
        file = io.BytesIO()
        if make(file):
            yield caption, base64.b64encode(file.getvalue()).decode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Makes the report of a sweep.")
    parser.add_argument("folder", type=pathlib.Path, help="of the sweep")
    parser.add_argument("--out", type=pathlib.Path, help="where the report goes; by default into the sweep")
    parser.add_argument("--mixed", action="store_true", help="allow runs of different commits")
    options = parser.parse_args(arguments)
    try:
        records = read_sweep(options.folder, mixed=options.mixed)
    except SweepError as error:
        parser.error(str(error))
    print(write_report(records, options.out or options.folder))


if __name__ == "__main__":
    main()
