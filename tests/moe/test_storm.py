"""Rounds in virtual time, in which a rank is killed, stopped, partitioned, cancelled or loses a rail at any moment.

What must hold: every output is that of the reference, bit for bit, so that no round is mixed with another and no row
is torn; nobody waits longer than the heartbeat limit; a group that is reset, and one whose dead rank was replaced, goes
on; one that masks goes on without being told. Who leaves after the last round breaks nobody's.

Moments are drawn, from all of a run; or they are the events of the network, one after the other: `make test-all` takes
each of them in a short run, `make test` some.
"""

from __future__ import annotations

from functools import partial

import pytest

from aiote.moe import MoeConfig
from aiote.testing import Fabric, run
from support.machine import LONG
from support.moe.sharing import simulated_ranks_share
from support.moe.storms import KINDS, World

SEEDS = (*range(2000 if LONG else 30), 5047)
"""In the last one a rank is written to just after it was lost."""
SHORT = 11
"""The seed of the short runs."""
PARTS = range(50 if LONG else 1)
"""Tests of which each takes its share of the seeds, or of the events: a minute, for pytest ends what takes five."""
EVENTS = 1 if LONG else 29
"""Of the events of a short run every so manieth is one at which something happens."""
SHAPES = {
    "direct": MoeConfig(experts=6, top_k=2, hidden=4, tokens=5, rows=30, placement="direct"),
    "packed": MoeConfig(experts=6, top_k=2, hidden=4, tokens=5, rows=30, placement="packed", private=2),
    "lanes": MoeConfig(experts=6, top_k=2, hidden=4, tokens=5, rows=30, placement="packed", lanes=2),
    "mask": MoeConfig(experts=6, top_k=2, hidden=4, tokens=5, on_loss="mask"),
    "by rank": MoeConfig(experts=6, top_k=2, hidden=4, tokens=5, rows=3, copies="rank", on_overflow="drop"),
}


SHARED = tuple(f"{shape}, shared" for shape in SHAPES)
"""With ranks that write into each other's memory. A rank that is lost goes on storing for a while."""


@pytest.fixture(autouse=True)
def shares_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks share memory where the shape says so."""
    if request.node.callspec.params["shape"] in SHARED:
        simulated_ranks_share(monkeypatch)


def config_of(shape: str) -> MoeConfig:
    """Return the config of a shape."""
    return SHAPES[shape.removesuffix(", shared")]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("shape", [*SHAPES, *SHARED])
def test_no_round_is_torn_mixed_or_waited_for_in_vain(shape, part):
    broken = 0
    for seed in SEEDS[part :: len(PARTS)]:
        kind = KINDS[seed % len(KINDS)]

        async def main(fabric: Fabric, seed: int = seed, kind: str = kind) -> int:
            return await World(fabric, seed, config_of(shape)).run(kind)

        try:
            broken += run(main, seed, rails=2, limit=30)
        except BaseException as error:
            error.add_note(f"seed {seed}, {kind}")
            raise
    assert broken


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["kill", "cancel", "stop", "partition", "rail"])
@pytest.mark.parametrize("shape", [*SHAPES, *SHARED])
def test_nothing_is_torn_mixed_or_waited_for_in_vain_whatever_event_something_happens_at(shape, kind, part):
    async def main(fabric: Fabric, kind: str, number: int) -> int:
        world = World(fabric, SHORT, config_of(shape), rounds=2, event=number)
        await world.run(kind)
        return world.events

    def one(kind: str, number: int) -> int:
        try:
            return run(partial(main, kind=kind, number=number), SHORT, rails=2, limit=30)
        except BaseException as error:
            error.add_note(f"{kind} at event {number}")
            raise

    events = one("nothing", 0)
    # Ranks that share memory post fewer writes, so fewer events come: 77 in the shortest run.
    assert events > 2 * EVENTS
    for number in range(part * EVENTS, events, EVENTS * len(PARTS)):
        one(kind, number)
