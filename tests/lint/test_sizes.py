"""Files and functions stay small enough to be read in one go, and nothing is left for later."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("aiote", "aiote_native", "bench", "programs", "tests", "tools", "examples")
FILE_LINES = 499
NATIVE_LINES = 900  # fewer and larger modules, because a call from one to another is a call through a pointer
FUNCTION_LINES = 40
LATER = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")


def sources(*suffixes: str) -> list[Path]:
    return sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in suffixes)


def long_functions(text: str) -> list[tuple[str, int]]:
    """Return every function of more than `FUNCTION_LINES` lines, its docstring not counted, with its length."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            words = isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str)
            lines = node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if words else 0)
            if lines > FUNCTION_LINES:
                found.append((node.name, lines))
    return found


def test_files_are_short():
    lengths = {p.relative_to(ROOT): len(p.read_text().splitlines()) for p in sources(".py", ".pyi", ".pyx", ".pxd")}
    assert len(lengths) > 10
    most = {path: NATIVE_LINES if path.parts[0] == "aiote_native" else FILE_LINES for path in lengths}
    assert {path: lines for path, lines in lengths.items() if lines > most[path]} == {}


def test_functions_are_short():
    # A test that tells one story may be a little longer than code.
    most = {p: 50 if {"programs", "tests"} & {*p.relative_to(ROOT).parts} else FUNCTION_LINES for p in sources(".py")}
    found = {
        p.relative_to(ROOT): [item for item in long_functions(p.read_text()) if item[1] > lines]
        for p, lines in most.items()
    }
    assert {path: functions for path, functions in found.items() if functions} == {}


def test_nothing_is_left_for_later():
    found = [p.relative_to(ROOT) for p in sources(".py", ".pyi", ".pyx", ".pxd", ".sh") if LATER.search(p.read_text())]
    assert found == []


@pytest.mark.parametrize(("body", "long"), [(FUNCTION_LINES - 1, False), (FUNCTION_LINES, True)])
def test_functions_over_the_limit_and_marks_of_later_work_are_found(body, long):
    text = 'async def f():\n    """Words\n    do not count."""\n' + "    x = 1\n" * body
    assert bool(long_functions(text)) is long
    assert LATER.search("# " + "TO" + "DO later")
    assert not LATER.search("name.X" + "XXXXX")
