"""A submission may run a round of the engine, and with it any callback of the push that submits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

import aiote
from aiote.kvcache.offers import Offer
from aiote.kvcache.pushing import Push
from aiote.transfers.moves import PreparedMoves
from support.engines.opening import fabric, until
from support.kv.caches import Model, Side, expected, fill, same
from support.kv.worlds import BEFORE, World, decode, world

pytestmark = pytest.mark.virtual_time

MODEL = Model(layers=3, item=64, state=5)
TOKENS = 19

Callback = Callable[[Push, aiote.Transfer], object]


class Submissions:
    """Call a function in the midst of each submission of an offer's pushes, and keep the transfers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, callback: Callback) -> None:
        self.transfers: list[aiote.Transfer] = []
        self.offer: Offer | None = None
        self.flying_at_the_end: list[int] = []
        start, remove = PreparedMoves.start, Offer.remove_reader

        def submit(moves: PreparedMoves, run: Any, stream: Any) -> aiote.Transfer:
            self.transfers.append(start(moves, run, stream))
            assert self.offer is not None
            for push in tuple(self.offer.pushes):
                callback(push, self.transfers[-1])
            return self.transfers[-1]

        def removed(offer: Offer, reader: object, failure: str) -> None:
            self.flying_at_the_end.append(sum(not transfer.done() for transfer in self.transfers))
            remove(offer, reader, failure)

        monkeypatch.setattr(PreparedMoves, "start", submit)
        monkeypatch.setattr(Offer, "remove_reader", removed)

    async def offered(self, w: World, here: Any) -> None:
        """Offer a request whose other layers are computed once the first is written; else one write may have all."""
        async with w.producers[0].offer("r", tokens=TOKENS, rows=here) as self.offer:
            for layer in range(MODEL.layers):
                self.offer.computed(layer)
                await until(lambda: self.transfers)


def bytes_of(w: World, there: Any) -> int:
    """Return how many bytes of the decode side a request covers: those that do not depend on what was there before."""
    ones, others = (expected(w.right.caches[0], there, 20, before) for before in (BEFORE, BEFORE ^ 0xFF))
    return sum(int((one == other).sum()) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize(
    "callback",
    [lambda push, _: push.step(), lambda push, transfer: push._landed(transfer)],
    ids=["a layer", "a transfer that is over"],
)
async def test_each_layer_is_written_once_and_the_push_ends_after_its_writes(callback, monkeypatch):
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        submissions = Submissions(monkeypatch, callback)
        await w.consumers[0].connect(w.places)
        fabric().slow_rail(w.consumers[0].engine, by=0.05)
        group.start_soon(submissions.offered, w, here)
        await decode(w, w.consumers[0], "r", TOKENS, there, reads=False)
        await until(lambda: submissions.offer.outcome)
        assert submissions.offer.outcome == "moved"
        assert sum(transfer.total_bytes for transfer in submissions.transfers) == bytes_of(w, there)
        assert submissions.flying_at_the_end == [0]
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))


@pytest.mark.parametrize(
    "callback",
    [lambda push, _: push.cancel(), lambda push, _: push._offer.stop("it gives up")],
    ids=["a Cancel", "the end of its offer"],
)
async def test_a_push_that_is_ended_ends_after_the_write_that_it_was_submitting(callback, monkeypatch):
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        submissions = Submissions(monkeypatch, callback)
        await w.consumers[0].connect(w.places)
        fabric().slow_rail(w.consumers[0].engine, by=0.05)
        group.start_soon(submissions.offered, w, here)
        with anyio.move_on_after(5):
            async with w.consumers[0].receive(w.places, "r", tokens=TOKENS, rows=there) as reception:
                await until(lambda: submissions.flying_at_the_end)
                assert not reception.complete
        assert submissions.flying_at_the_end == [0]
        assert len(submissions.transfers) == 1
        for cache in w.right.caches:
            for memory in cache.memories:
                memory[...] = BEFORE
        await anyio.sleep(20)
        assert all((memory == BEFORE).all() for cache in w.right.caches for memory in cache.memories)
