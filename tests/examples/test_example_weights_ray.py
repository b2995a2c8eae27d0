"""Ray starts trainers and inference ranks, and the weights go by the engine: with the real Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "weights" / "on_ray.py"
pytestmark = [
    pytest.mark.libfabric,
    pytest.mark.one_library,
    pytest.mark.needs_ray,
    pytest.mark.timeout(400),  # Ray's own processes and six actors start, two at a time
]


def test_every_rank_has_every_version():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "3", "--provider", "tcp"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    actors = [line.split(" on ")[0] for line in lines if " on " in line]
    assert actors == [*(f"trainer-{rank}" for rank in range(4)), *(f"inference-{rank}" for rank in range(2))]
    processes = {line.split("process ")[1].split(":")[0] for line in lines if " on " in line}
    assert len(processes) == 6
    for number in (1, 2, 3):
        (line,) = [line for line in lines if line.startswith(f"version {number}: {10 << 20} bytes")]
        assert line.count(f"'qkv': {number}.0, 'out': {number}.0") == 2
