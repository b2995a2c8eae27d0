"""A rail that fails among several: everything completes, no count is wrong, and the rail comes back."""

from __future__ import annotations

import asyncio
import random

import anyio
import numpy as np
import pytest

import aiote
from aiote import ScatterTarget
from support.engines.data_connections import cut, data_connections
from support.engines.opening import PATIENCE_S, across, go_round, until
from support.engines.two_way_traffic import IMM, SIZE, WRITES, Traffic, railed

pytestmark = pytest.mark.libfabric
GPUS = [(6, "socket+cuda"), (7, "socket+cuda")]


@pytest.mark.parametrize(("seed", "provider"), [*((seed, "tcp") for seed in range(6)), *GPUS])
async def test_traffic_is_exact_when_a_data_connection_fails_in_the_middle(seed, provider):
    draw = random.Random(seed)
    async with railed(2 + seed % 3, provider, progress=("adaptive", "thread")[seed % 2]) as (left, right, seen):
        traffic = Traffic(left, right, seed)
        victims = data_connections(left, right)
        running = asyncio.create_task(traffic.run())
        await asyncio.sleep(draw.random() * 0.03)
        cut(draw.choice(victims))
        await running
        traffic.check()
        await until(lambda: "rail.back" in seen or "rail.failed" not in seen)
        # At full strength again: everything once more.
        again = Traffic(left, right, seed + 100)
        await again.run()
        again.check()


async def test_traffic_is_exact_when_data_connections_fail_again_and_again():
    draw = random.Random(3)
    async with railed(3) as (left, right, _):
        for turn in range(5):
            traffic = Traffic(left, right, turn)
            running = asyncio.create_task(traffic.run())
            while not running.done():
                await asyncio.sleep(draw.random() * 0.05)
                peer = next(iter(left._runtime.core.peers))
                if sum(peer.carries(i) for i in range(3)) == 3 and (victims := data_connections(left, right)):
                    cut(draw.choice(victims))
            await running
            traffic.check()


async def test_traffic_waits_and_is_exact_when_all_rails_fail_at_once():
    """For the time that a rail takes to come back everything waits, and is done exactly once all the same."""
    async with railed(2) as (left, right, seen):
        traffic = Traffic(left, right, 1)
        running = asyncio.create_task(traffic.run())
        await go_round(5)
        for victim in data_connections(left, right):
            cut(victim)
        await running
        traffic.check()
        await until(lambda: seen.count("rail.back") == seen.count("rail.failed"))
        assert seen.count("rail.failed") >= 2
        assert "peer.lost" not in seen


async def test_a_scatter_over_a_rail_that_fails_counts_exactly():
    async with railed(2) as (left, right, _):
        traffic = Traffic(left, right, 5)
        group = await left.peer_group([right.address])
        targets = [
            ScatterTarget(traffic.part(traffic.source, i), traffic.part(traffic.target, i)) for i in range(WRITES)
        ]
        transfer = left.submit_scatter(group, targets, IMM)
        cut(data_connections(left, right)[0])
        await transfer
        await right.counter(IMM).wait(WRITES)
        assert right.counter(IMM).value == 0
        assert np.array_equal(traffic.got, traffic.sent)


@pytest.mark.parametrize("what", ["scatter", "pages"])
@pytest.mark.parametrize("provider", ["tcp", "socket+cuda"])
async def test_prepared_requests_over_a_rail_that_fails_count_exactly(what, provider):
    async with railed(2, provider) as (left, right, _):
        traffic = Traffic(left, right, 5)
        group = await left.peer_group([right.address])
        target = ScatterTarget(traffic.source, traffic.target)
        numbers = np.arange(WRITES)
        if what == "scatter":
            scatter = left.prepare_scatter(group, [target])
            lengths, places = np.full(WRITES, SIZE), numbers * SIZE
            transfer = scatter.submit(lengths, places, places, IMM, to=np.zeros(WRITES, np.int64))
        else:
            transfer = left.prepare_pages(group, [target], SIZE).submit(numbers, numbers, IMM)
        cut(data_connections(left, right)[0])
        await transfer
        await right.counter(IMM).wait(WRITES)
        assert right.counter(IMM).value == 0
        assert np.array_equal(traffic.got, traffic.sent)


@pytest.mark.parametrize("provider", ["tcp", "socket+cuda"])
async def test_transfers_cancelled_while_their_rail_is_gone_let_go_and_others_complete(provider):
    """The cancelled ones let go, the others complete, and the count is of those at least."""
    async with railed(2, provider) as (left, right, _):
        traffic = Traffic(left, right, 6)
        transfers = [
            left.submit_write_imm(traffic.part(traffic.source, i), traffic.part(traffic.target, i), IMM)
            for i in range(WRITES)
        ]
        cut(data_connections(left, right)[1])
        for transfer in transfers[::3]:
            transfer.cancel()
        ended = await asyncio.gather(*transfers, return_exceptions=True)
        well = [i for i, error in enumerate(ended) if error is None]
        assert set(range(WRITES)) - set(range(0, WRITES, 3)) <= set(well)
        await right.counter(IMM).wait(len(well))
        assert all(np.array_equal(traffic.got[i], traffic.sent[i]) for i in well)
        assert traffic.source.memory.in_flight == 0
        with anyio.fail_after(PATIENCE_S):
            await traffic.source.aclose()


async def test_memory_that_its_owner_has_closed_does_not_lose_the_peer():
    """Its connections break, those of all rails that had a stripe; the write fails by itself, and the rest goes on."""
    async with railed(2) as (left, right, seen):
        memory = right.register(bytearray(SIZE))
        remote = left.attach(memory.descriptor)
        source = left.register(bytes(SIZE))
        await left.write(source, remote)
        await memory.aclose()
        traffic = Traffic(left, right, 7)
        running = asyncio.create_task(traffic.run())
        with pytest.raises(aiote.TransferError):
            await left.write_imm(source, remote, IMM + 1)
        await running
        traffic.check()
        assert "peer.lost" not in seen
        assert right.counter(IMM + 1).value == 0


async def test_more_immediates_than_a_tally_holds_count_exactly_when_a_rail_fails():
    """More values than a tally holds, before and after a rail is lost."""
    async with railed(2) as (left, right, _):
        target = across(left, right, bytearray(8))
        for start in (0, 3000):
            transfers = [left.submit_write_imm(None, target, start + i) for i in range(3000)]
            if start:
                cut(data_connections(left, right)[0])
            for transfer in transfers:
                await transfer
        for imm in range(6000):
            with right.counter(imm) as counter:
                await counter.wait(1)
                assert counter.value == 0
