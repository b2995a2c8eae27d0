"""A loop that is held up for more than a heartbeat's interval, on one side or both: no peer is lost by that.

The interval is a quarter of the default one and a hold 1.2 of them; the limit is long enough for a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

import aiote
from support.engines.every_verb import ECHOED, Mix
from support.engines.opening import PATIENCE_S, opened, real_provider, served_on, until
from support.process.children import Child

pytestmark = [
    pytest.mark.libfabric,
    pytest.mark.one_library,
    pytest.mark.blocking_allowed("the loop is held up on purpose"),
]

SIZE = 1 << 18
INTERVAL_S = 0.25
HOLD_S = 1.2 * INTERVAL_S
TIMES = {"heartbeat_interval": INTERVAL_S, "heartbeat_timeout": 8 * INTERVAL_S}
SIDES = ["ours", "theirs", "both"]


async def held_up(side: str, child: Child, seconds: float = HOLD_S) -> None:
    """Hold up loops once."""
    if side != "ours":
        child.tell("hold", seconds=seconds)
    if side != "theirs":
        time.sleep(seconds)
    if side != "ours":
        await child.answer()


async def again_and_again(side: str, child: Child) -> None:
    """Hold up loops at several moments of the interval; at last, for more than the limit, hardly ever let go."""
    for part in (0.4, 0.95, *[0.1] * 7):
        await held_up(side, child)
        await anyio.sleep(part * INTERVAL_S)


@asynccontextmanager
async def still_served(provider: str, held: Child) -> AsyncIterator[tuple[aiote.Engine, aiote.Peer]]:
    """An engine and its peer in a child; in the end the two must still know each other, and a third be served."""
    with anyio.fail_after(PATIENCE_S):
        await held.open(provider, SIZE, **TIMES)
        async with opened(provider, **TIMES) as engine, opened(provider, **TIMES) as other:
            await engine.connect(other.address)
            peer = await engine.connect(held.address)
            yield engine, peer
            assert not peer.lost, peer.reason
            assert (await held.ask("peers"))["peers"] == [str(engine.address)]
            await served_on(engine, other)


@real_provider
@pytest.mark.verbs_once("side")
@pytest.mark.parametrize("side", SIDES)
async def test_an_idle_connection_survives_a_busy_loop(provider, side, child):
    held = child()
    async with still_served(provider, held):
        await again_and_again(side, held)


@real_provider
@pytest.mark.parametrize("side", SIDES)
async def test_transfers_survive_a_busy_loop(provider, side, child):
    held = child()
    async with still_served(provider, held) as (engine, peer):
        target = engine.register(bytearray(SIZE))
        await held.ask("take")
        await held.ask("flood", descriptor=target.descriptor.hex(), imm=ECHOED)
        mix = Mix(engine, peer, held.descriptor)
        await again_and_again(side, held)
        assert mix.ended == {}
        assert all(mix.done.values()), mix.done
        await mix.cancel()


@pytest.mark.parametrize("side", SIDES)
async def test_the_default_times_survive_a_loop_that_is_busy_for_a_second(side, child):
    held = child()
    with anyio.fail_after(PATIENCE_S):
        await held.open("tcp", SIZE)
        async with opened("tcp") as engine:
            peer = await engine.connect(held.address)
            mix = Mix(engine, peer, held.descriptor)
            await held.ask("take")
            await held_up(side, held, 1.1)
            before = dict(mix.done)
            await until(lambda: mix.ended or all(mix.done[name] > before[name] for name in before if name != "wait"))
            assert mix.ended == {}
            assert not peer.lost
            assert (await held.ask("peers"))["peers"] == [str(engine.address)]
            await mix.cancel()
