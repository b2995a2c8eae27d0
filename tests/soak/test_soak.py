"""Twenty seconds of each soak, over four providers; `make soak` and `make soak-kvcache` run ten minutes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import served_by_process

pytestmark = pytest.mark.libfabric

SCRIPT = Path(__file__).with_name("soak.py")
SEED = "20260"
SECONDS = "5"
KV_SECONDS = "5"
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


@served_by_process
def test_a_short_soak(provider, request):
    done = soak("--seconds", SECONDS, "--seed", SEED, "--provider", provider)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert "no violation" in done.stdout
    request.config.stash.setdefault(_said, []).append(done.stdout)


@pytest.mark.one_library
@served_by_process
def test_a_short_soak_of_the_kv_cache(provider):
    done = soak("--what", "kvcache", "--seconds", KV_SECONDS, "--seed", SEED, "--provider", provider)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert "no violation" in done.stdout


_said = pytest.StashKey[list[str]]()


@pytest.mark.parametrize("what", ["cut shortly", "cut for long", "killed, running"])
def test_what_was_done_to_them(request, what):
    """A soak passes where links cannot be cut or processes not be killed; then this says so."""
    said = request.config.stash.get(_said, [])
    if not said:
        pytest.skip("no soak ran before this")
    if not all(what in text for text in said):
        reasons = {line for text in said for line in text.splitlines() if line.startswith("!!!")}
        if reasons:
            pytest.skip("; ".join(sorted(reasons)))
    assert any(what in text for text in said)
