"""A few seconds of each kind of hostile peer; `make hostile` takes a minute of each, and longer if it is told to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import ROOT
from support.machine import LONG

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

SCRIPT = ROOT / "programs" / "malicious_peer" / "attack.py"
SECONDS = "60" if LONG else "4"
PATIENCE_S = 170


def hostile(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seed", "1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("no promise was broken\n")
    return done.stdout


@pytest.mark.parametrize(
    ("what", "loop"),
    [
        ("socket", "asyncio"),
        ("local", "uvloop"),
        ("local", "trio"),
        ("kvcache", "asyncio"),
        ("weights", "asyncio"),
        ("moe", "uvloop"),
    ],
)
def test_an_honest_peer_is_served_all_the_while(what, loop):
    said = hostile("--what", what, "--loop", loop, "--seconds", SECONDS, "--pauses")
    assert "cases" in said
    if what not in ("socket", "local"):
        assert " count" in said
        assert "a timer was late by" in said
        assert "the loop's thread worked meanwhile for" in said
    if what in ("socket", "local"):
        # It has come as far as to say frames.
        assert "joined" in said
        assert "frame" in said


def test_a_case_is_repeated():
    said = hostile("--what", "socket", "--case", "3")
    assert "1 cases" in said
    assert said == hostile("--what", "socket", "--case", "3")


def test_wrong_arguments_are_refused():
    done = subprocess.run([sys.executable, str(SCRIPT), "--what", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_promise_is_told_with_what_repeats_it():
    """Here one that nobody can keep: that memory shrinks."""
    text = """
        import sys
        sys.argv[1:] = ["--what", "socket", "--seconds", "20", "--seed", "1"]
        sys.path.insert(0, FOLDER)
        import attack, victim
        victim.GROWTH_BYTES = -1
        sys.exit(attack.main())
    """.replace("FOLDER", repr(str(SCRIPT.parent)))
    lines = "\n".join(line.strip() for line in text.splitlines())
    done = subprocess.run([sys.executable, "-P", "-c", lines], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN: resident memory has grown" in done.stdout
    assert "again: python programs/malicious_peer/attack.py --what socket --seed 1 --case" in done.stdout
    assert "Traceback" not in done.stderr
