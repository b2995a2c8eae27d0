"""A registry, and its clients, with a peer that registers, watches and tells whatever it likes."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import anyio
import pytest

import aiote
from aiote import service
from aiote.discovery import embedded
from aiote.discovery.lease_table import FORMER, POSTPONED, SESSIONS_EACH, LeaseTable
from aiote.discovery.membership import Roster
from aiote.discovery.registry_server import AT_ONCE, MEMBERS_EACH, WATCHES_EACH, Keeping, RegistryServer, Watching
from aiote.discovery.wire import MOST_KNOWN, MemberRecord, RosterUpdate
from aiote.service.endpoint import CallEndpoint
from aiote.service.errors import CallLostError
from aiote.service.link import Link
from aiote.service.members import AGAIN_S, CONNECTING, MOST_AGAIN_S, Chooser
from support.engines.opening import opened, until
from support.service.registries import client, member, until_told

METHOD = "X/1.x"


def test_members_are_their_engine_s_whatever_its_sessions_are():
    table = LeaseTable(roster := Roster(), limit=100, owner_limit=5)

    def keep(owner: str, session: int, *names: str) -> dict[str, str]:
        return table.keep((owner, session), 1, 1.0, [member(name) for name in names], 0.0, owner)

    assert keep("liar", 1, "a", "b", "c") == {}
    assert "has 5 members already" in keep("liar", 2, "d", "e", "f")["f"]
    assert len(roster.known) == 5
    for session in range(3, 2 * SESSIONS_EACH):
        keep("liar", session)
    assert sum(owner == "liar" for owner, _ in table._sessions) <= SESSIONS_EACH
    assert keep("honest", 1, "mine") == {}
    table.expire(1.0)
    assert not table._owned


def test_where_all_is_full_the_greediest_engine_loses_its_last():
    table = LeaseTable(roster := Roster(), limit=4)
    table.keep(1, 1, 1.0, [member(name) for name in "abc"], 0.0, "greedy")
    table.keep(2, 1, 1.0, [member("d")], 0.0, "one")
    assert table.keep(3, 1, 1.0, [member("e")], 0.0, "other") == {}
    assert list(roster.known) == ["a", "b", "d", "e"]
    # All have about as many then: the next is refused.
    assert table.keep(4, 1, 1.0, [member("f"), member("g")], 0.0, "third").keys() == {"g"}
    assert len(roster.known) == 4


def test_where_all_sessions_are_taken_the_greediest_engine_loses_its_last():
    table = LeaseTable(roster := Roster(), limit=6)

    def keep(session: int, owner: str, *names: str) -> dict[str, str]:
        return table.keep(session, 1, 1.0, [member(name) for name in names], 0.0, owner)

    for session, name in enumerate("abcd"):
        assert keep(session, "greedy", name) == {}
    assert keep(4, "one", "e") == {}
    assert keep(5, "greedy") == {}
    assert keep(6, "other", "f") == {}  # in the place of the session without members
    assert list(roster.known) == list("abcdef")
    table.keep(0, 2, 1.0, [], 0.0, "greedy")
    assert keep(7, "third", "g") == {}
    assert keep(8, "fourth", "h") == {}
    assert keep(9, "fifth", "i") == {}
    assert list(roster.known) == list("befghi")
    # All have about as many then: the next is refused, and so is the greedy one.
    assert keep(10, "sixth", "j") == {"j": "the registry has its 6 clients"}
    assert keep(11, "greedy", "k").keys() == {"k"}
    assert list(roster.known) == list("befghi")
    table.expire(1.0)
    assert not table._sessions_of


def test_a_session_without_members_is_forgotten_of_the_engine_with_the_most():
    table = LeaseTable(Roster(), limit=3)
    for session, owner in enumerate(["one", "greedy", "greedy"]):
        table.keep(session, 1, 1.0, [], 0.0, owner)
    assert table.keep(3, 1, 1.0, [member("a")], 0.0, "other") == {}
    assert list(table._sessions) == [0, 2, 3]


def test_a_name_is_its_engine_s_as_long_as_that_is_connected():
    there = {"honest"}
    table = LeaseTable(roster := Roster(), limit=9, connected=lambda owner: owner in there)
    assert table.keep(1, 1, 1.0, [member("a", 5)], 0.0, "honest") == {}
    largest = member("a", (1 << 64) - 1)
    assert "connected engine holds the name" in table.keep(2, 1, 1.0, [largest], 0.0, "liar")["a"]
    # Its own next run takes it, and another's once it is gone.
    assert table.keep(3, 1, 1.0, [member("a", 6)], 0.0, "honest") == {}
    assert "with incarnation 6" in table.keep(4, 1, 1.0, [member("a", 6)], 0.0, "honest")["a"]
    there.clear()
    assert table.keep(2, 2, 1.0, [member("a", 7)], 0.0, "successor") == {}
    assert roster.known["a"].incarnation == 7


def test_a_name_goes_to_an_engine_whose_clock_is_behind_and_not_back_to_an_earlier_one():
    table = LeaseTable(roster := Roster(), limit=9, connected=lambda _: False)

    def keep(session: int, owner: str, incarnation: int) -> dict[str, str]:
        return table.keep(session, 1, 1.0, [member("a", incarnation)], 0.0, owner)

    assert keep(1, "killed", 900) == {}
    assert keep(2, "behind", 5) == {}
    assert "another engine holds the name, or this one lost it, with incarnation 900" in keep(3, "killed", 900)["a"]
    assert keep(4, "behind again", 3) == {}
    assert keep(5, "behind", 5).keys() == {"a"}
    assert keep(6, "killed", 901) == {}  # its next life
    assert roster.known["a"].incarnation == 901
    for number in range(20):
        assert keep(10 + number, f"engine {number}", 0) == {}
    assert len(table._former_owners["a"]) == FORMER
    table.expire(1.0)
    assert not table._former_owners


def test_leases_are_postponed_a_few_times_until_they_are_renewed():
    table = LeaseTable(roster := Roster(), limit=9)
    table.keep(1, 1, 1.0, [member("dead")], 0.0)
    for _ in range(100):
        table.postpone(1.0)
    assert table.next_deadline() == 1.0 + POSTPONED
    table.keep(1, 2, 1.0, [member("dead")], 2.0)
    table.postpone(1.0)
    assert table.next_deadline() == 4.0
    table.expire(4.0)
    assert not roster.known


@pytest.mark.anyio
async def test_one_engine_has_a_few_watches_and_members_and_others_are_served():
    async with (
        opened("sim") as liar,
        opened("sim") as there,
        RegistryServer(there) as server,
        AsyncExitStack() as stack,
    ):
        watching = service.client(liar, server.address, Watching)
        streams = [watching.watch() for _ in range(3 * WATCHES_EACH)]
        for stream in streams[:WATCHES_EACH]:
            await anext(stream)
        with pytest.raises(aiote.AioteError, match=f"or {WATCHES_EACH} of this engine"):
            await anext(streams[-1])
        keeping = service.client(liar, server.address, Keeping)
        for session in range(4):
            records = [MemberRecord(f"{session}.{number}", "x", b"", 1, {}) for number in range(MEMBERS_EACH // 2)]
            await keeping.keep(session, 1, 600.0, records)
        assert len(server.members()) == MEMBERS_EACH
        honest = await stack.enter_async_context(client(server.address))
        events = honest.watch()
        async with honest.join(member("honest")):
            await until_told(events, ("joined", "honest"))


@pytest.mark.anyio
async def test_where_all_watch_that_may_the_greediest_engine_ends_one():
    async with opened("sim") as liar, opened("sim") as there, RegistryServer(there, limit=4) as server:
        watching = service.client(liar, server.address, Watching)
        streams = [watching.watch() for _ in range(4)]
        for stream in streams:
            await anext(stream)
        async with client(server.address) as one, client(server.address) as two:
            await one.ready()
            await two.ready()
            for stream in streams[2:]:
                with pytest.raises(aiote.AioteError, match="too many clients, and this engine the most of them"):
                    await anext(stream)
            assert server.watchers == 4
            # The others have about as many then: the next is refused.
            with pytest.raises(aiote.AioteError, match="has 4 clients"):
                await anext(watching.watch())
            async with one.join(member("honest")):
                for stream in streams[:2]:
                    while not (update := await anext(stream)).present:
                        pass
                    assert update.present[0][1].name == "honest"


def test_a_report_that_is_overtaken_while_it_pauses_stops():
    table = LeaseTable(roster := Roster(), limit=9)
    report = table.report(1, 1, 1.0, {"a", "b", "c"}, [member(name) for name in "abc"], 0.0)
    assert next(report) == ("a", "")
    assert table.keep(1, 2, 1.0, [member("d")], 0.0) == {}
    assert not list(report)
    assert list(roster.known) == ["d"]
    report = table.report(1, 3, 1.0, {"e", "f"}, [member("e"), member("f")], 0.0)
    assert [next(report) for _ in range(2)] == [("d", ""), ("e", "")]
    table.forget(1)
    assert not list(report)
    assert not roster.known


def test_a_name_that_another_takes_while_a_report_pauses_is_not_withdrawn():
    table = LeaseTable(roster := Roster(), limit=9, connected=lambda _: False)
    table.keep(1, 1, 1.0, [member("a"), member("b")], 0.0, "one")
    report = table.report(1, 2, 1.0, set(), [], 0.0, owner="one")
    first, _ = next(report)
    other = "b" if first == "a" else "a"
    assert table.keep(2, 1, 1.0, [member(other, 9)], 0.0, "two") == {}
    assert not list(report)
    assert list(roster.known) == [other]


def test_a_name_that_the_next_report_has_again_is_not_withdrawn_by_one_that_pauses():
    table = LeaseTable(roster := Roster(), limit=9)
    both = [member("a"), member("b")]
    table.keep(1, 1, 1.0, both, 0.0)
    report = table.report(1, 2, 1.0, set(), [], 0.0)
    next(report)
    assert table.keep(1, 3, 1.0, both, 0.0) == {}
    assert not list(report)
    assert sorted(roster.known) == ["a", "b"]


def test_a_session_that_is_renewed_while_it_expires_keeps_what_it_has():
    table = LeaseTable(roster := Roster(), limit=9)
    table.keep(1, 1, 1.0, [member("a"), member("b")], 0.0)
    expiring = table.expiring(1.0)
    next(expiring)
    assert list(roster.known) == ["b"]
    table.keep(1, 2, 1.0, [member("a"), member("b")], 1.0)
    assert not list(expiring)
    assert sorted(roster.known) == ["a", "b"]


@pytest.mark.anyio
async def test_a_long_report_and_its_expiry_let_others_run():
    grown, turns, known = Counter[int](), 0, 0

    async with opened("sim") as liar, opened("sim") as there, RegistryServer(there) as server:

        async def count() -> None:
            nonlocal turns, known
            while True:
                turns += 1
                grown[turns] += abs(len(server._roster.known) - known)
                known = len(server._roster.known)
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(count)
            records = [MemberRecord(f"m{number}", "x", b"", 1, {}) for number in range(MEMBERS_EACH)]
            keeping = service.client(liar, server.address, Keeping)
            assert await keeping.keep(1, 1, 600.0, records) == {}
            for session in server._leases._sessions.values():
                session.deadline = 0.0
            server._earlier_deadline.wake_all()
            await until(lambda: not server.members() and not known)
            group.cancel_scope.cancel()
    assert sum(grown.values()) == 2 * MEMBERS_EACH
    assert max(grown.values()) <= 3 * AT_ONCE


@pytest.mark.anyio
async def test_a_registry_takes_no_more_members_than_its_clients():
    async with opened("sim") as there:
        with pytest.raises(aiote.UsageError, match="which clients take at most"):
            RegistryServer(there, limit=MOST_KNOWN + 1)


class Talkative(service.Service):
    """A registry's server that tells of ever more members."""

    name = Watching.name

    @service.method
    async def watch(self) -> AsyncIterator[RosterUpdate]:
        for number in range(1 << 30):
            yield RosterUpdate(1, False, [], [(1.0, MemberRecord(f"m{number}", "x", b"", 1, {}))])


class Polite(service.Service):
    name = Keeping.name

    @service.method
    async def keep(self, session: int, number: int, lease_s: float, records: list[MemberRecord]) -> dict[str, str]:
        return {}


@pytest.mark.anyio
async def test_a_client_takes_no_more_members_than_may_be(monkeypatch):
    monkeypatch.setattr(embedded, "MOST_KNOWN", 40)
    async with opened("sim") as there, service.serve(there, Talkative(), Polite()), client(there.address) as registry:
        await until(lambda: "lists more than 40 members" in registry.failure)
        assert len(registry.members()) == 40
        assert not registry.in_touch


class FixedMembers:
    """Members that are where a test says."""

    def __init__(self, *addresses: aiote.Address) -> None:
        self.found = addresses

    async def addresses(self) -> tuple[aiote.Address, ...]:
        return self.found


def address(port: int, number: int) -> aiote.Address:
    return aiote.Address("127.0.0.1", port, number.to_bytes(16, "big"), 1)


@pytest.mark.anyio
async def test_a_few_members_are_connected_at_a_time():
    under_way: list[aiote.Address] = []
    over = anyio.Event()

    async def reach(where: aiote.Address, method: str) -> Link:
        under_way.append(where)
        await over.wait()
        raise CallLostError(method, "nobody is there", "no")

    async with opened("sim") as engine, anyio.create_task_group() as group:
        silent = [address(7, number) for number in range(1, 2000)]
        chooser = Chooser(FixedMembers(*silent, address(8, 1)), CallEndpoint.of(engine), reach)  # type: ignore[arg-type]
        group.start_soon(chooser.choose, METHOD, ())
        await until(lambda: len(under_way) == 2)
        assert {one.port for one in under_way} == {7, 8}
        many = [address(port, port) for port in range(100, 200)]
        other = Chooser(FixedMembers(*many), CallEndpoint.of(engine), reach)  # type: ignore[arg-type]
        under_way.clear()
        group.start_soon(other.choose, METHOD, ())
        await until(lambda: len(under_way) == CONNECTING)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert len(under_way) == CONNECTING
        group.cancel_scope.cancel()
        over.set()


@pytest.mark.anyio
async def test_a_member_that_cannot_be_reached_is_left_alone_for_ever_longer():
    async def reach(where: aiote.Address, method: str) -> Link:
        raise CallLostError(method, "nobody is there", "no")

    async with opened("sim") as engine:
        chooser = Chooser(FixedMembers(), CallEndpoint.of(engine), reach)  # type: ignore[arg-type]
        pauses = []
        for _ in range(9):
            before = anyio.current_time()
            await chooser._connect(address(7, 1), METHOD)
            pauses.append(chooser._retry_at[address(7, 1)] - before)
        for pause, times in zip(pauses, [1, 2, 4, 8, 16, 32, 64, 64, 64], strict=True):
            assert pause >= times * AGAIN_S / 2
        assert chooser._pauses[address(7, 1)]._next == MOST_AGAIN_S
