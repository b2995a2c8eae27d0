"""Calls, cancelled at random, on servers that are drained, stopped and killed: each ends once, truly.

`make test` makes four thousand of them, `make test-all` twenty thousand.
"""

from __future__ import annotations

import random

import anyio
import numpy
from numpy.typing import NDArray

import aiote
from aiote import service
from aiote.testing import Fabric, run
from support.machine import LONG

SEEDS = range(10 if LONG else 2)
CALLS, CALLERS, SERVERS = 2000, 20, 3
LIMITS = service.Limits(slots=64, calls=8, queue=8)


class Storm(service.Service):
    """A service, those who serve it, those who call it, and what became of each call."""

    def __init__(self, fabric: Fabric, seed: int) -> None:
        self.fabric = fabric
        self.rng = random.Random(seed)
        self.ran: dict[int, int] = {}
        self.ended: dict[int, str] = {}
        self.known: dict[int, aiote.Address] = {}
        self.over = anyio.Event()

    @service.method
    async def work(self, number: int, data: NDArray[numpy.int32]) -> NDArray[numpy.int32]:
        self.ran[number] = self.ran.get(number, 0) + 1
        await anyio.sleep(self.rng.random() * 0.01)
        if number % 17 == 0:
            raise LookupError(str(number))
        return data + number

    async def addresses(self) -> list[aiote.Address]:
        while not self.known:
            await anyio.sleep(0.01)
        return list(self.known.values())

    async def live(self, number: int) -> None:
        """Serve, and end again and again: drained, stopped or killed."""
        while not self.over.is_set():
            async with self.fabric.open_engine() as engine, service.serve(engine, self, limits=LIMITS) as server:
                self.known[number] = engine.address
                with anyio.move_on_after(0.05 + self.rng.random() * 0.3):
                    await self.over.wait()
                kind = self.rng.choice(("drain", "stop", "kill"))
                # Its end is known to the callers before, or not.
                if kind != "stop":
                    del self.known[number]
                if kind == "drain":
                    await server.drain()
                elif kind == "kill":
                    engine.abort()
            self.known.pop(number, None)

    async def call(self, client: Storm, number: int) -> None:
        data = numpy.arange(self.rng.choice((4, 5000)), dtype=numpy.int32)
        with anyio.CancelScope() as scope:
            if self.rng.random() < 0.3:
                scope.deadline = anyio.current_time() + self.rng.random() * 0.01
            try:
                numpy.testing.assert_array_equal(await client.work(number, data), data + number)
                self.note(number, "done")
            except service.RemoteError as error:
                assert error.message == repr(str(number)) or error.message == str(number)
                self.note(number, "raised")
            except service.CallError as error:
                self.note(number, error.ran)
            except aiote.PeerError:
                self.note(number, "no")
        if number not in self.ended:
            self.note(number, "cancelled")

    def note(self, number: int, how: str) -> None:
        assert number not in self.ended
        self.ended[number] = how

    async def calls(self, client: Storm, numbers: range) -> None:
        for number in numbers:
            await self.call(client, number)

    async def play(self) -> None:
        """Let all calls end, then see that nothing is held by any of them."""
        async with self.fabric.open_engine() as here:
            client = service.client(here, self, Storm)
            async with anyio.create_task_group() as servers:
                for number in range(SERVERS):
                    servers.start_soon(self.live, number)
                async with anyio.create_task_group() as callers:
                    for first in range(CALLERS):
                        callers.start_soon(self.calls, client, range(first, CALLS, CALLERS))
                self.over.set()
            endpoint = client._caller.endpoint  # type: ignore[attr-defined]
            with anyio.fail_after(60):
                while endpoint._links or endpoint.budget.used:
                    await anyio.sleep(0.01)
            assert endpoint.registrations.in_use == 0

    def check(self) -> None:
        """Compare what the callers heard with what ran."""
        assert len(self.ended) == CALLS
        for number, how in self.ended.items():
            times = self.ran.get(number, 0)
            # Only what did not run is called again.
            assert times <= 1, number
            assert (how, times) not in {("done", 0), ("raised", 0), ("no", 1)}, number


def test_thousands_of_calls_end_once_with_the_truth():
    ends: set[str] = set()
    for seed in SEEDS:

        async def main(fabric: Fabric, seed: int = seed) -> Storm:
            storm = Storm(fabric, seed)
            await storm.play()
            return storm

        storm = run(main, seed)
        storm.check()
        ends.update(storm.ended.values())
    assert ends >= {"done", "raised", "cancelled", "perhaps"}
