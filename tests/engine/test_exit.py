"""Engines that nobody closed: what the process says, and that it ends well."""

from __future__ import annotations

import pytest

from support.engines.opening import real_provider, run_script, two_kinds

pytestmark = pytest.mark.libfabric

PAIR = """
    import asyncio, gc, os, sys
    import aiote

    provider, progress = sys.argv[1:3]

    async def connected():
        config = aiote.EngineConfig(progress=progress)
        left = await aiote.open_engine(provider, config=config)
        right = await aiote.open_engine(provider, config=config)
        remote = left.attach(right.register(bytearray(1 << 20)).descriptor)
        await left.write_imm(left.register(bytes(1 << 20)), remote, 1)
        return left, right
"""


def said(script: str, *arguments: str, warnings: int, **environment: str) -> str:
    """Run a script that has to end well; return what it said, after counting its ResourceWarnings of engines."""
    done = run_script(PAIR + script, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the end\n"
    assert done.stderr.count("ResourceWarning: <Engine aiote://") == warnings, done.stderr
    assert done.stderr.count("was never closed") == warnings
    for word in ("Traceback", "Exception ignored", "Segmentation", "Fatal", "was destroyed"):
        assert word not in done.stderr, done.stderr
    return done.stderr


@two_kinds
def test_an_engine_left_open_in_a_variable_warns_at_exit(provider, progress):
    said(
        """
    engines = asyncio.run(connected())
    print("the end")
    """,
        provider,
        progress,
        warnings=2,
    )


@two_kinds
def test_an_engine_whose_loop_was_left_warns_once_and_not_for_each_of_its_tasks(provider, progress):
    """`asyncio.run` cancels what is left of tasks; a loop that is dropped as it is says that each was destroyed."""
    said(
        """
    loop = asyncio.new_event_loop()
    engines = loop.run_until_complete(connected())
    print("the end")
    """,
        provider,
        progress,
        warnings=2,
    )


@two_kinds
def test_an_engine_dropped_while_open_warns(provider, progress):
    said(
        """
    async def main():
        await connected()
        gc.collect()

    asyncio.run(main())
    gc.collect()
    print("the end")
    """,
        provider,
        progress,
        warnings=2,
    )


@real_provider
def test_an_engine_left_open_with_tasks_waiting_warns_at_exit(provider):
    """Tasks that wait, and a transfer that nobody takes, when the loop ends under them."""
    said(
        """
    async def main():
        global engines
        engines = left, right = await connected()
        waiting = [right.counter(9).wait(1), right.recv(), anext(left.watch(bytearray(8))), left.recv()]
        tasks = [asyncio.ensure_future(each) for each in waiting]
        transfers = [left.submit_send(right.address, b"x") for _ in range(100)]
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(main())
    print("the end")
    """,
        provider,
        "adaptive",
        warnings=2,
    )


def test_an_engine_left_open_under_uvloop_warns_at_exit():
    said(
        """
    import uvloop
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        engines = runner.run(connected())
    print("the end")
    """,
        "shm",
        "adaptive",
        warnings=2,
    )


def test_an_engine_left_open_under_trio_warns_at_exit():
    said(
        """
    import trio
    engines = trio.run(connected)
    print("the end")
    """,
        "tcp",
        "adaptive",
        warnings=2,
    )


@two_kinds
def test_an_engine_left_open_on_a_loop_that_never_ended_warns_at_exit(provider, progress):
    """The loop is merely not run any more; its own warnings are its user's."""
    said(
        """
    loop = asyncio.new_event_loop()
    engines = loop.run_until_complete(connected())
    print("the end")
    sys.stdout.flush()
    """,
        provider,
        progress,
        warnings=2,
    )


@two_kinds
def test_an_engine_whose_loop_was_closed_under_it_aborts_all_the_same(provider, progress):
    """Pending tasks and all. asyncio complains about those; the engine lets go of everything all the same."""
    done = run_script(
        PAIR
        + """
    loop = asyncio.new_event_loop()
    left, right = engines = loop.run_until_complete(connected())
    task = loop.create_task(right.counter(5).wait(1))
    loop.run_until_complete(asyncio.sleep(0))
    region = left.register(bytearray(8))
    loop.close()
    left.abort()
    assert left.closed and left.statistics().outstanding == 0
    print("the end")
    """,
        provider,
        progress,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the end\n"
    assert done.stderr.count("was never closed") == 1, done.stderr
    assert "in atexit callback" not in done.stderr, done.stderr


def test_development_mode_says_where_an_open_engine_was_made():
    text = said(
        """
    def the_place_to_look_at():
        return asyncio.run(connected())

    engines = the_place_to_look_at()
    print("the end")
    """,
        "tcp",
        "adaptive",
        warnings=2,
        PYTHONDEVMODE="1",
    )
    assert "it was opened at:" in text
    assert "in connected" in text


def test_closed_engines_warn_of_nothing_at_exit():
    text = said(
        """
    async def main():
        left, right = await connected()
        await left.aclose()
        right.abort()

    asyncio.run(main())
    print("the end")
    """,
        "tcp",
        "thread",
        warnings=0,
    )
    assert text == ""


def test_the_exit_status_with_engines_open_is_the_users():
    done = run_script(
        PAIR
        + """
    engines = asyncio.run(connected())
    sys.exit(3)
    """,
        "tcp",
        "thread",
    )
    assert done.returncode == 3
    assert done.stderr.count("was never closed") == 2


def test_an_error_of_the_users_is_all_that_is_printed():
    done = run_script(
        PAIR
        + """
    async def main():
        left, right = await connected()
        async with left, right:
            raise KeyError("the user's own")

    asyncio.run(main())
    """,
        "shm",
        "adaptive",
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == 'KeyError: "the user\'s own"'
    assert done.stderr.count("Traceback") == 1
    assert "Warning" not in done.stderr


def test_a_peer_that_exits_with_its_engine_open_is_noticed():
    """One process ends without a word; the other's awaits end, and it exits well."""
    said(
        """
    child = (
        "import asyncio, sys, aiote\\n"
        "async def main():\\n"
        "    engine = await aiote.open_engine('tcp')\\n"
        "    await engine.send(aiote.Address.parse(sys.argv[1]), b'here I am')\\n"
        "    await asyncio.sleep(0.05)\\n"
        "asyncio.run(main())\\n"
    )

    async def main():
        async with aiote.open_engine(provider, config=aiote.EngineConfig(progress="thread")) as engine:
            process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", child, str(engine.address))
            message = await engine.recv()
            assert await message.source.wait_closed()
            assert await process.wait() == 0
        print("the end")

    asyncio.run(main())
    """,
        "tcp",
        "adaptive",
        warnings=0,
    )
