"""The map of docs/architecture.md: every package at its floor, and the files that a write passes."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "lint"))

from test_floors import floor

ROOT = Path(__file__).parents[2]
FLOORS, FILES = re.findall(
    r"```text\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text().split("## Layers")[0], re.DOTALL
)


def names_of(line: str) -> list[str]:
    """Return the packages that a line names, before its explanation."""
    return re.split(r"  +", line, maxsplit=1)[0].split()


def full(name: str) -> str:
    return name if name == "aiote_native" else f"aiote.{name}"


def test_no_line_lies_below_what_it_imports():
    lines = [[floor(full(name)) for name in names_of(line)] for line in FLOORS.splitlines()]
    used = [line for line in lines if line]
    assert all(min(above) >= max(below) for above, below in itertools.pairwise(used))
    # What stands on the public names lies above the line that says so.
    public, here = floor("aiote"), lines.index([])
    assert min(number for line in lines[:here] for number in line) > public
    assert max(number for line in lines[here:] for number in line) < public


def test_every_package_is_on_it_once():
    named = [name for line in FLOORS.splitlines() for name in names_of(line)]
    found = {path.stem for path in (ROOT / "aiote").iterdir() if path.suffix in ("", ".py") and path.stem[0] != "_"}
    found = {name for name in found if name != "py"} | {"aiote_native"}
    assert sorted(named) == sorted(found)


def test_a_write_passes_files_that_are_there():
    files = [names_of(line)[0] for line in FILES.splitlines()]
    assert len(files) == 10
    assert all((ROOT / file).is_file() for file in files)


def test_every_package_says_what_it_owns_and_must_not_know():
    inits = [*(ROOT / "aiote").glob("*/__init__.py"), ROOT / "aiote_native" / "__init__.py"]
    said = {path.parent.name: ast.get_docstring(ast.parse(path.read_text())) or "" for path in inits}
    assert len(said) > 20
    for name, text in said.items():
        assert len([line for line in text.splitlines() if line]) <= 5, name
        assert "must not" in text, name
