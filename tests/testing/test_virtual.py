"""The event loop in virtual time: timers, threads, connections in memory, and standing still."""

from __future__ import annotations

import asyncio
import random
import selectors
import socket
import time

import anyio
import anyio.to_thread
import pytest

from aiote.errors import UsageError
from aiote.testing import StandstillError, VirtualLoop, run
from aiote.testing.virtual import VirtualSelector


def virtual(main):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def test_hours_pass_at_once_and_in_order():
    seen = []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(*(sleeper(seconds) for seconds in (7200, 0.001, 3600, 1e-9, 86_400 * 3)))

    started = time.perf_counter()
    virtual(main())
    assert time.perf_counter() - started < 60, "of real time"
    assert [seconds for seconds, _ in seen] == sorted(seconds for seconds, _ in seen)
    assert [at for _, at in seen] == pytest.approx([seconds for seconds, _ in seen], abs=1e-8)


def test_deadlines_are_virtual():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.sleep(2000)
        with anyio.move_on_after(500) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        return asyncio.get_running_loop().time()

    assert virtual(main()) == pytest.approx(1500)


def test_what_is_ready_is_told_in_the_order_of_registration():
    """Neither in that in which it became ready, as epoll tells it, nor in that of the descriptors' numbers."""
    selector = VirtualSelector(lambda _timeout: True)
    pairs = [socket.socketpair() for _ in range(8)]
    order = [3, 7, 1, 0, 6, 2, 5, 4]
    try:
        for number in order:
            selector.register(pairs[number][0], selectors.EVENT_READ, number)
        for _, there in pairs:
            there.send(b"x")
        assert [key.data for key, _ in selector.select(0)] == order
        selector.unregister(pairs[3][0])
        selector.register(pairs[3][0], selectors.EVENT_READ, 3)
        assert [key.data for key, _ in selector.select(0)] == [*order[1:], 3]
    finally:
        selector.close()
        for one in (end for pair in pairs for end in pair):
            one.close()


def test_what_would_hang_is_an_error():
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StandstillError, match="stands still"):
        virtual(main())


def test_run_bounds_virtual_time():
    async def ticking() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(TimeoutError):
        run(ticking(), limit=100)
    with pytest.raises(UsageError, match="a coroutine"):
        run(3)


def test_run_seeds_random_numbers_and_gives_them_back():
    async def drawn() -> float:
        return random.random()

    random.seed(42)
    first = random.random()
    random.seed(42)
    assert run(drawn(), 1) == run(drawn(), 1) != run(drawn(), 2)
    assert random.random() == first


@pytest.mark.blocking_allowed("a thread sleeps")
def test_a_thread_takes_its_time_and_virtual_time_none():
    async def main() -> float:
        loop = asyncio.get_running_loop()
        slow = loop.run_in_executor(None, time.sleep, 0.2)
        late = asyncio.ensure_future(asyncio.sleep(1000))
        await slow
        assert not late.done()
        assert loop.time() == 0
        late.cancel()
        return loop.time()

    assert virtual(main()) == 0


@pytest.mark.blocking_allowed("a thread sleeps")
def test_a_thread_of_anyio_takes_virtual_time_only_to_wait_for_its_limiter():
    run_sync = anyio.to_thread.run_sync

    async def main() -> tuple[float, float]:
        loop, limiter = asyncio.get_running_loop(), anyio.CapacityLimiter(1)
        ticking = asyncio.ensure_future(asyncio.sleep(1000))
        await anyio.to_thread.run_sync(time.sleep, 0.2)
        at_once = loop.time()
        async with limiter:
            waiting = asyncio.ensure_future(anyio.to_thread.run_sync(time.sleep, 0.2, limiter=limiter))
            await asyncio.sleep(5)
        await waiting
        ticking.cancel()
        return at_once, loop.time()

    assert virtual(main()) == (0, 5)
    assert anyio.to_thread.run_sync is run_sync


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
        await writer.drain()
    writer.close()


def test_streams_in_memory_carry_every_byte_both_ways():
    """More than lies unread at once goes both ways, and the end arrives after the last byte."""

    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 4711)
        reader, writer = await asyncio.open_connection("127.0.0.1", 4711)
        payload = random.Random(1).randbytes(2_000_000)

        async def feed() -> None:
            writer.write(payload)
            await writer.drain()
            writer.write_eof()

        feeding = asyncio.ensure_future(feed())
        assert await reader.read() == payload
        await feeding
        writer.close()
        server.close()
        with pytest.raises(ConnectionRefusedError, match="no server on this event loop"):
            await asyncio.open_connection("127.0.0.1", 4711)

    virtual(main())


def test_a_writer_that_nobody_reads_waits():
    async def main() -> None:
        async def silent(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(100)
            _writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.address)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                while True:
                    writer.write(bytes(100_000))
                    await writer.drain()
        writer.close()
        await asyncio.sleep(200)
        server.close()

    virtual(main())


def test_writing_to_who_has_gone_is_told():
    async def main() -> None:
        async def leave(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(leave, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.address)
        assert await reader.read() == b""
        with pytest.raises(ConnectionError):
            for _ in range(10):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(1)
        server.close()

    virtual(main())


def test_sockets_listen_in_memory():
    async def main() -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)

        async def answer(stream: anyio.abc.SocketStream) -> None:
            async with stream:
                await stream.send(await stream.receive() + b"!")

        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, answer)
            async with await anyio.connect_tcp("localhost", port) as stream:
                await stream.send(b"hello")
                assert await stream.receive() == b"hello!"
                with pytest.raises(anyio.EndOfStream):
                    await stream.receive()
            group.cancel_scope.cancel()

    virtual(main())
