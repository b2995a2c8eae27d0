"""The table of mechanisms that `make mutants` takes out fits the sources and names tests that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import mutants
from mutants import Mechanism, mechanisms

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mechanism", mechanisms(), ids=lambda mechanism: mechanism.name)
def test_every_mechanism_can_be_taken_out(mechanism):
    text = (ROOT / mechanism.file).read_text()
    assert mechanism.taken_out(text) != text
    assert mechanism.library in ("new", "old", "verbs")
    for test in mechanism.tests:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists()
        assert f"def {function}(" in (ROOT / path).read_text() or not function


STANDIN = ROOT / "tests" / "standin_efa"


def test_each_strictness_of_the_stand_in_for_efa_is_in_its_table_and_has_a_mutant():
    """And each variable that it reads is named there, and no row is without a source."""
    page = (STANDIN / "README.md").read_text()
    lines = [line.strip("|") for line in page.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[1:]]
    sources = "".join(path.read_text() for path in STANDIN.glob("*.[ch]"))
    names = re.search(r"strictnesses\[STRICTNESSES\] = \{(.*?)\};", sources, re.S)[1]
    switches = set(re.findall(r'"(\w+)"', names))
    assert switches
    assert {row[1].strip('"') for row in rows if row[1].startswith('"')} == switches
    assert {mechanism.switch for mechanism in mechanisms()} - {""} == switches
    assert len(re.findall(r"\bSTRICT_\w+", re.search(r"enum strictness \{(.*?)\};", sources, re.S)[1])) == len(switches)
    for row in rows:
        assert len(row) == 3
        assert row[2]
    for variable in re.findall(r'"(EFA_STANDIN\w*)"', sources):
        assert f"`{variable}" in page or f".`{variable}`" in page


def test_a_stale_table_is_noticed():
    mechanism = Mechanism("one", "none", "none.py", "it", "", [])
    assert mechanism.taken_out("it is here") == " is here"
    for text in ("gone", "it and it"):
        with pytest.raises(ValueError, match="one: none.py has its text"):
            mechanism.taken_out(text)


def test_the_private_copy_is_all_that_a_build_asks_for(tmp_path, monkeypatch):
    """Meson configures the copy, which has no tags and no checkout around it, in a folder that is none either."""
    monkeypatch.setattr(mutants, "WORK", tmp_path)
    mutants.copy_sources()
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["meson", "setup", str(tmp_path / "build"), str(tmp_path / "source")]
    done = subprocess.run(command, env=tools, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
