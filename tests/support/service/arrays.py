"""A service of arrays in every direction, and a caller that checks every byte: to be called while something breaks."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy
from numpy.typing import NDArray

import aiote
from aiote import service
from aiote.service.endpoint import CallEndpoint

Octets = NDArray[numpy.uint8]
LEAST, MOST = 65 << 10, 1 << 20
MESSAGE_BYTES = 4096
"""More than the messages of one call take at either side, whatever its arrays."""


class Arrays(service.Service):
    @service.method
    async def turn(self, data: Octets, out: service.Out[numpy.uint8]) -> Octets:
        out[...] = data[::-1]
        return data ^ 255

    @service.method
    async def parts(self, data: Octets, count: int) -> AsyncIterator[Octets]:
        for number in range(count):
            yield data + number

    @service.method
    async def counters(self) -> dict[str, int]:
        raise NotImplementedError


class Served(Arrays):
    """The same, where it is served."""

    name = "Arrays"

    def __init__(self, engine: aiote.Engine) -> None:
        self._engine = engine

    @service.method
    async def counters(self) -> dict[str, int]:
        return counters(self._engine)


class Numbered(service.Service):
    @service.method
    async def work(self, number: int, data: Octets, out: service.Out[numpy.uint8]) -> Octets:
        raise NotImplementedError


class Noted(Numbered):
    """The same, where it is served: what has begun is in a file, though the process be killed."""

    name = "Numbered"

    def __init__(self, journal: str) -> None:
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND)

    @service.method
    async def work(self, number: int, data: Octets, out: service.Out[numpy.uint8]) -> Octets:
        os.write(self._journal, b"%d\n" % number)
        await anyio.sleep(random.random() * 0.005)
        out[...] = data[::-1]
        return data ^ 255


def held(engine: aiote.Engine) -> dict[str, int]:
    """Return what calls hold of an engine: nothing, once they are over, but memory that is lent to a live peer."""
    endpoint = CallEndpoint.of(engine)
    links = tuple(endpoint._links.values())
    lent = {region.memory for link in links for _, region in link.values.lent_memory._segments.values()}
    return {
        "running": sum(len(link.running) for link in links),
        "calls": sum(len(link.calls) for link in links),
        "placed": sum(
            link.values._held_bytes + link.values.borrowed_memory.taken_bytes + link.unfolded_bytes for link in links
        ),
        "staged": sum(not one.free for link in links for one, _, _ in link.values.staging.segments.values()),
        "registered": endpoint.registrations.in_use,
        "leases": len(set(engine._links.leases._live) - lent),
    }


def counters(engine: aiote.Engine) -> dict[str, int]:
    """Return what an engine has sent: bytes in messages, bytes one-sided."""
    endpoint = CallEndpoint.of(engine)
    return {"messages": endpoint.message_bytes, "arrays": endpoint.array_bytes}


async def use(engine: aiote.Engine, address: aiote.Address | str, calls: int, width: int = 4) -> dict[str, Any]:
    """Make so many calls of either kind, `width` at a time; tell how many bytes of arrays each side had to send, and
    what each has sent. Raises AssertionError for a wrong byte.
    """
    client = service.client(engine, address, Arrays)
    needed, draw = {"here": 0, "there": 0}, random.Random(calls)
    before = counters(engine), await client.counters()

    async def call(number: int) -> None:
        data = numpy.frombuffer(draw.randbytes(draw.randrange(LEAST, MOST)), numpy.uint8)
        if number % 3:
            out = numpy.zeros_like(data)
            numpy.testing.assert_array_equal(await client.turn(data, out), data ^ 255)
            numpy.testing.assert_array_equal(out, data[::-1])
            times = 2
        else:
            times = 0
            async for part in client.parts(data, 4):
                numpy.testing.assert_array_equal(part, data + times)
                times += 1
            assert times == 4
        needed["here"] += data.nbytes
        needed["there"] += times * data.nbytes

    async def worker(first: int) -> None:
        for number in range(first, calls, width):
            await call(number)

    async with anyio.create_task_group() as group:
        for first in range(width):
            group.start_soon(worker, first)
    after = counters(engine), await client.counters()
    sent = [{name: now[name] - was[name] for name in now} for now, was in zip(after, before, strict=True)]
    return {"needed": needed, "here": sent[0], "there": sent[1]}


def check(used: dict[str, Any], calls: int) -> None:
    """See that every array went one-sided, once, and messages had none of them."""
    for side in ("here", "there"):
        assert used[side]["arrays"] == used["needed"][side]
        assert used[side]["messages"] < MESSAGE_BYTES * (calls + 4)
