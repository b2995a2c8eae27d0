"""The tables of docs/renamed.md lead from names that are gone to files that are there."""

from __future__ import annotations

import re

from support import ROOT, TESTS

PAGE = (ROOT / "docs" / "renamed.md").read_text()
ROWS = re.findall(r"^\| `([\w./]+)` \| `([\w./]+)` \|$", PAGE, re.MULTILINE)
FILES = [row for row in ROWS if "/" in row[0]]
MODULES = [row for row in ROWS if "/" not in row[0] and "." not in row[0]]


def test_every_table_is_read():
    assert len(FILES) > 100
    assert len(MODULES) > 60
    assert len(set(ROWS)) == len(ROWS)


def test_files_are_where_the_table_says():
    assert [now for _, now in FILES if not (ROOT / now).exists()] == []
    assert [before for before, _ in FILES if (ROOT / before).exists()] == []


def test_helpers_are_where_the_table_says():
    assert [now for _, now in MODULES if not (TESTS / f"{now.replace('.', '/')}.py").exists()] == []
    kept = {before for before, now in MODULES if now == f"support.{before}"}
    left = [before for before, _ in MODULES if (TESTS / "support" / f"{before}.py").exists()]
    assert set(left) <= kept
