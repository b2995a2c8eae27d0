"""Nobody uninvited: whoever has no key, or stands in the middle, gets nothing done and nothing to guess with."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import aiote
from aiote.core.control import ControlProtocol, Refusal, Role
from aiote.core.control_frames import Challenge, Hello, Proof, Refused, Welcome, decode, encode, frame
from aiote.core.descriptor import RegionDescriptor
from aiote.core.handshake import HandshakeConfig
from support.engines.opening import PATIENCE_S, opened, until
from support.engines.raw_clients import Stranger, refusals, stranger
from support.network.relay import Relay, relayed

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

KEY = b"0123456789abcdef0123456789abcdef"
NEVER_S = 1000.0
"""A limit that no test waits for: what ends sooner did not end by it."""


def keyed(**more: Any) -> Any:
    return opened("tcp", cluster_key=KEY, host="127.0.0.1", connect_timeout=NEVER_S, **more)


def once(kind: type[Any], change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Change the first frame if it is a message of that kind, and let everything else pass."""
    left = [kind]

    def apply(data: bytes) -> bytes:
        if left and isinstance(message := decode(data[4:]), left.pop()):
            return frame(encode(change(message)))
        return data

    return apply


def other(kind: type[Any], name: str) -> Callable[[Any], Any]:
    """Return what gives one field of a message another value."""

    def change(message: Any) -> Any:
        old = getattr(message, name)
        new: Any = (
            not old if isinstance(old, bool) else old + 1 if isinstance(old, int) else old[:-1] + bytes([old[-1] ^ 1])
        )
        return dataclasses.replace(message, **{name: new})

    return change


def fields(kind: type[Any]) -> list[str]:
    return [item.name for item in dataclasses.fields(kind) if item.name != "magic"]


async def fails(left: aiote.Engine, right: aiote.Engine, relay: Relay) -> tuple[str, str]:
    """Have `left` connect through a relay, in vain; return its error and what `right` said."""
    told = refusals(right)
    with pytest.raises(aiote.PeerError) as caught:
        await left.connect(relay.address)
    await until(lambda: told)
    assert left.peers == right.peers == ()
    return caught.value.reason, told[0]


async def test_a_relay_that_changes_nothing_is_a_wire():
    """The others fail because of what they change."""
    with anyio.fail_after(PATIENCE_S):
        async with keyed() as left, keyed() as right, relayed(right.address) as relay:
            peer = await left.connect(relay.address)
            await left.send(peer, b"through the relay")
            assert (await right.recv()).data == b"through the relay"
            kinds = [[type(decode(data[4:])) for data in way[:2]] for way in relay.said[0]]
            assert kinds == [[Hello, Proof], [Challenge, Welcome]]


@pytest.mark.parametrize("name", fields(Hello))
async def test_a_hello_that_was_changed_on_the_way_is_refused_by_both(name):
    with anyio.fail_after(PATIENCE_S):
        async with keyed() as left, keyed() as right, relayed(right.address) as relay:
            relay.forth = once(Hello, other(Hello, name))
            assert all(await fails(left, right, relay))


@pytest.mark.parametrize("name", fields(Challenge))
async def test_a_challenge_that_was_changed_on_the_way_is_refused_by_both(name):
    with anyio.fail_after(PATIENCE_S):
        async with keyed() as left, keyed() as right, relayed(right.address) as relay:
            relay.back = once(Challenge, other(Challenge, name))
            assert all(await fails(left, right, relay))


async def test_changed_flags_do_not_talk_both_sides_out_of_their_key():
    """Both have the key, and each is told that the other has none."""
    with anyio.fail_after(PATIENCE_S):
        async with keyed() as left, keyed() as right, relayed(right.address) as relay:
            relay.forth = once(Hello, lambda hello: dataclasses.replace(hello, keyed=False))
            relay.back = once(Challenge, lambda challenge: dataclasses.replace(challenge, keyed=False))
            at_initiator, at_acceptor = await fails(left, right, relay)
            assert "the acceptor has a cluster key and the initiator has none" in at_acceptor
            assert "it refused" in at_initiator


async def test_changed_flags_do_not_let_an_engine_without_a_key_in():
    """One side has none, and the flags say otherwise on the way: the proof is what counts."""
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp", connect_timeout=NEVER_S) as left, keyed() as right, relayed(right.address) as relay:
            relay.forth = once(Hello, lambda hello: dataclasses.replace(hello, keyed=True))
            relay.back = once(Challenge, lambda challenge: dataclasses.replace(challenge, keyed=False))
            for reason in await fails(left, right, relay):
                assert "cluster keys differ" in reason


@pytest.mark.parametrize("way", ["forth", "back"])
@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("what", ["changed", "repeated", "left out"])
async def test_a_frame_changed_repeated_or_left_out_after_the_proofs_is_noticed(way, number, what):
    """From the first frame after the proofs on."""
    seen: list[bytes] = []

    def change(data: bytes) -> bytes:
        seen.append(data)
        if len(seen) != number + 1:
            return data
        return {"changed": data[:-1] + bytes((data[-1] ^ 1,)), "repeated": data * 2, "left out": b""}[what]

    with anyio.fail_after(PATIENCE_S):
        async with keyed() as left, keyed() as right, relayed(right.address) as relay:
            setattr(relay, way, change)
            told: list[aiote.Event] = []
            for engine in (left, right):
                engine.listen_events(told.append)
            try:
                peer = await left.connect(relay.address)
            except aiote.PeerError:
                pass
            else:  # what was changed comes after all that connecting waits for
                assert await peer.wait_closed()
            await until(lambda: not left.peers and not right.peers)
            reasons = " ".join(str(event.details.get("reason", "")) for event in told)
            assert "wrong tag" in reasons


async def test_a_conversation_that_was_recorded_opens_nothing():
    """To the acceptor, word by word and all at once; it goes on serving those who know the key."""
    with anyio.fail_after(PATIENCE_S):
        async with keyed() as right:
            async with keyed() as left, relayed(right.address) as relay:
                await left.connect(relay.address)
            await until(lambda: not right.peers)
            told = refusals(right)
            ((forth, _),) = relay.said
            for words in ([*forth], [b"".join(forth)], forth[:2]):
                async with stranger(right.address) as one:
                    for word in words:
                        await one.say(word)
                    await one.hear(until_end=True)
                await until(lambda: told)
                assert told.pop()
                assert right.peers == ()
            async with keyed() as third:
                await third.connect(right.address)


async def test_an_acceptor_that_was_recorded_convinces_nobody():
    with anyio.fail_after(PATIENCE_S):
        async with keyed() as left:
            async with keyed() as right, relayed(right.address) as relay:
                await left.connect(relay.address)
            await until(lambda: not left.peers)
            ((_, back),) = relay.said
            heard, error = await impostor(left, [decode(data[4:]) for data in back[:2]])
            assert "cluster keys differ" in error
            assert [type(message) for message in heard] == [Hello, Proof]


async def impostor(engine: aiote.Engine, answers: list[Any]) -> tuple[list[Any], str]:
    """Have an engine connect to somebody who is no engine; return what it said, and its error."""
    heard: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)

        async def serve() -> None:
            await anyio.wait_readable(server)
            one = Stranger()
            one.socket.close()
            one.socket, _ = server.accept()
            one.socket.setblocking(False)
            with one.socket:
                heard.append(decode((await one.hear(until_end=False))[4:]))
                challenge, welcome = answers
                await one.say(frame(encode(challenge)))
                heard.append(decode((await one.hear(until_end=False))[4:]))
                before = one.heard
                await one.say(frame(encode(welcome)))
                assert await one.hear(until_end=True) == before, "it said more"

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            with pytest.raises(aiote.PeerError) as caught:
                await engine.connect(f"127.0.0.1:{server.getsockname()[1]}")
    return heard, caught.value.reason


async def guess(engine: aiote.Engine, key: bytes) -> tuple[list[Any], list[Any]]:
    """Try a key on an engine; return the messages that came, and the events that they made."""
    protocol = ControlProtocol(Role.INITIATOR, HandshakeConfig(b"g" * 16, 1, key))
    events: list[Any] = []
    async with stranger(engine.address) as one:
        await one.say(protocol.data_to_send())
        while not protocol.is_over:
            events += protocol.receive(await one.hear(until_end=False))
            await one.say(protocol.data_to_send())
        data, messages = await one.hear(until_end=True), []
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        messages.append(decode(data[4:end]))
        data = data[end:]
    return messages, events


async def test_a_wrong_key_is_told_nothing_to_guess_with():
    """What comes back is the same for every guess, up to the fresh nonce, and holds nothing that the key made."""
    with anyio.fail_after(PATIENCE_S):
        async with keyed() as engine:
            tries = [await guess(engine, key) for key in (b"x", b"y" * 32, KEY[:-1], KEY + b"0", KEY.swapcase())]
            assert engine.peers == ()
    for messages, events in tries:
        assert [type(message) for message in messages] == [Challenge, Refused]
        assert [(type(event), event.by_us) for event in events] == [(Refusal, False)]
    assert len({messages[1] for messages, _ in tries}) == 1
    assert len({messages[0].nonce for messages, _ in tries}) == len(tries)
    assert len({dataclasses.replace(messages[0], nonce=bytes(32)) for messages, _ in tries}) == 1


async def test_every_connection_has_nonces_of_its_own():
    with anyio.fail_after(PATIENCE_S):
        async with keyed() as left, keyed() as right, relayed(right.address) as relay:
            for _ in range(5):
                peer = await left.connect(relay.address)
                peer._connection.control.end("once more")
                await until(lambda: not left.peers and not right.peers)
    first = [decode(way[0][4:]) for kept in relay.said for way in kept]
    assert [type(message) for message in first] == [Hello, Challenge] * 5
    assert len({message.nonce for message in first}) == 10


async def test_a_thousand_silent_connections_do_not_stop_a_real_one():
    with anyio.fail_after(PATIENCE_S):
        async with keyed() as left, keyed() as right:
            told = refusals(right)
            with contextlib.ExitStack() as silent:
                for _ in range(1000):
                    one = Stranger()
                    silent.enter_context(one.socket)
                    await one.dial(right.address)
                memory = bytearray(1 << 20)
                remote = left.attach(right.register(memory).descriptor)
                await left.write_imm(left.register(b"w" * len(memory)), remote, 1)
                await right.counter(1).wait(1)
                assert memory == b"w" * len(memory)
                await until(lambda: len(told) >= 1000 - 256)
                assert set(told) == {"too many connections that have not proven themselves"}
                assert len(told) < 1000 - 200
                assert len(right.peers) == 1


@pytest.mark.parametrize("provider", ["tcp", "shm"])
async def test_region_keys_are_drawn_at_random(provider):
    """Where the key is ours to choose: 64 of them differ in the upper half and in the lower, and follow no pattern."""
    async with opened(provider) as engine:
        memory = bytearray(64)
        regions = [RegionDescriptor.from_bytes(engine.register(memory).descriptor) for _ in range(64)]
    for numbers in ([region.region for region in regions], [region.keys[0].key for region in regions]):
        assert len(set(numbers)) == 64
        wide = max(numbers).bit_length()
        assert wide > 30
        assert len({number >> wide - 8 for number in numbers}) > 20
        assert len({number & 0xFF for number in numbers}) > 20
        assert len({after - before for before, after in itertools.pairwise(numbers)}) == 63
