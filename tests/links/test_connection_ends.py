"""Whatever ends the service of a connection loses the peer, on both sides, and it may connect again."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import anyio
import pytest

import aiote
import aiote.aio as aio
from aiote.aio.loops import current_loop
from aiote.core.control_frames import Bye, Failed, RailDown
from support.engines.control_peers import Pair
from support.engines.opening import PATIENCE_S, linked, opened, served_on, until

TWO_RAILS = ["127.0.0.1"] * 2
OFTEN = {"heartbeat_interval": 0.1, "heartbeat_timeout": 10.0}


def messages(session, far, monkeypatch, mistake):
    monkeypatch.setattr(session.channels, "receive", mistake)
    far.channels._send(RailDown(0, 0, "", ()))


def heartbeats(session, far, monkeypatch, mistake):
    monkeypatch.setattr(session.channels, "tick", mistake)


def notices(session, far, monkeypatch, mistake):
    monkeypatch.setattr(session.channels, "notice", mistake)
    session.notice(SimpleNamespace(notices=lambda: [(0, 5)]))


def rails(session, far, monkeypatch, mistake):
    monkeypatch.setattr(session.channels, "fail", mistake)
    session.rail_failed(session._link, 0, "pulled", -1)


@pytest.mark.parametrize("kind", [RuntimeError, aiote.UsageError, KeyError])
@pytest.mark.parametrize("broken", [messages, heartbeats, notices, rails])
async def test_any_exception_loses_the_peer(kind, broken, monkeypatch):
    """Its side is closed, the other side hears it, another peer is served on, and it may come back."""
    reported: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: reported.append(kind))

    def mistake(*_args: object) -> None:
        raise kind("on purpose")

    with anyio.fail_after(PATIENCE_S):
        async with linked("socket", TWO_RAILS, **OFTEN) as (left, right), opened("socket", TWO_RAILS, **OFTEN) as other:
            await other.connect(left.address)
            there = left._links.find_or_connect(right.address)
            back = right._links.find_or_connect(left.address)
            broken(there.session, back.session, monkeypatch, mistake)
            assert "on purpose" in await there.wait_closed()
            assert "on purpose" in await back.wait_closed()
            assert there.link.closed
            assert reported == ([] if kind is aiote.UsageError else [kind])
            assert [peer.address for peer in left.peers] == [other.address]
            await left.connect(right.address)
            await served_on(left, right)
            await served_on(left, other)


async def test_more_immediates_than_a_frame_holds_are_told_in_several_frames():
    """A busy engine acknowledges late; when a channel fails then, what came is told in several frames."""
    many = 5000
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket", TWO_RAILS, **OFTEN) as (left, right):
            there = left._links.find_or_connect(right.address)
            seen: list[str] = []
            left.listen_events(lambda event: seen.append(event.name))
            channels = there.session.channels
            notice, channels.notice = channels.notice, lambda number, errnum: None
            for imm in range(many):
                await left.write_imm(None, there.peer, imm, rail=0)
            channels.notice = notice
            channels.fail(0, "on purpose")
            await until(lambda: "rail.back" in seen)
            assert seen == ["rail.failed", "rail.back"]
            for imm in range(many):
                with right.counter(imm) as counter:
                    assert counter.value == 1
            await served_on(left, right)


class Silent:
    """A stream on which nothing is ever read, and whatever is sent goes."""

    def __init__(self, words: list[bytes]) -> None:
        self.words = words

    async def receive(self, _most: int) -> bytes:
        if not self.words:
            raise anyio.EndOfStream
        return self.words.pop(0)

    async def send(self, _data: bytes) -> None:
        pass

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize(("word", "agreed"), [(Bye("gone"), True), (Failed(2, "gone"), False)])
@pytest.mark.anyio
async def test_only_a_bye_says_that_the_endpoints_are_closed(word, agreed):
    both = Pair().shake()
    both.right.send(word)
    connection = aio.ControlConnection(current_loop(), Silent([both.right.data_to_send()]), both.left, "test")
    connection.linger = PATIENCE_S
    connection.start()
    connection.send(Bye("torn down"))
    assert await connection.wait_for_bye() is agreed
    await connection.aclose()
