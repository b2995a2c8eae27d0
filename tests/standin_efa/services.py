"""The services over two or four NICs of EFA's stand-in, of which one fails in the midst: `services.py CASE:NICS`."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np

import aiote
from aiote.moe import MoeConfig
from aiote.weights import Controller, Layout, Replicate, Shard, serve_source, serve_target
from support.engines.opening import opened, until
from support.kv.caches import Model, Side
from support.kv.worlds import served_while, world
from support.moe.ranks import Tokens, ranks, whole_round
from support.rails.standin_efa import break_pairs, counted, faulty

HANGS_S = 120
PAGES, TOKENS = 48, 160
MODEL = Model(layers=6, heads=2, item=512, state=5)
SHAPE = (128, 256)
SOURCES = Layout.over([0], {name: (SHAPE, "I32", Replicate()) for name in "abcd"})
TARGETS = Layout.over([0], {name: (SHAPE, "I32", Shard(1)) for name in "abcd"})
EXPERTS = MoeConfig(experts=6, top_k=2, hidden=512, tokens=16, rows=96, placement="direct", shared_memory="off")


def names(nics: int) -> list[str]:
    return [f"standin{number}-rdm" for number in range(nics)]


def heard(engines: Iterable[aiote.Engine]) -> list[str]:
    """Return the list that the names of these engines' events come into."""
    events: list[str] = []
    for engine in engines:
        engine.listen_events(lambda event: events.append(event.name))
    return events


async def harmed(events: list[str], nic: int, work: Callable[[], object]) -> None:
    """Begin work, hold what it sends over a NIC, break the pairs of that one, and wait until it is back."""
    with faulty("hold", 1, nic):
        before = counted("held")
        working = asyncio.ensure_future(work())
        await until(lambda: counted("held") > before or working.done())
        assert not working.done(), "nothing of it went over this NIC: the case shows nothing"
        break_pairs(nic)
        await working
    await until(lambda: events.count("rail.back") == events.count("rail.failed"))
    assert "peer.lost" not in events


async def kvcache(nics: int) -> None:
    """Requests by writes, and by reads, while NICs break in turn."""
    for reads in (False, True):
        order = Side(pages=PAGES), Side(pages=PAGES, order="head token field")
        async with world("efa", *order, MODEL, rails=[names(nics)]) as w:
            await w.consumers[0].connect(w.places, reads=reads)
            events = await served_while(w, TOKENS, reads, 2 * nics, lambda number: break_pairs(number % nics))
            await until(lambda: events.count("rail.back") == events.count("rail.failed"))  # noqa: B023
            assert events.count("rail.failed") >= 2
            assert "peer.lost" not in events


async def weights(nics: int) -> None:
    """Updates in which each NIC breaks once: each takes one attempt, and every byte is right."""
    values = {name: np.arange(SHAPE[0] * SHAPE[1], dtype=np.int32).reshape(SHAPE) for name in SOURCES.tensors}
    arrays = {name: np.zeros(SHAPE, np.int32) for name in values}
    async with (
        opened("efa", names(nics)) as one,
        opened("efa", names(nics)) as other,
        opened("efa", names(nics)) as own,
        serve_source(one, SOURCES, 0, values),
        serve_target(other, TARGETS, 0, arrays, share_memory=False),
    ):
        controller = Controller(own, [one.address], [other.address])
        await controller.update(0)
        events = heard((one, other, own))
        for version in range(1, nics + 1):
            for number, array in enumerate(values.values()):
                array += 1000 * version + number

            async def update(version: int = version) -> None:
                assert (await controller.update(version)).attempts == 1

            await harmed(events, nics - version, update)
            for name, array in values.items():
                np.testing.assert_array_equal(arrays[name], array)
        assert events.count("rail.failed") >= nics


async def moe(nics: int) -> None:
    """Rounds in which each NIC breaks once, compared bit for bit."""
    drawn = np.random.default_rng(nics)
    async with ranks(lambda: opened("efa", names(nics), schedule="round-robin"), 2, EXPERTS) as groups:
        events = heard(group.engine for group in groups)
        for turn in range(nics + 1):
            given = [Tokens(drawn, EXPERTS, EXPERTS.tokens) for _ in groups]

            async def one_round(given: list[Tokens] = given) -> None:
                await whole_round(groups, given)

            if turn:
                await harmed(events, turn - 1, one_round)
            else:
                await one_round()
        assert events.count("rail.failed") >= nics


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    name, _, nics = sys.argv[1].partition(":")
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    asyncio.run({case.__name__: case for case in (kvcache, weights, moe)}[name](int(nics)))
    print({what: counted(what) for what in ("flushed", "discarded", "held")})
