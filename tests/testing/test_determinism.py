"""A seed decides everything: two runs, and two processes, see the same events at the same nanoseconds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from aiote.kvcache import Consumer, Producer
from aiote.testing import Fabric, run
from support.kv.caches import Model, Side, built, fill, rows

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


def test_a_kv_cache_sees_the_same_on_a_slow_machine():
    """Two requests are computed beside each other, with many layers done in a row, and that takes real time."""
    model, left, right = Model(layers=40, state=5), Side(pages=24), Side(pages=24, order="field token head")
    built(model, left, "prefill"), built(model, right, "decode")
    here, there = ([rows(side, 43, np.random.default_rng(seed)) for seed in (0, 1)] for side in (left, right))

    async def main(fabric: Fabric) -> None:
        async def compute(number: int) -> None:
            fill(left, here[number], 44, number)
            async with producer.offer(str(number), tokens=43, rows=here[number]) as offer:
                for layer in range(40):
                    until = time.perf_counter() + (pause if layer % 3 == 0 else 0)
                    while time.perf_counter() < until:
                        pass
                    offer.computed(layer)

        async def ask(number: int) -> None:
            async with consumer.receive(place, str(number), tokens=43, rows=there[number]) as reception:
                await reception.arrived()

        async with fabric.open_engine() as one, fabric.open_engine() as other:
            place = [one.address]
            async with Producer(one, left.caches[0]) as producer, Consumer(other, right.caches[0]) as consumer:
                await asyncio.gather(*(work(number) for work in (compute, ask) for number in (0, 1)))
            seen.append((fabric.now, fabric.events, fabric.digest))

    seen: list[tuple[float, int, str]] = []
    for pause in (0.0, 0.0, 0.3e-3, 1e-3):
        run(main, seed=3)
    assert seen == seen[:1] * 4
