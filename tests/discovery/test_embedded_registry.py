"""The embedded registry in virtual time: leases end, servers die and come back, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio
import pytest

import aiote
from aiote import service
from aiote.discovery import embedded
from aiote.discovery import registry_server as server_module
from aiote.discovery.embedded import EmbeddedRegistry
from aiote.discovery.lease_table import LOCAL_LEASE_S, LeaseTable
from aiote.discovery.membership import RegistryError, Roster
from aiote.discovery.registry_server import RegistryServer, Watching
from aiote.testing import Fabric, run
from support.engines.opening import opened
from support.service.registries import member, until_told

LEASE_S = 3.0
GRACE_S = LEASE_S + embedded.RETRY_MOST_S + LEASE_S
"""After which a member that a new server does not know is told as left."""


class Town:
    """Engines, servers and clients on a simulated network, closed together."""

    def __init__(self, fabric: Fabric, stack: AsyncExitStack) -> None:
        self.fabric = fabric
        self.stack = stack

    async def engine(self, **settings) -> aiote.Engine:
        return await self.stack.enter_async_context(self.fabric.open_engine(**settings))

    async def server(self, config: aiote.EngineConfig | None = None, **more) -> RegistryServer:
        engine = await self.engine(config=config)
        return await self.stack.enter_async_context(RegistryServer(engine, **more))

    async def mortal(self) -> tuple[RegistryServer, Callable[[], Awaitable[None]]]:
        """Open a server in a task of its own, and return it with what ends it."""
        opened, over = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def live() -> None:
            async with self.fabric.open_engine() as engine, RegistryServer(engine) as server:
                opened.set_result(server)
                await over.wait()

        task = asyncio.ensure_future(live())

        async def end() -> None:
            over.set()
            await task

        return await opened, end

    async def client(self, *addresses: aiote.Address, lease_s: float = LEASE_S) -> EmbeddedRegistry:
        registry = EmbeddedRegistry(await self.engine(), addresses, lease_s=lease_s)
        return await self.stack.enter_async_context(registry)


def in_town(story, seed=1):
    async def main(fabric: Fabric) -> None:
        async with AsyncExitStack() as stack:
            await story(Town(fabric, stack))

    run(main, seed=seed)


async def until(condition, within: float) -> float:
    """Let virtual time pass until something holds and return how long that took."""
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.01)
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", ["crash", "partition", "close"])
def test_a_member_whose_engine_dies_is_told_as_left_within_its_lease(how, seed):
    async def story(town: Town) -> None:
        server = await town.server()
        watcher = await town.client(server.address)
        victim = await town.client(server.address)
        events = watcher.watch()
        joining = await town.stack.enter_async_context(victim.join(member("a")))
        await until_told(events, ("joined", "a"))
        await asyncio.sleep(10 * LEASE_S)
        assert watcher.members() == (joining.member,)
        engine = victim._engine
        if how == "close":
            await engine.aclose()
        else:
            getattr(town.fabric, how)(engine)
        took = await until(lambda: not watcher.members(), LEASE_S + 1)
        assert took >= LEASE_S / 2
        await until_told(events, ("left", "a"))
        if how == "close":
            assert joining.lost
            with pytest.raises(RegistryError):
                await joining.update({"load": 1})

    in_town(story, seed)


@pytest.mark.parametrize(
    "given",
    [str, lambda address: [str(address)], lambda address: (address, str(address)), lambda at: f"{at.host}:{at.port}"],
    ids=["text", "texts", "both", "place"],
)
async def test_addresses_may_be_text(given):
    async with opened("sim") as there, opened("sim") as here, RegistryServer(there) as server:
        async with EmbeddedRegistry(here, given(server.address)) as registry:
            await registry.ready()
            registry.redirect(given(server.address))
            for wrong in ([], 5, None, [5], "nobody", b"1"):
                with pytest.raises(aiote.UsageError, match="address|no port number"):
                    registry.redirect(wrong)


@pytest.mark.parametrize("known", ["address", "addresses", "redirect"])
def test_a_server_that_dies_withdraws_nothing_and_its_successor_learns_all(known):
    async def story(town: Town) -> None:
        (server, end), spare = await town.mortal(), await town.server()
        address = aiote.Address(server.address.host, server.address.port)
        addresses = (server.address, spare.address) if known == "addresses" else (address,)
        here, there = await town.client(*addresses), await town.client(*addresses)
        events, seen = there.watch(), []
        async with here.join(member("a", load=1)) as registration:
            await until_told(events, ("joined", "a"))
            reading = asyncio.ensure_future(_collect(events, seen))
            await end()
            await until(lambda: not there.in_touch or known == "addresses", LEASE_S + 1)
            if known != "addresses":
                assert [one.stale for one in there.members()] == [True]
                assert there.failure
                await asyncio.sleep(60)
                assert [one.name for one in there.members()] == ["a"]
            config = aiote.EngineConfig(port=address.port)
            if known == "address":
                await town.server(config)
            elif known == "redirect":
                here.redirect(spare.address)
                there.redirect([spare.address])
            await registration.update({"load": 2})
            await until(lambda: there.members() == (member("a", load=2),), GRACE_S)
            await until(lambda: not any(one.stale for one in there.members()), GRACE_S)
            assert [(event.kind, event.member.name) for event in seen] == [("changed", "a")]
            reading.cancel()
        await until(lambda: not there.members(), LEASE_S)

    in_town(story)


async def _collect(events, seen) -> None:
    async for event in events:
        seen.append(event)


def test_a_member_that_died_with_the_server_is_told_as_left_after_a_grace():
    async def story(town: Town) -> None:
        (server, end), spare = await town.mortal(), await town.server()
        here, there = [await town.client(server.address, spare.address) for _ in range(2)]
        await town.stack.enter_async_context(here.join(member("a")))
        await until(lambda: there.members(), 1)
        town.fabric.crash(here._engine)
        await end()
        await until(lambda: there.in_touch and spare.watchers, GRACE_S)
        assert [one.stale for one in there.members()] == [True]
        await until(lambda: not there.members(), GRACE_S)

    in_town(story)


def test_joining_waits_for_a_server_and_can_be_given_up():
    async def story(town: Town) -> None:
        server, end = await town.mortal()
        address = aiote.Address(server.address.host, server.address.port)
        await end()
        here = await town.client(address)
        assert not here.in_touch
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20):
                async with here.join(member("a")):
                    pass
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await here.ready()
        server = await town.server(aiote.EngineConfig(port=address.port))
        await here.ready()
        assert here.members() == server.members() == ()

    in_town(story)


def test_a_thousand_joins_leave_nothing_behind():
    async def story(town: Town) -> None:
        server = await town.server()
        here, there = [await town.client(server.address) for _ in range(2)]
        await there.ready()
        slow = there.watch()
        for number in range(1000):
            async with here.join(member(f"m{number}")):
                pass
        await until(lambda: not there.members() and not server.members(), 1)
        assert len(server._leases) == 0
        kept = (here._registrations, there._leases, there._doubtful, slow._pending)
        assert sum(map(len, kept)) == 0
        assert all(not watch._reported for watch in server._roster._watches.values())
        gc.collect()
        assert server._roster.watchers == 2

    in_town(story)


def test_a_hundred_clients_that_come_and_go_leave_no_watcher():
    async def story(town: Town) -> None:
        server = await town.server()
        engine = await town.engine()
        for number in range(100):
            async with EmbeddedRegistry(engine, server.address) as registry, registry.join(member("a", number)):
                await registry.ready()
                assert 1 <= server.watchers <= 2
        await until(lambda: not server.watchers, 1)
        gc.collect()
        assert server._roster.watchers == 0
        assert server.members() == ()

    in_town(story)


def test_a_client_that_reads_nothing_keeps_no_other_waiting():
    async def story(town: Town) -> None:
        server = await town.server()
        here, there = [await town.client(server.address) for _ in range(2)]
        stuck = await town.engine()
        updates = service.client(stuck, server.address, Watching).watch()
        assert (await anext(updates)).complete
        async with here.join(member("a")) as registration:
            # One that reads nothing is told a few, and then the latest.
            for load in range(2000):
                await registration.update({"load": load})
            await until(lambda: there.members() == (registration.member,), 1)
            assert here.in_touch
            assert there.in_touch
            told = [await anext(updates)]
            while told[-1].present[0][1].attributes.get("load") != 1999:
                told.append(await anext(updates))
            assert len(told) < 500
            town.fabric.partition(stuck)
            await until(lambda: server.watchers == 2, 20 * LEASE_S)
            gc.collect()
            assert server._roster.watchers == 2

    in_town(story)


def test_a_server_that_was_stopped_tells_of_no_member_as_left(monkeypatch):
    async def story(town: Town) -> None:
        server = await town.server()
        here = await town.client(server.address)
        events, seen = server.watch(), []
        reading = asyncio.ensure_future(_collect(events, seen))
        async with here.join(member("a")):
            # As after SIGSTOP and SIGCONT: the clock has gone on, nobody was heard, and the sweep comes first.
            town.fabric.partition(here._engine)
            now, sweep = anyio.current_time, server._next_sweep
            monkeypatch.setattr(server_module.anyio, "current_time", lambda: now() + 10 * LEASE_S)
            await until(lambda: server._next_sweep != sweep, LEASE_S + 1)
            monkeypatch.undo()
            town.fabric.heal(here._engine)
            await until(lambda: here.in_touch, 10 * LEASE_S)
            assert [event.kind for event in seen] == ["joined"]
        await until(lambda: len(seen) == 2, 1)
        reading.cancel()

    in_town(story)


def test_a_stream_that_breaks_begins_again_with_everything():
    async def story(town: Town) -> None:
        server = await town.server()
        here, there = [await town.client(server.address) for _ in range(2)]
        async with here.join(member("a")), here.join(member("b")), here.join(member("c")) as last:
            await until(lambda: len(there.members()) == 3, 1)
            events, seen = there.watch(), []
            reading = asyncio.ensure_future(_collect(events, seen))
            there._engine.find_peer(server.address).disconnect("the test wants it so")
            await until(lambda: not there.in_touch, LEASE_S)
            assert all(one.stale for one in there.members())
            await last.update({"load": 1})
            await until(lambda: there.in_touch, 2 * LEASE_S)
            assert not any(one.stale for one in there.members())
            assert [(event.kind, event.member.name) for event in seen] == [("joined", name) for name in "abc"] + [
                ("changed", "c")
            ]
            reading.cancel()
        await until(lambda: not there.members(), 3 * LEASE_S)

    in_town(story)


def test_a_server_at_its_limits_refuses_members_and_clients():
    async def story(town: Town) -> None:
        server = await town.server(limit=1)
        here = await town.client(server.address)
        await here.ready()
        there = await town.client(server.address)
        async with here.join(member("a")):
            with pytest.raises(RegistryError, match="has 1 members already"):
                async with here.join(member("b")):
                    pass
        await until(lambda: server.turned_away, LEASE_S)
        assert not there.in_touch
        await until(lambda: "has 1 clients" in there.failure, LEASE_S)
        with pytest.raises(aiote.UsageError, match="message_bytes=1024 of the engine: services need at least 4096"):
            await town.stack.enter_async_context(
                EmbeddedRegistry(await town.engine(config=aiote.EngineConfig(message_bytes=1024)), server.address)
            )
        with pytest.raises(aiote.UsageError):
            EmbeddedRegistry(here._engine, [])

    in_town(story)


@pytest.mark.parametrize("after_ms", [0, 0.05, 0.2, 1, 999, 1000, 1001, 2500])
@pytest.mark.parametrize("around", ["join", "everything"])
def test_leaving_in_a_cancelled_scope_is_heard_at_once(around, after_ms):
    """While it joins, among its renewals, in between."""

    async def story(town: Town) -> None:
        async def live() -> None:
            async with town.fabric.open_engine() as engine:
                async with EmbeddedRegistry(engine, server.address, lease_s=LEASE_S) as registry:
                    await registry.ready()
                    ready.set()
                    with scope if around == "join" else anyio.CancelScope():
                        async with registry.join(member("a")):
                            await asyncio.sleep(1e6)
                    await asyncio.sleep(LEASE_S)

        server = await town.server()
        ready = asyncio.Event()
        scope = anyio.CancelScope()
        async with anyio.create_task_group() as group:
            group.start_soon(live)
            await ready.wait()
            await asyncio.sleep(after_ms / 1000)
            (scope if around == "join" else group.cancel_scope).cancel()
            began = town.fabric.now
        assert around == "join" or town.fabric.now - began < 0.1
        await until(lambda: not server.members(), 0.1)
        # What was said before it left, and came behind that, does not bring it back.
        await asyncio.sleep(LEASE_S / 3)
        assert not server.members()

    in_town(story)


def test_a_server_that_answers_nothing_holds_up_no_cancellation_for_long():
    async def story(town: Town) -> None:
        server = await town.server()
        here = await town.client(server.address)
        with anyio.CancelScope() as scope:
            async with here.join(member("a")):
                town.fabric.partition(server._engine)
                scope.cancel()
                began = town.fabric.now
                await asyncio.sleep(1)
        assert town.fabric.now - began < embedded.LEAVE_S + 0.1

    in_town(story)


def test_a_name_is_registered_once_also_while_the_old_one_leaves():
    async def story(town: Town) -> None:
        async def stay(name: str) -> None:
            with scopes[name]:
                async with here.join(member("a", load=int(name))):
                    registered.append(name)
                    await asyncio.sleep(1e6)

        server = await town.server()
        here = await town.client(server.address)
        scopes, registered = {name: anyio.CancelScope() for name in "123"}, []
        async with anyio.create_task_group() as group:
            group.start_soon(stay, "1")
            with pytest.raises(aiote.UsageError, match="is registered here already"):
                await asyncio.sleep(0)
                async with here.join(member("a")):
                    pass
            await until(lambda: registered == ["1"], 1)
            town.fabric.partition(server._engine)
            scopes["1"].cancel()
            await asyncio.sleep(embedded.LEAVE_S / 2)  # it is leaving
            group.start_soon(stay, "2")
            await asyncio.sleep(embedded.LEAVE_S / 4)
            assert here._registrations["a"].member.attributes["load"] == 1
            scopes["3"].cancel()
            await stay("3")  # one that does not wait for its turn changes nothing
            await asyncio.sleep(embedded.LEAVE_S)
            with pytest.raises(aiote.UsageError, match="is registered here already"):
                async with here.join(member("a")):
                    pass
            town.fabric.heal(server._engine)
            await until(lambda: registered == ["1", "2"], GRACE_S)
            await until(lambda: server.members() and server.members()[0].attributes["load"] == 2, LEASE_S)
            scopes["2"].cancel()
        await until(lambda: not server.members() and not here._registrations, LEASE_S)

    in_town(story)


def test_the_lease_table_ignores_what_is_older_than_it_has():
    table = LeaseTable(roster := Roster(), limit=2, connected=lambda _: False)

    def keep(session: int, number: int, *members, now: float = 0.0) -> dict[str, str]:
        return table.keep(session, number, 1.0, members, now, "owner")

    assert keep(1, 5, member("a", 2, load=5)) == {}
    assert keep(1, 4, member("a", 2, load=4), member("b")) == {}
    assert keep(1, 5, member("a", 2, load=5)) == {}  # the same once more: it may be called again
    assert roster.known["a"].attributes["load"] == 5
    assert len(table) == 1
    assert keep(1, 6) == {}
    assert keep(1, 5, member("a")) == {}
    assert not roster.known
    assert keep(1, 7, member("a")) == {}
    assert "with incarnation 1; " in keep(2, 1, member("a"))["a"]
    assert keep(2, 2, member("a", 2)) == {}
    assert (table.holds("a", 1), table.holds("a", 2)) == (False, True)
    assert "with incarnation 2; " in keep(1, 8, member("a"))["a"]
    assert keep(1, 9) == {}
    assert roster.known["a"].incarnation == 2


def test_the_lease_table_is_bounded():
    table = LeaseTable(roster := Roster(), limit=2)
    for session in range(9):
        assert table.keep(session, 1, 1.0, (), 0.0) == {}
    assert len(table._sessions) == 2
    assert table.keep("x", 1, 1.0, [member("a"), member("b"), member("c")], 0.0).keys() == {"c"}
    # The owner with the most gives one up, and takes it back from nobody who has as few.
    assert table.keep("y", 1, 1.0, [member("d")], 0.0) == {}
    assert table.keep("x", 2, 1.0, [member("a"), member("b")], 0.0).keys() == {"b"}
    assert list(roster.known) == ["a", "d"]
    assert table.keep("z", 1, 1.0, [member("e")], 0.0).keys() == {"e"}
    assert len(table) == len(table._sessions) == 2
    table.expire(1.0)
    assert (len(table), len(table._sessions), len(roster.known)) == (0, 0, 0)


def test_the_lease_table_ends_and_postpones_leases_by_their_times():
    table = LeaseTable(roster := Roster(), limit=2)
    table.keep(1, 1, 1.0, [member("a")], 0.0)
    table.keep(2, 1, 600.0, [member("b")], 0.0)
    assert (table.lease_s("a"), table.lease_s("b"), table.lease_s("c")) == (1.0, 600.0, LOCAL_LEASE_S)
    table.expire(0.999)
    assert len(table) == 2
    table.postpone(1.0)
    table.expire(1.5)
    assert table.next_deadline() == 2.0
    table.expire(2.0)
    assert list(roster.known) == ["b"]
    table.forget(2)
    table.forget(2)
    assert (len(table), table.next_deadline()) == (0, math.inf)
