"""What every registry does, whichever it is: the embedded one's clients, its server's own process, and etcd."""

from __future__ import annotations

import anyio
import pytest

import aiote
from aiote.discovery.etcd import EtcdRegistry
from aiote.discovery.membership import RegistryError
from support.engines.opening import PATIENCE_S, until
from support.service.registries import member, until_told

pytestmark = pytest.mark.anyio


async def test_a_member_joins_changes_and_leaves(registry):
    async with registry() as opened, opened() as here, opened() as there:
        await there.ready()
        events = there.watch()
        async with here.join(member("a", load=1)) as registration:
            (joined,) = await until_told(events, ("joined", "a"))
            assert joined.member == member("a", load=1)
            assert there.members() == (joined.member,)
            await registration.update({"load": 2, "model": "m"})
            (changed,) = await until_told(events, ("changed", "a"))
            assert changed.member == registration.member == member("a", load=2, model="m")
            assert not registration.lost
        (left,) = await until_told(events, ("left", "a"))
        assert left.member == changed.member
        assert there.members() == ()
        assert there.in_touch


async def test_a_watch_begins_with_the_members_that_are_there(registry):
    async with registry() as opened, opened() as here, here.join(member("a")), here.join(member("b", role="decode")):
        async with opened() as there:
            told = await until_told(there.watch(), ("joined", "a"), ("joined", "b"))
            assert {event.member.role for event in told} == {"prefill", "decode"}
            await until_told(here.watch(), ("joined", "a"), ("joined", "b"))
            assert len(here.members()) == len(there.members()) == 2


async def test_a_slow_reader_is_told_the_latest(registry):
    async with registry() as opened, opened() as here, opened() as there:
        await there.ready()
        slow = there.watch()
        async with here.join(member("a", load=0)) as registration:
            for load in range(1, 30):
                await registration.update({"load": load})
            await until(lambda: there.members() and there.members()[0].attributes["load"] == 29)
            (event,) = await until_told(slow, ("joined", "a"))
            assert event.member.attributes["load"] == 29
        await until(lambda: not there.members())


async def test_the_greater_incarnation_has_the_name(registry):
    async with registry() as opened, opened() as old, opened() as new:
        await new.ready()
        events = new.watch()
        async with old.join(member("a", 5)) as registration:
            await until_told(events, ("joined", "a"))
            for incarnation in (4, 5):
                why = "incarnation 5" if isinstance(new, EtcdRegistry) else "another connected engine"
                with pytest.raises(RegistryError, match=why):
                    async with new.join(member("a", incarnation)):
                        pass
            if not isinstance(new, EtcdRegistry):
                # The embedded registry knows whose a name is, and that engine is connected.
                for incarnation in (6, (1 << 64) - 1):
                    with pytest.raises(RegistryError, match="another connected engine holds the name"):
                        async with new.join(member("a", incarnation)):
                            pass
                assert not registration.lost
                return
            async with new.join(member("a", 6)) as successor:
                told = await until_told(events, ("left", "a"), ("joined", "a"))
                assert [(event.kind, event.member.incarnation) for event in told] == [("left", 5), ("joined", 6)]
                with pytest.raises(RegistryError):
                    while True:
                        await registration.update({"load": anyio.current_time()})
                        await anyio.sleep(0.01)
                assert registration.lost
                assert not successor.lost
            await until_told(events, ("left", "a"))


async def test_a_member_whose_task_is_cancelled_leaves(registry):
    async with registry() as opened, opened() as here, opened() as there:
        await there.ready()
        events = there.watch()
        async with anyio.create_task_group() as group:

            async def stay() -> None:
                async with here.join(member("a")):
                    await anyio.sleep_forever()

            group.start_soon(stay)
            await until_told(events, ("joined", "a"))
            group.cancel_scope.cancel()
        await until_told(events, ("left", "a"))
        async with here.join(member("a")):
            await until_told(events, ("joined", "a"))


async def test_wrong_use_is_refused_and_errors_of_the_block_come_out_unchanged(registry):
    async with registry() as opened, opened() as here:
        async with here.join(member("a")) as registration:
            with pytest.raises((aiote.UsageError, RegistryError)):
                async with here.join(member("a")):
                    pass
            with pytest.raises(aiote.UsageError):
                await registration.update({"load": object()})
        with pytest.raises(KeyError):
            async with here.join(member("b")):
                raise KeyError("mine")


async def test_watches_end_with_the_registry(registry):
    async with registry() as opened:
        async with opened() as here, here.join(member("a")):
            watch = here.watch()
            await until_told(watch, ("joined", "a"))
        if here.in_touch:  # the server itself, which goes on
            return
        with anyio.fail_after(PATIENCE_S):
            assert [event async for event in watch if event.kind == "joined"] == []
        with pytest.raises(aiote.ClosedError):
            async with here.join(member("a")):
                pass
