"""Registering that takes the kernel long: the loop goes on, and whatever ends it leaves nothing registered."""

from __future__ import annotations

import asyncio
import errno
import threading

import anyio
import numpy as np
import pytest

import aiote
from aiote_native.engine.provider import NativeDevice
from support import TESTS
from support.engines.opening import PATIENCE_S, go_round, linked, opened, round_trips, run_script, until
from support.engines.slow_registration import PinningDevice, pinning

pytestmark = [pytest.mark.libfabric, pytest.mark.anyio]


each_pinned = pytest.mark.parametrize("provider", ["local", "socket", "sim", "verbs"])


def devices(engine: aiote.Engine) -> list[NativeDevice]:
    return [rail.device for rail in engine._runtime.rail_set.rails]


def free(memory: bytearray) -> bool:
    """Whether nobody holds it, for then its length can change."""
    try:
        memory.append(0)
    except BufferError:
        return False
    return True


class Registering:
    """A call of `register_async` in a task that may be cancelled, and what became of it."""

    def __init__(self, engine: aiote.Engine, memory: object) -> None:
        self.scope = anyio.CancelScope()
        self.region: aiote.Region | None = None
        self.error: Exception | None = None
        self.over = False
        self._engine, self._memory = engine, memory

    async def run(self) -> None:
        try:
            with self.scope:
                self.region = await self._engine.register_async(self._memory)
        except Exception as error:
            self.error = error
        finally:
            self.over = True


async def begun(group: anyio.abc.TaskGroup, device: PinningDevice, registering: Registering) -> Registering:
    """Start it, and wait until the kernel is at it."""
    group.start_soon(registering.run)
    with anyio.fail_after(PATIENCE_S):
        await until(lambda: device.begun.is_set() or registering.over)
    assert not registering.over
    return registering


@each_pinned
async def test_the_loop_goes_on_while_memory_is_pinned(provider):
    memory = np.zeros(1000, np.uint8)
    async with linked(provider) as (left, right):
        device = pinning(right)
        async with anyio.create_task_group() as group:
            registering = await begun(group, device, Registering(right, memory))
            await round_trips(left, right)
            assert not registering.over
            device.end()
        assert device.thread == "aiote register"
        region = registering.region
        assert (region.nbytes, region.access, region.closed) == (1000, "read-write", False)
        await left.write(left.register(b"x" * 1000), left.attach(region.descriptor))
        assert bytes(memory) == b"x" * 1000


@pytest.mark.parametrize("fails", [False, True])
@each_pinned
async def test_a_cancelled_registration_ends_with_the_kernel_and_leaves_nothing(provider, fails):
    memory = bytearray(1000)
    async with linked(provider) as (left, right):
        device = pinning(right)
        before = device.real.children
        async with anyio.create_task_group() as group:
            registering = await begun(group, device, Registering(right, memory))
            registering.scope.cancel()
            await round_trips(left, right)
            assert not registering.over
            assert not free(memory)
            device.end(fails=fails)
        assert registering.scope.cancelled_caught
        assert (registering.region, registering.error) == (None, None)
        assert device.real.children == before
        assert free(memory)
        await right.register(bytearray(10)).aclose()


def test_a_registration_cancelled_again_and_again_waits_for_the_kernel():
    async def main() -> None:
        memory = bytearray(1000)
        async with opened("socket") as engine:
            device = pinning(engine)
            task = asyncio.create_task(engine.register_async(memory))
            await until(device.begun.is_set)
            for _ in range(3):
                task.cancel()
                await go_round()
                assert not task.done()
            device.end()
            await asyncio.wait([task])
            assert task.cancelled()
            assert free(memory)

    asyncio.run(main())


@each_pinned
async def test_closing_waits_for_a_registration_under_way(provider):
    memory = bytearray(1000)
    async with linked(provider) as (left, right):
        device = pinning(right)
        async with anyio.create_task_group() as group:
            registering = await begun(group, device, Registering(right, memory))
            group.start_soon(right.aclose)
            await left.peers[0].wait_closed()
            await go_round()
            assert not registering.over
            device.end()
        assert "the engine is closed" in str(registering.error)
        assert isinstance(registering.error, aiote.ClosedError)
        assert free(memory)
        assert device.real.children == 0


@each_pinned
async def test_abort_waits_for_a_registration_under_way(provider):
    memory = bytearray(1000)
    async with opened(provider) as engine:
        device = pinning(engine)

        def end_when_closing() -> None:
            until_closing.wait(PATIENCE_S)
            device.end()

        until_closing = threading.Event()
        ender = threading.Thread(target=end_when_closing)
        ender.start()
        async with anyio.create_task_group() as group:
            registering = await begun(group, device, Registering(engine, memory))
            until_closing.set()
            engine.abort()
            assert free(memory)
        assert isinstance(registering.error, aiote.ClosedError)
        ender.join(PATIENCE_S)
        assert device.real.children == 0


async def test_memory_that_one_rail_refuses_is_let_go_by_the_others():
    memory = bytearray(1000)
    async with opened("sim", ["sim0", "sim1"]) as engine:
        first, device = devices(engine)[0], pinning(engine)
        before = first.children
        async with anyio.create_task_group() as group:
            registering = await begun(group, device, Registering(engine, memory))
            assert first.children == before + 1
            device.end(fails=True)
        assert isinstance(registering.error, aiote.FabricError)
        assert (registering.error.errno, registering.error.operation) == (errno.ENOMEM, "register memory")
        assert "sim0, sim1" in str(registering.error)
        assert first.children == before
        assert free(memory)
        region = await engine.register_async(memory)
        assert first.children == before + 1
        await region.aclose()


async def test_no_thread_starts_where_nothing_is_pinned(monkeypatch):
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "aiote register":
            raise RuntimeError("can't start new thread")
        start(thread)

    async with opened("socket") as engine:
        memory = bytearray(10)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        region = await engine.register_async(memory, "read")
        assert region.access == "read"
        await region.aclose()
        pinning(engine)
        with pytest.raises(aiote.FabricError, match="can't start new thread") as caught:
            await engine.register_async(memory)
        assert caught.value.errno == errno.EAGAIN
        assert free(memory)


async def test_register_async_refuses_what_register_refuses():
    async with opened("socket") as engine:
        pinning(engine)
        with pytest.raises(aiote.UsageError, match="has no memory to lend"):
            await engine.register_async(7)
        with pytest.raises(aiote.UsageError, match="access='all': expected one of"):
            await engine.register_async(bytearray(1), "all")
    with pytest.raises(aiote.ClosedError):
        await engine.register_async(bytearray(1))


def test_a_child_of_a_fork_leaves_a_registration_to_its_parent():
    done = run_script(
        """
        import asyncio, os, sys
        sys.path.append(sys.argv[1])
        import aiote
        from support.engines.opening import until
        from support.engines.slow_registration import pinning

        async def main():
            async with aiote.open_engine("socket") as engine:
                device = pinning(engine)
                task = asyncio.create_task(engine.register_async(bytearray(1000)))
                await until(device.begun.is_set)
                child = os.fork()
                if child == 0:
                    engine.abort()
                    try:
                        engine.register_async(bytearray(1)).send(None)
                    except aiote.UsageError:
                        os._exit(0)
                    os._exit(1)
                assert os.waitpid(child, 0)[1] == 0
                device.end()
                region = await task
                assert not region.closed

        asyncio.run(main())
        print("done")
        """,
        str(TESTS),
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
