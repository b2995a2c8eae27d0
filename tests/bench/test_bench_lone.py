"""`make bench-lone` on one row of each kind: what it prints and keeps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def test_contestants_are_measured_alone(tmp_path: Path):
    """aiote is always there; how many peers are installed is the machine's."""
    file = tmp_path / "records.json"
    options = ["--provider", "local", "--only", "write 64 KiB, hot", "--runs", "1", "--peers", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "run.py"), "lone", *options], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    beside_c, alone = json.loads(file.read_text())
    assert beside_c["row"] == alone["row"] == "write 64 KiB, hot, back to back, engine"
    assert 1 < alone["alone_us"]["aiote"] < 1e6
    assert "each alone (us): aiote" in done.stdout


@pytest.mark.parametrize("provider", ["local", "socket"])
def test_a_row_is_measured_beside_its_floor(provider: str, tmp_path: Path):
    file = tmp_path / "records.json"
    options = ["--provider", provider, "--only", "write 8 B", "--runs", "1", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "run.py"), "lone", *options],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    records = json.loads(file.read_text())
    assert [one["row"] for one in records] == [
        "write 8 B, hot, back to back, engine",
        "write 8 B, cold, asleep, engine",
        "write 8 B, cold, asleep, bridge",
    ]
    for one in records:
        assert one["row"] in done.stdout
        assert one["floor_us"] > 0
        assert 0 < one["us"] <= one["p99_us"]
        assert one["cpu_us"] > 0
