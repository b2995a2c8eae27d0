"""A few schedules of the long run of failover; tests/core/test_failover_schedules.py has the rest of what is quick."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("failover.py")


def test_the_long_run_says_what_it_did() -> None:
    command = [sys.executable, str(SCRIPT), "--schedules", "300", "--first", "7", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {name: int(value) for value, name in (line.split(maxsplit=1) for line in done.stdout.splitlines())}
    assert (rows["schedules"], rows["violations"]) == (300, 0)
    assert rows["posts taken over"] > 300
