"""A connection that breaks takes no message with it that was called sent."""

from __future__ import annotations

import asyncio
import random

import pytest

import aiote
from support.engines.data_connections import cut, data_connections
from support.engines.opening import LOST_SOON, linked, until

pytestmark = pytest.mark.libfabric

MESSAGES = 60


async def take(engine: aiote.Engine, into: list[int]) -> None:
    async for message in engine.messages():
        into.append(int(message.data))


@pytest.mark.parametrize("rails", [1, 2, 4])
async def test_what_was_sent_has_come_wherever_its_connection_breaks(rails):
    for seed in range(8):
        await send_and_cut(rails, random.Random(seed))


async def send_and_cut(rails: int, draw: random.Random) -> None:
    """Cut right behind the completion: what only a socket had taken by then would be gone."""
    async with linked("tcp", ["127.0.0.1"] * rails, **LOST_SOON) as (left, right):
        lost: list[str] = []
        left.listen_events(lambda event: lost.append(event.name))
        sent, got = [], []
        taking = asyncio.create_task(take(right, got))
        for number in range(MESSAGES):
            try:
                await left.send(right.address, b"%d" % number)
            except (aiote.TransferError, aiote.PeerError):
                assert rails == 1
                break
            sent.append(number)
            if number % 20 == 13 and (connections := data_connections(left, right)):
                cut(draw.choice(connections))
        await until(lambda: set(sent) <= set(got))
        assert len(set(got)) == len(got)
        assert len(sent) == MESSAGES or "peer.lost" in lost
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
