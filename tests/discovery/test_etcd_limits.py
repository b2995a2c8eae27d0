"""What etcd refuses for good, and more than can be taken: against a pretended gateway, and a real one's users."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import httpx
import pytest

from aiote.discovery import etcd as etcd_module
from aiote.discovery import etcd_gateway
from aiote.discovery.etcd import EtcdRegistry
from aiote.discovery.etcd_gateway import EtcdError, LineSplitter, checked, number, packed, records, unpacked
from aiote.discovery.membership import RegistryError
from aiote.discovery.wire import encode_member
from aiote.testing import Fabric, run
from support.engines.opening import PATIENCE_S, until
from support.service.registries import Etcd, ask, etcd_process, member

pytestmark = pytest.mark.anyio
PREFIX = "here/"


class Fake:
    """A gateway with members m0, m1, ..., which answers some paths otherwise."""

    def __init__(self, members: int = 0) -> None:
        self.members = members
        self.revision = 7
        self.otherwise: dict[str, list[tuple[int, bytes]]] = {}
        self.asked: list[str] = []
        self.watching: list[bytes] = []
        self.news = anyio.Event()

    def kv(self, number: int) -> dict[str, str]:
        name = f"m{number}"
        value = packed(encode_member(member(name)))
        return {"key": packed((PREFIX + name).encode()), "value": value, "mod_revision": str(self.revision)}

    async def handle(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content)
        self.asked.append(path)
        if answers := self.otherwise.get(path):
            return response(*(answers.pop(0) if len(answers) > 1 else answers[0]))
        if path == "/v3/watch":
            return httpx.Response(200, content=self.watch())
        return response(200, said({"header": {"revision": str(self.revision)}} | self.answer(path, body)))

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v3/kv/range" and "range_end" in body:
            keys = {unpacked(entry["key"]): entry for entry in map(self.kv, range(self.members))}
            rest = [keys[key] for key in sorted(keys) if key >= unpacked(body["key"])]
            return {"kvs": rest[: int(body["limit"])], "more": len(rest) > int(body["limit"])}
        return {"/v3/lease/grant": {"ID": "1", "TTL": "2"}, "/v3/kv/txn": {"succeeded": True}}.get(path, {"TTL": "2"})

    async def watch(self) -> AsyncIterator[bytes]:
        yield said({"result": {"header": {"revision": str(self.revision)}, "created": True}}) + b"\n"
        while True:
            while self.watching:
                yield self.watching.pop(0)
            self.news = anyio.Event()
            await self.news.wait()

    def tell(self, *chunks: bytes) -> None:
        self.watching += chunks
        self.news.set()

    def joined(self, number: int) -> bytes:
        return said({"result": {"events": [{"kv": self.kv(number)}]}}) + b"\n"

    def registry(self) -> EtcdRegistry:
        options = {"transport": httpx.MockTransport(self.handle)}
        return EtcdRegistry("http://etcd", prefix=PREFIX, lease_s=2, options=options)


def said(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode()


def response(status: int, content: bytes) -> httpx.Response:
    """Return one that has yet to come, as from a network."""

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(content), 1000):
            yield content[at : at + 1000]

    return httpx.Response(status, content=chunks())


def refused(status: int, text: str, **more: Any) -> tuple[int, bytes]:
    return status, said({"error": text, "message": text} | more)


REFUSALS = [
    (400, {"code": 3}, "etcdserver: user name is empty"),
    (401, {"code": 16}, "etcdserver: invalid auth token"),
    (403, {"code": 7}, "etcdserver: permission denied"),
    (403, {}, "etcdserver: permission denied"),
]


@pytest.mark.parametrize(("status", "more", "text"), REFUSALS)
@pytest.mark.parametrize("path", ["/v3/lease/grant", "/v3/kv/range", "/v3/kv/txn"])
async def test_a_permanent_refusal_fails_a_join_at_once(status, more, text, path):
    fake = Fake()
    fake.otherwise[path] = [refused(status, text, **more)]
    with anyio.fail_after(PATIENCE_S):
        async with fake.registry() as here:
            with pytest.raises(RegistryError, match=f"member a: {path}: {text}"):
                async with here.join(member("a")):
                    pass
            assert not here._registrations
            if path == "/v3/kv/range":
                with pytest.raises(RegistryError, match=text):
                    await here.ready()
                # Once somebody has given it the right, it goes on by itself.
                fake.otherwise.clear()
                await until(lambda: here.in_touch)
                await here.ready()


async def test_a_proxy_that_refuses_is_heard_as_well():
    fake = Fake()
    fake.otherwise["/v3/lease/grant"] = [(401, b"<html>who are you?</html>")]
    async with fake.registry() as here:
        with pytest.raises(RegistryError, match="status 401"):
            async with here.join(member("a")):
                pass


@pytest.mark.parametrize("code", [1, 2, 4, 8, 13, 14])
async def test_a_passing_refusal_is_tried_again(code):
    fake = Fake()
    well = 200, said({"ID": "1", "TTL": "2"})
    fake.otherwise["/v3/lease/grant"] = [refused(503, "etcdserver: no leader", code=code), (502, b""), well]
    with anyio.fail_after(PATIENCE_S):
        async with fake.registry() as here, here.join(member("a")) as registration:
            assert not registration.lost


async def test_a_registration_is_kept_while_etcd_refuses(monkeypatch):
    fake = Fake()
    with anyio.fail_after(PATIENCE_S):
        async with fake.registry() as here, here.join(member("a")) as registration:
            fake.otherwise["/v3/kv/range"] = [refused(403, "etcdserver: permission denied", code=7)]
            with anyio.move_on_after(0.3) as scope:
                await registration.update({"load": 1})
            assert scope.cancelled_caught
            assert not registration.lost
            fake.otherwise.clear()
            await registration.update({"load": 1})


async def test_a_key_that_was_deleted_while_nobody_watched_is_put_again():
    fake = Fake()
    with anyio.fail_after(PATIENCE_S):
        async with fake.registry() as here, here.join(member("a")):
            await until(lambda: here.in_touch)
            puts, reads = (fake.asked.count(path) for path in ("/v3/kv/txn", "/v3/kv/range"))
            here._revision = None  # as where etcd has compacted what was missed
            fake.tell(said({"result": {"canceled": True, "compact_revision": "9"}}) + b"\n")
            await until(lambda: fake.asked.count("/v3/kv/txn") > puts)
            assert fake.asked.count("/v3/kv/range") > reads


@pytest.mark.parametrize("silent", [1, 4])
def test_a_lease_outlives_endpoints_that_say_nothing(silent):
    """The endpoint that keeps it is the last one that is asked, after some that take questions and do not answer."""

    async def main(fabric: Fabric) -> None:
        fake, kept = Fake(), [fabric.now]

        async def handle(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v3/lease/keepalive":
                if request.url.host != "e0":
                    await anyio.sleep_forever()
                kept.append(fabric.now)
            return await fake.handle(request)

        endpoints = [f"http://e{number}" for number in range(silent, -1, -1)]
        options = {"transport": httpx.MockTransport(handle)}
        async with EtcdRegistry(endpoints, prefix=PREFIX, lease_s=2, options=options) as here, here.join(member("a")):
            await asyncio.sleep(20)
        lease_s = 2.0  # as the fake says
        assert all(later - earlier < lease_s for earlier, later in itertools.pairwise([*kept, fabric.now]))

    run(main)


async def test_more_members_than_are_taken_are_an_error(monkeypatch):
    monkeypatch.setattr(etcd_module, "MEMBERS", 10)
    monkeypatch.setattr(etcd_module, "PAGE", 4)
    fake = Fake(members=11)
    with anyio.fail_after(PATIENCE_S):
        async with fake.registry() as here:
            with pytest.raises(RegistryError, match="etcd has more than 10 keys under 'here/'"):
                await here.ready()
            assert not here.members()
            fake.members = 10
            await until(lambda: here.in_touch)
            assert len(here.members()) == 10
            # One more in the watch: what is known stays, and is marked.
            fake.members = 11
            fake.tell(fake.joined(10))
            await until(lambda: not here.in_touch)
            assert "more than 10 keys" in here.failure
            assert [one.stale for one in here.members()] == [True] * 10
            fake.members = 3
            await until(lambda: here.in_touch)
            assert len(here.members()) == 3


async def test_a_watch_that_tells_too_much_at_once_is_made_anew(monkeypatch):
    monkeypatch.setattr(etcd_gateway, "ANSWER_BYTES", 4096)
    fake = Fake(members=2)
    with anyio.fail_after(PATIENCE_S):
        async with fake.registry() as here:
            await until(lambda: here.in_touch)
            assert len(here.members()) == 2
            fake.members, reads = 3, fake.asked.count("/v3/kv/range")
            fake.tell(*[b"x" * 1000] * 6)
            await until(lambda: here.in_touch and len(here.members()) == 3)
            assert fake.asked.count("/v3/kv/range") == reads + 1
            fake.tell(fake.joined(3))
            await until(lambda: len(here.members()) == 4)


async def test_pages_that_are_too_long_are_made_shorter(monkeypatch):
    fake = Fake(members=20)
    monkeypatch.setattr(etcd_gateway, "ANSWER_BYTES", len(json.dumps(fake.kv(19))) * 3)
    with anyio.fail_after(PATIENCE_S):
        async with fake.registry() as here:
            await here.ready()
            assert len(here.members()) == 20
            monkeypatch.setattr(etcd_gateway, "ANSWER_BYTES", 20)
            with pytest.raises(EtcdError, match="more than 20 bytes"):
                await here._read_all()


def test_lines_are_found_wherever_the_chunks_end(monkeypatch):
    monkeypatch.setattr(etcd_gateway, "ANSWER_BYTES", 8)
    data = b"ab\n\ncdefghij\nk\n"
    for size in range(1, len(data)):
        lines = LineSplitter()
        chunks = [data[at : at + size] for at in range(0, len(data), size)]
        assert [line for chunk in chunks for line in lines.feed(chunk)] == [b"ab", b"", b"cdefghij", b"k"]
    for chunks in ([b"123456789\n"], [b"1234", b"56789"], [b"1234", b"56789\n1\n"]):
        lines = LineSplitter()
        with pytest.raises(EtcdError, match="more than 8 bytes"):
            for chunk in chunks:
                lines.feed(chunk)


def test_malformed_answers_are_refused():
    for content in (b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"\xff", b"\xed\xa0\x80"):
        with pytest.raises(EtcdError):
            checked("/p", 200, content)
    for value in (float("inf"), float("nan"), "1" * 5000, 1 << 63, [], {}):
        with pytest.raises(EtcdError):
            number({"a": value}, "a")
    for value in (3, "kvs", {"a": 1}, [1], [None]):
        with pytest.raises(EtcdError):
            records({"kvs": value}, "kvs")
    for value in ([], 3, None):
        with pytest.raises(EtcdError):
            unpacked(value)
    assert records({"kvs": None}, "kvs") == records({}, "kvs") == []


@pytest.fixture(scope="module")
def guarded() -> Iterator[Etcd]:
    """Return an etcd that asks who one is, where nobody but root may do anything."""
    with etcd_process() as etcd:
        for name in ("root", "guest"):
            ask(etcd, "/v3/auth/user/add", {"name": name, "password": "x"})
        ask(etcd, "/v3/auth/role/add", {"name": "root"})
        ask(etcd, "/v3/auth/user/grant", {"user": "root", "role": "root"})
        ask(etcd, "/v3/auth/enable", {})
        yield etcd


@pytest.mark.needs_etcd
@pytest.mark.parametrize(
    ("who", "text"), [("nobody", "user name is empty"), ("guest", "permission denied"), ("liar", "invalid auth token")]
)
async def test_refusals_of_a_real_etcd_are_told_in_its_words(guarded, who, text):
    headers = {"liar": {"Authorization": "nonsense"}, "nobody": {}}.get(who)
    with anyio.fail_after(PATIENCE_S):
        for user in ("root", "guest") if headers is None else ():
            body = {"name": user, "password": "x"}
            token = (await anyio.to_thread.run_sync(ask, guarded, "/v3/auth/authenticate", body))["token"]
            headers = {"Authorization": str(token)}
            if user == "root":
                async with EtcdRegistry(guarded.endpoint, prefix=PREFIX, options={"headers": headers}) as here:
                    async with here.join(member("a")):
                        await here.ready()
        async with EtcdRegistry(guarded.endpoint, prefix=PREFIX, options={"headers": headers}) as here:
            with pytest.raises(RegistryError, match=text):
                async with here.join(member("b")):
                    pass
            with pytest.raises(RegistryError, match=text):
                await here.ready()
