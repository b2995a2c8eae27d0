"""A few schedules of the long run of failover, a million in `make test-all`.

tests/core/test_failover_schedules.py has the rest of what is quick.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import ROOT
from support.machine import LONG

SCRIPT = ROOT / "programs" / "soak" / "failover_schedules.py"
SCHEDULES = 1_000_000 if LONG else 300
PATIENCE_S = 60 + SCHEDULES / 100


@pytest.mark.timeout(PATIENCE_S + 60)
def test_the_long_run_says_what_it_did() -> None:
    command = [sys.executable, str(SCRIPT), "--schedules", str(SCHEDULES), "--first", "7", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {name: int(value) for value, name in (line.split(maxsplit=1) for line in done.stdout.splitlines())}
    assert (rows["schedules"], rows["violations"]) == (SCHEDULES, 0)
    assert rows["posts taken over"] > SCHEDULES
