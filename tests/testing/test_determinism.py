"""A seed decides everything: two runs, and two processes, see the same events at the same nanoseconds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiote.kvcache import CacheLayout
from aiote.testing import Fabric, run
from kvcaches import PrefillRank, deployed

STORY = Path(__file__).parent / "story.py"


def in_a_process(seed: int, hash_seed: int, address_space: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONMALLOC": address_space}
    done = subprocess.run(
        [sys.executable, STORY, str(seed)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", range(4))
def test_two_processes_see_the_same(seed):
    """Other hashes, and objects at other addresses: what is kept in sets would come in another order."""
    one, other = in_a_process(seed, 1, "malloc"), in_a_process(seed, 2, "pymalloc")
    # The hash of a tuple with text in it is a process's own.
    assert one.split()[:4] == other.split()[:4]


def test_two_runs_see_the_same_and_two_seeds_do_not(monkeypatch):
    monkeypatch.syspath_prepend(STORY.parent)
    from story import told

    first, again, other = told(1), told(1), told(2)
    assert first == again
    assert first[1] != other[1]
    assert first[2] != other[2]
    assert len(first[1]) > 500
    assert first[0][-1] == b"on we go"
    assert {"PeerError", "TransferError", "ClosedError"} & set(map(str, first[0][1:-1]))


def test_a_kv_cache_sees_the_same_on_a_slow_machine(monkeypatch):
    """Two requests are computed beside each other, with many layers done in a row, and that takes real time."""

    async def main(fabric: Fabric) -> None:
        async def ask(tokens: list[int]) -> None:
            async with decode.decoder.request(tokens, deployment.group) as slot:
                await slot.arrived()
                decode.check(slot)

        async with deployed(fabric.open_engine, layout, serving=False) as deployment:
            (decode,), (prefill,) = deployment.decode, deployment.prefill
            asking = [asyncio.ensure_future(ask(list(range(first, first + 43)))) for first in (0, 100)]
            jobs = prefill.prefiller.jobs()
            both = [await anext(jobs) for _ in asking]
            await asyncio.gather(*(prefill.compute(job) for job in both), *asking)
            seen.append((fabric.now, fabric.events, fabric.digest))

    async def rest(_rank: PrefillRank, _pause: float) -> None:
        nonlocal layers
        layers += 1
        until = time.perf_counter() + (pause if layers % 3 == 0 else 0)
        while time.perf_counter() < until:
            pass

    layout = CacheLayout(layers=40, kv_heads=4, head_size=2, page_tokens=4, dtype="uint8")
    monkeypatch.setattr(PrefillRank, "rest", rest)
    seen: list[tuple[float, int, str]] = []
    for pause in (0.0, 0.0, 0.3e-3, 1e-3):
        layers = 0
        run(main, seed=3)
    assert seen == seen[:1] * 4
