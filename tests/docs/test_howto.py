"""The programs of the how-to pages run, and print what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.engines.opening import PATIENCE_S

PAGES = sorted((Path(__file__).parents[2] / "docs" / "howto").glob("*.md"))
WITH_PROGRAMS = [page for page in PAGES if "\n```python\n" in page.read_text()]


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda page: page.stem)
def test_a_program_prints_what_its_page_shows(page):
    programs = re.findall(
        r"^```python\n(.*?)^```$\n(.*?)^```text\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(programs) == page.read_text().count("\n```python\n")
    for program, between, shown in programs:
        assert "It prints" in between
        command = [sys.executable, "-P", "-W", "error", "-"]
        done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.stdout, done.stderr) == (shown, "")
