"""The registry in etcd, against a real one that is killed, compacted and made to lie."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import pytest

import aiote
from aiote.discovery import etcd as etcd_module
from aiote.discovery.etcd import EtcdRegistry
from aiote.discovery.etcd_gateway import EtcdError, Gateway, checked, number, packed, prefix_end, unpacked
from aiote.discovery.membership import RegistryError
from support.engines.opening import PATIENCE_S, until
from support.service.registries import Etcd, ask, etcd_process, free_port, member, until_told

pytestmark = pytest.mark.needs_etcd
PREFIX = "here/"


@pytest.fixture(scope="module")
def shared() -> Iterator[Etcd]:
    with etcd_process() as etcd:
        yield etcd


@pytest.fixture
def etcd(shared: Etcd) -> Etcd:
    """Return a running etcd with nothing under the prefix."""
    if shared.process is None:
        shared.start()
    ask(
        shared, "/v3/kv/deleterange", {"key": packed(PREFIX.encode()), "range_end": packed(prefix_end(PREFIX.encode()))}
    )
    return shared


async def asked(etcd: Etcd, path: str, body: dict[str, object]) -> dict[str, object]:
    return await anyio.to_thread.run_sync(ask, etcd, path, body)


def registry(etcd: Etcd, **more: object) -> EtcdRegistry:
    return EtcdRegistry(etcd.endpoint, prefix=PREFIX, lease_s=2, **more)  # type: ignore[arg-type]


JOIN = """
import anyio, sys
from aiote.discovery.etcd import EtcdRegistry
from aiote.discovery.membership import Member
async def main():
    async with EtcdRegistry(sys.argv[1], prefix=sys.argv[2], lease_s=1) as registry:
        async with registry.join(Member("a", "decode", b"", 1)):
            await anyio.sleep_forever()
anyio.run(main)
"""


@asynccontextmanager
async def joined_process(etcd: Etcd) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Yield a process that joins as member a, with incarnation 1 and a lease of 1 s; kill it at the end."""
    command = [sys.executable, "-P", "-c", JOIN, etcd.endpoint, PREFIX]
    process = await anyio.to_thread.run_sync(subprocess.Popen, command)
    try:
        with anyio.fail_after(PATIENCE_S):
            yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.blocking_allowed("it starts and ends a process")
async def test_a_killed_process_is_told_as_left_within_its_lease(etcd):
    async with joined_process(etcd) as process, registry(etcd) as here:
        events = here.watch()
        await until_told(events, ("joined", "a"))
        process.kill()
        with anyio.fail_after(2 + 7):  # etcd's least lease, and its leisure in ending them; the default is 10
            await until_told(events, ("left", "a"))


@pytest.mark.blocking_allowed("it starts and ends a process")
async def test_the_name_of_a_killed_process_goes_to_a_successor_whose_clock_is_behind(etcd):
    async with joined_process(etcd) as process, registry(etcd) as here:
        await until_told(here.watch(), ("joined", "a"))
        with pytest.raises(RegistryError, match="incarnation 1 of another engine holds the name"):
            async with here.join(member("a", 0)):
                pass
        process.kill()
        async with here.join(member("a", 0)) as registration:
            await until(lambda: here.members() == (registration.member,))
            assert not registration.lost


@pytest.mark.anyio
async def test_members_are_stale_while_etcd_is_down_and_updated_when_it_is_back(etcd):
    with anyio.fail_after(PATIENCE_S):
        async with registry(etcd) as here, registry(etcd) as there, here.join(member("a", load=1)) as registration:
            events = there.watch()
            await until_told(events, ("joined", "a"))
            await anyio.to_thread.run_sync(etcd.kill)
            await until(lambda: not there.in_touch)
            assert [one.stale for one in there.members()] == [True]
            with anyio.move_on_after(0.1) as scope:
                await registration.update({"load": 2})
            assert scope.cancelled_caught
            await anyio.to_thread.run_sync(etcd.start)
            told = await until_told(events, ("changed", "a"))
            assert [(event.kind, event.member.attributes["load"]) for event in told] == [("changed", 2)]
            await until(lambda: there.in_touch)
            assert [one.stale for one in there.members()] == [False]


@pytest.mark.anyio
async def test_a_lease_that_is_lost_is_taken_anew(etcd):
    body = {"key": packed((PREFIX + "a").encode())}
    with anyio.fail_after(PATIENCE_S):
        async with registry(etcd) as here, here.join(member("a")) as registration:
            before = registration.lease
            await asked(etcd, "/v3/lease/revoke", {"ID": str(before)})
            await until(lambda: registration.lease != before)
            # Events may tell nothing of it: of what goes and comes back at once only the last state is kept.
            while not any(entry.get("lease") == str(registration.lease) for entry in await entries(etcd, body, 0)):
                await anyio.sleep(0.01)
            await until(lambda: [one.name for one in here.members()] == ["a"])
            assert not registration.lost


async def entries(etcd, body: dict[str, str], after: int) -> list[dict[str, str]]:
    """Return a key's entry, if it was made after a revision."""
    found = (await asked(etcd, "/v3/kv/range", body)).get("kvs", [])
    return [entry for entry in found if int(entry["create_revision"]) > after]


@pytest.mark.anyio
async def test_a_key_that_somebody_deletes_is_put_again(etcd):
    body = {"key": packed((PREFIX + "a").encode())}
    with anyio.fail_after(PATIENCE_S):
        async with registry(etcd) as here, registry(etcd) as there, here.join(member("a")) as registration:
            events = there.watch()
            await until_told(events, ("joined", "a"))
            lease = registration.lease
            for _ in range(2):
                deleted = number(await asked(etcd, "/v3/kv/deleterange", body), "header", "revision")
                # Events may tell nothing of it: of what goes and comes back at once only the last state is kept.
                while not any(entry.get("lease") == str(lease) for entry in await entries(etcd, body, deleted)):
                    await anyio.sleep(0.01)
                await until(lambda: [one.name for one in there.members()] == ["a"])
            assert (registration.lease, registration.lost) == (lease, "")
            await registration.update({"load": 1})
            await until_told(events, ("changed", "a"))


@pytest.mark.anyio
async def test_a_name_that_is_being_left_is_taken_once_it_is_free(etcd):
    with anyio.fail_after(PATIENCE_S):
        async with registry(etcd) as here, anyio.create_task_group() as group:

            async def stay(scope: anyio.CancelScope, joined: anyio.Event, leaves: anyio.Event) -> None:
                with scope:
                    async with here.join(member("a")):
                        joined.set()
                        try:
                            await anyio.sleep_forever()
                        finally:
                            leaves.set()

            for _ in range(5):
                scope, joined, leaves = anyio.CancelScope(), anyio.Event(), anyio.Event()
                group.start_soon(stay, scope, joined, leaves)
                await joined.wait()
                with pytest.raises(aiote.UsageError, match="is registered here already"):
                    async with here.join(member("a")):
                        pass
                scope.cancel()
                await leaves.wait()
                # The same incarnation, whose key still bears the old lease.
                async with here.join(member("a")) as registration:
                    assert not registration.lost


async def test_a_watch_of_a_compacted_revision_reads_all_again(etcd, monkeypatch):
    monkeypatch.setattr(etcd_module, "WATCH_S", 2.0)
    with anyio.fail_after(PATIENCE_S):
        async with registry(etcd) as there, registry(etcd) as here, here.join(member("a")):
            events = there.watch()
            await until_told(events, ("joined", "a"))
            answer = await asked(etcd, "/v3/kv/put", {"key": packed(b"elsewhere"), "value": ""})
            await asked(etcd, "/v3/kv/compaction", {"revision": str(number(answer, "header", "revision"))})
            there._revision = 1
            there._roster.remove("a")
            # The next watch, from a revision that is no more there, has it read everything.
            await until_told(events, ("left", "a"), ("joined", "a"))
            assert there._revision > 1
            # Only a watch that is left alone is sure to be refused.
            monkeypatch.setattr(etcd_module, "WATCH_S", PATIENCE_S)
            with pytest.raises(EtcdError) as raised:
                await there._listen(1)
            assert raised.value.code == etcd_module.OUT_OF_RANGE


@pytest.mark.anyio
async def test_a_watch_of_a_revision_that_went_back_reads_all_again(etcd):
    with anyio.fail_after(PATIENCE_S):
        async with registry(etcd) as here:
            await here.ready()
            with pytest.raises(EtcdError, match="lower than before"):
                await here._listen(1 << 40)


@pytest.mark.anyio
async def test_other_endpoints_are_asked_when_the_first_are_dead(etcd):
    dead = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with anyio.fail_after(PATIENCE_S):
        async with EtcdRegistry([*dead, etcd.endpoint], prefix=PREFIX, lease_s=2) as here, here.join(member("a")):
            await until_told(here.watch(), ("joined", "a"))
            await until(lambda: here.in_touch)


@pytest.mark.anyio
async def test_keys_that_hold_no_member_are_counted_and_stop_no_watch(etcd):
    with anyio.fail_after(PATIENCE_S):
        for key in (PREFIX + "noise", PREFIX + "a"):
            await asked(etcd, "/v3/kv/put", {"key": packed(key.encode()), "value": packed(b"noise")})
        async with registry(etcd) as here:
            events = here.watch()
            await here.ready()
            await until(lambda: here.in_touch)
            assert here.malformed == 2
            async with here.join(member("a")):
                await until_told(events, ("joined", "a"))
                await asked(etcd, "/v3/kv/put", {"key": packed((PREFIX + "b").encode()), "value": packed(b"\xff")})
                await until(lambda: here.malformed >= 3)
            await until_told(events, ("left", "a"))


@pytest.mark.anyio
async def test_more_members_than_a_page_are_all_read(etcd, monkeypatch):
    monkeypatch.setattr(etcd_module, "PAGE", 3)
    with anyio.fail_after(PATIENCE_S):
        async with registry(etcd) as here, anyio.create_task_group() as group:

            async def stay(name: str) -> None:
                async with here.join(member(name)):
                    await anyio.sleep_forever()

            names = [f"m{number}" for number in range(7)]
            for name in names:
                group.start_soon(stay, name)
            await until_told(here.watch(), *(("joined", name) for name in names))
            async with registry(etcd) as there:
                await there.ready()
                assert [one.name for one in there.members()] == names
            group.cancel_scope.cancel()
        answer = await asked(etcd, "/v3/lease/leases", {})
        assert not answer.get("leases")


@pytest.mark.anyio
async def test_joining_waits_while_no_endpoint_answers():
    with anyio.fail_after(PATIENCE_S):
        async with EtcdRegistry(f"http://127.0.0.1:{free_port()}") as here:
            await until(lambda: here.failure)
            assert not here.in_touch
            with anyio.move_on_after(0.2) as scope:
                async with here.join(member("a")):
                    pass
            assert scope.cancelled_caught


def test_answers_of_the_gateway_are_checked():
    assert checked("/p", 200, b'{"result": {"a": 1}}') == {"a": 1}
    for status, content, code in [
        (200, b"", 14),
        (502, b"<html>", 14),
        (200, b"[]", 14),
        (404, b'{"error": "gone", "code": 5}', 5),
        (200, b'{"error": {"grpc_code": 11, "message": "compacted"}}', 11),
        (503, b'{"error": "busy"}', 14),
    ]:
        with pytest.raises(EtcdError) as raised:
            checked("/p", status, content)
        assert raised.value.code == code
    with pytest.raises(EtcdError):
        number({"a": "x"}, "a")
    with pytest.raises(EtcdError):
        unpacked("*")
    assert number({}, "a", "b") == 0
    assert (prefix_end(b"a/"), prefix_end(b"a\xff"), prefix_end(b"\xff")) == (b"a0", b"b", b"\0")
    for wrong in ("etcd:2379", [], ["ftp://x"]):
        with pytest.raises(aiote.UsageError):
            Gateway(wrong)
