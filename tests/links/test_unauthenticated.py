"""Whoever connects to the control port and is no engine: heard out, told what is wrong, never in the way."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from dataclasses import replace

import anyio
import pytest

from aiote.core.control_frames import Hello, encode, frame
from aiote.core.handshake import VERSION
from support.engines.opening import PATIENCE_S, linked, opened, pair, served_on, until
from support.engines.raw_clients import Stranger, refusals, stranger
from support.process.open_resources import descriptors

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

NEVER_S = 1000.0
"""A limit that no test waits for: what ends sooner did not end by it."""


def hello(**changes: object) -> bytes:
    """Return a well-formed Hello to anyone, with some fields changed."""
    fields: dict = {
        "version_min": VERSION,
        "version_max": VERSION,
        "nonce": b"n" * 32,
        "identity": b"i" * 16,
        "incarnation": 1,
        "target_identity": bytes(16),
        "target_incarnation": 0,
        "keyed": False,
    }
    return frame(encode(Hello(**{**fields, **changes})), None)


WRONG = {
    "http": b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "a frame of 4 GiB": b"\xff\xff\xff\xff\x01",
    "a frame over the limit": b"\0\0\x04\x01" + b"\x01" * 1025,
    "an unknown kind": b"\0\0\0\x02\xee\0",
    "a message that comes later": b"\0\0\0\x09\x0a" + bytes(8),
    "a hello cut short": b"\0\0\0\x10" + hello()[4:20],
    "a hello with more behind it": (len(hello()) - 3).to_bytes(4, "big") + hello()[4:] + b"!",
    "a hello with other magic": hello().replace(b"aiote", b"etoia"),
    "two hellos": hello() * 2,
    "a hello of no version": hello(version_min=0, version_max=0),
    "a hello of later versions": hello(version_min=200, version_max=300),
    "a hello of nobody": hello(identity=bytes(16)),
    "a hello to somebody else": hello(target_identity=b"x" * 16, target_incarnation=1),
    "a hello with a key": hello(keyed=True),
}


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in WRONG.items()])
async def test_wrong_bytes_are_refused_at_once(words):
    with anyio.fail_after(PATIENCE_S):
        async with pair("tcp", connect_timeout=NEVER_S) as (left, right):
            reasons = refusals(right)
            async with stranger(right.address) as one:
                await one.say(words)
                await one.hear(until_end=True)
                await until(lambda: reasons)
                await left.connect(right.address)
            assert len(reasons) == 1
            assert right.peers[0].address == left.address


async def test_a_refusal_is_told_to_the_stranger():
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp", connect_timeout=NEVER_S) as engine, stranger(engine.address) as one:
            await one.say(hello(keyed=True))
            assert b"give both the same" in await one.hear(until_end=True)


@pytest.mark.parametrize("cut", [1, 4, 5, 60, -1])
async def test_a_hello_that_breaks_off_is_refused(cut):
    with anyio.fail_after(PATIENCE_S):
        async with pair("tcp", connect_timeout=NEVER_S) as (left, right):
            reasons = refusals(right)
            async with stranger(right.address) as one:
                await one.say(hello()[:cut])
            await until(lambda: reasons)
            assert "ended within a frame" in reasons[0]
            await left.connect(right.address)


async def test_silent_connections_beyond_the_limit_make_room_for_an_engine():
    """They cannot fill the process: the oldest make room, and a real engine gets through."""
    with anyio.fail_after(PATIENCE_S):
        async with pair("tcp", connect_timeout=NEVER_S) as (left, right):
            reasons = refusals(right)
            silent = [Stranger() for _ in range(300)]
            for one in silent:
                await one.dial(right.address)
            await left.send(right.address, b"past them all")
            assert (await right.recv()).data == b"past them all"
            await until(lambda: len(reasons) >= 44)
            assert set(reasons) == {"too many connections that have not proven themselves"}
            assert len(reasons) < 60
            for one in silent:
                one.socket.close()


async def test_a_process_without_descriptors_accepts_later():
    """Descriptors that ran out are the machine's trouble, not the listener's end."""
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp", connect_timeout=NEVER_S) as engine:
            one = Stranger()
            spare = [os.dup(0)]
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare[0] + 1, before[1]))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        spare.append(os.dup(0))
                await one.dial(engine.address)
                await anyio.sleep(0.05)
            finally:
                for descriptor in spare:
                    os.close(descriptor)
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            with one.socket:
                await one.say(hello(keyed=True))
                assert b"give both the same" in await one.hear(until_end=True)
            async with opened("tcp") as other:
                await other.connect(engine.address)


@pytest.mark.parametrize(
    "trouble", [OSError(errno.ENETDOWN, "Network is down"), OSError(errno.EPROTO, "proto"), ValueError("?")]
)
async def test_an_accept_that_fails_once_refuses_nobody_later(trouble, monkeypatch):
    """Whatever it is: those who are connected stay, and those who come later are accepted."""
    with anyio.fail_after(PATIENCE_S):
        async with opened("socket") as engine, opened("socket") as early, opened("socket") as late:
            reasons = refusals(engine)
            (listener,) = engine._links._listener._listeners
            accept = listener.accept
            troubles = [trouble]

            async def fails_once() -> object:
                if troubles:
                    raise troubles.pop()
                return await accept()

            monkeypatch.setattr(listener, "accept", fails_once)
            # This one ends the accept that was under way.
            await early.connect(engine.address)
            await until(lambda: not troubles)
            await late.connect(engine.address)
            await served_on(engine, early)
            await served_on(engine, late)
            assert len(reasons) == 1
            assert "could not be accepted" in reasons[0]


async def test_a_trouble_that_lasts_is_told_once_and_again_when_it_changes(monkeypatch):
    """As one connection that waits for a descriptor: it could not be accepted for as long as there is none."""
    none_here, none_at_all = (OSError(number, os.strerror(number)) for number in (errno.EMFILE, errno.ENFILE))
    monkeypatch.setattr("aiote.aio.control_stream.ACCEPT_PAUSES_S", (1e-3, 2e-3))
    with anyio.fail_after(PATIENCE_S):
        async with opened("socket") as engine, opened("socket") as early, opened("socket") as late:
            reasons = refusals(engine)
            (listener,) = engine._links._listener._listeners
            accept, troubles = listener.accept, [none_here] * 9 + [none_at_all] * 9 + [none_here]

            async def fails() -> object:
                if troubles:
                    raise troubles.pop(0)
                return await accept()

            monkeypatch.setattr(listener, "accept", fails)
            await early.connect(engine.address)
            await until(lambda: not troubles)
            await late.connect(engine.address)
            assert [reason.partition("[Errno ")[2][:2] for reason in reasons] == ["24", "23", "24"]
            # One that was accepted ends it: the next trouble is another one.
            troubles = [none_here] * 3
            async with opened("socket") as third, opened("socket") as fourth:
                await third.connect(engine.address)
                await until(lambda: not troubles)
                await fourth.connect(engine.address)
            assert len(reasons) == 4


def listening_ports() -> set[int]:
    """Return the TCP ports at which this process listens, the libraries' own among them."""
    ports = set()
    for number, leads_to in descriptors().items():
        if leads_to.startswith("socket:"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.add(copy.getsockname()[1])
    return ports


async def test_silent_connections_to_the_data_ports_go_with_the_peer():
    """libfabric 2.5.1 and 1.17 forget them when the endpoint is closed; the leak check is the rest of this test."""
    with anyio.fail_after(PATIENCE_S), contextlib.ExitStack() as stack:
        silent = []
        others = listening_ports()  # of this process, which may have listeners of other tests
        async with linked("tcp") as (left, right):
            data_ports = listening_ports() - {left.address.port, right.address.port} - others
            assert data_ports
            before = len(descriptors())
            for port in data_ports:
                silent.append(one := Stranger())
                stack.enter_context(one.socket)
                await one.dial(replace(left.address, port=port))
            await until(lambda: len(descriptors()) >= before + 2 * len(silent))
            await left.send(right.address, b"not in the way")
            assert (await right.recv()).data == b"not in the way"
        for one in silent:
            assert await one.hear(until_end=True) == b""
