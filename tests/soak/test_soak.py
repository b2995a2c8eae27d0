"""A few seconds of each soak over two providers, twenty over four with AIOTE_TEST_LONG; `make soak` and `make
soak-kvcache` run ten minutes of it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import ROOT
from support.machine import LONG

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

SCRIPT = ROOT / "programs" / "soak" / "soak.py"
SEED = "20260"
SECONDS = "20" if LONG else "2"
OF_ENGINES, OF_CACHES = (("tcp", "local", "socket", "shm"),) * 2 if LONG else (("tcp", "shm"), ("local", "socket"))
ON_GPUS = ("local", "socket")
"""In a short run each provider has every second kind of mishap, so that together they have them all."""
PATIENCE_S = 170


def soak(provider: str, order: tuple[str, ...], *arguments: str) -> str:
    """Run the soak, see that no promise was broken, and return what it said."""
    share = "0/1" if LONG else f"{order.index(provider)}/{len(order)}"
    chosen = ("--seconds", SECONDS, "--seed", SEED, "--provider", provider, "--share", share)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *chosen, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"AIOTE_SOAK_INSIDE": ""},
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert "no violation" in done.stdout
    return done.stdout


@pytest.mark.parametrize("provider", OF_ENGINES)
def test_a_short_soak_of_engines_finds_no_violation(provider, request):
    request.config.stash.setdefault(_said, []).append(soak(provider, OF_ENGINES))


@pytest.mark.parametrize("provider", OF_CACHES)
def test_a_short_soak_of_the_kv_cache_finds_no_violation(provider):
    soak(provider, OF_CACHES, "--what", "kvcache")


@pytest.mark.parametrize("provider", ON_GPUS)
def test_a_short_soak_with_memory_of_gpus_finds_no_violation(provider):
    """On the stand-in for the driver: staged over one, pulled over the other."""
    soak(provider, ON_GPUS, "--memory", "cuda")


_said = pytest.StashKey[list[str]]()


@pytest.mark.parametrize("what", ["cut shortly", "cut for long", "killed, running"])
def test_every_kind_of_fault_was_injected_in_some_soak(request, what):
    """A soak passes where links cannot be cut or processes not be killed; then this says so."""
    said = request.config.stash.get(_said, [])
    if len(said) < len(OF_ENGINES):
        pytest.skip("not every soak ran before this")
    if not all(what in text for text in said):
        reasons = {line for text in said for line in text.splitlines() if line.startswith("!!!")}
        if reasons:
            pytest.skip("; ".join(sorted(reasons)))
    assert any(what in text for text in said)
