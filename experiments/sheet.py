"""Tables whose every figure says whether it is `paper`, `simulated` or `measured`."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.benchmarks.provenance import command_line, provenance


class Sheet:
    """Rows of labelled cells, printed and written as Markdown and CSV."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title, self.columns = title, tuple(columns)
        self.rows: list[tuple[str, ...]] = []
        self.notes: list[str] = []

    def add(self, *cells: str) -> None:
        """One row; every figure in it carries its own label."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def markdown(self) -> str:
        """The sheet with its notes."""
        lines = [
            f"# {self.title}",
            "",
            "| " + " | ".join(self.columns) + " |",
            "|---" * len(self.columns) + "|",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes)])

    def write(self, folder: pathlib.Path, name: str) -> None:
        """NAME.md, which says how it was made, and NAME.csv in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        made = f"`{command_line()}`. {provenance('lazyjax', 'experiments').replace('Measured', 'Made')}"
        (folder / f"{name}.md").write_text(f"{self.markdown()}\n{made}\n")
        quoted = [",".join(f'"{cell}"' for cell in row) for row in (self.columns, *self.rows)]
        (folder / f"{name}.csv").write_text("\n".join(quoted) + "\n")


def paper(value: float | None, digits: int = 2) -> str:
    """A cell with a published figure."""
    return "-" if value is None else f"{value:.{digits}f} (paper)"


def simulated_cell(value: float, digits: int = 2) -> str:
    """A cell with a simulated figure."""
    return f"{value:.{digits}f} (simulated)"


def measured_cell(value: float, digits: int = 2) -> str:
    """A cell with a measured figure."""
    return f"{value:.{digits}f} (measured)"
