"""Falling asleep and being woken, over a million times in random orders of single steps, on a scripted rail.

Two cores take turns at every step that one can see of the other: each poll, post, arming, reading and writing of a
descriptor (`interleaving/interleaving.pyx`). No timer helps out. When both sleep, everything has to have arrived.
`make test-all` plays more, and `AIOTE_TEST_SCHEDULES` asks for more of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkout import compiled
from support.machine import LONG

SOURCES = Path(__file__).parent / "interleaving"
SCHEDULES = int(os.environ.get("AIOTE_TEST_SCHEDULES") or (170_000 if LONG else 100_000))
PATIENCE_S = 90 + SCHEDULES / 5000

kinds = pytest.mark.parametrize("waits", [True, False], ids=["descriptor", "wakeup"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the module against the installed declarations, and what is preloaded."""
    folder = tmp_path_factory.mktemp("interleaving")
    # Fortified, longjmp refuses to change stacks.
    compiled.module(SOURCES / "interleaving.pyx", folder, "-U_FORTIFY_SOURCE")
    compiled.shared(SOURCES / "steps.c", folder)
    return folder


def run(
    built: Path, waits: bool, schedules: int, seed: int, deaf: bool = False, may_rest: bool = False
) -> tuple[int, int, int, int]:
    """Run schedules in a process of its own; return how many went well, the turns taken, the sleeps, and the rests."""
    arguments = f"{waits}, {schedules}, {seed}, {deaf}, {may_rest}"
    call = f"import json, interleaving; print(json.dumps(interleaving.run({arguments})))"
    # Behind it, the copy of the package that `make mutants` has changed.
    path = os.pathsep.join(filter(None, (str(built), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-P", "-c", call],
        env={**os.environ, "LD_PRELOAD": compiled.preloaded(built / "steps.so"), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )
    well, turns, sleeps, rests = json.loads(done.stdout)
    return well, turns, sleeps, rests


@kinds
def test_no_order_of_steps_loses_a_wake_up(built, waits):
    well, turns, sleeps, rests = run(built, waits, SCHEDULES, seed=1)
    assert well == SCHEDULES, f"schedule {well} of seed 1 left something behind, and everybody asleep"
    # The steps are fine enough to meet every gap, and most schedules fall asleep several times.
    assert turns > 50 * SCHEDULES
    assert sleeps > 6 * SCHEDULES
    assert rests == 0


@kinds
def test_no_order_of_steps_leaves_a_channel_at_rest_with_work(built, waits):
    well, turns, sleeps, rests = run(built, waits, SCHEDULES // 2, seed=5, may_rest=True)
    assert well == SCHEDULES // 2, f"schedule {well} of seed 5 left something behind, or in no list"
    assert turns > 25 * SCHEDULES
    assert rests > SCHEDULES
    assert sleeps > SCHEDULES


@kinds
def test_a_wake_up_that_is_lost_is_found(built, waits):
    assert run(built, waits, 1000, seed=2, deaf=True)[0] < 1000


@kinds
def test_a_seed_repeats_its_schedules(built, waits):
    assert run(built, waits, 500, seed=3) == run(built, waits, 500, seed=3) != run(built, waits, 500, seed=4)
