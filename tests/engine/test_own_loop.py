"""An engine belongs to the event loop that it was opened in: every method says so elsewhere, and does nothing."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import numpy
import pytest
import trio

import aiote
from aiote.errors import UsageError

IMM = 77
ANYWHERE = {
    # What is read alone, and what is documented to be safe.
    "Engine": {"statistics", "listen_events"},
    "Region": {"require_open"},  # reads one flag
    "Lease": {"end"},  # the grantor's own
    "Counter": {"wake_waits", "release"},  # the engine's own
    "CounterRow": set(),
    "Peer": {"has_revoked"},
    "Transfer": {
        "require_here", "give_up", "start", "fail", "revoke", "explain", "refuse", "belong", "hold", "join",
        "raise_failure", "interrupted", "done", "exception", "prefer",
    },
    "PreparedScatter": set(),
    "PreparedPages": {"of"},
    "ImmediateBlock": {"close"},  # as its docstring says
    "Changes": {"aclose"},  # gives memory back, without the engine
}  # fmt: skip
"""Public methods that need no loop, by class; those of `Transfer` are its parts' own, or only look."""


Calls = dict[str, Callable[[], Any]]


def nothing(*_: object) -> None:
    """Do nothing."""


class Home:
    """Two connected engines whose event loop runs in a thread of its own, and one of everything that they make."""

    def __init__(self, backend: str) -> None:
        self._ready, self._end = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, args=(backend,), name="home", daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        if self.failure is not None:
            raise self.failure

    def _main(self, backend: str) -> None:
        try:
            anyio.run(self._live, backend=backend)
        except BaseException as error:
            self.failure = error
        self._ready.set()

    async def _live(self) -> None:
        async with aiote.open_engine("local") as self.engine, aiote.open_engine("local") as other:
            engine = self.engine
            self.source, self.target = numpy.arange(64, dtype=numpy.uint8), numpy.zeros(64, numpy.uint8)
            self.region = engine.register(self.source)
            self.remote = engine.attach(other.register(self.target).descriptor)
            self.peer = await engine.connect(other.address)
            self.group = await engine.peer_group([other.address])
            self.lease = engine.lease([self.region[0:8]], self.peer)
            self.counter, self.row = engine.counter(IMM), engine.counters(IMM + 1, [1])
            self.written = [aiote.ScatterTarget(self.region, self.remote)]
            self.prepared = engine.prepare_scatter(self.group, self.written)
            self.pages = engine.prepare_pages(self.group, self.written, 8)
            # Under way until it is cancelled: nobody raises the flag.
            eight = numpy.array([8])
            self.transfer = self.prepared.submit_when(numpy.zeros(1, numpy.uint32), 1, eight, skip_empty=True)
            self.block = engine.reserve_immediates(1, sources=())
            self.watched = engine.watch(self.source[0:8])
            self._ready.set()
            while not self._end.is_set():
                await anyio.sleep(0.01)
            # Everything still works where it belongs.
            assert not self.transfer.done()
            self.transfer.cancel()
            with pytest.raises(aiote.TransferError, match="cancelled"):
                await self.transfer
            self.block.allow(self.peer)
            await engine.write_imm(self.region, self.remote, IMM)
            await other.write_imm(None, engine.address, IMM)
            await self.counter.wait(1)
            assert (self.target == self.source).all()
            await self.watched.aclose()
            await self.lease.revoke()
            assert not engine.closed
            assert not self.region.closed
        assert engine.closed

    def close(self) -> None:
        self._end.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the engine's own loop hangs"
        if self.failure is not None:
            raise self.failure

    def calls(self) -> dict[tuple[str, str], Callable[[], Any]]:
        """Return a call of every public method, by class and name."""
        calls = {"Engine": self.of_engine(), **self.of_parts()}
        return {(kind, name): call for kind, of_kind in calls.items() for name, call in of_kind.items()}

    def of_engine(self) -> Calls:
        e, region, remote, peer, group = self.engine, self.region, self.remote, self.peer, self.group
        here, there = aiote.Pages(region, [0], 8), aiote.Pages(remote, [0], 8)
        return {
            "find_peer": lambda: e.find_peer(peer.address),
            "time_rails": lambda: e.time_rails(1),
            "time_waits": lambda: e.time_waits(None),
            "register": lambda: e.register(bytearray(8)),
            "register_async": lambda: e.register_async(bytearray(8)),
            "attach": lambda: e.attach(b""),
            "lease": lambda: e.lease([region[0:8]], peer),
            "connect": lambda: e.connect(peer.address),
            "share_memory": lambda: e.share_memory(8, [peer]),
            "map_memory": lambda: e.map_memory(b""),
            "room": lambda: e.room(peer),
            "submit_write": lambda: e.submit_write(region, remote),
            "write": lambda: e.write(region, remote),
            "submit_write_imm": lambda: e.submit_write_imm(region, remote, IMM),
            "write_imm": lambda: e.write_imm(region, remote, IMM),
            "submit_read": lambda: e.submit_read(remote, region),
            "read": lambda: e.read(remote, region),
            "submit_write_pages": lambda: e.submit_write_pages(here, there, IMM),
            "write_pages": lambda: e.write_pages(here, there, IMM),
            "submit_read_pages": lambda: e.submit_read_pages(there, here),
            "read_pages": lambda: e.read_pages(there, here),
            "peer_group": lambda: e.peer_group([peer]),
            "room_for": lambda: e.room_for(group),
            "submit_scatter": lambda: e.submit_scatter(group, self.written),
            "scatter": lambda: e.scatter(group, self.written),
            "prepare_scatter": lambda: e.prepare_scatter(group, self.written),
            "prepare_pages": lambda: e.prepare_pages(group, self.written, 8),
            "barrier": lambda: e.barrier(group, IMM),
            "submit_send": lambda: e.submit_send(peer, b"1"),
            "send": lambda: e.send(peer, b"1"),
            "recv": lambda: e.recv(),
            "recv_into": lambda: e.recv_into(bytearray(1 << 16)),
            "recv_nowait": lambda: e.recv_nowait(),
            "listen_messages": lambda: e.listen_messages(nothing, nothing),
            "messages": lambda: e.messages().__anext__(),
            "counter": lambda: e.counter(IMM),
            "counters": lambda: e.counters(IMM, [1]),
            "reserve_immediates": lambda: e.reserve_immediates(1),
            "watch": lambda: e.watch(bytearray(8)),
            "wait_closed": lambda: e.wait_closed(),
            "aclose": lambda: e.aclose(),
            "abort": lambda: e.abort(),
        }

    def of_parts(self) -> dict[str, Calls]:
        region, peer = self.region, self.peer
        eight, first = numpy.array([8]), numpy.array([0])
        return {
            "Region": {
                "lease": lambda: region.lease(slice(0, 8), peer),
                "aclose": lambda: region.aclose(),
            },
            "Lease": {"revoke": lambda: self.lease.revoke(), "begin_revoking": lambda: self.lease.begin_revoking()},
            "Counter": {
                "wait": lambda: self.counter.wait(1),
                "wait_unless": lambda: self.counter.wait_unless(1, None),
                "close": lambda: self.counter.close(),
            },
            "CounterRow": {"wait": lambda: self.row.wait(1), "close": lambda: self.row.close()},
            "Peer": {
                "wait_closed": lambda: peer.wait_closed(),
                "disconnect": lambda: peer.disconnect("why"),
                "recv": lambda: peer.recv(),
                "recv_into": lambda: peer.recv_into(bytearray(1 << 16)),
                "messages": lambda: peer.messages().__anext__(),
                "rotate_rails": lambda: peer.rotate_rails(1),
                "room": lambda: peer.room(),
            },
            "Transfer": {
                "cancel": lambda: self.transfer.cancel(),
                "add_done_callback": lambda: self.transfer.add_done_callback(nothing),
            },
            "PreparedScatter": {
                "submit": lambda: self.prepared.submit(eight),
                "submit_when": lambda: self.prepared.submit_when(numpy.zeros(1, numpy.uint32), 1, eight),
                "write": lambda: self.prepared.write(eight),
            },
            "PreparedPages": {
                "submit": lambda: self.pages.submit(first, first),
                "write": lambda: self.pages.write(first, first),
            },
            "ImmediateBlock": {"allow": lambda: self.block.allow(peer)},
            "Changes": {"__anext__": lambda: self.watched.__anext__()},
        }


@pytest.fixture(params=["asyncio", "trio"])
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    made = Home(request.param)
    yield made
    made.close()


def refusal(call: Callable[[], Any], run: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any] | None) -> str:
    """Return what a call is refused with, outside of a loop or in a task of one."""

    async def awaited() -> None:
        found = call()
        if inspect.isawaitable(found):
            await found

    try:
        if run is not None:
            run(awaited)
        elif inspect.iscoroutine(found := call()):
            found.send(None)
    except UsageError as error:
        return str(error)
    return "nothing"


WAYS = {"no loop": None, "another asyncio": lambda work: asyncio.run(work()), "another trio": trio.run}


@pytest.mark.parametrize("way", WAYS)
def test_every_method_is_refused_outside_of_the_engine_s_own_loop(way, home):
    for (kind, name), call in home.calls().items():
        said = refusal(call, WAYS[way])
        assert "the engine belongs to one event loop" in said, f"{kind}.{name}: {said}"
        assert "aiote.bridge" in said


def test_a_transfer_is_not_awaited_in_another_loop(home):
    async def awaited() -> None:
        await home.transfer

    for run in (asyncio.run, lambda work: trio.run(lambda: work)):
        with pytest.raises(UsageError, match="belongs to one event loop"):
            run(awaited())


def test_no_public_method_is_left_out(home):
    """A new one is either refused elsewhere, or it says that it may be called there."""
    called = home.calls()
    for kind, safe in ANYWHERE.items():
        made = getattr(aiote, kind, None) or getattr(aiote.transfers, kind)
        methods = {name for name, found in inspect.getmembers(made, callable) if not name.startswith("_")}
        named = {name for of_kind, name in called if of_kind == kind and not name.startswith("_")} | safe
        assert methods == named, kind


def test_a_second_loop_of_the_same_thread_is_another_one():
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        engine = first.run_until_complete(aiote.open_engine("local")._open())
        region = engine.register(bytearray(8))  # outside of a loop, in the engine's own thread
        for use in (engine.aclose, engine.recv, region.aclose):
            with pytest.raises(UsageError, match="from another event loop: call it there"):
                second.run_until_complete(use())
        assert not engine.closed
        first.run_until_complete(engine.aclose())
        assert engine.closed
    finally:
        first.close()
        second.close()


def test_an_engine_that_was_forgotten_is_closed_from_anywhere():
    """What the collector or the exit closes is not refused: nobody called it."""
    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(aiote.open_engine("local")._open())

    def drop() -> None:
        thread = threading.Thread(target=engine._lifetime.close_dropped, args=(engine,))
        thread.start()
        thread.join()

    with pytest.warns(ResourceWarning, match="was never closed"):
        drop()
    assert engine.closed
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
