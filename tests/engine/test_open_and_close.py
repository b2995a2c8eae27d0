"""Engines open and close: every way in, every way out, and what becomes of those who still wait."""

from __future__ import annotations

import asyncio
import gc

import anyio
import pytest

import aiote
from support.engines.opening import each_progress, each_provider, go_round, linked, opened, pair, until

pytestmark = pytest.mark.libfabric


class MineError(Exception):
    """An exception that only the test's body raises."""


@pytest.mark.anyio
@each_provider
@each_progress
async def test_an_engine_is_open_within_its_block_and_closed_after_it(provider, progress):
    async with opened(provider, progress=progress) as engine:
        assert not engine.closed
        assert engine.address.host == "127.0.0.1"
        assert aiote.Address.from_bytes(bytes(engine.address)) == engine.address
        assert aiote.Address.parse(str(engine.address)) == engine.address
        rail, *spares = engine.rails
        assert provider == "efa" or not spares
        assert rail.provider.partition(";")[0] == provider
        assert rail.state == "up"
        libraries = {"sim": "simulated", "verbs": "libibverbs", "local": "aiote", "socket": "aiote"}
        assert rail.library.startswith(libraries.get(provider, "libfabric "))
        assert str(engine.address) in repr(engine)
    assert engine.closed
    assert "closed" in repr(engine)


@pytest.mark.anyio
@each_provider
async def test_an_engine_that_is_awaited_stays_open_until_aclose(provider):
    engine = await opened(provider)
    assert not engine.closed
    await engine.aclose()
    assert engine.closed


async def test_an_open_engine_may_be_entered_later():
    engine = await opened("tcp")
    async with engine as entered:
        assert entered is engine
    assert engine.closed


@pytest.mark.anyio
@each_progress
async def test_aclose_twice_and_by_several_tasks_ends_each_time(progress):
    async with linked("tcp", progress=progress) as (left, right):
        ended = []

        async def close() -> None:
            await left.aclose()
            assert left.closed
            ended.append(1)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(close)
        assert len(ended) == 4
        await left.aclose()
        await until(lambda: not right.peers)


@pytest.mark.anyio
@each_provider
@each_progress
async def test_abort_closes_at_once_and_the_peer_finds_out(provider, progress):
    async with linked(provider, progress=progress) as (left, right):
        left.abort()
        assert left.closed
        left.abort()
        await left.aclose()
        with pytest.raises(aiote.ClosedError):
            left.register(bytearray(8))
        # It left without a message; its peer finds out by itself.
        await until(lambda: not right.peers)


@pytest.mark.anyio
@each_provider
async def test_an_exception_of_the_body_passes_unchanged(provider):
    mine = MineError("mine")
    with pytest.raises(MineError) as caught:
        async with linked(provider) as (left, right):
            left.submit_send(right.address, b"under way")
            raise mine
    assert caught.value is mine
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert left.closed
    assert right.closed


@pytest.mark.anyio
async def test_an_engine_opened_in_one_task_closes_in_another():
    engines = []

    async def open_one() -> None:
        engines.append(await opened("tcp"))

    async def use() -> None:
        await engines[0].send(engines[1].address, b"x")
        assert (await engines[1].recv()).data == b"x"

    async def close() -> None:
        for engine in engines:
            await engine.aclose()

    for step in (open_one, open_one, use, close):
        async with anyio.create_task_group() as group:
            group.start_soon(step)
    assert [engine.closed for engine in engines] == [True, True]


@pytest.fixture
async def engine_of_a_fixture(anyio_backend):
    async with opened("tcp") as engine:
        yield engine


@pytest.mark.anyio
async def test_an_engine_opened_by_an_async_fixture_works(engine_of_a_fixture):
    async with opened("tcp") as other:
        await other.send(engine_of_a_fixture.address, b"hello")
        assert (await engine_of_a_fixture.recv()).data == b"hello"


async def test_a_cancelled_open_leaves_nothing():
    for turns in range(4):
        task = asyncio.ensure_future(opened("tcp")._open())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            engine = await task
        except asyncio.CancelledError:
            continue
        await engine.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["aclose", "abort"])
async def test_whoever_waits_for_the_end_of_an_engine_hears_of_it(way):
    async with opened("sim") as engine:
        told: list[str] = []

        async def wait(name: str) -> None:
            await engine.wait_closed()
            assert engine.closed
            told.append(name)

        async with anyio.create_task_group() as group:
            group.start_soon(wait, "one")
            group.start_soon(wait, "another")
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as given_up:
                    given_up.start_soon(wait, "who gives up")
                    await go_round()
                    scope.cancel()
            assert not told
            assert len(engine._lifetime._waiters) == 2
            if way == "abort":
                engine.abort()
            else:
                await engine.aclose()
        assert sorted(told) == ["another", "one"]
        assert not engine._lifetime._waiters
        await engine.wait_closed()


async def test_a_cancelled_aclose_leaves_nothing_half_closed():
    async with linked("tcp") as (left, right):
        task = asyncio.create_task(left.aclose())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert left.closed
        await left.aclose()
        await until(lambda: not right.peers)


def test_opening_without_a_running_loop_is_refused():
    opening = opened("tcp").__await__()
    with pytest.raises(aiote.UsageError, match="no event loop is running"):
        opening.send(None)
    gc.collect()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((5,), "provider must be a name, got int"),
        (("tcp", "lo"), r"rails='lo': expected a list of names, like \['lo'\]"),
        (("tcp", []), "from 1 to 8 names"),
        (("tcp", ["lo"] * 9), "expected from 1 to 8 names, got 9"),
    ],
)
def test_bad_arguments_of_open_engine_are_refused(arguments, says):
    with pytest.raises(aiote.UsageError, match=says):
        aiote.open_engine(*arguments)


async def test_an_unknown_provider_is_named():
    with pytest.raises(aiote.UsageError, match=r"provider='carrier-pigeon': libfabric .*fi_info -l. lists"):
        await opened("carrier-pigeon")
    gc.collect()


async def test_an_unknown_rail_is_named_with_those_that_are_here():
    with pytest.raises(aiote.UsageError, match=r"rails=\['eth99'\].*lo \(127\.0\.0\.1\)"):
        await opened("tcp", ["eth99"])
    gc.collect()


@each_progress
async def test_every_verb_of_a_closed_engine_raises(progress):
    async with linked("tcp", progress=progress) as (left, right):
        source = left.register(bytearray(8))
        target = left.attach(right.register(bytearray(8)).descriptor)
        pages = aiote.Pages(source, [0], 8), aiote.Pages(target, [0], 8)
        peer = left.peers[0]
        counter = left.counter(1)
        await left.aclose()
        for call in (
            lambda: left.register(bytearray(8)),
            lambda: left.attach(b""),
            lambda: left.counter(5),
            lambda: left.watch(bytearray(8)),
            lambda: left.submit_write(source, target),
            lambda: left.submit_write_imm(source, target, 1),
            lambda: left.submit_write_imm(None, peer, 1),
            lambda: left.submit_read(target, source),
            lambda: left.submit_write_pages(*pages),
            lambda: left.submit_send(right.address, b""),
        ):
            with pytest.raises(aiote.ClosedError, match="engine is closed"):
                call()
        for verb in (
            left.recv(),
            left.recv_into(bytearray(8)),
            left.connect(right.address),
            left.write(source, target),
            counter.wait(1),
        ):
            with pytest.raises(aiote.ClosedError, match="engine is closed"):
                await verb
        assert [message async for message in left.messages()] == []
        await source.aclose()
        assert left.statistics().outstanding == 0


async def collect(into: dict[str, BaseException | None], name: str, awaitable) -> None:
    try:
        await awaitable
        into[name] = None
    except aiote.AioteError as error:
        into[name] = error


async def outcome(transfer: aiote.Transfer) -> None:
    await transfer


async def next_change(engine: aiote.Engine, memory: bytearray) -> None:
    async for _ in engine.watch(memory):
        return


@pytest.mark.anyio
@each_provider
@pytest.mark.parametrize("way", ["aclose", "abort"])
async def test_closing_ends_every_await(provider, way):
    async with pair(provider, message_pool=2) as (left, right):
        peer = await left.connect(right.address)
        ended: dict[str, BaseException | None] = {}
        counter = left.counter(3)
        # The pool takes two; the last one waits for a credit, so there is one way for it to end.
        sends = [left.submit_send(peer, b"nobody takes it") for _ in range(4)]
        await until(lambda: sends[1].done())
        async with anyio.create_task_group() as group:
            for name, awaitable in {
                "recv": left.recv(),
                "recv_into": left.recv_into(bytearray(8)),
                "recv_into of a peer": peer.recv_into(bytearray(8)),
                "wait": counter.wait(1),
                "watch": next_change(left, bytearray(8)),
                "send": outcome(sends[-1]),
                "closed": peer.wait_closed(),
            }.items():
                group.start_soon(collect, ended, name, awaitable)
            await go_round()
            assert ended == {}
            if way == "abort":
                left.abort()
            else:
                await left.aclose()
        assert {name: type(error) for name, error in ended.items()} == {
            "recv": aiote.ClosedError,
            "recv_into": aiote.ClosedError,
            "recv_into of a peer": aiote.ClosedError,
            "wait": aiote.ClosedError,
            "watch": aiote.ClosedError,
            "send": aiote.TransferError,
            "closed": type(None),
        }
        assert isinstance(ended["send"].cause, aiote.PeerError)
        assert ("its engine was closed" if way == "aclose" else "aborted") in peer.reason


@each_provider
async def test_the_other_side_hears_of_the_close(provider):
    async with pair(provider) as (left, right):
        await left.connect(right.address)
        await until(lambda: right.peers)
        (peer,) = right.peers
        await left.aclose()
        assert "its engine was closed" in await peer.wait_closed()
        assert right.peers == ()
        with pytest.raises(aiote.PeerError, match="its engine was closed"):
            await right.send(peer, b"too late")
        with pytest.raises(aiote.PeerError, match="cannot be reached"):
            await right.connect(left.address)
