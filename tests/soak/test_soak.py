"""Twenty seconds of the soak; `make soak` runs ten minutes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import each_provider

pytestmark = pytest.mark.libfabric

SCRIPT = Path(__file__).with_name("soak.py")
SEED = "20260"
SECONDS = "10"
PATIENCE_S = 110


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the soak and return what it said."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"AIOTE_SOAK_INSIDE": ""},
    )


@each_provider
def test_a_short_soak(provider, request):
    done = soak("--seconds", SECONDS, "--seed", SEED, "--provider", provider)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert "no violation" in done.stdout
    request.config.stash.setdefault(_said, []).append(done.stdout)


_said = pytest.StashKey[list[str]]()


def test_links_were_cut(request):
    """Says so where they were not: a soak passes without."""
    said = request.config.stash.get(_said, [])
    if not said:
        pytest.skip("no soak ran before this")
    reasons = {line for text in said for line in text.splitlines() if line.startswith("!!!")}
    if reasons:
        pytest.skip("; ".join(sorted(reasons)))
    assert any(" cut shortly" in text or " cut for long" in text for text in said)
