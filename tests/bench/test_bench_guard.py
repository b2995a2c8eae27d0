"""The guard against slower commits: what chance does passes, what is slower each time does not."""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import textwrap
from pathlib import Path

import pytest

from aiote.bench.contestants import Contestant

ENTRY = Path(__file__).parents[2] / "bench" / "entries" / "guard.py"
SPEC = importlib.util.spec_from_file_location("guard", ENTRY)
guard = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(guard)
WORKER = textwrap.dedent(
    """
    import json, random, sys
    factor = float(sys.argv[1])
    def say(**answer):
        print(json.dumps(answer), flush=True)
    say(address="nowhere", library="")
    for line in sys.stdin:
        word = line.split(" ", 1)[0].strip()
        if word == "quit":
            break
        if word == "peer":
            say(ready=True)
        elif word == "run":
            count = int(dict(pair.split("=") for pair in line.split()[1:])["count"])
            say(prepared=True)
        elif word == "go":
            each = 1e-6 * factor * random.uniform(0.9, 1.1)
            say(verified=True, seconds=count * each, cpu=count * each, p50_us=1e6 * each, p99_us=0.0, max_us=0.0)
    """
)


def workers(monkeypatch: pytest.MonkeyPatch, here: float) -> argparse.Namespace:
    """Have workers that only say how long they took, ours `here` times as long; return the guard's arguments."""

    def contestant(name: str, path: Path | None) -> Contestant:
        return Contestant(name, "other", (sys.executable, "-c", WORKER, str(here if path is None else 1.0)))

    monkeypatch.setattr(guard, "contestant", contestant)
    return argparse.Namespace(built="built", base="before", runs=11, tolerance=5.0, provider=["local"])


def test_what_is_slower_each_time_is_named(monkeypatch, capsys):
    found = guard.guard(workers(monkeypatch, here=1.5))
    assert found == [guard.named("local", work) for work in guard.WORKS]
    assert len(set(found)) == len(guard.WORKS)
    assert capsys.readouterr().out.count("SLOWER") == 2 * len(found)


@pytest.mark.parametrize("here", [1.0, 0.5])
def test_what_is_equal_or_faster_passes(monkeypatch, here):
    assert guard.guard(workers(monkeypatch, here)) == []


@pytest.mark.parametrize(("runs", "count"), [(7, 7), (8, 8), (10, 10), (11, 10), (15, 13), (20, 16)])
def test_so_many_runs_have_to_be_slower(runs, count):
    assert guard.needed(runs) == count


def test_too_few_runs_tell_nothing():
    for runs in range(7):
        with pytest.raises(ValueError, match="at least 7 are needed"):
            guard.needed(runs)


def test_chance_alone_is_rarely_taken_for_slower():
    """Two equal packages on a machine that doubles its time now and then, without a tolerance that would hide it."""
    chance = random.Random(1)

    def cost() -> float:
        return chance.uniform(1, 2) * chance.choice((1, 1, 2))

    trials = 2000
    found = sum(guard.slower([cost() for _ in range(11)], [cost() for _ in range(11)], 0.0) for _ in range(trials))
    assert found <= trials * guard.CHANCE * 2


def test_what_is_within_the_tolerance_is_equal():
    base = [1.0 + number / 10 for number in range(11)]
    assert not guard.slower([1.04 * cost for cost in base], base, 5.0)
    assert guard.slower([1.06 * cost for cost in base], base, 5.0)
    assert not guard.slower([0.5] * 2 + [1.06 * cost for cost in base[2:]], base, 5.0)


def test_what_is_no_commit_is_refused():
    with pytest.raises(SystemExit, match="no-such-commit is no commit here"):
        guard.build("no-such-commit")
