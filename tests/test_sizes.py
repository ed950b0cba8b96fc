"""How long classes and functions may be: what is longer does more than one thing."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

import lazyjax

LIBRARY = pathlib.Path(lazyjax.__file__).parent
MOST_CLASS_LINES, MOST_FUNCTION_LINES = 150, 60


def too_long(path: pathlib.Path) -> Iterator[str]:
    """Classes and functions of a module that are longer than they may be, with their docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1
        if lines > (MOST_CLASS_LINES if isinstance(node, ast.ClassDef) else MOST_FUNCTION_LINES):
            yield f"{path.relative_to(LIBRARY)} {node.name}"


def test_classes_and_functions_can_be_read_at_once() -> None:
    assert [name for path in LIBRARY.rglob("*.py") for name in too_long(path)] == []


@pytest.mark.parametrize(("lines", "expected"), [(60, 0), (61, 1)])
def test_a_long_function_is_found(lines: int, expected: int, tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.setattr("tests.test_sizes.LIBRARY", tmp_path)
    body = "\n".join("    pass" for _ in range(lines - 1))
    (tmp_path / "module.py").write_text(f"def long():\n{body}\n")
    assert len(list(too_long(tmp_path / "module.py"))) == expected
