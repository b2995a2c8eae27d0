"""`make bench`: which runs it makes of its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def runs(program, monkeypatch):
    """Return a function that returns the commands of `run.py compare` with some arguments; none of them is run."""
    compare = program("compare")
    found: list[list[str]] = []

    class Replaced(Exception):
        pass

    def execv(_: str, command: list[str]) -> None:
        found.append(command)
        raise Replaced

    monkeypatch.setattr(compare, "ended", lambda command: found.append(command) or 0)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(compare, "libraries", lambda peers: [Path("/one/libfabric.so.1")])

    def made(*arguments: str) -> list[list[str]]:
        monkeypatch.setattr(sys, "argv", ["compare", *arguments])
        found.clear()
        try:
            assert compare.main() == 0
        except Replaced:
            assert len(found) == 1
        return found

    made.value_of = compare.value_of
    made.module = compare
    return made


def test_the_first_half_has_default_settings(runs):
    first, second = runs()
    value_of = runs.value_of
    assert [value_of(one, "--mode") for one in (first, second)] == ["default", "spin"]
    assert value_of(first, "--provider") == "local,socket"
    assert value_of(second, "--provider") == "local,socket,tcp,shm"
    assert (value_of(first, "--library"), value_of(second, "--library")) == ("", "/one/libfabric.so.1")
    assert [Path(value_of(one, "--json")).name for one in (first, second)] == ["bench-default.json", "bench.json"]


def test_files_that_are_named_are_two(runs):
    for arguments in (("--json", "a.json", "--plot=p.png"), ("--json=a.json", "--plot", "p.png")):
        files = [(runs.value_of(one, "--json"), runs.value_of(one, "--plot")) for one in runs(*arguments)]
        assert files == [("a-default.json", "p-default.png"), ("a.json", "p.png")]


@pytest.mark.parametrize(
    ("arguments", "provider", "library"),
    [
        (("--mode", "event"), "tcp,shm", "/one/libfabric.so.1"),
        (("--provider=verbs",), "verbs", ""),
        (("--provider", "local, socket"), "local, socket", ""),
        (("--library", "/mine"), "tcp,shm", "/mine"),
        (("--connect", "10.0.0.2"), "socket", ""),
    ],
)
def test_what_is_chosen_is_one_run(runs, arguments, provider, library):
    (one,) = runs("write", *arguments)
    assert (runs.value_of(one, "--provider"), runs.value_of(one, "--library")) == (provider, library)


def test_with_peers_each_half_has_their_workers(runs):
    for one in runs("--peers"):
        assert Path(runs.value_of(one, "--with")).exists()
        assert Path(runs.value_of(one, "--json")).name.startswith("bench-peers")


def test_a_half_that_fails_is_the_end(runs, monkeypatch):
    monkeypatch.setattr(runs.module, "ended", lambda command: -9)
    monkeypatch.setattr(sys, "argv", ["compare"])
    assert runs.module.main() == 9


def test_an_interrupt_waits_for_the_run_to_end(runs, monkeypatch):
    waits = iter([KeyboardInterrupt(), 130])

    class Running:
        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait(self) -> int:
            following = next(waits)
            if isinstance(following, BaseException):
                raise following
            return following

    monkeypatch.undo()
    monkeypatch.setattr(subprocess, "Popen", lambda command: Running())
    assert runs.module.ended(["anything"]) == 130
