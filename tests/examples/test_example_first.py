"""The smallest program runs as it stands."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.libfabric


def test_the_bytes_arrive_over_every_provider(start, provider):
    program = start("first.py", "--provider", provider)
    assert program.end() == 0
    assert program.out.startswith(provider)
    assert program.out.endswith(": written by one engine, read by the other\n")
    assert program.err == ""


def test_the_program_runs_without_arguments(start):
    assert start("first.py").end() == 0


def test_an_unknown_provider_is_one_line(start):
    program = start("first.py", "--provider", "carrier-pigeon")
    assert program.end() == 1
    assert program.out == ""
    assert program.err.startswith("first.py: ")
    assert "carrier-pigeon" in program.err
    assert len(program.err.splitlines()) == 1
