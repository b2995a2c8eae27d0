"""Forked processes: a parent's engine is an error in the child, not a crash, and the parent's goes on unharmed."""

from __future__ import annotations

import pytest

from support.engines.opening import run_script, two_kinds

pytestmark = pytest.mark.libfabric

START = """
    import asyncio, gc, os, sys
    import numpy as np
    import aiote

    provider, progress = sys.argv[1:3]
    config = aiote.EngineConfig(progress=progress)
    loop = asyncio.new_event_loop()
    run = loop.run_until_complete
    left = run(aiote.open_engine(provider, config=config)._open())
    right = run(aiote.open_engine(provider, config=config)._open())
    target = np.zeros(100_000, np.uint8)
    remote = left.attach(right.register(target).descriptor)
    local = left.register(np.full(100_000, 1, np.uint8))
    peer = run(left.connect(right.address))
    run(left.write_imm(local, remote, 1))
    counter = right.counter(1)
    run(counter.wait(1))
    under_way = left.submit_write(local, remote)

    def refused(call):
        try:
            call()
        except aiote.UsageError as error:
            assert "belongs to the parent process: after a fork, open another one in the child" in str(error), error
        else:
            raise AssertionError("it was not refused")

    def step(coroutine):
        try:
            coroutine.send(None)
        finally:
            coroutine.close()

    def use_everything():
        refused(lambda: left.register(bytearray(8)))
        refused(lambda: left.attach(remote))
        refused(lambda: left.counter(5))
        refused(lambda: left.watch(bytearray(8)))
        refused(lambda: left.submit_write(local, remote))
        refused(lambda: left.submit_read(remote, local))
        refused(lambda: left.submit_send(peer, b"x"))
        refused(lambda: left.submit_write_imm(None, peer, 1))
        refused(lambda: step(counter.wait(1)))
        refused(lambda: step(right.recv()))
        refused(lambda: step(left.connect(right.address)))
        refused(lambda: step(peer.recv()))
        refused(lambda: step(right.recv_into(bytearray(8))))
        refused(lambda: step(peer.recv_into(bytearray(8))))
        peer.disconnect("by a child")
        refused(lambda: step(left.write(local, remote)))
        under_way.cancel()
        assert counter.value == 0
        counter.close()
        left.statistics()

    def in_parent(child):
        _, status = os.waitpid(child, 0)
        assert status == 0, f"the child ended with {status}"
        run(go_on())
        run(left.aclose())
        run(right.aclose())
        loop.close()
        print("the parent went on")

    async def go_on():
        async with asyncio.timeout(20):
            await under_way
            target[:] = 0
            await left.write_imm(local, remote, 1)
            await counter.wait(1)
            assert (target == 1).all()
            await right.send(left.address, b"hello")
            assert (await left.recv()).data == b"hello"
"""


def went_on(script: str, *arguments: str) -> None:
    done = run_script(START + script, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the parent went on"
    for word in ("Traceback", "Exception ignored", "Segmentation", "Fatal", "never closed"):
        assert word not in done.stderr, done.stderr


@two_kinds
def test_use_after_fork_is_an_error(provider, progress):
    went_on(
        """
    child = os.fork()
    if child == 0:
        use_everything()
        os._exit(0)
    in_parent(child)
    """,
        provider,
        progress,
    )


@two_kinds
def test_a_child_that_drops_and_exits_touches_nothing_of_the_parent_s(provider, progress):
    """The child runs its interpreter down to the end, finalizers included."""
    went_on(
        """
    child = os.fork()
    if child == 0:
        del left, right, local, remote, peer, under_way
        counter.close()
        del counter
        gc.collect()
        sys.exit(0)
    in_parent(child)
    """,
        provider,
        progress,
    )


@two_kinds
def test_a_child_that_closes_or_aborts_touches_nothing_of_the_parent_s(provider, progress):
    went_on(
        """
    child = os.fork()
    if child == 0:
        left.abort()
        try:
            right.aclose().send(None)
        except StopIteration:
            pass
        os._exit(0)
    in_parent(child)
    """,
        provider,
        progress,
    )


@pytest.mark.parametrize("provider", ["shm"])
def test_a_child_may_open_engines_of_its_own(provider):
    """With a loop of its own, and reach the parent's engine as any other process does."""
    went_on(
        """
    child = os.fork()
    if child == 0:
        async def main():
            async with asyncio.timeout(20), aiote.open_engine(provider) as mine:
                await mine.send(right.address, b"from the child")
        asyncio.Runner(loop_factory=asyncio.new_event_loop).run(main())
        os._exit(0)

    message = run(right.recv())
    assert message.data == b"from the child"
    run(message.source.wait_closed())
    in_parent(child)
    """,
        provider,
        "adaptive",
    )


@pytest.mark.parametrize("progress", ["thread"])
def test_a_child_of_the_fork_start_method_gets_errors_and_the_parent_goes_on(progress):
    """The way of multiprocessing, in the middle of a running loop."""
    went_on(
        """
    import multiprocessing

    def child():
        use_everything()

    async def main():
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        while process.exitcode is None:
            await asyncio.sleep(0.01)
        assert process.exitcode == 0
        await go_on()

    run(main())
    run(left.aclose())
    run(right.aclose())
    loop.close()
    print("the parent went on")
    """,
        "tcp",
        progress,
    )
