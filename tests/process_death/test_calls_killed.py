"""Calls between processes that are stopped and killed: each ends once, with the truth, and nothing of it comes late."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy
import pytest

import aiote
from aiote import service
from aiote.service.endpoint import CallEndpoint
from aiote.service.memory import LEND_BYTES
from support.engines.opening import LOST_SOON, PATIENCE_S, opened, until
from support.process.children import Child
from support.service.arrays import Numbered, Served, held

pytestmark = pytest.mark.anyio

CALLERS, BETWEEN = 12, 30
SOON = {**LOST_SOON, "drain_timeout": LOST_SOON["heartbeat_timeout"]}
"""A call that waits for a revocation is not to fail before its peer counts as lost."""
each_kind = pytest.mark.parametrize("provider", ["local", "socket"])


class Storm:
    """Callers of a service on several processes, and how each call ended."""

    def __init__(self, engine: aiote.Engine) -> None:
        self.known: list[Child] = []
        self.client = service.client(engine, self, Numbered)
        self.ended: dict[int, str] = {}
        self.left: list[tuple[numpy.ndarray, numpy.ndarray]] = []
        self.over = False
        self.rng = random.Random(11)
        self.numbers = itertools.count()

    async def addresses(self) -> list[aiote.Address]:
        return [child.address for child in self.known]

    async def caller(self) -> None:
        while not self.over:
            number = next(self.numbers)
            count = LEND_BYTES + number if number % 4 == 0 else 20_000
            data = numpy.frombuffer(self.rng.randbytes(count), numpy.uint8)
            out, how = numpy.zeros_like(data), "cancelled"
            with anyio.move_on_after(self.rng.random() * 0.01 if number % 3 == 0 else PATIENCE_S):
                how = await self.call(number, data, out)
            assert number not in self.ended
            self.ended[number] = how
            if how != "done":
                self.left.append((out, out.copy()))

    async def call(self, number: int, data: numpy.ndarray, out: numpy.ndarray) -> str:
        try:
            result = await self.client.work(number, data, out)
        except service.CallError as error:
            return error.ran
        numpy.testing.assert_array_equal(result, data ^ 255)
        numpy.testing.assert_array_equal(out, data[::-1])
        return "done"

    async def more(self, count: int = BETWEEN) -> None:
        """Wait until so many more calls have ended."""
        enough = len(self.ended) + count
        await until(lambda: len(self.ended) >= enough)

    def check(self, journal: Path) -> None:
        ran = [int(line) for line in journal.read_text().split()]
        assert len(ran) == len(set(ran))
        for number, how in self.ended.items():
            assert (how, number in ran) not in {("done", False), ("no", True)}, number
        for out, as_it_was in self.left:
            numpy.testing.assert_array_equal(out, as_it_was)


@each_kind
async def test_calls_to_processes_that_are_stopped_and_killed(provider, child: Callable[[], Child], tmp_path):
    journal = tmp_path / "ran"
    journal.touch()
    with anyio.fail_after(PATIENCE_S):
        children = [child() for _ in range(5)]
        async with opened(provider, **SOON) as engine:
            for one in children:
                await one.open(provider, **SOON)
                await one.ask("serve", journal=str(journal))
            storm = Storm(engine)
            first, second, third, fourth, fifth = children
            storm.known += [first, second, third]
            async with anyio.create_task_group() as group:
                for _ in range(CALLERS):
                    group.start_soon(storm.caller)
                await storm.more()
                # A pause is no loss.
                await first.stop()
                await storm.more()
                first.resume()
                await storm.more()
                second.kill()
                storm.known[1] = fourth
                await storm.more()
                # One that is lost while it stands still goes on with its calls later, and reaches nobody.
                lost = engine.find_peer(third.address)
                await third.stop()
                await lost.wait_closed()
                storm.known[2] = fifth
                await storm.more()
                third.resume()
                await storm.more()
                await first.stop()
                await storm.more(20)
                first.kill()
                del storm.known[0]
                await storm.more()
                storm.over = True
            for one in (third, fourth, fifth):
                while any((await one.ask("serving")).values()):
                    await anyio.sleep(0.01)
            await until(lambda: not any(held(engine).values()))
            storm.check(journal)
            assert set(storm.ended.values()) >= {"done", "cancelled", "perhaps"}


@each_kind
async def test_callers_that_are_stopped_and_killed_hold_nothing(provider, child: Callable[[], Child]):
    with anyio.fail_after(PATIENCE_S):
        children = [child() for _ in range(3)]
        async with opened(provider, **SOON) as engine, service.serve(engine, Served(engine)) as server:
            for one in children:
                await one.open(provider, **SOON)
                one.tell("use", address=str(engine.address), calls=10_000)
            for one in children:
                began = server.calls
                await until(lambda began=began: server.calls > began + 20)
                if one is not children[0]:
                    await one.stop()
                if one is children[2]:
                    # It is lost by its silence before it is killed.
                    await until(lambda: not engine.peers)
                one.kill()
            endpoint = CallEndpoint.of(engine)
            await until(lambda: not (server.running or endpoint._links or endpoint.budget.used))
            assert not engine._links.leases._live
            assert not endpoint.registrations.in_use
