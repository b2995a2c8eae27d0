"""The embedded registry in virtual time: leases end, servers die and come back, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio
import pytest

import aiote
from aiote.discovery import embedded
from aiote.discovery import wire as registry_wire
from aiote.discovery.embedded import EmbeddedRegistry
from aiote.discovery.lease_table import LeaseTable
from aiote.discovery.membership import RegistryError, Roster
from aiote.discovery.server import RegistryServer
from aiote.service.mailroom import Mailroom
from aiote.testing import Fabric, run
from registries import member, until_told

LEASE_S = 3.0
GRACE_S = LEASE_S + embedded.RETRY_MOST_S + LEASE_S
"""After which a member that a new server does not know is told as left."""


class Town:
    """Engines with mailrooms, servers and clients on a simulated network, closed together."""

    def __init__(self, fabric: Fabric, stack: AsyncExitStack) -> None:
        self.fabric = fabric
        self.stack = stack

    async def mailroom(self, **settings) -> Mailroom:
        engine = await self.stack.enter_async_context(self.fabric.open_engine(**settings))
        return await self.stack.enter_async_context(Mailroom(engine))

    async def server(self, config: aiote.EngineConfig | None = None, **more) -> RegistryServer:
        mailroom = await self.mailroom(config=config)
        return await self.stack.enter_async_context(RegistryServer(mailroom, **more))

    async def mortal(self) -> tuple[RegistryServer, Callable[[], Awaitable[None]]]:
        """Open a server in a task of its own, and return it with what ends it."""
        opened, over = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def live() -> None:
            async with self.fabric.open_engine() as engine, Mailroom(engine) as mailroom:
                async with RegistryServer(mailroom) as server:
                    opened.set_result(server)
                    await over.wait()

        task = asyncio.ensure_future(live())

        async def end() -> None:
            over.set()
            await task

        return await opened, end

    async def client(self, *addresses: aiote.Address, lease_s: float = LEASE_S) -> EmbeddedRegistry:
        registry = EmbeddedRegistry(await self.mailroom(), addresses, lease_s=lease_s)
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
        engine = victim._mailroom.engine
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


@pytest.mark.parametrize("known", ["address", "addresses", "redirect"])
def test_a_server_that_dies_withdraws_nothing_and_its_successor_learns_all(known):
    async def story(town: Town) -> None:
        (server, end), spare = await town.mortal(), await town.server()
        address = aiote.Address(server.address.host, server.address.port)
        addresses = (server.address, spare.address) if known == "addresses" else (address,)
        here, there = await town.client(*addresses), await town.client(*addresses)
        events, seen = there.watch(), []
        async with here.join(member("a", load=1)) as seat:
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
            await seat.update({"load": 2})
            await until(lambda: there.members() == (member("a", load=2),), GRACE_S)
            await until(lambda: not any(one.stale for one in there.members()), GRACE_S)
            assert [(event.kind, event.member.name) for event in seen] == [("changed", "a")]
            reading.cancel()
        await until(lambda: not there.members(), LEASE_S)

    in_town(story)


async def _collect(events, seen) -> None:
    async for event in events:
        seen.append(event)


def test_who_died_with_the_server_is_told_as_left_after_a_grace():
    async def story(town: Town) -> None:
        (server, end), spare = await town.mortal(), await town.server()
        here, there = [await town.client(server.address, spare.address) for _ in range(2)]
        await town.stack.enter_async_context(here.join(member("a")))
        await until(lambda: there.members(), 1)
        town.fabric.crash(here._mailroom.engine)
        await end()
        await until(lambda: there.in_touch and spare._clients, GRACE_S)
        assert [one.stale for one in there.members()] == [True]
        await until(lambda: not there.members(), GRACE_S)

    in_town(story)


def test_joining_waits_for_a_server_and_says_so_to_whoever_gives_up():
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
        assert all(not client._answers and not client.watch._reported for client in server._clients.values())
        gc.collect()
        assert server._roster.watchers == 2

    in_town(story)


def test_clients_come_and_go():
    async def story(town: Town) -> None:
        server = await town.server()
        mailroom = await town.mailroom()
        for number in range(100):
            async with EmbeddedRegistry(mailroom, server.address) as registry, registry.join(member("a", number)):
                assert len(server._clients) == 1
        await until(lambda: not server._clients, 1)
        gc.collect()
        assert server._roster.watchers == 0
        assert server.members() == ()

    in_town(story)


def test_a_client_that_takes_nothing_keeps_nobody_waiting():
    async def story(town: Town) -> None:
        server = await town.server()
        here, there = [await town.client(server.address) for _ in range(2)]
        stuck = await town.client(server.address)
        await stuck.ready()
        letters = stuck._mailroom.queue(1, 1)
        for _ in range(3):
            await here._mailroom.engine.send(stuck._mailroom.engine.address, b"\x01")
        async with here.join(member("a")) as seat:
            for load in range(200):
                await seat.update({"load": load})
            await until(lambda: there.members() == (seat.member,), 1)
            await until(lambda: not stuck.in_touch, 20 * LEASE_S)
            await asyncio.sleep(20 * LEASE_S)
            assert here.in_touch
            assert there.in_touch
            assert len(server._clients) <= 3
            gc.collect()
            assert server._roster.watchers <= 3
            letters.close()
            await until(lambda: stuck.in_touch and stuck.members() == (seat.member,), 20 * LEASE_S)

    in_town(story)


def test_a_server_that_is_held_up_lets_nobody_leave():
    async def story(town: Town) -> None:
        server = await town.server()
        here = await town.client(server.address)
        letters = server._mailroom.queue(1, 1)
        async with here.join(member("a")):
            for _ in range(3):
                await here._mailroom.engine.send(server.address, b"\x01")
            await asyncio.sleep(10 * LEASE_S)
            assert [one.name for one in server.members()] == ["a"]
            letters.close()
            await asyncio.sleep(LEASE_S)
            assert [one.name for one in server.members()] == ["a"]
        await until(lambda: not server.members(), LEASE_S + 1)

    in_town(story)


def test_missed_updates_are_asked_for_again():
    async def story(town: Town) -> None:
        server = await town.server()
        here, there = [await town.client(server.address) for _ in range(2)]
        await there.ready()
        take, dropped = there._take, []
        there._give_back()
        there._give_back = there._mailroom.handle(
            registry_wire.FROM_REGISTRY, lambda message: dropped.append(1) if len(dropped) < 2 else take(message)
        )
        async with here.join(member("a")), here.join(member("b")), here.join(member("c")):
            await until(lambda: len(there.members()) == 3 and there.in_touch, 3 * LEASE_S)
        assert dropped
        await until(lambda: not there.members(), 3 * LEASE_S)

    in_town(story)


def test_noise_and_limits():
    async def story(town: Town) -> None:
        server = await town.server(limit=1)
        here = await town.client(server.address)
        await here.ready()
        there = await town.client(server.address)
        kinds = (registry_wire.TO_REGISTRY, registry_wire.FROM_REGISTRY)
        for kind in kinds:
            await there._mailroom.engine.send(server.address, bytes((kind, 1, 9)))
            await server._mailroom.engine.send(here._mailroom.engine.address, bytes((kind, 1, 9)))
        async with here.join(member("a")):
            with pytest.raises(RegistryError, match="has its 1 members"):
                async with here.join(member("b")):
                    pass
        await until(lambda: server.malformed == 1 and here.malformed == 1 and server.turned_away, LEASE_S)
        assert not there.in_touch
        with pytest.raises(aiote.UsageError, match="message_bytes=1024"):
            EmbeddedRegistry(await town.mailroom(config=aiote.EngineConfig(message_bytes=1024)), server.address)
        with pytest.raises(aiote.UsageError):
            EmbeddedRegistry(here._mailroom, [])

    in_town(story)


@pytest.mark.parametrize("after_ms", [0, 0.05, 0.2, 1, 999, 1000, 1001, 2500])
@pytest.mark.parametrize("around", ["join", "everything"])
def test_leaving_in_a_cancelled_scope_is_heard_at_once(around, after_ms):
    """While it joins, among its renewals, in between."""

    async def story(town: Town) -> None:
        async def live() -> None:
            async with town.fabric.open_engine() as engine, Mailroom(engine) as mailroom:
                async with EmbeddedRegistry(mailroom, server.address, lease_s=LEASE_S) as registry:
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


def test_a_server_that_takes_nothing_holds_up_no_cancellation_for_long():
    async def story(town: Town) -> None:
        server = await town.server()
        here = await town.client(server.address)
        with anyio.CancelScope() as scope:
            async with here.join(member("a")):
                town.fabric.partition(server._mailroom.engine)
                scope.cancel()
                began = town.fabric.now
                await asyncio.sleep(1)
        assert town.fabric.now - began < embedded.LEAVE_S + 0.1

    in_town(story)


def test_a_name_has_one_seat_also_while_the_old_one_leaves():
    async def story(town: Town) -> None:
        async def sit(name: str) -> None:
            with scopes[name]:
                async with here.join(member("a", load=int(name))):
                    registered.append(name)
                    await asyncio.sleep(1e6)

        server = await town.server()
        here = await town.client(server.address)
        scopes, registered = {name: anyio.CancelScope() for name in "123"}, []
        async with anyio.create_task_group() as group:
            group.start_soon(sit, "1")
            with pytest.raises(aiote.UsageError, match="is registered here already"):
                await asyncio.sleep(0)
                async with here.join(member("a")):
                    pass
            await until(lambda: registered == ["1"], 1)
            town.fabric.partition(server._mailroom.engine)
            scopes["1"].cancel()
            await asyncio.sleep(embedded.LEAVE_S / 2)  # it is leaving
            group.start_soon(sit, "2")
            await asyncio.sleep(embedded.LEAVE_S / 4)
            assert here._registrations["a"].member.attributes["load"] == 1
            scopes["3"].cancel()
            await sit("3")  # one that does not wait for its turn changes nothing
            await asyncio.sleep(embedded.LEAVE_S)
            with pytest.raises(aiote.UsageError, match="is registered here already"):
                async with here.join(member("a")):
                    pass
            town.fabric.heal(server._mailroom.engine)
            await until(lambda: registered == ["1", "2"], GRACE_S)
            await until(lambda: server.members() and server.members()[0].attributes["load"] == 2, LEASE_S)
            scopes["2"].cancel()
        await until(lambda: not server.members() and not here._registrations, LEASE_S)

    in_town(story)


def test_the_lease_table_takes_no_announcement_behind_its_leave():
    table = LeaseTable(roster := Roster(), limit=2)

    def announce(number: int, name: str = "a", session: int = 1) -> str | None:
        return table.announce(registry_wire.Announce(session, number, 1000, member(name)), 0.0)

    assert announce(5) == ""
    table.leave(registry_wire.Leave(1, "a", 6))
    assert announce(6) is None
    assert not roster.known
    assert announce(7) == ""
    table.leave(registry_wire.Leave(1, "a", 6))
    assert len(table) == 1
    assert announce(7, "b") == ""
    table.leave(registry_wire.Leave(1, "", 8))
    assert announce(8, "c") is None
    assert (len(table), len(table._left)) == (0, 2)
    for number in range(9, 20):
        table.leave(registry_wire.Leave(number, "a", number))
    assert len(table._left) == 2
    assert announce(9, session=2) == ""


def test_the_lease_table_takes_nothing_late():
    table = LeaseTable(roster := Roster(), limit=2)
    announce = registry_wire.Announce(1, 5, 1000, member("a", 2, load=5))
    assert table.announce(announce, 0.0) == ""
    assert table.announce(registry_wire.Announce(1, 4, 1000, member("a", 2, load=4)), 0.5) is None
    assert table.announce(registry_wire.Announce(1, 9, 1000, member("a", 1)), 0.5) is None
    assert roster.known["a"].attributes["load"] == 5
    table.leave(registry_wire.Leave(2, "a", 9))
    table.leave(registry_wire.Leave(1, "a", 4))
    table.expire(0.999)
    assert len(table) == 1
    table.postpone(1.0)
    table.expire(1.5)
    assert table.next_deadline() == 2.0
    table.expire(2.0)
    assert len(table) == 0
    assert not roster.known
