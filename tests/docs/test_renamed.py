"""The tables of docs/renamed.md lead from names that are gone to files that are there."""

from __future__ import annotations

import re

import pytest

from support import ROOT, TESTS

PAGE = (ROOT / "docs" / "renamed.md").read_text()
ROWS = re.findall(r"^\| `([\w./]+)` \| `([\w./]+)` \|$", PAGE, re.MULTILINE)
FILES = [row for row in ROWS if "/" in row[0]]
MODULES = [row for row in ROWS if "/" not in row[0] and "." not in row[0]]


def test_every_table_is_read():
    assert len(FILES) > 100
    assert len(MODULES) > 60
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize(("before", "now"), FILES, ids=[row[0] for row in FILES])
def test_a_file_is_where_the_table_says(before, now):
    assert (ROOT / now).exists()
    assert not (ROOT / before).exists()


@pytest.mark.parametrize(("before", "now"), MODULES, ids=[row[0] for row in MODULES])
def test_a_helper_is_where_the_table_says(before, now):
    assert (TESTS / f"{now.replace('.', '/')}.py").exists()
    assert not (TESTS / "support" / f"{before}.py").exists() or now == f"support.{before}"
