"""The table of mechanisms that `make mutants` takes out fits the sources and names tests that exist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from mutants import Mechanism, mechanisms

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mechanism", mechanisms(), ids=lambda mechanism: mechanism.name)
def test_every_mechanism_can_be_taken_out(mechanism):
    text = (ROOT / mechanism.file).read_text()
    assert mechanism.taken_out(text) != text
    assert mechanism.library in ("new", "old", "verbs")
    for test in mechanism.tests:
        assert (ROOT / test).exists()


def test_a_stale_table_is_noticed():
    mechanism = Mechanism("one", "none", "none.py", "it", "", [])
    assert mechanism.taken_out("it is here") == " is here"
    for text in ("gone", "it and it"):
        with pytest.raises(ValueError, match="one: none.py has its text"):
            mechanism.taken_out(text)
