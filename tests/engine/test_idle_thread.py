"""The idle thread: it makes progress in place of an event loop that nothing needs, and the loop misses nothing.

The target's loop is the test's. The writer has a loop of its own, in another thread, so it goes on while the test's
loop stands still.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import aiote
from support.engines.opening import PATIENCE_S, UNHURRIED, run_script, until

RAILS = pytest.mark.parametrize("provider", ["local", "socket", "shm", "tcp"])
IMM = 5
SIZE = 4096
ROUNDS = 200
"""More than a write of SIZE bytes takes: about 18."""


class Writer:
    """An engine in a thread of its own, connected to the test's."""

    def __init__(self, provider: str, loop: asyncio.AbstractEventLoop) -> None:
        self.provider, self.loop = provider, loop
        self.engine: aiote.Engine
        self.source: aiote.Region
        self.descriptor: bytes
        self.remote: aiote.RemoteRegion

    async def open(self, descriptor: bytes) -> None:
        self.engine = await aiote.open_engine(self.provider, config=aiote.EngineConfig(**UNHURRIED))._open()
        self.source = self.engine.register(bytearray(random.Random(1).randbytes(SIZE)))
        self.descriptor = self.engine.register(bytearray(SIZE)).descriptor
        self.remote = self.engine.attach(descriptor)
        await self.engine.connect(self.remote.owner)

    async def writes(self, count: int, imm: int | None = None) -> None:
        """Write one after another, and fall asleep in between."""
        for _ in range(count):
            slept = self.engine._runtime.core.statistics()["sleeps"]
            await self.engine.write(self.source, self.remote)
            await until(lambda slept=slept: self.engine._runtime.core.statistics()["sleeps"] > slept)
        if imm is not None:
            await self.engine.write_imm(self.source, self.remote, imm)

    def start(self, what: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Start it there; the future is the test's loop's."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(what, self.loop))

    def finish(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Run it there while the test's loop stands still."""
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(PATIENCE_S)


@contextmanager
def elsewhere(provider: str) -> Iterator[Writer]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield Writer(provider, loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


def opened(provider: str, progress: str = "adaptive") -> Any:
    return aiote.open_engine(provider, config=aiote.EngineConfig(progress=progress, **UNHURRIED))


async def relieve(writer: Writer, target: aiote.Engine) -> None:
    """Write until the target's idle thread makes progress."""
    for _ in range(100):
        if target._runtime.core.relieved:
            return
        await writer.start(writer.writes(5))
    raise AssertionError("the loop never left progress to the thread")


@pytest.mark.libfabric
@RAILS
async def test_writes_end_while_the_targets_loop_stands_still(provider):
    with elsewhere(provider) as writer:
        async with opened(provider) as target:
            memory = bytearray(SIZE)
            await writer.start(writer.open(target.register(memory).descriptor))
            await relieve(writer, target)
            with target.counter(IMM) as counter:
                writer.finish(writer.writes(3, IMM))
                assert memory == bytes(memoryview(writer.source))
                await counter.wait(1)
            await writer.start(writer.engine.aclose())


@pytest.mark.libfabric
@RAILS
async def test_the_loop_is_woken_for_its_news_and_makes_progress_again(provider):
    """A count, a message, a watched value, and the end of a peer each come while the thread makes progress."""
    with elsewhere(provider) as writer:
        async with opened(provider) as target:
            await writer.start(writer.open(target.register(bytearray(SIZE)).descriptor))
            with target.counter(IMM) as counter:
                counted = asyncio.ensure_future(counter.wait(1))
                await relieve(writer, target)
                await writer.start(writer.writes(0, IMM))
                await counted
            assert not target._runtime.core.relieved
            message = asyncio.ensure_future(target.recv())
            await relieve(writer, target)
            await writer.start(writer.engine.send(target.address, b"a message"))
            assert (await message).data == b"a message"
            assert not target._runtime.core.relieved
            gone = asyncio.ensure_future(target.recv())
            await relieve(writer, target)
            await writer.start(writer.engine.aclose())
            await until(lambda: not target.peers)
            gone.cancel()


@pytest.mark.libfabric
@RAILS
async def test_no_news_is_lost_in_any_order(provider):
    """The target counts, receives, writes back and does nothing, at random; hand-overs come between all of them."""
    draw = random.Random(3)
    with elsewhere(provider) as writer:
        async with opened(provider) as target:
            await writer.start(writer.open(target.register(bytearray(SIZE)).descriptor))
            back, source = target.attach(writer.descriptor), target.register(bytearray(SIZE))
            for turn in range(40):
                if draw.random() < 0.5:
                    await relieve(writer, target)
                await writer.start(writer.writes(draw.randrange(8)))
                what = draw.randrange(3)
                if what == 0:
                    with target.counter(IMM + turn) as counter:
                        sent = writer.start(writer.writes(draw.randrange(3), IMM + turn))
                        await counter.wait(1)
                elif what == 1:
                    sent = writer.start(writer.engine.send(target.address, b"%d" % turn))
                    assert (await target.recv()).data == b"%d" % turn
                else:
                    sent = writer.start(writer.writes(draw.randrange(3)))
                    await target.write(source, back)
                await sent
            assert target._runtime.core.hand_overs > 10
            await writer.start(writer.engine.aclose())


async def test_a_loop_that_saw_its_descriptor_readable_before_leaves_progress_to_the_thread():
    """The loop may have put the callback into its queue before the turn that left progress to the thread."""
    with elsewhere("local") as writer:
        async with opened("local") as target:
            await writer.start(writer.open(target.register(bytearray(SIZE)).descriptor))
            await relieve(writer, target)
            target._runtime._driver._readable()
            assert target._runtime.core.relieved
            with target.counter(IMM) as counter:
                writer.finish(writer.writes(0, IMM))
                await counter.wait(1)
            await writer.start(writer.engine.aclose())


async def test_the_thread_sleeps_between_writes():
    """In a millisecond without a sleep it would do more rounds than are allowed for a write."""
    with elsewhere("local") as writer:
        async with opened("local") as target:
            await writer.start(writer.open(target.register(bytearray(SIZE)).descriptor))
            await relieve(writer, target)
            before = target._runtime.core.rounds
            await writer.start(writer.writes(50))
            assert target._runtime.core.relieved
            assert target._runtime.core.rounds - before < 50 * ROUNDS
            await writer.start(writer.engine.aclose())


async def test_the_loop_setting_keeps_progress_on_the_loop():
    with elsewhere("local") as writer:
        async with opened("local", "loop") as target:
            await writer.start(writer.open(target.register(bytearray(SIZE)).descriptor))
            await writer.start(writer.writes(30))
            assert target._runtime.core.hand_overs == 0
            await writer.start(writer.engine.aclose())


async def test_an_engine_closes_while_the_thread_makes_progress():
    with elsewhere("local") as writer:
        async with opened("local") as target:
            await writer.start(writer.open(target.register(bytearray(SIZE)).descriptor))
            await relieve(writer, target)
            core = target._runtime.core
        assert not core.relieved
        await writer.start(writer.engine.aclose())


def test_an_engine_is_dropped_while_the_thread_makes_progress():
    """The process ends, too: no thread of it uses memory that is gone."""
    done = run_script(DROPPED)
    assert (done.returncode, done.stdout) == (0, "dropped\n"), done.stderr


DROPPED = """
    import asyncio, gc
    import aiote

    async def main():
        left, right = [await aiote.open_engine("local")._open() for _ in range(2)]
        source, remote = left.register(bytearray(8)), left.attach(right.register(bytearray(8)).descriptor)
        while not right._runtime.core.relieved:
            await left.write(source, remote)
            await asyncio.sleep(0.001)
        return right._runtime.core

    core = asyncio.run(main())
    gc.collect()
    assert not core.relieved
    print("dropped")
"""


def test_a_child_of_a_fork_lets_the_thread_of_its_parent_be():
    done = run_script(
        """
        import asyncio, os, sys
        import aiote

        async def main():
            async with aiote.open_engine("local") as left, aiote.open_engine("local") as right:
                source, remote = left.register(bytearray(8)), left.attach(right.register(bytearray(8)).descriptor)
                while not right._runtime.core.relieved:
                    await left.write(source, remote)
                    await asyncio.sleep(0.001)
                child = os.fork()
                if child == 0:
                    right.statistics()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
                await left.write(source, remote)

        asyncio.run(main())
        print("went on")
        """
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
