"""Successors whose clocks are behind, in etcd: they wait for a dead member's lease; living members keep their names.

A pretended etcd, in virtual time, has leases that end late, as those of a real one do.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest

from aiote.discovery.etcd import EtcdRegistry
from aiote.discovery.etcd_gateway import packed, unpacked
from aiote.discovery.membership import Member, RegistryError
from aiote.discovery.wire import decode_member, encode_member
from aiote.testing import Fabric, run
from support.service.registries import member

PREFIX = "here/"
LATE_S = 0.8
"""Seconds for which etcd keeps a key whose lease has ended."""
PHASES = (0.0, 0.4, 0.9)


async def _chunk(answer: dict[str, Any]) -> AsyncIterator[bytes]:
    yield json.dumps(answer).encode()


class Store:
    """An etcd with one key at most, of which it tells its watchers; `leases` has seconds and ends by number."""

    def __init__(self) -> None:
        self.revision = 7
        self.key: dict[str, str] = {}
        self.leases: dict[str, tuple[float, float]] = {}
        self.events: list[dict[str, Any]] = []

    def put(self, held: Member, lease: str) -> None:
        """Write the key, as a member's process does."""
        self.revision += 1
        key, value = packed((PREFIX + held.name).encode()), packed(encode_member(held))
        self.key = {"key": key, "value": value, "lease": lease, "mod_revision": str(self.revision)}
        self.events.append({"type": "PUT", "kv": self.key})

    def dead(self, held: Member, lease_s: float) -> None:
        """Write the key of a member whose process dies at once."""
        self.leases["99"] = (lease_s, anyio.current_time() + lease_s)
        self.put(held, "99")

    def _sweep(self) -> None:
        """End the leases that are over, and delete the key with its lease."""
        for lease, (_, end) in tuple(self.leases.items()):
            if end + LATE_S <= anyio.current_time():
                self._revoke(lease)

    def _revoke(self, lease: str) -> None:
        self.leases.pop(lease, None)
        if self.key.get("lease") == lease:
            self.revision += 1
            gone = {"key": self.key["key"], "mod_revision": str(self.revision)}
            self.events.append({"type": "DELETE", "kv": gone})
            self.key = {}

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self._sweep()
        if request.url.path == "/v3/watch":
            first = int(json.loads(request.content)["create_request"]["start_revision"])
            return httpx.Response(200, content=self._watch(first))
        answer = self._answer(request.url.path, json.loads(request.content))
        return httpx.Response(200, content=_chunk({"header": {"revision": str(self.revision)}} | answer))

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        now, lease = anyio.current_time(), str(body.get("ID", len(self.leases) + 1))
        if path == "/v3/lease/grant":
            self.leases[lease] = (float(body["TTL"]), now + float(body["TTL"]))
            return {"ID": lease, "TTL": body["TTL"]}
        if path == "/v3/lease/keepalive":
            ttl_s, end = self.leases.get(lease, (0.0, 0.0))
            if end > now:
                self.leases[lease] = ttl_s, now + ttl_s
            return {"TTL": str(int(ttl_s) if end > now else 0)}
        if path == "/v3/lease/timetolive":
            return {"TTL": str(int(self.leases[lease][1] - now) if lease in self.leases else -1)}
        if path == "/v3/lease/revoke":
            self._revoke(lease)
            return {}
        if path == "/v3/kv/range":
            return {"kvs": [self.key] if self.key else []}
        compare, put = body["compare"][0], body["success"][0]["request_put"]
        if compare["mod_revision"] != self.key.get("mod_revision", "0"):
            return {}
        self.put(decode_member(unpacked(put["value"])), put["lease"])
        return {"succeeded": True}

    async def _watch(self, first: int) -> AsyncIterator[bytes]:
        yield json.dumps({"result": {"header": {"revision": str(self.revision)}, "created": True}}).encode() + b"\n"
        while True:
            self._sweep()
            news = [event for event in self.events if int(event["kv"]["mod_revision"]) >= first]
            first = self.revision + 1
            if news:
                yield json.dumps({"result": {"events": news}}).encode() + b"\n"
            await anyio.sleep(0.1)

    def registry(self, lease_s: float) -> EtcdRegistry:
        options = {"transport": httpx.MockTransport(self.handle)}
        return EtcdRegistry("http://etcd", prefix=PREFIX, lease_s=lease_s, options=options)


async def refused(registry: EtcdRegistry) -> None:
    """Join with a smaller incarnation than the holder's, which is refused by name."""
    with pytest.raises(RegistryError, match="member a: incarnation 1000 of another engine holds the name"):
        async with registry.join(member("a", 5)):
            pass


@pytest.mark.parametrize("incarnation", [5, 1000])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("lease_s", [2, 10, 60])
def test_a_successor_whose_clock_is_behind_joins_when_the_dead_members_lease_ends(lease_s, phase, incarnation):
    async def main(fabric: Fabric) -> None:
        store, begun = Store(), fabric.now
        store.dead(member("a", 1000), lease_s)
        await anyio.sleep(phase)
        async with store.registry(lease_s) as here:
            async with here.join(member("a", incarnation)) as registration:
                assert lease_s <= fabric.now - begun <= lease_s + LATE_S + 0.2
                await anyio.sleep(lease_s * 2)
                assert not registration.lost
                assert here.members() == (member("a", incarnation),)
        assert not store.leases

    run(main)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("lease_s", [2, 10, 60])
def test_a_living_member_keeps_its_name(lease_s, phase):
    async def main(fabric: Fabric) -> None:
        store = Store()
        async with store.registry(lease_s) as there, there.join(member("a", 1000)) as holder, store.registry(2) as here:
            await anyio.sleep(phase)
            begun = fabric.now
            await refused(here)
            assert fabric.now - begun <= lease_s / 3 + 3
            assert not holder.lost
            assert store.leases.keys() == {str(holder.lease)}

    run(main)


def test_a_member_that_changes_its_key_lives():
    async def main(fabric: Fabric) -> None:
        store = Store()
        async with store.registry(600) as there, there.join(member("a", 1000)) as holder, store.registry(600) as here:

            async def change() -> None:
                await anyio.sleep(3)
                await holder.update({"load": 1})

            async with anyio.create_task_group() as group:
                group.start_soon(change)
                await refused(here)
            assert fabric.now < 5

    run(main)


def test_a_key_without_a_lease_is_not_waited_for():
    async def main(fabric: Fabric) -> None:
        store = Store()
        store.put(member("a", 1000), "0")
        async with store.registry(2) as here:
            await refused(here)
        assert fabric.now < 1

    run(main)


def test_one_of_two_successors_has_the_name_and_the_greater_one_gets_it():
    async def main(fabric: Fabric) -> None:
        store, names, ends = Store(), [], []
        store.dead(member("a", 1000), 10)
        async with store.registry(10) as here, store.registry(10) as there, anyio.create_task_group() as group:

            async def stay(registry: EtcdRegistry, incarnation: int) -> None:
                try:
                    async with registry.join(member("a", incarnation)) as registration:
                        names.append(incarnation)
                        await anyio.sleep(30)
                        ends.append((incarnation, registration.lost))
                except RegistryError as error:
                    ends.append((incarnation, str(error)))

            group.start_soon(stay, here, 5)
            group.start_soon(stay, there, 6)
        assert names[-1] == 6
        assert dict(ends)[6] == ""
        assert "incarnation 6" in dict(ends)[5]

    run(main)


def test_a_wait_for_a_name_can_be_given_up():
    async def main(fabric: Fabric) -> None:
        store = Store()
        store.dead(member("a", 1000), 600)
        async with store.registry(2) as here:
            with anyio.move_on_after(5) as scope:
                async with here.join(member("a", 5)):
                    pass
            assert scope.cancelled_caught
            assert store.leases.keys() == {"99"}

    run(main)


def test_what_was_written_before_takes_no_name_and_what_is_written_later_does():
    async def main(fabric: Fabric) -> None:
        store = Store()
        store.dead(member("a", 1000), 2)
        late = dict(store.key)
        async with store.registry(2) as here, here.join(member("a", 5)) as registration:
            here._lose_to(late, member("a", 1000))  # as in a page of an earlier revision that is read late
            assert not registration.lost
            store.put(member("a", 1000), "1")
            await anyio.sleep(1)
            assert registration.lost == "incarnation 1000 has taken the name over"

    run(main)
