"""Falling asleep and being woken, in a million random orders of single steps, with real cores and a scripted rail.

Two cores take turns at every step that one can see of the other: each poll, post, arming, reading and writing of a
descriptor (`interleaving/interleaving.pyx`). No timer helps out. When both sleep, everything has to have arrived.
`AIOTE_TEST_SCHEDULES` asks for more of them.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import aiote_native

SOURCES = Path(__file__).parent / "interleaving"
SCHEDULES = int(os.environ.get("AIOTE_TEST_SCHEDULES") or 500_000)
PATIENCE_S = 90 + SCHEDULES / 5000

kinds = pytest.mark.parametrize("waits", [True, False], ids=["descriptor", "doorbell"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the module against the installed declarations, and what is preloaded."""
    folder = tmp_path_factory.mktemp("interleaving")
    site = Path(aiote_native.__file__).parents[1]
    compiler = [*shlex.split(os.environ.get("CC") or "cc"), "-O2", "-shared", "-fPIC", "-D_GNU_SOURCE"]
    source, include = folder / "interleaving.c", sysconfig.get_path("include")
    # Fortified, longjmp refuses to change stacks.
    jumps = ["-U_FORTIFY_SOURCE", f"-I{include}"]
    for command in (
        [sys.executable, "-m", "cython", "-3", "-I", site, SOURCES / "interleaving.pyx", "-o", source],
        [*compiler, *jumps, source, "-o", folder / "interleaving.so", "-ldl", "-lpthread"],
        [*compiler, SOURCES / "steps.c", "-o", folder / "steps.so"],
    ):
        subprocess.run(command, check=True, timeout=PATIENCE_S)
    return folder


def run(built: Path, waits: bool, schedules: int, seed: int, deaf: bool = False) -> tuple[int, int, int]:
    """Run schedules in a process of its own; return how many went well, the turns taken, and the sleeps."""
    call = f"import json, interleaving; print(json.dumps(interleaving.run({waits}, {schedules}, {seed}, {deaf})))"
    done = subprocess.run(
        [sys.executable, "-c", call],
        env={**os.environ, "LD_PRELOAD": str(built / "steps.so"), "PYTHONPATH": str(built)},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )
    well, turns, sleeps = json.loads(done.stdout)
    return well, turns, sleeps


@kinds
def test_no_order_of_steps_loses_a_wake_up(built, waits):
    well, turns, sleeps = run(built, waits, SCHEDULES, seed=1)
    assert well == SCHEDULES, f"schedule {well} of seed 1 left something behind, and everybody asleep"
    # The steps are fine enough to meet every gap, and most schedules fall asleep several times.
    assert turns > 50 * SCHEDULES
    assert sleeps > 6 * SCHEDULES


@kinds
def test_a_wake_up_that_is_lost_is_found(built, waits):
    assert run(built, waits, 1000, seed=2, deaf=True)[0] < 1000


@kinds
def test_a_seed_repeats_its_schedules(built, waits):
    assert run(built, waits, 500, seed=3) == run(built, waits, 500, seed=3) != run(built, waits, 500, seed=4)
