"""A service's clients find its servers by a role, whichever registry keeps them, and share their calls among them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

import aiote
from aiote import service
from aiote.discovery import EmbeddedRegistry, Member, MemberRegistration, Members, RegistryServer
from aiote.discovery.membership import Roster
from aiote.service.members import COMPARED, Chooser
from aiote.testing import Fabric, run
from support.engines.opening import go_round, opened, until

pytestmark = pytest.mark.anyio
NAMES = ["a", "b", "c"]
LEASE_S = 3.0


class Who(service.Service):
    """A service that says whose it is."""

    def __init__(self, name: str) -> None:
        self.own = name
        self.holding = 0
        self.gate = anyio.Event()

    @service.method(idempotent=True)
    async def name_it(self) -> str:
        return self.own

    @service.method
    async def hold(self) -> str:
        self.holding += 1
        await self.gate.wait()
        return self.own

    @service.method
    async def items(self) -> AsyncIterator[str]:
        yield self.own
        yield "end"


@dataclass
class Serving:
    """An engine that serves, and is registered."""

    engine: aiote.Engine
    server: service.Server
    who: Who
    registration: MemberRegistration


Opened = Callable[[], AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def serving(registries: Opened, name: str, role: str = "who") -> AsyncIterator[Serving]:
    async with opened("sim") as engine, registries() as registry:
        async with service.serve(engine, who := Who(name)) as server:
            member = Member(name, role, bytes(engine.address), engine.address.incarnation)
            async with registry.join(member) as registration:
                yield Serving(engine, server, who, registration)


@asynccontextmanager
async def three(registry: Any) -> AsyncIterator[tuple[list[Serving], Members, Who, Opened]]:
    """Have three members serve, and yield them, where they are looked up, and a client that is connected to all."""
    async with registry() as registries, opened("sim") as engine, registries() as here, AsyncExitStack() as stack:
        there = [await stack.enter_async_context(serving(registries, name)) for name in NAMES]
        members = Members(here, "who")
        client = service.client(engine, members, Who)
        await all_answer(client, NAMES)
        yield there, members, client, registries


async def all_answer(client: Who, names: list[str]) -> None:
    """Call until each of them has answered, which are then connected."""
    missing = set(names)
    while missing:
        missing.discard(await client.name_it())


async def answers(client: Who, count: int) -> Counter[str]:
    return Counter([await client.name_it() for _ in range(count)])


async def test_calls_are_shared_among_the_members(registry):
    async with three(registry) as (there, _, client, _), anyio.create_task_group() as group:
        assert await answers(client, 30) == Counter(dict.fromkeys(NAMES, 10))
        ended: list[None] = []

        async def hold() -> None:
            await client.hold()
            ended.append(None)

        for _ in range(6):
            group.start_soon(hold)
        await until(lambda: sum(one.who.holding for one in there) == 6)
        assert [one.who.holding for one in there] == [2, 2, 2]
        # One that is faster has more.
        there[1].who.gate.set()
        await until(lambda: len(ended) == 2)
        there[1].who.gate = anyio.Event()
        for _ in range(2):
            group.start_soon(hold)
        await until(lambda: sum(one.who.holding for one in there) == 8)
        assert there[1].who.holding == 4
        for one in there:
            one.who.gate.set()


async def test_a_member_that_drains_takes_no_more_calls(registry):
    async with three(registry) as (there, members, client, _):
        await there[0].server.drain()
        assert set(await answers(client, 20)) == {"b", "c"}
        # It was asked once, and is then left alone.
        assert there[0].server.refused == 1
        await there[1].registration.update({"draining": True})
        while len(await members.addresses()) != 2:
            await anyio.sleep(0.001)
        await until(lambda: not there[1].server.running)
        calls = there[1].server.calls
        assert set(await answers(client, 20)) == {"c"}
        assert there[1].server.calls == calls
        assert there[0].server.refused == 1


async def test_a_stream_that_a_member_refuses_begins_at_another(registry):
    async with three(registry) as (there, _, client, _):
        await there[2].server.drain()
        heard = Counter([await anext(client.items()) for _ in range(10)])
        assert heard.keys() == {"a", "b"}
        assert there[2].server.refused == 1
        assert [item async for item in client.items()][1:] == ["end"]
        for one in there:
            await one.server.drain()
        with pytest.raises(service.DrainingError):
            await anext(client.items())


async def test_a_killed_member_is_left_out_and_one_that_joins_is_called(registry):
    async with three(registry) as (there, members, client, registries):
        there[0].engine.abort()
        assert set(await answers(client, 20)) == {"b", "c"}
        assert len(await members.addresses()) == 3
        async with serving(registries, "d"):
            await all_answer(client, ["b", "c", "d"])
            assert (await answers(client, 30)) == Counter(dict.fromkeys("bcd", 10))
        # It has left in order: its calls had ended.
        while len(await members.addresses()) == 4:
            await anyio.sleep(0.001)
        assert set(await answers(client, 20)) == {"b", "c"}


async def test_a_call_waits_while_there_is_no_member(registry):
    async with registry() as registries, opened("sim") as engine, registries() as here:
        client = service.client(engine, Members(here, "who"), Who)
        for _ in range(2):
            names: list[str] = []
            async with anyio.create_task_group() as group:

                async def call(names: list[str] = names) -> None:
                    names.append(await client.name_it())

                async with serving(registries, "other", role="other"):
                    for _ in range(3):
                        group.start_soon(call)
                    await go_round()
                    assert not names
                    async with serving(registries, "a"):
                        await until(lambda names=names: len(names) == 3)
            assert names == ["a"] * 3
            await until(lambda: not here.members())


async def test_a_choice_looks_at_members_only_when_they_have_changed(registry, monkeypatch):
    async with three(registry) as (there, members, client, _):
        looks = []
        look = Chooser._update_members
        monkeypatch.setattr(Chooser, "_update_members", lambda self, *args: (looks.append(1), look(self, *args)))
        before = await members.addresses()
        await there[0].registration.update({"load": 1})
        await until(lambda: any(one.attributes for one in members._watch._roster.members()))
        assert await members.addresses() is before
        await answers(client, 100)
        assert not looks


async def test_one_engine_serves_registers_and_calls():
    async with opened("sim") as one, opened("sim") as other, RegistryServer(one) as server:
        async with EmbeddedRegistry(other, server.address) as registry, AsyncExitStack() as stack:
            for engine, at, name in ((one, server, "a"), (other, registry, "b")):
                await stack.enter_async_context(service.serve(engine, Who(name)))
                member = Member(name, "who", bytes(engine.address), engine.address.incarnation)
                await stack.enter_async_context(at.join(member))
            # An engine does not connect to itself, so each calls the other, and a third calls both.
            async with opened("sim") as third, EmbeddedRegistry(third, server.address) as seen:
                client = service.client(third, Members(seen, "who"), Who)
                await all_answer(client, ["a", "b"])


async def test_members_without_an_address_are_counted_and_a_closed_registry_is_named():
    roster = Roster()
    members = Members(roster, "who")  # type: ignore[arg-type]
    address = aiote.Address("here", 1, b"x" * 16, 1)
    roster.put(Member("a", "who", b"no address", 1))
    roster.put(Member("b", "who", bytes(address), 1))
    roster.put(Member("c", "who", bytes(address), 1))
    assert await members.addresses() == (address,)
    assert members.malformed == 1
    for name in "abc":
        roster.remove(name)
    roster.close()
    with pytest.raises(aiote.ClosedError, match="the registry is closed"):
        await members.addresses()
    with pytest.raises(aiote.UsageError):
        Members(roster, "x" * 33)  # type: ignore[arg-type]


def test_a_choice_compares_a_few_of_many_members_and_gives_all_their_turn():
    class Link:
        def __init__(self) -> None:
            self.calls: dict[int, None] = {}

    chooser = object.__new__(Chooser)
    links: list[Any] = [Link() for _ in range(3 * COMPARED + 1)]
    chooser._choices, chooser._next_start = links, 7
    for number in range(10 * len(links)):
        link = chooser._least_loaded()
        assert link is not None
        link.calls[number] = None  # type: ignore[assignment]
    assert max(len(link.calls) for link in links) - min(len(link.calls) for link in links) <= 2


@pytest.mark.parametrize("how", ["crash", "partition"])
def test_a_member_that_is_silent_holds_up_only_its_own_calls(how):
    """In virtual time: those that wait for it are called again elsewhere, and it is left out when its lease ends."""

    async def main(fabric: Fabric) -> None:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            server = await enter(RegistryServer(await enter(fabric.open_engine())))
            engines = [await enter(fabric.open_engine()) for _ in NAMES]
            for engine, name in zip(engines, NAMES, strict=True):
                registry = await enter(EmbeddedRegistry(engine, server.address, lease_s=LEASE_S))
                await enter(service.serve(engine, Who(name)))
                await enter(registry.join(Member(name, "who", bytes(engine.address), 1)))
            engine = await enter(fabric.open_engine())
            members = Members(await enter(EmbeddedRegistry(engine, server.address)), "who")
            client = service.client(engine, members, Who)
            await all_answer(client, NAMES)
            getattr(fabric, how)(engines[0])
            async with asyncio.timeout(60):
                assert set(await answers(client, 20)) == {"b", "c"}
                while len(await members.addresses()) == 3:
                    await asyncio.sleep(0.01)
            assert set(await answers(client, 20)) == {"b", "c"}
            if how == "partition":
                fabric.heal(engines[0])
                await all_answer(client, NAMES)

    run(main, seed=3)
