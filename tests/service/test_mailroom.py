"""One inbox, several services: each message reaches the one that it is for, and a full queue makes senders wait."""

from __future__ import annotations

import sys

import anyio
import pytest

import aiote
from aiote.service.background import beside
from aiote.service.mailroom import Mailroom
from engines import go_round, linked, pair, round_trips, until

pytestmark = pytest.mark.anyio


async def test_each_kind_has_its_taker():
    async with linked("sim") as (sender, receiver), Mailroom(receiver) as mailroom:
        seen: list[bytes] = []
        mailroom.handle(1, lambda message: seen.append(message.data))
        with mailroom.queue(2, size=4) as letters:
            for payload in (b"\x01a", b"\x02b", b"\x03c", b"", b"\x01d"):
                await sender.send(receiver.address, payload)
            assert (await anext(letters)).data == b"\x02b"
            await until(lambda: len(seen) == 2 and mailroom.unknown == 2)
        assert sorted(seen) == [b"\x01a", b"\x01d"]


async def test_a_function_that_raises_is_reported_and_stops_nobody(monkeypatch):
    reported: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: reported.append(error))
    async with linked("sim") as (sender, receiver), Mailroom(receiver) as mailroom:
        seen: list[bytes] = []
        mailroom.handle(1, lambda message: 1 // 0)
        mailroom.handle(2, lambda message: seen.append(message.data))
        await sender.send(receiver.address, b"\x01")
        await sender.send(receiver.address, b"\x02")
        await until(lambda: seen and mailroom.failed)
        assert [type(error) for error in reported] == [ZeroDivisionError]


async def test_a_full_queue_makes_the_sender_wait():
    async with linked("sim", message_pool=4) as (sender, receiver), Mailroom(receiver) as mailroom:
        sent = 0
        with mailroom.queue(1, size=3) as letters:

            async def send_all() -> None:
                nonlocal sent
                for value in range(60):
                    await sender.send(receiver.address, bytes([1, value]))
                    sent += 1

            async with anyio.create_task_group() as group:
                group.start_soon(send_all)
                await until(lambda: mailroom.held_up_s > 0)
                await round_trips(sender, receiver)
                # What the queue holds, the one in the mailroom's hand, and the pool's credits.
                assert sent <= 3 + 1 + 4
                assert mailroom.held_up_s > 0
                values = sorted([(await anext(letters)).data[1] for _ in range(60)])
                assert values == list(range(60))
        held = mailroom.held_up_s
        await go_round()
        assert mailroom.held_up_s == held


async def test_a_queue_closed_while_it_is_full_lets_the_others_go_on():
    async with linked("sim") as (sender, receiver), Mailroom(receiver) as mailroom:
        seen: list[bytes] = []
        mailroom.handle(2, lambda message: seen.append(message.data))
        letters = mailroom.queue(1, size=1)
        for payload in (b"\x01", b"\x01", b"\x01", b"\x02"):
            await sender.send(receiver.address, payload)
        await round_trips(sender, receiver)
        letters.close()
        await until(lambda: seen)
        with pytest.raises(StopAsyncIteration):
            await anext(letters)
        mailroom.queue(1).close()


async def test_wrong_use_is_named():
    async with pair("sim") as (engine, _):
        mailroom = Mailroom(engine)
        stop = mailroom.handle(1, print)
        for wrong in (1, 256, -1, "1"):
            with pytest.raises(aiote.UsageError):
                mailroom.queue(wrong)  # type: ignore[arg-type]
        with pytest.raises(aiote.UsageError, match="size=0"):
            mailroom.queue(2, size=0)
        stop()
        stop()
        async with mailroom:
            mailroom.handle(1, print)
            with pytest.raises(aiote.UsageError, match="once"):
                await mailroom.__aenter__()
        with pytest.raises(aiote.ClosedError):
            mailroom.handle(2, print)


async def test_it_ends_with_the_engine_and_so_do_its_queues():
    async with pair("sim") as (engine, _), Mailroom(engine) as mailroom:
        letters = mailroom.queue(1)
        await engine.aclose()
        assert [message async for message in letters] == []


async def test_what_the_body_raises_comes_out_as_it_is():
    async with pair("sim") as (engine, _):
        with pytest.raises(KeyError):
            async with Mailroom(engine):
                raise KeyError("mine")
        with anyio.move_on_after(0.01) as scope:
            async with Mailroom(engine):
                await anyio.sleep_forever()
        assert scope.cancelled_caught


async def test_what_fails_beside_ends_the_body_and_comes_out_as_it_is():
    async def fail() -> None:
        await anyio.sleep(0)
        raise OSError("beside")

    with pytest.raises(OSError, match="beside"):
        async with beside(fail):
            await anyio.sleep_forever()
