"""One that passes the handshake and then talks nonsense: it gets no peer, and disturbs nobody who is one."""

from __future__ import annotations

import dataclasses
import socket

import anyio
import pytest

import aiote
from aiote.core.control import Authenticated
from aiote.core.control_frames import Channel, EngineOffer, Heartbeat, Mapped, RailOffer, Ready, Revoke, encode, frame
from support.engines.opening import PATIENCE_S, opened, until
from support.engines.raw_clients import LIKE_YOURS, Insider, offer, refusals

pytestmark = pytest.mark.libfabric

NEVER_S = 1000.0
"""A limit that no test waits for: what ends sooner did not end by it."""


def channel(**changes: object) -> Channel:
    """Return a channel between the first rails."""
    fields: dict = {
        "rail_local": 0,
        "rail_remote": 0,
        "generation": 0,
        "address": bytes(16),
        "imm_key": 0,
        "imm_base": 0,
        "wakeup": b"",
    }
    return Channel(**{**fields, **changes})


PIGEON = RailOffer(0, "pigeon", "carrier/1.0", "p0", 1)

SAID_AT_ONCE = {
    "no rails": (offer(rails=()), [], "no rail in common"),
    "another rail": (offer(rails=(PIGEON,)), [], "no rail in common"),
    "a pool of the size of the moon": (offer(message_bytes=2**32 - 1, pool=2**16 - 1), [], "it offers 65535 messages"),
    "no pool": (offer(pool=0), [], "it offers 0 messages"),
    "messages of no length": (offer(message_bytes=0), [], "messages of 0 bytes"),
    "a storm of heartbeats": (offer(heartbeat_ms=1), [], "asks for a heartbeat every 1 ms"),
    "a channel from a rail that is not there": (
        offer(),
        [channel(rail_local=7)],
        "channel of rails 7 and 0 out of order",
    ),
    "a channel to a rail that is not there": (offer(), [channel(rail_remote=255)], "channel of rails 0 and 255"),
    "words without a seal": (offer(), [frame(encode(Heartbeat()), None)], "broke the protocol"),
    "no words at all": (offer(), [b"\xff" * 100], "broke the protocol"),
}


async def say(engine: aiote.Engine, said: EngineOffer, messages: list, identity: bytes) -> None:
    """Pass the handshake, make an offer, say the messages, and listen until the engine hangs up."""
    insider = Insider(identity)
    with insider.socket:
        await insider.dial(engine.address)
        await insider.next(Authenticated)
        seen = await insider.next(EngineOffer)
        if said.rails == LIKE_YOURS:
            said = dataclasses.replace(said, rails=seen.rails)
        await insider.tell(said)
        for message in messages:
            await (insider.say(message) if isinstance(message, bytes) else insider.tell(message))
        await insider.hear(until_end=True)


async def nonsense(provider: str, limit: float, said: list[tuple[EngineOffer, list]]) -> list[str]:
    """Say it to an engine that has another peer; return why it refused. It goes on as if nothing had been."""
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, connect_timeout=limit) as engine, opened(provider) as honest:
            await honest.connect(engine.address)
            reasons = refusals(engine)
            async with anyio.create_task_group() as group:
                for number, (offered, messages) in enumerate(said, start=1):
                    group.start_soon(say, engine, offered, messages, bytes([number]) * 16)
            await until(lambda: len(reasons) == len(said))
            assert [peer.address for peer in engine.peers] == [honest.address]
            await honest.send(engine.address, b"still well")
            assert (await engine.recv()).data == b"still well"
            return reasons


@pytest.mark.parametrize("case", SAID_AT_ONCE)
async def test_nonsense_is_refused_at_once(case, capfd):
    said, messages, expected = SAID_AT_ONCE[case]
    (reason,) = await nonsense("tcp", NEVER_S, [(said, messages)])
    assert expected in reason
    assert capfd.readouterr().err == ""


COMES_TO_NOTHING = [
    [channel(address=b"")],
    [channel(address=b"\xff" * 256)],
    [channel(wakeup=b"\xff" * 128)],
    [channel(wakeup=b"x")],
    [Mapped()],
    [channel(), Mapped(), Heartbeat(), Revoke(0, 0, 0)],
]


@pytest.mark.parametrize("provider", ["tcp", "shm"])
async def test_nonsense_that_never_completes_is_given_up_by_the_connect_timeout(provider, capfd):
    """A connection that comes to nothing is given up by `connect_timeout` at the latest, all of them at once."""
    reasons = await nonsense(provider, 3.0, [(offer(), messages) for messages in COMES_TO_NOTHING])
    assert "no connection was made within 3.0 s" in reasons
    assert capfd.readouterr().err == ""


async def test_a_peer_whose_rail_leads_nowhere_is_lost(capfd):
    """It is taken for a peer, for all that it said was well-formed; its end is told as any peer's."""
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp", heartbeat_timeout=NEVER_S) as engine:
            insider = Insider()
            with insider.socket:
                await insider.dial(engine.address)
                await insider.next(Authenticated)
                seen = await insider.next(EngineOffer)
                await insider.tell(dataclasses.replace(offer(), rails=seen.rails))
                theirs = await insider.next(Channel)
                with socket.socket() as closed:
                    closed.bind(("127.0.0.1", 0))
                    nowhere = b"\x02\0" + closed.getsockname()[1].to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
                assert len(theirs.address) == len(nowhere)
                await insider.tell(dataclasses.replace(theirs, address=nowhere), Mapped(), Ready())
                await until(lambda: engine.peers)
                (peer,) = engine.peers
                sent = engine.submit_send(peer, b"to nobody")
            assert await peer.wait_closed()
            with pytest.raises((aiote.TransferError, aiote.PeerError)):
                await sent
    assert capfd.readouterr().err == ""
