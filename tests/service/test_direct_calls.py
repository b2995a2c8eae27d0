"""Methods without a task: they begin and end in callbacks, and a caller cannot tell them from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

import aiote
from aiote import service
from aiote.service import RemoteError, sending
from aiote.service.definition import DirectCall
from aiote.service.frames import CallFrame, unpack
from aiote.service.sending import FrameSender
from support.engines.opening import pair, until

pytestmark = pytest.mark.anyio


class Held(DirectCall):
    """A call that ends when its owner says so."""

    def __init__(self, who: service.CallInfo, word: str) -> None:
        self.who, self.word, self.cancelled = who, word, 0

    def begin(self, end: Callable[[Exception | None], None]) -> None:
        self.end = end
        if self.word == "raise":
            raise KeyError(self.word)
        if self.word == "now":
            self.finish()

    def finish(self, error: Exception | None = None) -> None:
        end, self.end = self.end, lambda _: None
        end(error)

    def cancel(self) -> None:
        self.cancelled += 1


class Holds(service.Service):
    """What is called."""

    def __init__(self) -> None:
        self.calls: list[Held] = []

    @service.method(raises=[KeyError], direct=True)
    def hold(self, word: str) -> AsyncIterator[None]:
        """Go on until told to end."""
        self.calls.append(Held(service.current_call(), word))
        return self.calls[-1]


async def proceed(info, run):
    return await run()


@asynccontextmanager
async def held(interceptors):
    async with pair("sim") as (left, right):
        holds = Holds()
        async with service.serve(right, holds, interceptors=interceptors) as server:
            try:
                yield service.client(left, right.address, Holds), holds, server
            finally:
                for call in holds.calls:
                    call.finish()


async def items(stream):
    return [item async for item in stream]


intercepted = pytest.mark.parametrize("interceptors", [[], [proceed]], ids=["plain", "intercepted"])


@intercepted
async def test_a_direct_call_ends_when_its_owner_says_so(interceptors):
    async with held(interceptors) as (client, holds, server), anyio.create_task_group() as group:
        assert await items(client.hold("now")) == []
        with pytest.raises(KeyError, match="raise"):
            await items(client.hold("raise"))
        group.start_soon(items, client.hold("later"))
        await until(lambda: len(holds.calls) == 3)
        assert holds.calls[2].who.method == "Holds/1.hold"
        assert (server.running, holds.calls[2].cancelled) == (1, 0)
        holds.calls[2].finish()
        await until(lambda: server.running == 0)


@intercepted
async def test_a_direct_call_that_is_left_is_confirmed_when_it_is_over(interceptors):
    async with held(interceptors) as (client, holds, server):
        stream, scope = client.hold("later"), anyio.CancelScope()

        async def take():
            with scope:
                await items(stream)

        async with anyio.create_task_group() as group:
            group.start_soon(take)
            await until(lambda: holds.calls)
            scope.cancel()
        await until(lambda: holds.calls[0].cancelled)
        left = False

        async def leave():
            nonlocal left
            await stream.aclose()
            left = True

        async with anyio.create_task_group() as group:
            group.start_soon(leave)
            for _ in range(50):
                await anyio.sleep(0)
            assert (server.running, left) == (1, False)
            holds.calls[0].finish()
        assert (server.running, left) == (0, True)


async def test_the_error_of_a_direct_call_reaches_its_caller():
    async with held([]) as (client, holds, _), anyio.create_task_group() as group:

        async def ask():
            with pytest.raises(KeyError, match="wrong"):
                await items(client.hold("later"))

        group.start_soon(ask)
        await until(lambda: holds.calls)
        holds.calls[0].finish(KeyError("wrong"))


async def test_a_direct_call_ends_at_the_deadline_that_its_frame_carries(monkeypatch):
    """Our clients send no deadline with a stream; another peer may."""
    post = FrameSender.post

    def hurried(sender, frame, nbytes, *, now=False):
        post(sender, msgspec.structs.replace(frame, left=0.01) if type(frame) is CallFrame else frame, nbytes, now=now)

    monkeypatch.setattr(FrameSender, "post", hurried)
    async with held([]) as (client, holds, server), anyio.create_task_group() as group:

        async def ask():
            with pytest.raises(RemoteError, match="Cancelled"):
                await items(client.hold("later"))

        group.start_soon(ask)
        await until(lambda: holds.calls and holds.calls[0].cancelled)
        assert server.running == 1
        holds.calls[0].finish()


class Patient(Held):
    """A call whose caller learns of a good end in another way."""

    end_may_wait = True


class Brief(service.Service):
    """Calls that end at once; their ends may wait."""

    begun = 0

    @service.method(raises=[KeyError], direct=True)
    def hold(self, word: str) -> AsyncIterator[None]:
        """End at once."""
        self.begun += 1
        return Patient(service.current_call(), word)


@asynccontextmanager
async def patient(monkeypatch: pytest.MonkeyPatch, seconds: float):
    monkeypatch.setattr(sending, "LATE_S", seconds)
    async with pair("sim") as (left, right), service.serve(right, brief := Brief()) as server:
        client, sent = service.client(left, right.address, Brief), Counter[str]()
        submit = right.submit_send

        def counted(to: object, data: bytes) -> aiote.Transfer:
            sent.update(type(frame).__name__ for frame in unpack(bytes(data)))
            sent["messages"] += 1
            return submit(to, data)

        # The first call connects, so what is counted begins behind it.
        with pytest.raises(KeyError):
            await items(client.hold("raise"))
        monkeypatch.setattr(right, "submit_send", counted)
        brief.begun = 0
        yield client, sent, lambda calls: brief.begun == calls and not server.running


async def test_ends_that_may_wait_travel_together(monkeypatch):
    ended: list[Exception | None] = []
    async with patient(monkeypatch, 3600) as (client, sent, over):
        for turn in range(2 * sending.LATE_FRAMES):
            assert len(ended) == turn // sending.LATE_FRAMES * sending.LATE_FRAMES
            await client.hold("now").listen(print, ended.append)
            await until(lambda turn=turn: over(turn + 1) and len(ended) >= (turn + 1) // sending.LATE_FRAMES * 8)
        assert (ended, sending.LATE_FRAMES) == ([None] * 16, 8)
        assert (sent["End"], sent["messages"]) == (2 * sending.LATE_FRAMES, 2)


async def test_an_end_that_may_wait_comes_by_itself(monkeypatch):
    async with patient(monkeypatch, 0.001) as (client, sent, _):
        assert await items(client.hold("now")) == []
        assert sent["messages"] == 1


async def test_a_failure_does_not_wait_and_takes_other_ends_along(monkeypatch):
    ended: list[Exception | None] = []
    async with patient(monkeypatch, 3600) as (client, sent, _):
        await client.hold("now").listen(print, ended.append)
        with pytest.raises(KeyError):
            await items(client.hold("raise"))
        await until(lambda: ended)
        assert (ended, sent["messages"]) == ([None], 1)
