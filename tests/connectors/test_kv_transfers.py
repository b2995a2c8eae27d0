"""A worker's side of the KV connector for vLLM: what begins in a step and what has ended, with real engines."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import aiote
from aiote.connectors.vllm.requests import BlockRow, Offered, Steps, Wanted
from aiote.connectors.vllm.transfers import EndedRequests, RankTransfers
from aiote.kvcache import Cache, Consumer, PageRow, Producer
from aiote.kvcache.protocol import MOST_NAMED
from aiote.rails.rail_set import RailSet
from support.engines.opening import PATIENCE_S, opened
from support.service.bridges import aside

PAGES, LAYERS = 8, 2

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


def cache(name: str, value: int) -> tuple[Cache, np.ndarray]:
    """Make a cache of opaque pages, as vLLM's CPU backend has them."""
    made, array = Cache(name), np.full((LAYERS, PAGES, 2, 64), value, np.uint8)
    made.add(array, "layer page head item")
    return made, array


@contextmanager
def transfers(made: Cache, *, produces: bool, lease: float = PATIENCE_S, turn: int = 0) -> Iterator[RankTransfers]:
    settings = {"provider": "local"}
    one = RankTransfers(made, produces=produces, consumes=not produces, lease=lease, turn=turn, settings=settings)
    try:
        yield one
    finally:
        aside(one.close)


def ended(one: RankTransfers) -> EndedRequests:
    """Ask as an engine does between two steps, until something has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = one.take_ended()
        if found.sent or found.received:
            return found
    raise AssertionError("nothing has ended")


def offered(request: str, blocks: list[int], tokens: int = 40) -> Steps:
    return Steps([Offered(request, tokens, {0: BlockRow(blocks, 0)})], [], [])


def test_what_is_offered_is_kept_until_it_was_read(portal):
    (left, here), (right, there) = cache("prefill", 3), cache("decode", 0)
    with (
        transfers(left, produces=True) as worker,
        portal.wrap_async_context_manager(opened("local")) as engine,
        portal.wrap_async_context_manager(Consumer(engine, right)) as consumer,
    ):

        async def receive() -> None:
            rows = {0: PageRow([4, 1], 1)}
            async with consumer.receive([worker.address], "r", tokens=40, rows=rows) as reception:
                await reception.arrived()

        here[:, 7], here[:, 2] = 7, 2
        # What cannot be offered is the engine's again.
        worker.start(offered("wrong", [PAGES]))
        assert worker.take_ended() == ({"wrong"}, set(), {})
        worker.start(offered("r", [5, 7, 2]))
        assert worker.take_ended() == (set(), set(), {})
        portal.call(receive)
        assert ended(worker) == ({"r"}, set(), {})
    assert there[0, :, 0, 0].tolist() == [0, 2, 0, 0, 7, 0, 0, 0]
    assert np.array_equal(there[0], there[1])


def test_what_is_wanted_comes_or_its_producer_hears_that_it_is_not(portal):
    (left, _), (right, there) = cache("prefill", 3), cache("decode", 0)
    with (
        transfers(right, produces=False) as worker,
        portal.wrap_async_context_manager(opened("local")) as engine,
        portal.wrap_async_context_manager(Producer(engine, left, match_timeout=PATIENCE_S)) as producer,
    ):
        outcomes: dict[str, str] = {}

        async def offer(name: str) -> None:
            rows = {0: PageRow([0, 1, 2])}
            async with producer.offer(name, tokens=40, rows=rows, readers=None, computed=True) as offer:
                pass
            outcomes[name] = offer.outcome

        def wanted(name: str, rows: dict[int, BlockRow], places: list[str] | None = None) -> Wanted:
            return Wanted(f"our {name}", name, places or [str(engine.address)], 40, rows)

        rows = {0: BlockRow([4, 1], 1)}
        offers = [portal.start_task_soon(offer, name) for name in ("r", "cancelled", "no")]
        worker.start(Steps([], [wanted("r", rows)], []))
        assert ended(worker) == (set(), {"our r"}, {})
        assert there[0, :, 0, 0].tolist() == [0, 3, 0, 0, 3, 0, 0, 0]
        # Cancelled before it is asked for, or after: either way the producer is told, and it is no failure.
        worker.start(Steps([], [wanted("cancelled", {0: BlockRow([2, 3, 5], 0)})], ["our cancelled"]))
        assert ended(worker) == (set(), {"our cancelled"}, {})
        worker.start(Steps([], [wanted("no", {})], []))
        worker.start(Steps([], [wanted("nobody", rows, ["aiote://nobody"])], ["unknown"]))
        found = ended(worker)
        assert (found.received, list(found.failed)) == ({"our nobody"}, ["our nobody"])
        for one in offers:
            one.result(PATIENCE_S)
        assert outcomes["r"] == outcomes["no"] == "moved"
        assert worker.take_ended() == (set(), set(), {})


def test_requests_that_wait_are_renewed_by_the_first_rank(portal, monkeypatch):
    renewed: list[list[str]] = []
    monkeypatch.setattr(Producer, "renew", lambda _, requests: renewed.append(requests))
    (left, _), (right, _) = cache("prefill", 3), cache("decode", 0)
    with (
        transfers(right, produces=False) as worker,
        transfers(cache("second", 0)[0], produces=False, turn=1) as second,
        portal.wrap_async_context_manager(opened("local")) as engine,
        portal.wrap_async_context_manager(Producer(engine, left)),
    ):
        names = [f"r{number}" for number in range(MOST_NAMED + 2)]
        second.start(Steps([], [], [], {str(engine.address): ["second"]}))
        worker.start(Steps([], [], [], {str(engine.address): names, "aiote://nobody": ["r"]}))
        deadline = time.monotonic() + PATIENCE_S
        while sum(map(len, renewed)) < len(names):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert [name for some in renewed for name in some] == names
        assert worker.take_ended() == second.take_ended() == (set(), set(), {})


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
def test_no_page_is_copied_or_allocated(portal, monkeypatch, reads):
    """Of 12 MiB that move nothing is registered but the tensors, and less than a page is allocated at any time."""
    registered: list[tuple[int, int]] = []
    counts: list[int] = []
    keep = RailSet.keep_memory

    def kept(rails: RailSet, memory: Any) -> Any:
        registered.append((memory.address, memory.length))
        return keep(rails, memory)

    monkeypatch.setattr(RailSet, "keep_memory", kept)
    page = 1 << 20
    arrays = [np.full((LAYERS, PAGES, page), value, np.uint8) for value in (3, 0)]
    caches = [Cache(name) for name in ("prefill", "decode")]
    for one, array in zip(caches, arrays, strict=True):
        one.add(array, "layer page item")
    with (
        transfers(caches[1], produces=False) as worker,
        portal.wrap_async_context_manager(opened("local")) as engine,
        portal.wrap_async_context_manager(Producer(engine, caches[0])) as producer,
    ):
        worker.reads = reads

        async def offer(name: str) -> None:
            rows = {0: PageRow([5, 7, 2, 0, 1, 3])}
            async with producer.offer(name, tokens=40, rows=rows, readers=None, computed=True):
                pass

        for name in ("first", "second"):
            under_way = portal.start_task_soon(offer, name)
            tracemalloc.start()
            there = {0: BlockRow([4, 1, 0, 2, 7, 6], 0)}
            worker.start(Steps([], [Wanted(name, name, [str(engine.address)], 40, there)], []))
            assert ended(worker) == (set(), {name}, {})
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert 0 < peak < page
            under_way.result(PATIENCE_S)
            counts.append(len(registered))
    assert arrays[1][:, [4, 1, 0, 2, 7, 6]].all()
    ours = {(array.ctypes.data, array.nbytes) for array in arrays}
    # What is shorter is for messages, once for each connection.
    assert {one for one in registered if one[1] >= page} == ours
    assert counts[0] == counts[1]


def test_an_engine_that_is_no_consumer_says_so():
    made, _ = cache("prefill", 3)
    with transfers(made, produces=True) as worker:
        worker.start(Steps([], [Wanted("r", "r", [worker.address], 40, {0: BlockRow([1], 0)})], ["r"]))
        assert worker.take_ended() == (
            set(),
            {"r"},
            {"r": "this engine is not a kv_consumer; set kv_role to kv_consumer or kv_both"},
        )
    with pytest.raises(aiote.UsageError, match="no setting"):
        RankTransfers(made, produces=True, consumes=False, settings={"providers": "local"})
