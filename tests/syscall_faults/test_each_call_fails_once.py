"""Every call that can fail does so once, in turn, under load: nothing crashes, hangs, leaks or is left half done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.checkout.compiled import shared_by_all
from support.machine import LONG

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

FOLDER = ROOT / "programs" / "syscall_faults"
MOST = "1000" if LONG else "6"
"""Places of each function that are tried; of many calls the first ones, and others drawn."""
PATIENCE_S = 900 if LONG else 170


@pytest.fixture(scope="module")
def injector() -> Path:
    return shared_by_all(FOLDER / "injector.c")


def inject(injector: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", FOLDER / "scenario.py", injector, *arguments],
        env={**os.environ, "LD_PRELOAD": str(injector)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize(
    ("provider", "progress", "loop"),
    [("local", "adaptive", "asyncio"), ("socket", "thread", "trio"), ("tcp", "adaptive", "asyncio")],
)
def test_whatever_system_call_fails_nothing_else_does(injector, provider, progress, loop):
    done = inject(injector, "--provider", provider, "--progress", progress, "--loop", loop, "--most", MOST)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    *_, told, count = done.stdout.splitlines()
    assert int(count.split()[0]) > 40, done.stdout
    for function in ("calloc", "epoll_ctl", "socket", "accept4", "connect"):
        assert f" {function}: " in told
    assert "Traceback" not in done.stderr


def test_an_error_that_nobody_expected_is_found(injector, tmp_path):
    """Here an error that is no error of aiote's comes out of every opening."""
    source = (FOLDER / "scenario.py").read_text()
    planted = source.replace(
        "self._turn += 1\n", 'self._turn += 1\n        open("/nowhere") if self._turn > 4 else None\n', 1
    )
    program = tmp_path / "syscall_faults" / "scenario.py"
    program.parent.mkdir()
    program.write_text(planted.replace("Path(__file__).parents[2]", f"Path({str(ROOT)!r})"))
    done = subprocess.run(
        [sys.executable, program, injector, "--provider", "socket", "--most", "2", "--only", "eventfd"],
        env={**os.environ, "LD_PRELOAD": str(injector)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "call 1 of" in done.stderr
    assert "of eventfd failed, and then: FileNotFoundError" in done.stderr
