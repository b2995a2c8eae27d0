"""Whatever interrupts a wait, and wherever: when it raises, nothing of the call is under way, and others go on.

Each wait is interrupted at each of its steps, as a signal handler can, and at each of its awaits, on each event loop.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent import futures
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote import bridge as bridges
from support.engines.opening import PATIENCE_S
from support.process.interrupts import Interrupts, thrown_at
from support.service.bridges import Stubborn, Work, aside, bridge_to, memory_elsewhere, press_ctrl_c, value

pytestmark = [
    pytest.mark.libfabric,
    pytest.mark.one_library,
    # What is interrupted before it has begun.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    # What is interrupted before its caller has it.
    pytest.mark.filterwarnings("ignore:a registration of .* was garbage-collected without close:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What was interrupted before it had begun is warned of here, and not in another test."""
    yield
    gc.collect()


@pytest.fixture(params=["uvloop", "asyncio"])
def bridge(request, monkeypatch) -> Iterator[bridges.Bridge]:
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    with bridge_to() as bridge:
        monkeypatch.undo()
        yield bridge


def settled(bridge: bridges.Bridge) -> None:
    """Check that every call has ended, and that others still work."""
    for _ in range(100):
        assert bridge.call(value(1)) == 1
        if not bridge._thread.calls_of(bridge):
            return
    raise AssertionError(bridge._thread.calls_of(bridge))


def registered(bridge: bridges.Bridge) -> int:
    return len(bridge._shared)


def call(bridge: bridges.Bridge, work: Work) -> object:
    return bridge.call(work.run())


def call_within(bridge: bridges.Bridge, work: Work) -> object:
    return bridge.call(work.run(), timeout=PATIENCE_S)


def prepared(bridge: bridges.Bridge, work: Work) -> object:
    return bridge.prepare(work.run()).wait()


@pytest.mark.parametrize("wait", [call, call_within, prepared])
def test_a_call_that_is_interrupted_at_any_step_is_over(bridge, wait):
    def tried(at: int) -> bool:
        work, steps = Work(), Interrupts(at)
        try:
            with steps.armed():
                assert wait(bridge, work) == 7
        except KeyboardInterrupt:
            pass
        at_once = work.begun, work.ended
        settled(bridge)
        assert at_once in ((False, False), (True, True)), f"at step {at} it goes on"
        assert (work.begun, work.ended) == at_once, f"at step {at} it begins later"
        return steps.happened

    assert next(at for at in itertools.count() if not aside(tried, at)) > 20


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_move_that_is_interrupted_at_any_step_is_over(bridge, verb):
    with memory_elsewhere("local", 64) as (descriptor, _, _), bridge.register(np.zeros(64, np.uint8)) as mine:
        remote = bridge.attach(descriptor)

        def tried(at: int) -> bool:
            steps = Interrupts(at)
            try:
                with steps.armed():
                    bridge.write(mine.region, remote) if verb == "write" else bridge.read(remote, mine.region)
            except KeyboardInterrupt:
                pass
            assert not bridge._thread.transfers
            # It is over, and once the loop has taken note of it nothing is outstanding.
            settled(bridge)
            assert bridge.engine.statistics().outstanding == 0, f"step {at}"
            return steps.happened

        assert tried(1000) is False
        assert next(at for at in itertools.count() if not aside(tried, at)) > 8


def test_a_future_that_is_interrupted_at_any_step_can_be_waited_for_again(bridge):
    """As torch and Ray wait: for no longer than they like."""

    def tried(at: int) -> bool:
        work, steps = Work(), Interrupts(at)
        future = bridge.submit(work.run())
        try:
            with steps.armed():
                assert future.result(PATIENCE_S) == 7
        except KeyboardInterrupt:
            pass
        # Of another thread, which needs what locks it has.
        assert aside(future.result, PATIENCE_S) == 7
        assert future.done()
        assert future.exception() is None
        settled(bridge)
        return steps.happened

    assert next(at for at in itertools.count() if not aside(tried, at)) > 5


def test_memory_whose_registration_is_interrupted_is_not_registered(bridge):
    memory = np.zeros(100, np.uint8)

    def tried(at: int) -> bool:
        steps, made = Interrupts(at), None
        try:
            with steps.armed():
                made = bridge.register(memory, "read")
        except KeyboardInterrupt:
            pass
        settled(bridge)
        if made is not None:
            made.close()
        assert registered(bridge) == 0, f"step {at}"
        return steps.happened

    assert next(at for at in itertools.count() if not aside(tried, at)) > 20


@pytest.mark.parametrize("how", ["close", "trim"])
def test_what_is_interrupted_when_it_ends_can_be_ended_again(bridge, how):
    memory = np.zeros(100, np.uint8)

    def tried(at: int) -> bool:
        made, steps = bridge.register(memory, "local"), Interrupts(at)
        end: Callable[[], object] = made.close if how == "close" else bridge.trim
        try:
            with steps.armed():
                end()
        except KeyboardInterrupt:
            pass
        settled(bridge)
        end()
        made.close()
        assert registered(bridge) == 0
        return steps.happened

    assert next(at for at in itertools.count() if not aside(tried, at)) > 10


def test_a_bridge_whose_acquisition_or_end_is_interrupted_leaves_no_share():
    with bridge_to() as first:

        def tried(at: int) -> bool:
            steps, made = Interrupts(at), None
            try:
                with steps.armed():
                    made = bridges.acquire()
                    made.close()
            except KeyboardInterrupt:
                pass
            if made is not None:
                made.close()
            # One that was interrupted before it was returned is dropped, which closes it.
            for _ in range(1000):
                settled(first)
                if first._thread.users == 1:
                    break
            assert first._thread.users == 1, f"step {at}"
            return steps.happened

        with pytest.warns(ResourceWarning):
            assert next(at for at in itertools.count() if not aside(tried, at)) > 20


def on(loop: str, function: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine function on an event loop of the caller's thread."""
    return anyio.run(
        function,
        backend="trio" if loop == "trio" else "asyncio",
        backend_options={"use_uvloop": True} if loop == "uvloop" else {},
    )


async def run(bridge: bridges.Bridge, work: Work) -> None:
    assert await bridge.run(work.run()) == 7


async def join(bridge: bridges.Bridge, work: Work) -> None:
    assert await bridge.submit(work.run()).join() == 7


async def register(bridge: bridges.Bridge, _: Work) -> None:
    async with await bridge.register_async(bytearray(100), "read"):
        pass


async def acquire(_: bridges.Bridge, __: Work) -> None:
    async with bridges.acquire():
        pass


WAITS = [run, join, register, acquire]


def over(bridge: bridges.Bridge, work: Work, at: int) -> None:
    at_once = work.begun, work.ended
    assert at_once in ((False, False), (True, True)), f"at step {at} it goes on"
    aside(settled, bridge)
    assert (work.begun, work.ended) == at_once, f"at step {at} it begins later"
    aside(given_back, bridge, at)


def given_back(bridge: bridges.Bridge, at: int) -> None:
    """Check that no registration and no other share of the engine is left."""
    for _ in range(100):
        if (bridge._thread.users, registered(bridge)) == (1, 0):
            return
        # What was interrupted may be garbage by now, and is given back on the bridge's thread.
        gc.collect()
        bridge.call(value(1))
    raise AssertionError(f"at step {at}: {bridge._thread.users} shares, {registered(bridge)} registrations")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.filterwarnings("ignore:.*was garbage-collected without close:ResourceWarning")
def test_an_await_that_is_interrupted_at_any_step_is_over(bridge, loop, wait):
    async def main() -> int:
        for at in itertools.count():
            work, steps = Work(), Interrupts(at, awaited=True)
            try:
                with steps.armed():
                    await wait(bridge, work)
            except KeyboardInterrupt:
                pass
            if wait is not join:
                # A future that was submitted goes on until somebody waits for it.
                over(bridge, work, at)
            if not steps.happened:
                return at
        raise AssertionError

    assert aside(on, loop, main) > 5


@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize("wait", WAITS)
def test_an_await_that_is_interrupted_where_it_sleeps_is_over(bridge, loop, wait):
    async def main() -> int:
        for at in itertools.count():
            told: list[int] = []
            endless = wait in (run, join)
            work = Work(endless)
            try:
                await thrown_at(wait(bridge, work), at, lambda told=told: told.append(1))
            except KeyboardInterrupt:
                pass
            over(bridge, work, at)
            if endless or not told:
                return at
        raise AssertionError

    aside(on, loop, main)


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_under_trio_is_raised_when_the_coroutine_has_ended(bridge, times):
    """trio raises it in the main task, however often it comes, and whatever shields that."""
    trio = pytest.importorskip("trio")
    work = Stubborn()
    thread = threading.Thread(target=press_ctrl_c, args=(bridge, work, times))

    async def main() -> None:
        thread.start()
        try:
            await bridge.run(work.run())
        finally:
            assert work.ended

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    thread.join()
    assert bridge.call(value(1)) == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_any_exception_of_a_signal_handler_cancels_an_await(bridge, kind):
    work = Work(endless=True)

    async def main() -> None:
        with pytest.raises(kind):
            await thrown_at(bridge.run(work.run()), 0, int, kind)
        over(bridge, work, 0)

    aside(asyncio.run, main())


def test_a_wait_of_the_standard_library_that_has_kept_a_lock_stops_nobody(bridge):
    """`concurrent.futures.wait`, interrupted between two of its own steps, loses the lock of a future."""
    work = Work(endless=True)
    lost, others = bridge.submit(work.run()), bridge.submit(value(3, turns=50))
    aside(lost._condition.acquire)
    assert lost.cancel()
    assert others.result(PATIENCE_S) == 3
    with pytest.raises(futures.CancelledError):
        lost.result(PATIENCE_S)
    settled(bridge)


@pytest.mark.parametrize(
    "wait",
    [
        lambda bridge, other: bridge.call(value(1)),
        lambda bridge, other: other.result(),
        lambda bridge, other: other.result(5),
        lambda bridge, other: other.exception(),
        lambda bridge, other: other.wait(),
        lambda bridge, other: bridge.register(bytearray(8)),
        lambda bridge, other: bridge.trim(),
        lambda bridge, other: bridge.close(),
    ],
)
def test_a_callback_that_would_wait_is_refused(bridge, wait):
    """It runs on the thread that has to end what it waits for."""
    other, told = bridge.submit(Work(endless=True).run()), futures.Future[object]()

    def told_of(_: object) -> None:
        try:
            told.set_result(wait(bridge, other))
        except BaseException as error:
            told.set_exception(error)

    first = Stubborn()
    ending = bridge.submit(first.run())
    first.until(first.begun)
    # Before it may end: a callback of what has ended runs on this thread.
    ending.add_done_callback(told_of)
    ending.cancel()
    first.may_end.set()
    with pytest.raises(aiote.UsageError, match="the bridge's own thread, which would wait for itself"):
        told.result(PATIENCE_S)
    other.cancel()
    # What has ended can be asked.
    assert bridge.call(ask(bridge.submit(value(5)))) == 5


async def ask(future: bridges.Call[int]) -> int:
    while not future.done():
        await asyncio.sleep(0)
    return future.result()
