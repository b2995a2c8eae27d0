"""Coroutines that other threads and other loops have running beside the engine end before anybody goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.to_thread
import pytest

import aiote
from aiote import bridge as bridges
from support.engines.opening import PATIENCE_S
from support.service.bridges import Stubborn, aside, bridge_to, press_ctrl_c, value

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


@pytest.fixture(params=["uvloop", "asyncio"])
def bridge(request, monkeypatch):
    """A bridge on either loop that it may have."""
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    with bridge_to() as bridge:
        assert type(bridge._thread.loop).__module__.startswith(request.param)
        monkeypatch.undo()
        yield bridge


def test_calls_of_many_threads_return_their_results(bridge):
    def calls(number: int) -> list[int]:
        return [bridge.call(value(number * 100 + step, turns=step % 3)) for step in range(100)]

    with ThreadPoolExecutor(8) as pool:
        found = [result for results in pool.map(calls, range(8)) for result in results]
    assert found == list(range(800))


def test_a_call_raises_what_its_coroutine_raises(bridge):
    async def fail(error: BaseException) -> None:
        await asyncio.sleep(0)
        raise error

    for error in (LookupError("x"), aiote.UsageError("y"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)) as caught:
            bridge.call(fail(error))
        assert caught.value is error
    # The last two have not ended the loop.
    assert bridge.call(value(1)) == 1


def test_a_coroutine_has_no_context_of_its_caller(bridge):
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")
    name.set("the caller")

    async def look() -> str:
        return name.get()

    assert bridge.call(look()) == "nobody"


@pytest.mark.parametrize("work", [None, value, lambda: 1], ids=["nothing", "function", "lambda"])
def test_a_call_of_no_coroutine_is_refused(bridge, work):
    with pytest.raises(aiote.UsageError, match="expected a coroutine, which a call of an async function returns"):
        bridge.call(work)


def test_the_bridges_own_thread_does_not_wait_for_itself(bridge):
    refused = pytest.raises(aiote.UsageError, match="would wait for itself")

    async def inside() -> int:
        with refused:
            bridge.call(value(1))
        with refused:
            bridge.register(bytearray(8))
        with refused:
            bridge.close()
        with refused:
            await bridge.aclose()
        # What awaits is welcome.
        async with await bridge.register_async(bytearray(8)) as registration:
            assert len(registration.region) == 8
        return await bridge.run(value(7))

    assert bridge.call(inside()) == 7


def test_a_future_is_done_when_the_task_has_ended(bridge):
    work, told = Stubborn(), []
    call = bridge.submit(work.run())
    call.add_done_callback(told.append)
    work.until(work.begun)
    assert aside(call.cancel)
    work.until(work.cancelled)
    for _ in range(20):
        bridge.call(value(0))
        assert not call.done()
        assert not call.cancelled()
        assert not told
    with pytest.raises(TimeoutError):
        call.result(timeout=0)
    work.may_end.set()
    with pytest.raises(concurrent.futures.CancelledError):
        call.result(PATIENCE_S)
    assert work.ended
    assert call.cancelled()
    assert told == [call]
    assert not call.cancel()


def test_a_call_that_is_cancelled_before_it_begins_does_not_begin(bridge):
    began = []

    async def begin() -> None:
        began.append(1)

    def hold_and_cancel() -> bridges.Call[None]:
        # On the loop's thread: nothing begins before this has ended.
        call = bridge.submit(begin())
        call.cancel()
        return call

    async def inside() -> bridges.Call[None]:
        return hold_and_cancel()

    call = bridge.call(inside())
    assert concurrent.futures.wait([call], PATIENCE_S).done
    assert call.cancelled()
    assert not began


def test_cancelling_twice_interrupts_no_cleanup(bridge):
    work = Stubborn()
    call = bridge.submit(work.run())
    work.until(work.begun)
    call.cancel()
    work.until(work.cancelled)
    for _ in range(5):
        call.cancel()
        bridge.call(value(0))
    work.may_end.set()
    assert concurrent.futures.wait([call], PATIENCE_S).done
    assert work.ended


def test_a_call_that_times_out_waits_for_the_end(bridge):
    work = Stubborn()
    threading.Thread(target=lambda: (work.until(work.cancelled), work.may_end.set())).start()
    with pytest.raises(TimeoutError):
        bridge.call(work.run(), timeout=0)
    assert work.ended


def test_a_result_that_comes_in_time_is_returned(bridge):
    assert bridge.call(value(5), timeout=PATIENCE_S) == 5


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_is_raised_when_the_coroutine_has_ended(bridge, times):
    """However often it is pressed."""
    work = Stubborn()
    thread = threading.Thread(target=press_ctrl_c, args=(bridge, work, times))
    with pytest.raises(KeyboardInterrupt):
        try:
            thread.start()
            bridge.call(work.run())
        finally:
            assert work.ended
    thread.join()
    assert bridge.call(value(1)) == 1


def test_an_exception_of_another_signal_is_raised_when_the_coroutine_has_ended(bridge):
    work = Stubborn()

    def end(*_: object) -> None:
        raise SystemExit(4)

    def send() -> None:
        work.until(work.begun)
        os.kill(os.getpid(), signal.SIGUSR1)
        work.until(work.cancelled)
        work.may_end.set()

    before = signal.signal(signal.SIGUSR1, end)
    thread = threading.Thread(target=send)
    try:
        thread.start()
        with pytest.raises(SystemExit):
            bridge.call(work.run())
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.join()
    assert work.ended


@pytest.mark.anyio
async def test_any_loop_awaits_a_call(bridge):
    async def fail() -> None:
        raise LookupError("x")

    assert await bridge.run(value(3, turns=5)) == 3
    with pytest.raises(LookupError):
        await bridge.run(fail())
    found = []

    async def one(number: int) -> None:
        found.append(await bridge.run(value(number, turns=number % 7)))

    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(one, number)
    assert sorted(found) == list(range(100))


@pytest.mark.anyio
async def test_cancelling_on_any_loop_waits_for_the_end(bridge):
    work = Stubborn()
    over = anyio.Event()

    async def wait() -> None:
        try:
            await bridge.run(work.run())
        finally:
            assert work.ended
            over.set()

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            while not work.begun.is_set():
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                while not work.cancelled.is_set():
                    await anyio.sleep(0.001)
                for _ in range(20):
                    await anyio.sleep(0)
                    assert not over.is_set()
                work.may_end.set()
        assert over.is_set()


async def test_bare_cancellations_of_asyncio_wait_for_the_end(bridge):
    """However often the task is cancelled."""
    work = Stubborn()
    task = asyncio.ensure_future(bridge.run(work.run()))
    async with asyncio.timeout(PATIENCE_S):
        while not work.begun.is_set():
            await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            while not work.cancelled.is_set():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            assert not task.done()
        work.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert work.ended


async def test_the_callers_loop_runs_on_during_a_call(bridge):
    enough = threading.Event()

    async def wait() -> None:
        while not enough.is_set():
            await asyncio.sleep(0.001)

    task = asyncio.ensure_future(bridge.run(wait()))
    for _ in range(50):
        await asyncio.sleep(0)
        assert not task.done()
    enough.set()
    await task


def test_a_loop_that_ends_under_a_call_cancels_it(bridge):
    """A host that stops its loop and never looks again."""
    work = Stubborn()
    work.may_end.set()
    loop = asyncio.new_event_loop()
    waiting = bridge.run(work.run())
    task = loop.create_task(waiting)
    while not work.begun.is_set():
        loop.run_until_complete(asyncio.sleep(0.001))
    waiting.close()
    task.cancel()
    with pytest.raises((asyncio.CancelledError, RuntimeError)):
        loop.run_until_complete(task)
    loop.close()
    work.until(work.cancelled)
    aside(bridge.close)
    assert work.ended
