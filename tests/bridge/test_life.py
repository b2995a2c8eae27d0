"""One engine a process, opened by the first and closed by the last, after forks, and at the exit whatever goes on."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

import aiote
from aiote import bridge as bridges
from support.engines.opening import PATIENCE_S, run_script
from support.service.bridges import Stubborn, aside, bridge_to, call_and_leave, drop, value

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


def test_all_who_acquire_share_one_engine_until_the_last_closes():
    with bridges.acquire("local") as first:
        engine = first.engine
        with bridges.acquire() as second, bridges.acquire("local") as third:
            assert first.engine is second.engine is third.engine
        assert second.closed
        assert not engine.closed
        assert first.call(value(1)) == 1
        second.close()
        assert not engine.closed
    assert engine.closed
    with bridges.acquire("socket") as again:
        assert again.engine is not engine
        assert again.engine.rails[0].provider == "socket"


def test_other_settings_than_the_engine_has_are_refused():
    key = b"k" * 16
    with bridges.acquire("local", spin_us=7, cluster_key=key, host="127.0.0.1") as bridge:
        same = [
            {},
            {"provider": "local"},
            {"spin_us": 7},
            {"config": bridge.engine.config},
            {"cluster_key": key, "kept_bytes": 256 << 20},
        ]
        for settings in same:
            bridges.acquire(**settings).close()
        other = [
            ({"provider": "socket"}, "provider is 'local', not 'socket'"),
            ({"rails": ["local"]}, r"rails is None, not \('local',\)"),
            ({"spin_us": 8}, "spin_us is 7, not 8"),
            ({"config": aiote.EngineConfig()}, "spin_us is 7, not 50"),
            ({"kept_bytes": 5}, "kept_bytes is 268435456, not 5"),
            ({"nonsense": 5}, "'nonsense' is no setting"),
        ]
        for settings, text in other:
            with pytest.raises(aiote.UsageError, match=text):
                bridges.acquire(**settings)
        with pytest.raises(aiote.UsageError, match="cluster_key is 'another', not 'this one'") as caught:
            bridges.acquire(cluster_key=b"K" * 16)
        assert "kkkk" not in str(caught.value)
        # None of them has left a share behind.
        engine = bridge.engine
    assert engine.closed


def test_without_a_key_only_the_loopback_is_listened_on(monkeypatch):
    monkeypatch.delenv("AIOTE_CLUSTER_KEY", raising=False)
    with pytest.raises(aiote.UsageError, match="without a cluster_key"):
        bridges.acquire("socket", host="0.0.0.0")
    with bridges.acquire("socket") as bridge:
        assert bridge.engine.address.host == "127.0.0.1"
    monkeypatch.setenv("AIOTE_CLUSTER_KEY", "a key of the environment")
    with bridges.acquire("socket", host="0.0.0.0") as bridge:
        assert bridge.engine.config.cluster_key == b"a key of the environment"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(("nonsense",), aiote.AioteError), (("local", ["eth9"]), aiote.UsageError), ((5,), aiote.UsageError)],
)
def test_an_engine_that_cannot_be_opened_does_not_hinder_the_next(arguments, error):
    with pytest.raises(error):
        bridges.acquire(*arguments)
    with bridges.acquire("local") as bridge:
        assert bridge.call(value(1)) == 1


def test_many_threads_that_acquire_and_close_leave_no_engine_open():
    engines = set()

    def use(number: int) -> int:
        with bridges.acquire("local") as bridge:
            engines.add(bridge.engine)
            return bridge.call(value(number))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(80))) == list(range(80))
    assert all(engine.closed for engine in engines)


def test_closing_ends_the_calls_of_this_bridge_alone_and_waits_for_them():
    work, others = Stubborn(), Stubborn()
    with bridge_to() as bridge:
        second = bridges.acquire()
        going = bridge.submit(others.run())
        outcomes = []

        def wait_for_it() -> None:
            try:
                second.call(work.run())
            except aiote.ClosedError as error:
                outcomes.append(error)

        waiting = threading.Thread(target=wait_for_it)
        waiting.start()
        work.until(work.begun)
        with ThreadPoolExecutor(3) as pool:
            closing = [pool.submit(second.close) for _ in range(3)]
            work.until(work.cancelled)
            bridge.call(value(0, turns=20))
            assert not any(each.done() for each in closing)
            for use in (lambda: second.call(value(1)), lambda: second.engine, lambda: second.register(bytearray(8))):
                with pytest.raises(aiote.ClosedError, match="the bridge is closed"):
                    use()
            work.may_end.set()
            assert not wait(closing, PATIENCE_S).not_done
        waiting.join()
        assert len(outcomes) == 1
        assert work.ended
        assert not going.done()
        others.may_end.set()
    assert isinstance(going.exception(), aiote.ClosedError)
    assert others.ended


@pytest.mark.anyio
async def test_bridges_are_closed_on_any_loop():
    work = Stubborn()
    work.may_end.set()
    async with bridges.acquire("local") as bridge, bridges.acquire() as second:
        engine = bridge.engine
        call = second.submit(work.run())
    assert engine.closed
    assert isinstance(call.exception(), aiote.ClosedError)
    await bridge.aclose()


async def test_a_cancelled_close_is_done_when_it_is_raised():
    work = Stubborn()
    bridge = bridges.acquire("local")
    engine = bridge.engine
    bridge.submit(work.run())
    closing = asyncio.ensure_future(bridge.aclose())
    async with asyncio.timeout(PATIENCE_S):
        while not work.cancelled.is_set():
            await asyncio.sleep(0.001)
        closing.cancel()
        await asyncio.sleep(0)
        assert not closing.done()
        work.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert work.ended
    assert engine.closed


def test_a_bridge_whose_engine_was_closed_by_others_can_be_closed():
    with bridge_to() as bridge:
        bridge.call(bridge.engine.aclose())
        with pytest.raises(aiote.ClosedError):
            bridge.register(bytearray(8))
    with bridge_to() as bridge:
        assert bridge.call(value(1)) == 1


START = """
    import asyncio, gc, os, signal, sys, threading, time
    from aiote import bridge as bridges

    async def value(result):
        await asyncio.sleep(0)
        return result

    async def forever():
        begun.set()
        await asyncio.sleep(1e6)

    begun = threading.Event()
    if "asyncio" in sys.argv:
        sys.modules["uvloop"] = None
"""

each_loop = pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
"""That a bridge may have: where uvloop is not installed it is asyncio's."""


def said(script: str, loop: str = "uvloop", status: int = 0) -> None:
    """Run a script that has to end by itself, and to complain of nothing."""
    done = run_script(START + script, loop)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1:] == ["the end"], done.stderr
    # From 3.12 on Python warns of every fork beside a thread.
    words = [line for line in done.stderr.splitlines() if "fork()" not in line and "os.fork" not in line]
    assert words == [], done.stderr


EXITS = {
    "nothing under way": "",
    "a future": "call = bridge.submit(forever()); begun.wait()",
    "a daemon thread that waits": (
        "threading.Thread(target=bridge.call, args=(forever(),), daemon=True).start(); begun.wait(); "
        "sys.excepthook = threading.excepthook = lambda *_: None"
    ),
    "a registration": "kept = bridge.register(bytearray(1 << 20))",
    "a coroutine that ignores it": """
    async def ignore():
        while True:
            try:
                await forever()
            except asyncio.CancelledError:
                pass
    call = bridge.submit(ignore()); begun.wait()""",
    "a loop that stands still": """
    async def stand():
        begun.set()
        time.sleep(1e6)
    call = bridge.submit(stand()); begun.wait()
    import warnings; warnings.simplefilter("ignore")""",
}


@each_loop
@pytest.mark.parametrize("what", EXITS)
def test_the_interpreter_exits_whatever_is_under_way(what, loop):
    said(
        f"""
    bridge = bridges.acquire("local")
    {EXITS[what].strip()}
    print("the end", flush=True)
    sys.exit(3)
    """,
        loop,
        status=3,
    )


def test_peers_hear_of_the_exit_at_once():
    """They hear of it at once, not by silence."""
    said(
        """
    import subprocess
    child = (
        "import sys; from aiote import bridge as bridges\\n"
        "bridge = bridges.acquire('local')\\n"
        "bridge.call(bridge.engine.send(sys.argv[1], b'here I am'))\\n"
    )
    async def hear():
        message = await bridge.engine.recv()
        return await message.source.wait_closed()
    with bridges.acquire("local", heartbeat_timeout=1000, heartbeat_interval=100) as bridge:
        hearing = bridge.submit(hear())
        subprocess.run([sys.executable, "-P", "-c", child, str(bridge.engine.address)], check=True)
        assert hearing.result(30)
    print("the end")
    """
    )


@each_loop
def test_a_fork_leaves_the_engine_to_its_parent(loop):
    """The child gets errors of the parent's, has one of its own, and exits to the end of its interpreter."""
    said(
        """
    import aiote
    bridge = bridges.acquire("local")
    registration = bridge.register(bytearray(100))
    waiting = bridge.submit(forever())
    begun.wait()

    def refused(use):
        try:
            use()
        except aiote.UsageError as error:
            assert "after a fork, acquire another one in the child" in str(error), error
        else:
            raise AssertionError("it was not refused")

    def in_child():
        for use in (lambda: bridge.call(value(1)), lambda: bridge.submit(value(1)), lambda: bridge.engine,
                    lambda: bridge.register(bytearray(8)), lambda: registration.region, bridge.trim,
                    lambda: asyncio.run(bridge.run(value(1)))):
            refused(use)
        bridge.close()
        registration.close()
        with bridges.acquire("local", spin_us=3) as mine:
            assert mine.call(value(2)) == 2
            mine.call(mine.engine.send(address, b"from the child"))

    address = str(bridge.engine.address)
    for leave in (sys.exit, os._exit):
        child = os.fork()
        if child == 0:
            in_child()
            del bridge, registration, waiting
            gc.collect()
            leave(0)
        async def hear():
            message = await bridge.engine.recv()
            await message.source.wait_closed()
            return message.data
        assert bridge.call(hear(), timeout=30) == b"from the child"
        assert os.waitpid(child, 0)[1] == 0
        assert bridge.call(value(3)) == 3
    assert not waiting.done()
    bridge.close()
    print("the end")
    """,
        loop,
    )


@each_loop
def test_a_fork_at_any_moment_leaves_the_child_able_to_acquire(loop):
    """Whatever lock of ours another thread holds then; those of Python's imports are taken before."""
    said(
        """
    with bridges.acquire("local") as bridge:
        bridge.call(value(1))
    over = threading.Event()

    def use():
        while not over.is_set():
            with bridges.acquire("local") as bridge:
                bridge.call(value(1))

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            with bridges.acquire("local") as bridge:
                assert bridge.call(value(2)) == 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    over.set()
    for thread in threads:
        thread.join()
    print("the end")
    """,
        loop,
    )


def test_spawned_processes_have_engines_of_their_own():
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with bridge_to() as bridge:
        processes = [context.Process(target=call_and_leave, args=(results,)) for _ in range(2)]
        for process in processes:
            process.start()
        assert [aside(results.get, True, PATIENCE_S) for _ in processes] == [4, 4]
        for process in processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0
        assert bridge.call(value(5)) == 5
    results.close()
    results.join_thread()


def test_a_dropped_bridge_is_closed_and_the_engine_with_the_last():
    bridge = aside(bridges.acquire, "local")
    thread, registration = bridge._thread, aside(bridge.register, bytearray(100))
    held: list[Any] = [registration]
    del bridge
    gc.collect()
    assert len(registration.region) == 100
    del registration
    drop(held)
    thread.ended.result(PATIENCE_S)
    assert thread.users == 0


def test_a_dropped_bridge_lives_while_its_calls_do():
    with bridge_to() as first:
        bridge, stubborn = aside(bridges.acquire, "local"), Stubborn()
        call = bridge.submit(stubborn.run())
        stubborn.until(stubborn.begun)
        del bridge
        gc.collect()
        assert first._thread.users == 2
        call.cancel()
        stubborn.may_end.set()
        with pytest.raises(futures.CancelledError):
            aside(call.result, PATIENCE_S)
        held = [call]
        del call
        drop(held)
        for _ in range(int(PATIENCE_S * 100)):
            if first._thread.users == 1:
                break
            threading.Event().wait(0.01)
        assert first._thread.users == 1
