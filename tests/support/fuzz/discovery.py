"""What is fuzzed of discovery: what clients of the registry say, what its server tells, and what comes from etcd.

`registry` takes a program of calls: steps of a byte (which engine, and how much later), a 16-bit length and that many
bytes, the arguments. `update` takes an item of the server's stream, `member` a value of etcd's. `etcd` takes a byte
that chooses the status, and what the gateway answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec

from aiote.discovery.etcd import EtcdRegistry
from aiote.discovery.etcd_gateway import EtcdError, LineSplitter, checked, packed
from aiote.discovery.lease_table import LeaseTable
from aiote.discovery.membership import Member, Roster
from aiote.discovery.registry_server import Keeping, Watching
from aiote.discovery.wire import MemberRecord, RosterUpdate, decode_member, encode_member
from aiote.service.codec import decode
from aiote.service.definition import methods_of

STATUSES = (200, 400, 401, 403, 404, 500, 503)
PREFIX = b"m/"
LIMIT = 6
(KEEP,), (WATCH,) = methods_of(Keeping), methods_of(Watching)


def registry(data: bytes) -> None:
    """Let clients of several engines say what they have; the table stays within its bounds, and agrees with itself."""
    table, at, now = LeaseTable(roster := Roster(), LIMIT), 0, 0.0
    while at < len(data):
        who, now = data[at] & 3, now + (data[at] >> 2) / 4
        stop = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        body, at = data[at + 3 : stop], stop
        try:
            said = decode(KEEP.read_arguments, body)
        except ValueError:
            continue
        members = [record.member() for record in said.records]
        table.expire(now)
        refused = table.keep((who, said.session), said.number, said.lease_s, members, now)
        assert refused.keys() <= {one.name for one in members}
        assert table._holders.keys() == roster.known.keys()
        assert len(table._holders) <= LIMIT
        assert len(table._sessions) <= LIMIT
        held = {name: key for key, session in table._sessions.items() for name in session.names}
        assert held == table._holders
        assert now < table.next_deadline() <= now + 600


def update(data: bytes) -> None:
    """Decode what the server tells."""
    try:
        found: RosterUpdate = decode(WATCH.read_result, data)
    except ValueError:
        return
    assert [MemberRecord.of(record.member()) for _, record in found.present] == [record for _, record in found.present]


def member(data: bytes) -> None:
    """Decode a member that stands by itself."""
    try:
        found = decode_member(data)
    except ValueError:
        return
    assert decode_member(encode_member(found)) == found


def etcd(data: bytes) -> None:
    """Take what a gateway streams, in chunks or at once, as pages and as news."""
    status, content = (STATUSES[data[0] % len(STATUSES)], data[1:]) if data else (200, b"")
    size = max(1, data[0]) if data else 1
    lines, reader, whole = [], LineSplitter(), LineSplitter()
    for at in range(0, len(content), size):
        lines += reader.feed(content[at : at + size])
    assert lines == whole.feed(content)
    here = EtcdRegistry("http://etcd", prefix=PREFIX.decode())
    for line in (*lines, content):
        try:
            answer = checked("/p", status, line)
        except EtcdError as error:
            assert len(str(error)) < 1000
            continue
        for take in (lambda answer: here._take_page(answer, {}, 0), lambda answer: here._apply_watch(answer, 7)):
            try:
                take(answer)
            except EtcdError as error:
                assert len(str(error)) < 1000
    for name, known in here._roster.known.items():
        assert known.name == name
        assert decode_member(encode_member(known)) == known


DISCOVERY: dict[str, Callable[[bytes], None]] = {
    function.__name__: function for function in (registry, update, member, etcd)
}


# Seeds.


def discovery_seeds() -> dict[str, dict[str, bytes]]:
    """Return the seeds of these targets: target, name, bytes."""
    bare, whole = _members().values()
    present = [(1.0, MemberRecord.of(bare)), (2.0, MemberRecord.of(whole))]
    return {
        "registry": {name: b"".join(step(*one) for one in steps) for name, steps in calls().items()},
        "update": {"whole": msgspec.msgpack.encode(RosterUpdate(1, True, ["c"], present))},
        "member": {name: encode_member(one) for name, one in _members().items()},
        "etcd": _answers(),
    }


def calls() -> dict[str, list[tuple[int, int, float, list[Member]]]]:
    """Return programs of calls: which engine, its number, its lease, its members."""
    bare, whole = _members().values()
    greater = Member("a", "decode", b"", 1)
    many = [Member(f"m{number}", "decode", b"", 1) for number in range(LIMIT + 2)]
    return {
        "keep": [(0, 1, 3.0, [bare, whole]), (0, 2, 3.0, [bare]), (0, 3, 3.0, [])],
        "late": [(0, 2, 3.0, []), (0, 1, 3.0, [bare])],
        "taken": [(0, 1, 3.0, [bare]), (1, 1, 3.0, [greater]), (0, 2, 3.0, [bare])],
        "many": [(0, 1, 0.1, many), (1, 1, 600.0, many)],
    }


def step(who: int, number: int, lease_s: float, members: list[Member]) -> bytes:
    """Return the bytes of one step of `registry`."""
    body = arguments(1, number, lease_s, members)
    return bytes((who | 4,)) + len(body).to_bytes(2, "big") + body


def arguments(session: int, number: int, lease_s: float, members: list[Member]) -> bytes:
    """Return the arguments of a call as they travel."""
    return msgspec.msgpack.encode((session, number, lease_s, [MemberRecord.of(one) for one in members]))


def _members() -> dict[str, Member]:
    attributes = {"load": 3, "share": 0.5, "draining": True, "model": "m"}
    return {"bare": Member("a", "prefill", b"", 0), "whole": Member("b", "decode", b"address", 7, attributes)}


def _answers() -> dict[str, bytes]:
    def kv(name: str, one: Member) -> dict[str, str]:
        value = packed(encode_member(one))
        return {"key": packed(PREFIX + name.encode()), "value": value, "mod_revision": "8", "lease": "1"}

    bare, whole = _members().values()
    kvs = [kv("a", bare), kv("b", whole), kv("c", bare)]
    header = {"revision": "9"}
    events = [{"kv": kvs[0]}, {"type": "DELETE", "kv": {"key": kvs[1]["key"], "mod_revision": "9"}}]
    said = {
        "page": {"header": header, "kvs": kvs, "more": True, "count": "3"},
        "created": {"result": {"header": header, "created": True}},
        "events": {"result": {"header": header, "events": events}},
        "compacted": {"result": {"header": header, "canceled": True, "compact_revision": "5"}},
        "refused": {"error": "etcdserver: permission denied", "message": "permission denied", "code": 7},
        "stream-error": {"error": {"grpc_code": 11, "http_code": 400, "message": "compacted"}},
    }
    found = {name: bytes((4 if "ref" in name else 7,)) + json.dumps(one).encode() + b"\n" for name, one in said.items()}
    return found | {"stream": b"\7" + b"".join(found[name][1:] for name in ("created", "events", "compacted"))}
