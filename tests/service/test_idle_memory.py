"""Memory that peers have lent each other for calls goes back when nobody uses it, and comes again."""

from __future__ import annotations

from typing import Any

import anyio
import numpy
import pytest
from numpy.typing import NDArray

from aiote import service
from aiote.service.memory import FIRST_BYTES, IDLE_S, LEND_BYTES
from aiote.testing import Fabric, run

PEERS = 20
TICK_S = 0.00002
LIMITS = service.Limits(total_bytes=PEERS * (64 << 20), peer_bytes=64 << 20)


class Slow(service.Service):
    @service.method
    async def double(self, data: NDArray[numpy.int64], out: service.Out[numpy.int64], seconds: float) -> NDArray[Any]:
        await anyio.sleep(seconds)
        out[: data.size] = data[: out.size]
        return data * 2


async def call(client: Slow, seconds: float = 0.0, count: int = LEND_BYTES) -> None:
    data, out = numpy.arange(count), numpy.zeros(LEND_BYTES // 8, numpy.int64)
    numpy.testing.assert_array_equal(await client.double(data, out, seconds), data * 2)
    numpy.testing.assert_array_equal(out[:count], data[: out.size])


def spent(client: Any) -> int:
    return client._caller.endpoint.budget.used


def test_connected_peers_that_are_idle_hold_no_memory():
    async def main(fabric: Fabric) -> None:
        async with fabric.open_engine() as there, service.serve(there, Slow(), limits=LIMITS) as server:
            async with anyio.create_task_group() as group:
                clients, done = [], anyio.Event()

                async def peer() -> None:
                    async with fabric.open_engine() as here:
                        clients.append(service.client(here, there.address, Slow))
                        await call(clients[-1])
                        await done.wait()

                for _ in range(PEERS):
                    group.start_soon(peer)
                await anyio.sleep(1)
                budget = server.endpoint.budget
                # Arguments, results there, and what is filled.
                assert budget.used >= PEERS * (LEND_BYTES * 8 + FIRST_BYTES)
                assert all(spent(client) >= LEND_BYTES * 8 for client in clients)
                await anyio.sleep(2 * IDLE_S + 1)
                assert len(there.peers) == PEERS
                assert budget.used == 0
                assert not any(map(spent, clients))
                assert not there._links.leases._live
                assert server.endpoint._sweeper is None
                for client in clients:
                    await call(client)
                assert budget.used > 0
                done.set()

    run(main)


def test_memory_in_use_is_not_given_back():
    async def main(fabric: Fabric) -> None:
        async with fabric.open_engine() as there, fabric.open_engine() as here:
            async with service.serve(there, Slow(), limits=LIMITS) as server:
                client = service.client(here, there.address, Slow)
                await call(client)
                async with anyio.create_task_group() as group:
                    group.start_soon(call, client, 10 * IDLE_S)
                    for _ in range(10):
                        await anyio.sleep(IDLE_S / 2)
                        # One call now and then keeps what it needs.
                        await call(client, count=10)
                        await call(client, count=1 << 21)
                    (link,) = server.endpoint._links.values()
                    assert link.values.lent_memory.nbytes >= 16 << 20
                await anyio.sleep(3 * IDLE_S)
                assert server.endpoint.budget.used == spent(client) == 0

    run(main)


@pytest.mark.parametrize("seed", range(4))
def test_calls_that_come_as_memory_goes_back_are_served(seed):
    """All that one peer may have is asked for anew in the moment in which it is given back."""

    async def main(fabric: Fabric) -> None:
        limits = service.Limits(peer_bytes=6 << 20, total_bytes=18 << 20)
        async with fabric.open_engine() as there, fabric.open_engine() as here:
            async with service.serve(there, Slow(), limits=limits):
                client = service.client(here, there.address, Slow, limits=limits)
                await call(client, count=5 << 17)
                for turn in range(40):
                    link = client._caller._link
                    while link.values.borrowed_memory.segments:
                        await anyio.sleep(TICK_S)
                        link.values.sweep()
                    await anyio.sleep(turn * TICK_S)
                    await call(client, count=(5 << 17) + turn % 2 * (1 << 16))

    run(main, seed)
